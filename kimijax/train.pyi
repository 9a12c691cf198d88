# Where type checkers and editors find kimijax.train; not shipped. See docs/architecture.md, "Imports".
from train import *
from train import bpe as bpe
from train import nano_answers as nano_answers
from train import nano_corpus as nano_corpus
from train import nano_dialogues as nano_dialogues
from train import nano_examples as nano_examples
from train import nano_examples_more as nano_examples_more
from train import nano_facts as nano_facts
from train import nano_texts as nano_texts
