"""Constrained output: masks along drafts, thinking that ends inside a block, and texts drawn from the masks."""

import functools
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimijax import grammar
from kimijax.engine.request import Constraint, ConstraintError
from kimijax.errors import ConfigError, RequestError
from kimijax.grammar import Grammars, GrammarSpec, Matcher
from kimijax.loader import NANO
from kimijax.tokenizer import Tokenizer
from tests import toy_tokenizer

TOKENIZER = Tokenizer.from_dir(NANO)
V = TOKENIZER.vocab_size + 45  # padding rows above the tokenizer, and not a multiple of 32
GRAMMARS = Grammars(TOKENIZER, V)
END, EOS, THINK_END = (TOKENIZER.special_ids[name] for name in ("<|im_end|>", "[EOS]", "</think>"))
STOPS = (END, EOS)


def object_of(**properties: object) -> dict[str, object]:
    """A strict schema: all of these and nothing else."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


INTEGER = object_of(a={"type": "integer"})
POINT = object_of(x={"type": "number"}, y={"type": "integer", "minimum": -5, "maximum": 120})
SCHEMAS: dict[str, dict[str, object]] = {
    "integer": INTEGER,
    "enum": object_of(colour={"enum": ["red", "green", 'dark "blue"']}, on={"type": "boolean"}, n={"const": None}),
    "nested": object_of(name={"type": "string", "maxLength": 6}, at=POINT, more={"anyOf": [POINT, {"type": "null"}]}),
    "array": {"type": "array", "items": {"enum": [1, 20, 300]}, "minItems": 2, "maxItems": 4},
    "pattern": object_of(day={"type": "string", "pattern": "^[0-9]{4}-[01][0-9]$"}, ids={"$ref": "#/$defs/ids"})
    | {"$defs": {"ids": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}}},
}
CHOICES = ("yes", "yes, but", "no", 'say "no"', "a\nb\\c", "世界 😀")
REGEX = r"[ab]{2,5}(-[0-9]{1,3})?"
LARK = 'start: word (" " word)*\nword: "up" | "down" | /[xyz]+/'


def spec_of(name: str) -> GrammarSpec:
    if name in SCHEMAS:
        return GrammarSpec.of_json_schema(SCHEMAS[name])
    others = {
        "choice": GrammarSpec.of_choices(CHOICES),
        "regex": GrammarSpec("regex", REGEX),
        "lark": GrammarSpec("lark", LARK),
        "any object": GrammarSpec("json_object"),
    }
    return others[name]


def fits(schema: Mapping[str, Any], value: object, root: Mapping[str, Any] | None = None) -> bool:
    """Whether a value fits, by the keywords that are used here."""
    root = schema if root is None else root
    if "$ref" in schema:
        return fits(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], value, root)
    if "anyOf" in schema:
        return any(fits(s, value, root) for s in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if "const" in schema:
        return value == schema["const"]
    match schema["type"], value:
        case "null", None:
            return True
        case "boolean", bool():
            return True
        case ("integer", int()) | ("number", int() | float()):
            return not isinstance(value, bool) and schema.get("minimum", value) <= value <= schema.get("maximum", value)
        case "string", str():
            return len(value) <= schema.get("maxLength", len(value)) and bool(
                re.search(schema.get("pattern", ""), value)
            )
        case "array", list():
            longest = schema.get("maxItems", len(value))
            return schema.get("minItems", 0) <= len(value) <= longest and all(
                fits(schema["items"], v, root) for v in value
            )
        case "object", dict():
            return list(value) == schema["required"] and all(
                fits(schema["properties"][k], v, root) for k, v in value.items()
            )
        case _:
            return False


def is_right(name: str, text: str) -> bool:
    if name in SCHEMAS:
        return fits(SCHEMAS[name], json.loads(text))
    checks: dict[str, Callable[[str], object]] = {
        "choice": lambda t: t in CHOICES,
        "regex": lambda t: re.fullmatch(REGEX, t),
        "lark": lambda t: re.fullmatch("(up|down|[xyz]+)( (up|down|[xyz]+))*", t),
        "any object": lambda t: isinstance(json.loads(t), dict),
    }
    return bool(checks[name](text))


ALL = [*SCHEMAS, "choice", "regex", "lark", "any object"]


def matcher(spec: GrammarSpec, *, thinking: bool = False, stops: Sequence[int] = STOPS) -> Matcher:
    return GRAMMARS.constraint(spec, stops, think_end=THINK_END, thinking=thinking)


def ids_of(row: np.ndarray) -> list[int]:
    """The allowed ids of one mask, by the packing's definition."""
    return [32 * w + i for w, word in enumerate(row.tolist()) for i in range(32) if word >> i & 1]


