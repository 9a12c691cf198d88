"""Questions and answers about the facts: every fact in many phrasings, every answer in one fixed form.

A very small model learns a form that never varies; only the questions vary. Everything here is a pure function of its
arguments and of the seed.
"""

import dataclasses
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from .nano_english import predicate, question_phrase
from .nano_facts import TEXTS, Fact, is_self_contained
from .nano_written import SYSTEM_PROMPTS, Dialogue, ask, fence, read_blocks, written_dialogues

WHAT = (
    "What does {n} do?",
    "What does {n}() do?",
    "what does {n} do",
    "What is {n}?",
    "What is {n} for?",
    "Explain {n}.",
    "Describe {n}.",
    "Tell me about {n}.",
    "Can you explain {n}?",
    "What does {n} do in Python?",
    "What does `{n}` do?",
    "{n}",
    "help({n})",
    "Please explain {n}.",
    "What is the purpose of {n}?",
    "What does the {n} {k} do?",
    "What is the {n} {k}?",
    "Explain the {n} {k}.",
    "What's {n}?",
    "How does {n} work?",
    "Can you tell me about {n}?",
    "explain {n}",
)
SIGNATURE = (
    "What is the signature of {n}?",
    "Give me the signature of {n}.",
    "Show the signature of {n}.",
    "signature of {n}",
    "How do I call {n}?",
    "What is the syntax of {n}?",
)
ARGUMENTS = (
    "What are the arguments of {n}?",
    "Which arguments does {n} take?",
    "What parameters does {n} have?",
    "What arguments does {n} accept?",
    "arguments of {n}",
)
EXAMPLE = (
    "Show an example of {n}.",
    "Show me an example of {n}.",
    "Give me an example of {n}.",
    "How do I use {n}?",
    "How to use {n}?",
    "how do I use {n}",
    "How is {n} used?",
    "Example of {n}",
    "Write an example with {n}.",
    "Can you show me how to use {n}?",
    "How can I use {n} in Python?",
)
WHERE = ("Which module has {s}?", "Where is {s} defined?", "Which module do I import for {s}?", "Where do I find {s}?")
WHICH = (
    "Which function {third}?",
    "How do I {base}?",
    "How can I {base}?",
    "How do I {base} in Python?",
    "How to {base}?",
    "What {third}?",
)
MODULE_WHAT = (
    "What is the {m} module?",
    "What does the {m} module do?",
    "What is {m}?",
    "Tell me about the {m} module.",
    "Explain the {m} module.",
    "What is the {m} module for?",
    "What is {m} used for?",
    "What can I do with {m}?",
    "Describe the {m} module.",
    "what is the {m} module",
    "What does {m} do?",
    "What's the {m} module?",
    "How do I use the {m} module?",
    "How do I use {m}?",
    "When do I use the {m} module?",
    "Can you explain the {m} module?",
    "{m}",
    "{m} module",
    "import {m}",
)
MODULE_LIST = (
    "Which functions does {m} have?",
    "What functions are in the {m} module?",
    "List the functions of {m}.",
    "What is in the {m} module?",
    "What are the most important names in {m}?",
    "Name some functions of the {m} module.",
)
MODULE_FOR = (
    "Which module is for {t}?",
    "Which module do I use for {t}?",
    "What module should I use for {t}?",
    "Is there a module for {t}?",
    "Which module helps with {t}?",
    "How do I work with {t} in Python?",
)
MORE_EXAMPLE = ("Show me an example.", "Can you give an example?", "An example, please.", "How do I use it?")
MORE_SIGNATURE = ("What is its signature?", "How do I call it?", "Which arguments does it take?")
UNKNOWN = ("What does {n} do?", "What is {n}?", "How do I use {n}?", "Explain {n}.", "Show an example of {n}.")
_SYLLABLES = "ba bri cor dax fle gor hun jib kel lum mip nar oxi pru quor rez sko tav ul vex wob yan zor".split()


