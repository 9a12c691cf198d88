"""Conversations from the hand-written answers: tasks, language topics, exceptions, programs and small talk.

The texts lie in `recipes/nano/`: `tasks.txt` (`@ how to do this; or in these words`), `topics.txt`
(`@ singular; plural`), `errors.txt` (`@ name`), `programs.txt` (`@ what the function does`), `talk.txt`
(`@ question | question`). Code is a doctest session or a plain program; a test runs them.
"""

import dataclasses
import random
import re
from collections.abc import Iterator

from .nano_facts import TEXTS

type Message = dict[str, str]

TASK_FORMS = (
    "How do I {p}?",
    "How can I {p}?",
    "How to {p}?",
    "how do I {p}",
    "how to {p}",
    "How do I {p} in Python?",
    "How can I {p} in Python?",
    "how to {p} in python",
    "How do you {p}?",
    "Show me how to {p}.",
    "I want to {p}.",
    "What is the best way to {p}?",
    "{P}.",
    "{p}",
    "Write code to {p}.",
    "Please show me how to {p}.",
    "Can you show me how to {p}?",
    "How would you {p} in Python?",
)
TOPIC_FORMS = (
    "What is {s}?",
    "What is {s} in Python?",
    "What's {s}?",
    "what is {s}",
    "What are {t}?",
    "Explain {t}.",
    "Explain {s}.",
    "Explain {t} in Python.",
    "How do {t} work?",
    "How do I write {s}?",
    "How do I use {t}?",
    "How do I use {s}?",
    "How do I make {s}?",
    "Show me {s}.",
    "Show me an example of {s}.",
    "Give me an example of {s}.",
    "Tell me about {t}.",
    "Tell me about {t} in Python.",
    "{t}",
    "Write {s}.",
    "When do I use {t}?",
)
WORD_FORMS = (
    "What is {s}?",
    "What does {s} do?",
    "What does {s} do in Python?",
    "what does {s} do",
    "What does {s} mean?",
    "Explain {s}.",
    "Explain {s} in Python.",
    "How does {s} work?",
    "How do I use {s}?",
    "Show me an example of {s}.",
    "Give me an example of {s}.",
    "Tell me about {s}.",
    "When do I use {s}?",
    "What is {s} for?",
)
ERROR_FORMS = (
    "What is {s}?",
    "What is a {s}?",
    "what is {s}",
    "What's {s}?",
    "What does {s} mean?",
    "When is {s} raised?",
    "When do I get a {s}?",
    "Why do I get a {s}?",
    "Explain {s}.",
    "What causes a {s}?",
    "{s}",
    "What is the {s} exception?",
    "Tell me about {s}.",
    "How do I get a {s}?",
    "Show an example of {s}.",
)
CATCH_FORMS = (
    "How do I catch a {s}?",
    "How do I handle a {s}?",
    "How can I catch {s}?",
    "How do I handle {s}?",
    "Catch a {s}.",
)
PROGRAM_FORMS = (
    "Write a function that {p}.",
    "Write a Python function that {p}.",
    "write a function that {p}",
    "Can you write a function that {p}?",
    "Please write a function that {p}.",
    "Show me a function that {p}.",
    "Give me a function that {p}.",
    "Write code that {p}.",
    "Write Python code that {p}.",
    "Write a program that {p}.",
    "Implement a function that {p}.",
    "How do I write a function that {p}?",
    "I need a function that {p}.",
)


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """One conversation; `key` is the fact it is about, equal for all phrasings of the same question."""

    key: str
    messages: tuple[Message, ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """One hand-written entry: what it is asked by, a line of text and code; either of the last two may be empty."""

    phrases: tuple[str, ...]
    text: str
    code: str


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are kimi-nano, a small model that knows the Python standard library.",
    "You answer questions about Python.",
    "Answer briefly.",
)


def ask(key: str, *turns: str) -> Dialogue:
    """A dialogue of alternating user and assistant turns."""
    roles = ("user", "assistant")
    return Dialogue(key, tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(turns)))


def fence(code: str) -> str:
    """Code as a fenced Python block, without doctest directives."""
    shown = re.sub(r" *# doctest: \+\w+", "", code)
    return f"```python\n{shown}\n```"