def draw(row: np.ndarray, rng: np.random.Generator) -> int:
    """One of the allowed ids; the end, where it is allowed, every other time."""
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    if END in allowed and rng.random() < 0.5:
        return END
    return int(rng.choice(allowed))


def draft_for(found: Matcher, committed: Sequence[int], rng: np.random.Generator, k: int) -> list[int]:
    """k guesses: of some, the first ones are right; prose, control tokens, padding ids and no token at all."""
    row, path = found.masks([])[0], list[int]()
    for _ in range(int(rng.integers(0, k + 1))):
        path.append(draw(row, rng))
        row = found.masks(path)[-1]
    prose = TOKENIZER.encode(" the answer is, of course, 12.")
    strange = [*prose, END, THINK_END, TOKENIZER.n_ranks, V - 1, V + 500, -1]
    path += [int(rng.choice(strange)) for _ in range(k - len(path))]
    return path


def stepped(spec: GrammarSpec, tokens: Sequence[int], *, thinking: bool = False) -> np.ndarray:
    """The mask after these tokens, of a matcher that was given them one by one and asked for every mask."""
    fresh = matcher(spec, thinking=thinking)
    for token in tokens:
        fresh.masks([])
        fresh.commit([token])
    return fresh.masks([])[0]


# ---- along drafts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_a_text_drawn_under_drafts_fits_and_every_mask_is_that_of_its_own_text(name: str, thinking: bool) -> None:
    """Blocks of guesses, some of them right: what is drawn replaces the first guess that differs, as in a round."""
    spec = spec_of(name)
    drafts_passed = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        found: Constraint = matcher(spec, thinking=thinking)
        assert isinstance(found, Matcher)
        output: list[int] = []
        while not output or output[-1] not in STOPS:
            assert len(output) < 2000
            guesses = draft_for(found, output, rng, 4)
            if thinking and THINK_END not in output and len(output) > 6:
                guesses[int(rng.integers(0, 4))] = THINK_END
            rows = found.masks(guesses)
            block: list[int] = []
            for i, row in enumerate(rows):
                wanted = guesses[i] if i < len(guesses) and rng.random() < 0.8 else -1
                token = wanted if 0 <= wanted < V and wanted in ids_of(row) else draw(row, rng)
                block.append(token)
                if seed == 0 and len(output) < 40:
                    np.testing.assert_array_equal(row, stepped(spec, [*output, *block[:-1]], thinking=thinking))
                if token in STOPS or i == len(guesses) or token != guesses[i]:
                    break
            drafts_passed += len(block) > 1
            found.commit(block)
            output += block
        text = output[output.index(THINK_END) + 1 : -1] if thinking else output[:-1]
        assert not set(text) & set(TOKENIZER.special_ids.values())
        assert is_right(name, TOKENIZER.decode(text))
        assert ids_of(found.masks([])[0]) == sorted(STOPS)
    assert drafts_passed > 0


names = st.sampled_from(ALL)