@dataclasses.dataclass(frozen=True)
class ModuleText:
    """A line of `modules.txt`: "The `name` module `does`."; `topic` is what it is for; `main` the names to mention."""

    name: str
    does: str
    topic: str
    main: tuple[str, ...]


def read_modules() -> dict[str, ModuleText]:
    """{module name: its text}, in name order."""
    rows = [line.split(" | ") for line in (TEXTS / "modules.txt").read_text().splitlines()]
    return {name: ModuleText(name, does, topic, tuple(main.split())) for name, does, topic, main in sorted(rows)}


def read_summaries() -> dict[str, tuple[str, str]]:
    """{name: (signature, predicate)} of `summaries.txt`: names whose own docstring is missing, long or hard to read."""
    summaries: dict[str, tuple[str, str]] = {}
    for line in (TEXTS / "summaries.txt").read_text().splitlines():
        call, _, does = line.partition(" | ")
        name, bracket, rest = call.partition("(")
        if name in summaries or not does:
            raise ValueError(f"summaries.txt: found {line!r}, expected `name(signature) | predicate`, each name once")
        summaries[name] = (bracket + rest, does)
    return summaries


def read_examples() -> dict[str, str]:
    """{name: doctest session} of `examples.txt`."""
    return {block.phrases[0]: block.code for block in read_blocks("examples", has_text=False)}


def _list_words(names: list[str]) -> str:
    shown = [f"`{name}`" for name in names]
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A fact ready to be asked about.

    `does` follows "`name` "; `call` is the name with its signature or ""; `example` a doctest session or "";
    `tier` 2 with a hand-written example, 1 with a hand-written summary, 0 otherwise.
    """

    fact: Fact
    does: str
    call: str
    example: str
    tier: int

    @property
    def popular(self) -> bool:
        """Whether a person wrote an example: asked about in every phrasing."""
        return self.tier == 2

    @property
    def what(self) -> str:
        if self.example:
            return f"`{self.fact.name}` {self.does}.\n\n{fence(self.example)}"
        return f"`{self.fact.name}` {self.does}." + (f" Call it as `{self.call}`." if self.call else "")

    @property
    def sample(self) -> str:
        if self.example:
            return f"Here is an example of `{self.fact.name}`:\n\n{fence(self.example)}"
        return f"Call it as `{self.call}`. It {self.does}."

    @property
    def signature(self) -> str:
        return f"The signature is `{self.call}`."

    @property
    def arguments(self) -> str:
        names = list(self.fact.parameters)
        if not names:
            return f"`{self.fact.name}` takes no arguments: `{self.call}`."
        count = "one argument" if len(names) == 1 else "the arguments"
        return (
            f"`{self.fact.name}` takes {count} {_list_words(names[:6])}"
            + (" and more" if len(names) > 6 or "..." in self.call else "")
            + f": `{self.call}`."
        )


def entries(facts: list[Fact]) -> list[Entry]:
    """Facts with their predicate and example; facts whose text gives no readable sentence are left out."""
    examples, summaries, modules = read_examples(), read_summaries(), read_modules()
    explained = {block.phrases[0] for block in read_blocks("errors")}
    by_name = {fact.name: fact for fact in facts}
    for name in sorted(summaries):
        if name not in by_name:
            module, owner = _split_name(name, modules)
            kind = "method" if owner else "class" if name.rpartition(".")[2][0].isupper() else "function"
            by_name[name] = Fact(name, module, owner, kind, "", "", (), "")
    result: list[Entry] = []
    for name in sorted(by_name):
        fact = by_name[name]
        if name in summaries:
            signature, does = summaries[name]
            # The arguments as written; without defaults, "a=1" is "a".
            parameters = tuple(re.findall(r"\w+", re.sub(r"=('[^']*'|[^,)]*)", "", signature)))
            fact = dataclasses.replace(fact, signature=signature, parameters=parameters)
        else:
            does = predicate(fact.summary)
            if fact.kind == "exception" and not does.startswith("is "):
                does = ""
        if name in explained:
            continue
        example = examples.get(name) or _with_import(fact)
        if does:
            call = name + fact.signature if fact.signature else ""
            result.append(Entry(fact, does, call, example, 2 if name in examples else int(name in summaries)))
    return result


def _with_import(fact: Fact) -> str:
    """The docstring's own example, with the import that it takes for granted."""
    example = fact.example
    if example and fact.module != "builtins" and "import" not in example:
        top = (fact.owner or fact.name).removeprefix(fact.module + ".")
        example = f">>> from {fact.module} import {top}\n{example}"
    return example if example and is_self_contained(example) else ""