def read_blocks(name: str, *, separator: str = ";", has_text: bool = True) -> list[Block]:
    """The entries of the table `name`.txt; raises ValueError when a phrase is given twice.

    An entry is `@ phrases`, a line of text (unless `has_text` is False), an empty line and code.
    """
    source = (TEXTS / f"{name}.txt").read_text()
    blocks: list[Block] = []
    seen: set[str] = set()
    for entry in re.split(r"\n+(?=@ )", source.strip()):
        head, _, body = entry.partition("\n")
        phrases = tuple(phrase.strip() for phrase in head.removeprefix("@ ").split(separator))
        twice = seen.intersection(phrases)
        if twice:
            raise ValueError(f"{name}.txt: {sorted(twice)} is given twice, expected one entry a phrase; join the two")
        seen.update(phrases)
        text, _, code = body.partition("\n\n") if has_text else ("", "", body)
        blocks.append(Block(phrases, text.strip(), code.strip("\n")))
    return blocks


def _answer(block: Block) -> str:
    return f"{block.text}\n\n{fence(block.code)}" if block.code else block.text


def task_answers() -> list[tuple[list[str], str]]:
    """(questions, answer) of every everyday task."""
    return [
        ([form.format(p=p, P=p[0].upper() + p[1:]) for p in block.phrases for form in TASK_FORMS], _answer(block))
        for block in read_blocks("tasks")
    ]


def topic_answers() -> list[tuple[list[str], str]]:
    """(questions, answer) of every language topic."""
    made: list[tuple[list[str], str]] = []
    for block in read_blocks("topics"):
        singular, plural = block.phrases
        forms = WORD_FORMS if singular == plural else TOPIC_FORMS
        questions = [form.format(s=singular, t=plural) for form in forms]
        if singular.startswith("*"):
            questions += [f"What does {singular} mean in a function?", f"What is {singular} in a function?"]
        made.append((questions, _answer(block)))
    return made


def error_answers() -> list[tuple[list[str], str]]:
    """(questions, answer) of every exception: what it means and how to catch it."""
    made: list[tuple[list[str], str]] = []
    for block in read_blocks("errors"):
        (name,) = block.phrases
        short = name.rpartition(".")[2]
        meaning = f"`{name}` {block.text}" + (f" This code raises it:\n\n{fence(block.code)}" if block.code else "")
        made.append(([form.format(s=s) for s in dict.fromkeys((name, short)) for form in ERROR_FORMS], meaning))
        if block.code and "import" not in block.code:
            body = "\n".join(f"    {line}" for line in block.code.split("\n"))
            catch = f'try:\n{body}\nexcept {name}:\n    print("caught")'
            made.append(
                ([form.format(s=name) for form in CATCH_FORMS], f"Use `try` and `except {name}`.\n\n{fence(catch)}")
            )
    return made


def program_answers() -> list[tuple[list[str], str]]:
    """(questions, answer) of every small program."""
    return [
        (
            [form.format(p=p) for p in block.phrases for form in PROGRAM_FORMS],
            f"This function {block.phrases[0]}.\n\n{fence(block.code)}",
        )
        for block in read_blocks("programs", has_text=False)
    ]


def _talk_answers() -> list[tuple[list[str], str]]:
    made: list[tuple[list[str], str]] = []
    for block in read_blocks("talk", separator=" | "):
        questions, answer = block.phrases, block.text
        variants = dict.fromkeys(questions)
        variants |= dict.fromkeys(q[0].lower() + q[1:].rstrip("?.!") for q in questions)
        variants |= dict.fromkeys(f"Please tell me: {q[0].lower()}{q[1:]}" for q in questions if q.endswith("?"))
        variants |= dict.fromkeys(f"Hi! {q}" for q in questions if q.endswith("?"))
        variants |= dict.fromkeys(f"Hello. {q}" for q in questions if q.endswith("?"))
        variants |= dict.fromkeys(f"{q.rstrip('?.!')}, please." for q in questions if not q.endswith("!"))
        made.append((list(variants), answer))
    return made


def written_dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Every hand-written answer under all its questions, and conversations of two or three of them."""
    talk = _talk_answers()
    answers = [*task_answers(), *topic_answers(), *error_answers(), *program_answers()]
    for questions, answer in [*talk, *answers]:
        for question in questions:
            yield ask(f"written {questions[0]}", question, answer)
    thanks = next(group for group in talk if group[1].startswith("You are welcome"))
    for _ in range(250):
        (first, reply), (second, answer) = rng.choice(talk), rng.choice(answers)
        yield ask("talk", rng.choice(first), reply, rng.choice(second), answer)
    for _ in range(500):
        (first, reply), (second, answer) = rng.sample(answers, 2)
        yield ask("two", rng.choice(first), reply, rng.choice(second), answer)
    for _ in range(200):
        first, reply = rng.choice(answers)
        yield ask("thanks", rng.choice(first), reply, rng.choice(thanks[0]), thanks[1])


def program_sources() -> list[str]:
    """The small programs as plain source."""
    return [block.code for block in read_blocks("programs", has_text=False)]