@settings(max_examples=60)
@given(names, st.integers(0, 2**32 - 1), st.booleans())
def test_a_draft_leaves_no_trace(name: str, seed: int, thinking: bool) -> None:
    """However many drafts a matcher looked along, it allows what one without drafts does."""
    rng = np.random.default_rng(seed)
    spec = spec_of(name)
    found = matcher(spec, thinking=thinking)
    output: list[int] = []
    for _ in range(6):
        before = found.masks([])
        for _ in range(3):
            found.masks(draft_for(found, output, rng, 3))
        np.testing.assert_array_equal(found.masks([]), before)
        output.append(THINK_END if thinking and len(output) == 2 else draw(before[0], rng))
        found.commit(output[-1:])
    np.testing.assert_array_equal(found.masks([])[0], stepped(spec, output, thinking=thinking))


@settings(max_examples=60)
@given(names, st.integers(0, 2**32 - 1), st.booleans())
def test_every_chunking_of_commits_gives_the_same_masks(name: str, seed: int, thinking: bool) -> None:
    rng = np.random.default_rng(seed)
    spec = spec_of(name)
    output = [*TOKENIZER.encode("let me see"), THINK_END] if thinking else []
    found = matcher(spec, thinking=thinking)
    found.commit(output)
    for _ in range(8):
        output.append(draw(found.masks([])[0], rng))
        found.commit(output[-1:])
    chunked, at = matcher(spec, thinking=thinking), 0
    while at < len(output):
        n = int(rng.integers(1, 6))
        if rng.random() < 0.5:
            chunked.masks(output[at : at + 2])
        chunked.commit(output[at : at + n])
        at += n
    np.testing.assert_array_equal(chunked.masks(output[-3:]), found.masks(output[-3:]))


@pytest.mark.parametrize("name", ["integer", "regex", "any object"])
def test_commit_takes_exactly_what_the_mask_allows(name: str) -> None:
    spec = spec_of(name)
    rng = np.random.default_rng(5)
    output: list[int] = []
    for _ in range(4):
        allowed = set(ids_of(matcher_after(spec, output).masks([])[0]))
        sample = [*rng.integers(0, V + 40, 60).tolist(), *sorted(allowed)[:20], -1, END, THINK_END]
        for token in sample:
            found = matcher_after(spec, output)
            if token in allowed:
                found.commit([token])
            else:
                with pytest.raises(ConstraintError, match=f"found token {token} "):
                    found.commit([token])
        output.append(draw(matcher_after(spec, output).masks([])[0], rng))


def matcher_after(spec: GrammarSpec, tokens: Sequence[int]) -> Matcher:
    found = matcher(spec)
    found.commit(tokens)
    return found


# ---- thinking -------------------------------------------------------------------------------------------------------


def test_the_mask_switches_on_right_after_thinking_inside_a_block() -> None:
    found = matcher(GrammarSpec.of_json_schema(INTEGER), thinking=True)
    thought, text = TOKENIZER.encode("so 7 it is"), TOKENIZER.encode('{"a": 7}')
    found.commit(thought[:1])
    guesses = [*thought[1:], THINK_END, *text, END]
    rows = found.masks(guesses)
    first = len(thought)  # row of the text
    free = set(range(TOKENIZER.n_ranks)) | {THINK_END}
    for row in rows[:first]:
        assert set(ids_of(row)) == free
    opening = set(ids_of(rows[first]))
    assert {TOKENIZER.token_bytes(i)[:1] for i in opening} == {b"{"}
    for row, guess in zip(rows[first:], guesses[first:], strict=False):
        assert guess in ids_of(row)
    assert ids_of(rows[-2]) == sorted(STOPS)
    # Prose right after thinking is ruled out, and nothing behind it is said.
    rows = found.masks([THINK_END, thought[0], THINK_END])
    assert set(ids_of(rows[1])) == opening
    assert not rows[2:].any()
    found.commit([THINK_END])
    assert set(ids_of(found.masks([])[0])) == opening


