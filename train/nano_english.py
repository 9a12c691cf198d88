"""The English of docstring summaries: "Return the sum of x" as "returns the sum of x" or "get the sum of x"."""

import re

VERBS = frozenset(
    "abort accept acquire add alter append apply arrange ask assert attach block bind build calculate call cancel "
    "change check choose clear close collect combine compare compile compress compute concatenate configure "
    "connect construct convert copy create cut decode decompress decorate decrease decrement define delete "
    "describe deserialize detach determine disable display divide duplicate emit enable encode end enter enumerate "
    "escape evaluate exchange execute exit expand extend extract fail feed fetch find finish flush force fork "
    "format generate get give guess handle hash import increase increment indent indicate initialize insert invoke "
    "issue iterate join kill launch list listen load locate lock log look make map mark match measure merge mix "
    "modify move multiply normalize notify obtain open pack pad parse partition peek perform play poll pop prepend "
    "prevent print process provide push put query quote raise read rebuild receive recompute record recover "
    "redirect reduce register release reload remove rename render repeat replace report request reset resolve "
    "restore resume retrieve return reverse rewind rotate round run save scan schedule search seek select send "
    "serialize set shift show shuffle shut shutdown signal skip sleep sort split start stop store strip submit "
    "subtract suspend swap switch take tell terminate test translate transform truncate try turn unescape unpack "
    "unquote unregister update use validate verify wait wake walk warn wrap write yield zip".split()
)
_NOUNS = frozenset(
    "abstract asynchronous class common context decorator exception helper interface mapping metaclass object simple "
    "special subclass".split()
)
_ADVERBS = frozenset({"recursively", "repeatedly", "randomly", "asynchronously", "safely", "temporarily"})
# An imperative docstring goes on in the imperative: "Remove an item and return it".
_FOLLOWING = re.compile(
    r"(\b(?:and|or|then|but)) (return|raise|yield|close|print|convert|remove|replace|wait|update|restore|release|keep|"
    r"decode|encode|split|join|exit|insert|delete|extract|write|read|discard|store|set|clear|start|call|add|move|try)\b"
    r"(?! it\.| mode| operations| locks?\b)"
)
# "A LogRecord instance represents ..." is a sentence of its own and cannot follow "`name` is".
_CLAUSE = re.compile(
    r"(An?|The) [\w.-]+( [\w.-]+){0,3} (is|was|are|has|have|represents|provides|simulates|affects|holds)\b"
)


def third_person(verb: str) -> str:
    """The third person of a regular verb: "copy" -> "copies"."""
    if verb.endswith(("s", "sh", "ch", "x", "z")):
        return verb + "es"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"


_BASES = {form: verb for verb in VERBS for form in (verb, third_person(verb))}


def predicate(summary: str) -> str:
    """The summary as what follows "`name` ": "Return the sum" -> "returns the sum"; "" when it is no such sentence."""
    if _CLAUSE.match(summary):
        return ""
    words = summary.split(" ")
    first = words[0].lower()
    if first == "this" and len(words) > 2 and words[1] in {"function", "method", "class"}:
        return predicate(" ".join(words[2:]))
    at = 1 if first in _ADVERBS and len(words) > 1 else 0
    verb = _BASES.get(words[at].lower().rstrip(","), "")
    if verb:
        comma = "," if words[at].endswith(",") else ""
        words[at] = third_person(verb) + comma
        words[0] = words[0].lower() if at else words[0]
        return _FOLLOWING.sub(lambda m: f"{m[1]} {third_person(m[2])}", " ".join(words))
    rest = summary[0].lower() + summary[1:]
    if first in {"a", "an", "the", "like", "equivalent", "similar", "raised"}:
        return f"is {rest}"
    if first == "whether":
        return f"tells {rest}"
    if first == "same":
        return f"does the {rest}"
    if first == "base":
        return f"is the {rest}"
    if first in _NOUNS:
        return f"is {'an' if first[0] in 'aeio' else 'a'} {rest}"
    return ""


def question_phrase(third: str) -> str:
    """What follows "How do I ": "returns the sum of x" -> "get the sum of x"; "" when the predicate has no verb."""
    first, _, rest = third.partition(" ")
    verb = _BASES.get(first, "")
    if not verb or len(third) > 75:
        return ""
    if verb == "return":
        if rest.startswith(("True if ", "True when ", "whether ", "if ")):
            condition = re.sub(r"^(True if|True when|whether|if) ", "", rest)
            return "check whether " + re.sub(r",? (False )?otherwise$", "", condition).replace(" and False", "")
        return "get " + rest
    second = rest.split(" ")
    if len(second) > 2 and second[0] in {"and", "or"} and second[1] in _BASES:
        rest = " ".join([second[0], _BASES[second[1]], *second[2:]])
    return f"{verb} {rest}"