def _split_name(name: str, modules: Mapping[str, ModuleText]) -> tuple[str, str]:
    """(module, owner) of a hand-written name: "os.path.join" -> ("os.path", ""), "str.join" -> ("builtins", "str")."""
    head, _, _ = name.rpartition(".")
    if not head:
        return "builtins", ""
    if head in modules:
        return head, ""
    return (head.rpartition(".")[0] or "builtins"), head


def fact_dialogues(all_entries: list[Entry], rng: random.Random) -> Iterator[Dialogue]:
    """Single questions and short conversations about each entry."""
    modules = read_modules()
    short_names = _short_names(all_entries, modules)
    phrases: defaultdict[str, list[str]] = defaultdict(list)
    for entry in all_entries:
        phrases[question_phrase(entry.does)].append(entry.fact.name)
    for entry in all_entries:
        fact, name = entry.fact, entry.fact.name
        asked: list[tuple[str, tuple[str, ...], str]] = [("what", WHAT, entry.what)]
        if entry.call and fact.kind != "exception":
            asked.append(("signature", SIGNATURE, entry.signature))
            if fact.parameters or entry.call.endswith("()"):
                asked.append(("arguments", ARGUMENTS, entry.arguments))
        if entry.example or entry.call:
            asked.append(("example", EXAMPLE, entry.sample))
        for topic, templates, answer in asked:
            share = len(templates) * (entry.tier + 1) // 3
            for template in rng.sample(templates, share):
                yield ask(f"{topic} {name}", template.format(n=_spelling(name, fact.owner, rng), k=fact.kind), answer)
        yield from _where(entry, short_names, rng)
        phrase = question_phrase(entry.does)
        if phrase and len(phrases[phrase]) == 1:
            for template in rng.sample(WHICH, (2, 5, 6)[entry.tier]):
                yield ask(
                    f"which {name}",
                    template.format(third=entry.does, base=phrase),
                    f"Use `{name}`: it {entry.does}." + (f"\n\n{fence(entry.example)}" if entry.example else ""),
                )
        if (entry.popular or rng.random() < 0.2) and (entry.example or entry.call):
            first = rng.choice(WHAT).format(n=name, k=fact.kind)
            more, reply = (
                (MORE_EXAMPLE, entry.sample)
                if entry.example and rng.random() < 0.6
                else (MORE_SIGNATURE, entry.signature)
            )
            if entry.call or more is MORE_EXAMPLE:
                yield ask(f"more {name}", first, entry.what, rng.choice(more), reply)


def _spelling(name: str, owner: str, rng: random.Random) -> str:
    """Now and then the short way to write a method: "Path.exists" for "pathlib.Path.exists"."""
    if owner and "." in owner and rng.random() < 0.3:
        return ".".join(name.split(".")[-2:])
    return name


def _short_names(all_entries: list[Entry], modules: Mapping[str, ModuleText]) -> dict[str, str]:
    """{last part: full name} where that is clear: one name has it, or only one popular name has it."""
    owners: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in all_entries:
        owners[entry.fact.name.rpartition(".")[2]].append(entry)
    clear: dict[str, str] = {}
    for short, candidates in owners.items():
        popular = [entry for entry in candidates if entry.popular] or [entry for entry in candidates if entry.tier]
        chosen = candidates if len(candidates) == 1 else popular
        if len(chosen) == 1 and len(short) > 2 and short not in modules:
            clear[short] = chosen[0].fact.name
    return clear