def test_no_stop_id_ends_thinking() -> None:
    newline = TOKENIZER.encode("\n")[0]
    found = matcher(GrammarSpec("json_object"), thinking=True, stops=(END, newline))
    allowed = ids_of(found.masks([])[0])
    assert newline not in allowed
    assert not found.masks([END, THINK_END])[1:].any()
    with pytest.raises(ConstraintError):
        found.commit([END])


def test_a_second_end_of_thinking_is_no_text() -> None:
    for spec in (GrammarSpec("json_object"), GrammarSpec("regex", "(?s:.*)")):
        found = matcher(spec, thinking=True)
        found.commit([THINK_END])
        assert THINK_END not in ids_of(found.masks([])[0])


# ---- the end --------------------------------------------------------------------------------------------------------


def test_stop_ids_are_allowed_where_the_text_is_complete_and_all_of_them() -> None:
    found = matcher(GrammarSpec("regex", "ab|abc"))
    a, b, c = (TOKENIZER.encode(x)[0] for x in "abc")
    rows = found.masks([a, b, c, END, EOS])
    ends = [set(ids_of(row)) & set(STOPS) for row in rows]
    assert ends == [set(), set(), set(STOPS), set(STOPS), set(STOPS), set(STOPS)]
    assert set(ids_of(rows[3])) == set(STOPS)
    assert TOKENIZER.n_ranks not in {i for row in rows for i in ids_of(row)}


def test_a_stop_id_that_is_text_stays_where_the_grammar_needs_it() -> None:
    """It cuts the text short there, as its request wants: without it nothing could come next."""
    brace = TOKENIZER.encode("}")[0]
    found = matcher(GrammarSpec.of_json_schema(INTEGER), stops=(brace,))
    found.commit(TOKENIZER.encode('{"a":1'))
    assert brace in ids_of(found.masks([])[0])
    found.commit([brace])
    assert ids_of(found.masks([])[0]) == [brace]


def test_control_tokens_are_allowed_only_where_a_grammar_names_them() -> None:
    control = set(TOKENIZER.special_ids.values())
    found = matcher(GrammarSpec("regex", "(?s:.*)"))
    assert set(ids_of(found.masks([])[0])) & control == set(STOPS)
    named = matcher(GrammarSpec("lark", f'start: "a" <[{THINK_END}]> "b"'))
    a, b = TOKENIZER.encode("a")[0], TOKENIZER.encode("b")[0]
    assert [set(ids_of(row)) & control for row in named.masks([a, THINK_END, b])] == [
        set(),
        {THINK_END},
        set(),
        {*STOPS},
    ]
    assert max(ids_of(found.masks([])[0])) < TOKENIZER.vocab_size


def test_a_grammar_that_names_a_stop_id_leads_nowhere() -> None:
    found = matcher(GrammarSpec("lark", 'start: "a" <|im_end|> "b"'))
    rows = found.masks([TOKENIZER.encode("a")[0]])
    assert not rows[1].any()
    found.commit(TOKENIZER.encode("a"))
    with pytest.raises(ConstraintError, match="leads nowhere"):
        found.masks([])


# ---- what JSON looks like -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_the_usual_spellings_of_json_are_allowed_as_they_are_tokenised(separators: tuple[str, str]) -> None:
    value = {"name": "Zoë", "at": {"x": 1.5, "y": 12}, "more": None}
    text = json.dumps(value, separators=separators, ensure_ascii=False)
    found = matcher(spec_of("nested"))
    found.commit([*TOKENIZER.encode(text), END])


