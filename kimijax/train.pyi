# Where type checkers and editors find kimijax.train; not shipped. See docs/architecture.md, "Imports".
from train import *
from train import bpe as bpe
from train import cli as cli
from train import config as config
from train import metrics as metrics
from train import nano_corpus as nano_corpus
from train import nano_dialogues as nano_dialogues
from train import nano_english as nano_english
from train import nano_facts as nano_facts
from train import nano_written as nano_written
from train import optimizer as optimizer
from train import packing as packing
from train import pretrain as pretrain
from train import report as report
from train import run_record as run_record
from train import stages as stages
from train import target_export as target_export