def _where(entry: Entry, short_names: dict[str, str], rng: random.Random) -> Iterator[Dialogue]:
    """Questions that give only the last part of the name."""
    fact = entry.fact
    short = fact.name.rpartition(".")[2]
    if short_names.get(short) != fact.name:
        return
    if fact.owner:
        answer = f"`{short}` is a method of `{fact.owner}`."
    elif fact.module == "builtins":
        answer = f"`{short}` is built in, no import is needed."
    else:
        answer = f"`{short}` is in the `{fact.module}` module. Write `from {fact.module} import {short}`."
    for template in rng.sample(WHERE, (1, 2, 4)[entry.tier]):
        yield ask(f"where {fact.name}", template.format(s=short), answer)
    if fact.module != "builtins" or fact.owner:
        for template in rng.sample(WHAT, (2, 5, 9)[entry.tier]):
            yield ask(f"what {fact.name}", template.format(n=short, k=fact.kind), entry.what)
        if entry.popular and entry.example:
            for template in rng.sample(EXAMPLE, 5):
                yield ask(f"example {fact.name}", template.format(n=short), entry.sample)


def module_dialogues(all_entries: list[Entry], rng: random.Random) -> Iterator[Dialogue]:
    """What a module is for, what is in it, which module to take."""
    known = {entry.fact.name: entry for entry in all_entries}
    for module, text in read_modules().items():
        does, topic = text.does, text.topic
        names = [f"{module}.{name}" for name in text.main]
        listed = _list_words(names)
        what = (
            f"The `{module}` module {does}. Its main names are {listed}."
            if len(names) > 1
            else f"The `{module}` module {does}. Its main name is {listed}."
        )
        contents = f"The `{module}` module has {listed}."
        for template in MODULE_WHAT:
            yield ask(f"module {module}", template.format(m=module), what)
        for template in MODULE_LIST:
            yield ask(f"names {module}", template.format(m=module), contents)
        for template in MODULE_FOR:
            yield ask(f"for {module}", template.format(t=topic), f"Use the `{module}` module. It {does}.")
        for name in names:
            if name in known:
                yield ask(
                    f"more {module}",
                    rng.choice(MODULE_WHAT).format(m=module),
                    what,
                    rng.choice(WHAT[:9]).format(n=name),
                    known[name].what,
                )


def unknown_dialogues(all_entries: list[Entry], rng: random.Random, count: int) -> Iterator[Dialogue]:
    """Names that do not exist, so that the model learns to say so."""
    modules = sorted({entry.fact.module for entry in all_entries})
    known = {entry.fact.name.rpartition(".")[2] for entry in all_entries}
    for _ in range(count):
        invented = "".join(rng.sample(_SYLLABLES, rng.choice((2, 3))))
        if invented in known:
            continue
        name = f"{rng.choice(modules)}.{invented}" if rng.random() < 0.7 else invented
        yield ask(
            "unknown",
            rng.choice(UNKNOWN).format(n=name),
            f"I do not know `{name}`. It is not in the part of the standard library that I learned.",
        )


def all_dialogues(facts: list[Fact], seed: int) -> list[Dialogue]:
    """Every conversation of the corpus, each once, shuffled by `seed`."""
    rng = random.Random(seed)
    ready = entries(facts)
    made = [
        *written_dialogues(rng),
        *module_dialogues(ready, rng),
        *fact_dialogues(ready, rng),
        *unknown_dialogues(ready, rng, 600),
    ]
    # One question has one answer: the hand-written one where there is one.
    unique: dict[tuple[str, ...], Dialogue] = {}
    for dialogue in made:
        question = tuple(m["content"].casefold() for m in dialogue.messages if m["role"] == "user")
        unique.setdefault(question, dialogue)
    result = list(unique.values())
    rng.shuffle(result)
    return [_with_system(dialogue, rng) if rng.random() < 0.04 else dialogue for dialogue in result]


def _with_system(dialogue: Dialogue, rng: random.Random) -> Dialogue:
    message = {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}
    return dataclasses.replace(dialogue, messages=(message, *dialogue.messages))