@pytest.mark.parametrize(
    ("text", "n_right"),
    [
        ('{"a": 1}', 8),
        ('{"a":[1, 2,3]}', 14),
        ('{ "a": 1}', 1),
        ('{"a" : 1}', 4),
        ('{"a":  1}', 6),
        ('{"a":\n1}', 5),
        ('{"a":[1,  2]}', 9),
        ('{"a": 1 }', 7),
        ('{"a": 1}\n', 8),
        (' {"a": 1}', 0),
    ],
)
def test_one_space_after_commas_and_colons_and_no_more(text: str, n_right: int) -> None:
    """Byte by byte, so that no token hides a blank."""
    found = matcher(spec_of("any object"))
    tokens = [TOKENIZER.ranks[bytes([byte])] for byte in text.encode()]
    found.commit(tokens[:n_right])
    if n_right < len(tokens):
        with pytest.raises(ConstraintError):
            found.commit(tokens[n_right : n_right + 1])


def test_properties_come_in_the_order_of_the_schema() -> None:
    schema = object_of(z={"type": "null"}, a={"type": "null"})
    found = matcher(GrammarSpec.of_json_schema(schema))
    found.commit([*TOKENIZER.encode('{"z":null,"a":null}'), END])
    with pytest.raises(ConstraintError):
        matcher(GrammarSpec.of_json_schema(schema)).commit(TOKENIZER.encode('{"a":null,"z":null}'))


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", '{"type": "integr"}', "integr"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", '{"type": "string", "format": "nope"}', "nope"),
        ("json_schema", '{"$ref": "#/nope"}', "nope"),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "http://example.com/schema"),
        ("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
        ("json_schema", '{"type": "string", "pattern": "a(?=b)"}', "look-around"),
        ("json_schema", '{"$ref": "#"}', "no text fits it"),
        ("json_schema", '{"const": "\\ud800"}', "cannot be expressed"),
        ("json_schema", '{"type": "object", "x-guidance": {"whitespace_flexible": true}}', "x-guidance"),
        ("json_schema", "[1]", "list"),
        ("json_schema", "{", "JSON"),
        ("json_schema", '{"a":' * 5000 + "1" + "}" * 5000, "recursion"),
        ("json_object", "{}", "expected none"),
        ("regex", "[a", "unclosed"),
        ("regex", r"\bfoo\b", "lookarounds"),
        ("regex", r"[^\s\S]", "no text fits it"),
        ("regex", "\ud800", "surrogates"),
        ("lark", "start: foo", "unknown name"),
        ("lark", "start: <|nope|>", "unknown special token"),
        ("lark", 'stat: "a"', "no start rule"),
        ("lark", 'start: %json {"x-guidance": {"lenient": true}, "type": "array", "uniqueItems": true}', "uniqueItems"),
        ("lark", "start: " + "(" * 1000 + '"a"' + ")" * 1000, "nested"),
        ("choice", "[]", "no choices"),
        ("choice", '["a", 1]', "array of strings"),
        ("choice", '["\\ud800"]', "cannot be expressed"),
        ("regex", "a" * (grammar.MAX_TEXT + 1), "characters"),
        ("xml", "", "kind"),
    ],
)
def test_what_cannot_be_expressed_is_refused(kind: Any, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as e:
        matcher(GrammarSpec(kind, text, "response_format.json_schema.schema"))
    assert e.value.field == "response_format.json_schema.schema"
    assert len(e.value.message) < 600


def test_a_refusal_names_the_field_of_its_own_request() -> None:
    """Equal grammars share what is compiled, not what errors say."""
    assert GrammarSpec("regex", "[a", "one") == GrammarSpec("regex", "[a", "other")
    for field in ("one", "other"):
        with pytest.raises(RequestError) as e:
            matcher(GrammarSpec("regex", "[a", field))
        assert e.value.field == field


def test_a_schema_that_is_no_json_is_refused() -> None:
    with pytest.raises(RequestError, match="JSON"):
        GrammarSpec.of_json_schema({"enum": [{1, 2}]}, "schema")
    with pytest.raises(RequestError):
        matcher(GrammarSpec.of_json_schema({"const": float("nan")}, "schema"))


def test_settings_under_which_no_text_could_come_or_end_are_refused() -> None:
    spec = GrammarSpec("json_object")
    with pytest.raises(RequestError, match="ignore_eos"):
        matcher(spec, stops=())
    with pytest.raises(RequestError, match="ends thinking"):
        matcher(spec, stops=(END, THINK_END), thinking=True)
    with pytest.raises(ValueError, match="think_end"):
        GRAMMARS.constraint(spec, STOPS, think_end=None, thinking=True)
    with pytest.raises(ConfigError, match="vocab_size"):
        Grammars(TOKENIZER, 100)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(12_000)) + 'r12000: "a"'),
        GrammarSpec("lark", "start: R0\n" + "".join(f"R{i}: R{i + 1}\n" for i in range(12_000)) + 'R12000: "a"'),
        GrammarSpec.of_json_schema(
            {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(7000)} | {"7000": {}}}
        ),
    ],
    ids=["rules", "terminals", "references"],
)
def test_long_chains_do_not_end_the_process(spec: GrammarSpec) -> None:
    """The parser recurses along them, and has the stack for it."""
    found = matcher(spec)
    found.commit([draw(found.masks([])[0], np.random.default_rng(0))])


