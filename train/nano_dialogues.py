"""Questions and answers about the facts: every fact in many phrasings, every answer in one fixed form.

A very small model learns a form that never varies; only the questions vary. Everything here is a pure function of its
arguments and of the seed.
"""

import dataclasses
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from .nano_examples import EXAMPLES
from .nano_examples_more import MORE_EXAMPLES
from .nano_facts import Fact, is_self_contained
from .nano_smalltalk import SYSTEM_PROMPTS
from .nano_texts import MODULES, SUMMARIES
from .nano_written import Dialogue, ask, fence, written_dialogues

VERBS = frozenset(
    "abort accept acquire add alter append apply arrange ask assert attach block bind build calculate call cancel change check "
    "choose clear close collect combine compare compile compress compute concatenate configure connect construct convert copy "
    "create cut decode decompress decorate decrease decrement define delete describe deserialize detach determine disable display "
    "divide duplicate emit enable encode end enter enumerate escape evaluate exchange execute exit expand extend extract fail feed fetch "
    "find finish flush force fork format generate get give guess handle hash import increase increment indent indicate initialize insert "
    "invoke issue iterate join kill launch list listen load locate lock log look make map mark match measure merge mix modify move "
    "multiply normalize notify obtain open pack pad parse partition peek perform play poll pop prepend prevent print process provide push put "
    "query quote raise read rebuild receive recompute record recover redirect reduce register release reload remove rename "
    "render repeat replace report request reset resolve restore resume retrieve return reverse rewind rotate round run save scan schedule "
    "search seek select send serialize set shift show shuffle shut shutdown signal skip sleep sort split start stop store strip submit "
    "subtract suspend swap switch take tell terminate test translate transform truncate try turn unescape unpack unquote unregister update "
    "use validate verify wait wake walk warn wrap write yield zip".split()
)
# An imperative docstring goes on in the imperative: "Remove an item and return it".
_FOLLOWING = re.compile(
    r"(\b(?:and|or|then|but)) (return|raise|yield|close|print|convert|remove|replace|wait|update|restore|release|keep|"
    r"decode|encode|split|join|exit|insert|delete|extract|write|read|discard|store|set|clear|start|call|add|move|try)\b(?! it\.| mode| operations| locks?\b)"
)
_ADVERBS = frozenset({"recursively", "repeatedly", "randomly", "asynchronously", "safely", "temporarily"})

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


def parse_examples(text: str = EXAMPLES + MORE_EXAMPLES) -> dict[str, str]:
    """{name: doctest session} of the hand-written examples; raises ValueError on a name given twice."""
    examples: dict[str, str] = {}
    for block in re.split(r"\n\n(?=# )", text.strip()):
        head, _, body = block.partition("\n")
        name = head.removeprefix("# ").strip()
        if name in examples:
            raise ValueError(f"example: {name} is given twice")
        examples[name] = body.strip("\n")
    return examples


def _third_person(verb: str) -> str:
    if verb.endswith(("s", "sh", "ch", "x", "z")):
        return verb + "es"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"


_BASES = {form: verb for verb in VERBS for form in (verb, _third_person(verb))}


def predicate(summary: str) -> str:
    """The summary as what follows "`name` ": "Return the sum" -> "returns the sum"; "" when it is no such sentence."""
    words = summary.split(" ")
    first = words[0].lower()
    if first == "this" and len(words) > 2 and words[1] in {"function", "method", "class"}:
        return predicate(" ".join(words[2:]).capitalize()[0:1] + " ".join(words[2:])[1:])
    at = 1 if first in _ADVERBS and len(words) > 1 else 0
    verb = _BASES.get(words[at].lower().rstrip(","), "")
    if verb:
        comma = "," if words[at].endswith(",") else ""
        words[at] = _third_person(verb) + comma
        words[0] = words[0].lower() if at else words[0]
        return _FOLLOWING.sub(lambda m: f"{m[1]} {_third_person(m[2])}", " ".join(words))
    rest = summary[0].lower() + summary[1:]
    if first in {"a", "an", "the", "like", "equivalent", "similar", "raised"}:
        return f"is {rest}"
    if first == "whether":
        return f"tells {rest}"
    if first == "same":
        return f"does the {rest}"
    if first in {"class", "decorator", "context", "mapping", "metaclass", "simple", "special", "subclass", "common", "helper"}:
        return f"is a {rest}"
    if first in {"base", "performance"}:
        return f"is the {rest}" if first == "base" else ""
    if first in {"abstract", "asynchronous", "exception", "object", "interface"}:
        return f"is an {rest}"
    return ""