# ---- limits, threads, other tokenizers ------------------------------------------------------------------------------


def test_a_guess_past_the_parsers_limits_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the request only if it is committed."""

    monkeypatch.setattr(grammar, "LLParserLimits", functools.partial(grammar.LLParserLimits, step_max_items=40))
    tight_grammars = Grammars(TOKENIZER, V)
    rules = 'start: "p" ("b" "c" | "a" x{1,60} "c")\nx: y | z | u\ny: "q"\nz: "q" "q"?\nu: z y?'
    spec = GrammarSpec("lark", rules)
    p, a, b, q = (TOKENIZER.encode(t)[0] for t in "pabq")
    found = tight_grammars.constraint(spec, STOPS, think_end=THINK_END, thinking=False)
    found.commit([p])
    before = found.masks([])
    rows = found.masks([a, *[q] * 12])
    assert rows[1].any()
    assert not rows[-1].any()
    np.testing.assert_array_equal(found.masks([]), before)
    found.commit([b])
    assert ids_of(found.masks([])[0]) == TOKENIZER.encode("c")
    bad = tight_grammars.constraint(spec, STOPS, think_end=THINK_END, thinking=False)
    with pytest.raises(ConstraintError, match="Too many items"):
        bad.commit([p, a, *[q] * 12])


def test_requests_of_many_threads_share_a_grammar() -> None:
    """Each moves its own matcher at its own pace."""
    spec = spec_of("nested")
    texts: list[str] = []

    def work(seed: int) -> None:
        rng, found, output = np.random.default_rng(seed), matcher(spec), list[int]()
        while not output or output[-1] not in STOPS:
            output.append(draw(found.masks([])[0], rng))
            found.commit(output[-1:])
        texts.append(TOKENIZER.decode(output[:-1]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 8
    assert all(is_right("nested", text) for text in texts)


def test_a_vocabulary_of_single_bytes(tmp_path: Path) -> None:
    """Allowed ids of a few texts, by hand: the bytes and merges that go on with one of them."""
    toy = toy_tokenizer.load(tmp_path)
    stop = toy.special_ids["[EOS]"]
    found = Grammars(toy, toy.vocab_size).constraint(
        GrammarSpec.of_choices(["aab", "a b", "34x", "a"]), [stop], think_end=None, thinking=False
    )
    a, space, aa, space_b, three, n34 = ord("a"), ord(" "), 259, 260, ord("3"), 258
    rows = found.masks([a, space_b, stop])
    assert [ids_of(row) for row in rows] == [
        sorted([a, aa, three, n34]),
        sorted([a, space, space_b, stop]),
        [stop],
        [stop],
    ]
    assert rows.shape == (4, -(-toy.vocab_size // 32))
    assert rows.dtype == np.uint32