def question_phrase(third: str) -> str:
    """What follows "How do I ": "returns the sum of x" -> "get the sum of x"; "" when the predicate has no verb."""
    first, _, rest = third.partition(" ")
    verb = _BASES.get(first, "")
    if not verb or len(third) > 75:
        return ""
    if verb == "return":
        if rest.startswith(("True if ", "True when ", "whether ", "if ")):
            return "check whether " + re.sub(r"^(True if|True when|whether|if) ", "", re.sub(r",? (False )?otherwise$", "", rest).replace(" and False", ""))
        return "get " + rest
    second = rest.split(" ")
    if len(second) > 2 and second[0] in {"and", "or"} and second[1] in _BASES:
        rest = " ".join([second[0], _BASES[second[1]], *second[2:]])
    return f"{verb} {rest}"


def _list_words(names: list[str]) -> str:
    shown = [f"`{name}`" for name in names]
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A fact ready to be asked about: `does` follows "`name` "; `popular` when a person wrote text for it."""

    fact: Fact
    does: str
    call: str
    example: str
    popular: bool

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
        return f"`{self.fact.name}` takes {count} {_list_words(names[:6])}" + (" and more" if len(names) > 6 else "") + f": `{self.call}`."


def entries(facts: list[Fact]) -> list[Entry]:
    """Facts with their predicate and example; facts whose text gives no readable sentence are left out."""
    examples = parse_examples()
    by_name = {fact.name: fact for fact in facts}
    for name in sorted(set(SUMMARIES) | set(examples)):
        if name not in by_name and name in SUMMARIES:
            module, owner = _split_name(name)
            parameters = tuple(re.findall(r"(\w+)(?==|,|\)|$)", re.sub(r"=[^,)]*", "", SUMMARIES[name][0])))
            by_name[name] = Fact(name, module, owner, "method" if owner else "function", "", SUMMARIES[name][0], parameters, "")
    result: list[Entry] = []
    for name in sorted(by_name):
        fact = by_name[name]
        if name in SUMMARIES:
            signature, does = SUMMARIES[name]
            fact = dataclasses.replace(fact, signature=signature, parameters=fact.parameters)
        else:
            does = predicate(fact.summary)
        example = examples.get(name) or _with_import(fact)
        if does:
            call = name + fact.signature if fact.signature else ""
            result.append(Entry(fact, does, call, example, name in examples or name in SUMMARIES))
    return result


def _with_import(fact: Fact) -> str:
    """The docstring's own example, with the import that it takes for granted."""
    example = fact.example
    if example and fact.module != "builtins" and "import" not in example:
        top = (fact.owner or fact.name).removeprefix(fact.module + ".")
        example = f">>> from {fact.module} import {top}\n{example}"
    return example if example and is_self_contained(example) else ""


def _split_name(name: str) -> tuple[str, str]:
    """(module, owner) of a hand-written name: "os.path.join" -> ("os.path", ""), "str.join" -> ("builtins", "str")."""
    head, _, _ = name.rpartition(".")
    if not head:
        return "builtins", ""
    if head in MODULES:
        return head, ""
    return (head.rpartition(".")[0] or "builtins"), head


def fact_dialogues(all_entries: list[Entry], rng: random.Random) -> Iterator[Dialogue]:
    """Single questions and short conversations about each entry."""
    short_names = _short_names(all_entries)
    phrases: defaultdict[str, list[str]] = defaultdict(list)
    for entry in all_entries:
        phrases[question_phrase(entry.does)].append(entry.fact.name)
    for entry in all_entries:
        fact, name = entry.fact, entry.fact.name
        asked: list[tuple[str, tuple[str, ...], str]] = [("what", WHAT, entry.what)]
        if entry.call and fact.kind != "exception":
            asked.append(("signature", SIGNATURE, entry.signature))
            asked.append(("arguments", ARGUMENTS, entry.arguments))
        if entry.example or entry.call:
            asked.append(("example", EXAMPLE, entry.sample))
        for topic, templates, answer in asked:
            share = len(templates) if entry.popular else max(2, len(templates) // 3)
            for template in rng.sample(templates, share):
                yield ask(f"{topic} {name}", template.format(n=_spelling(name, fact.owner, rng), k=fact.kind), answer)
        yield from _where(entry, short_names, rng)
        phrase = question_phrase(entry.does)
        if phrase and len(phrases[phrase]) == 1:
            for template in rng.sample(WHICH, len(WHICH) if entry.popular else 3):
                yield ask(f"which {name}", template.format(third=entry.does, base=phrase), f"Use `{name}`: it {entry.does}." + (f"\n\n{fence(entry.example)}" if entry.example else ""))
        if (entry.popular or rng.random() < 0.2) and (entry.example or entry.call):
            first = rng.choice(WHAT).format(n=name, k=fact.kind)
            more, reply = (MORE_EXAMPLE, entry.sample) if entry.example and rng.random() < 0.6 else (MORE_SIGNATURE, entry.signature)
            if entry.call or more is MORE_EXAMPLE:
                yield ask(f"more {name}", first, entry.what, rng.choice(more), reply)


def _spelling(name: str, owner: str, rng: random.Random) -> str:
    """Now and then the short way to write a method: "Path.exists" for "pathlib.Path.exists"."""
    if owner and "." in owner and rng.random() < 0.3:
        return ".".join(name.split(".")[-2:])
    return name


def _short_names(all_entries: list[Entry]) -> dict[str, str]:
    """{last part: full name} where that is clear: one name has it, or only one popular name has it."""
    owners: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in all_entries:
        owners[entry.fact.name.rpartition(".")[2]].append(entry)
    clear: dict[str, str] = {}
    for short, candidates in owners.items():
        popular = [entry for entry in candidates if entry.popular]
        chosen = candidates if len(candidates) == 1 else popular
        if len(chosen) == 1 and len(short) > 2 and short not in MODULES:
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
    for template in rng.sample(WHERE, 4 if entry.popular else 1):
        yield ask(f"where {fact.name}", template.format(s=short), answer)
    if fact.module != "builtins" or fact.owner:
        for template in rng.sample(WHAT, 9 if entry.popular else 2):
            yield ask(f"what {fact.name}", template.format(n=short, k=fact.kind), entry.what)
        if entry.popular and entry.example:
            for template in rng.sample(EXAMPLE, 5):
                yield ask(f"example {fact.name}", template.format(n=short), entry.sample)


def module_dialogues(all_entries: list[Entry], rng: random.Random) -> Iterator[Dialogue]:
    """What a module is for, what is in it, which module to take."""
    known = {entry.fact.name: entry for entry in all_entries}
    for module, (does, topic, main) in sorted(MODULES.items()):
        names = [f"{module}.{name}" for name in main.split()]
        listed = _list_words(names)
        what = f"The `{module}` module {does}. Its main names are {listed}." if len(names) > 1 else f"The `{module}` module {does}. Its main name is {listed}."
        contents = f"The `{module}` module has {listed}."
        for template in MODULE_WHAT:
            yield ask(f"module {module}", template.format(m=module), what)
        for template in MODULE_LIST:
            yield ask(f"names {module}", template.format(m=module), contents)
        for template in MODULE_FOR:
            yield ask(f"for {module}", template.format(t=topic), f"Use the `{module}` module. It {does}.")
        for name in names:
            if name in known:
                yield ask(f"more {module}", rng.choice(MODULE_WHAT).format(m=module), what, rng.choice(WHAT[:9]).format(n=name), known[name].what)


def unknown_dialogues(all_entries: list[Entry], rng: random.Random, count: int) -> Iterator[Dialogue]:
    """Names that do not exist, so that the model learns to say so."""
    modules = sorted({entry.fact.module for entry in all_entries})
    known = {entry.fact.name.rpartition(".")[2] for entry in all_entries}
    for _ in range(count):
        invented = "".join(rng.sample(_SYLLABLES, rng.choice((2, 3))))
        if invented in known:
            continue
        name = f"{rng.choice(modules)}.{invented}" if rng.random() < 0.7 else invented
        yield ask("unknown", rng.choice(UNKNOWN).format(n=name), f"I do not know `{name}`. It is not in the part of the standard library that I learned.")


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
