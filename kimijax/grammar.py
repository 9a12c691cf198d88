"""Constrained output: which ids may come next if a text has to fit a JSON schema, a regular expression or a grammar.

llguidance parses; here is what drafts and thinking need on top. A `Matcher` is moved by committed tokens alone: for a
draft it looks ahead, one mask for each position, and steps back. The mask changes inside a block, right after the
token that ends thinking. The end of an answer is the request's own stop ids, where the text is complete and nowhere
else, so a text that ended with one of them always fits.

JSON is written on one line with at most one space after "," and ":", both the compact and Python's usual style. Free
white space between tokens would let a model that is at a loss write blanks until `max_tokens`; all the white space
that can be left without limit is that inside strings and of grammars that ask for it.
"""

import enum
import functools
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import tiktoken
from llguidance import LLMatcher, LLParserLimits
from llguidance.tiktoken import lltokenizer_from_encoding

from .engine.request import ConstraintError
from .errors import ConfigError, RequestError
from .tokenizer import SPLIT_PATTERN, Tokenizer

GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "choice"]

MAX_TEXT = 2**18  # characters of a grammar; with the stack below it bounds how deep llguidance may recurse
_STACK = 512 * 2**20  # bytes, reserved and not used: some 100,000 calls; chains of rules or of $ref need them
_N_KEPT = 64  # compiled grammars, the last used
_MAX_MESSAGE = 400  # characters of llguidance's messages that are passed on; some list a whole vocabulary


@dataclass(frozen=True)
class GrammarSpec:
    """What a request's text has to fit, all of it from the first character to the last.

    `text` by kind: json_schema, a JSON object; json_object, nothing: any JSON object; regex, an expression in Rust's
    syntax without look-around; lark, a grammar in llguidance's dialect, which may name control tokens as <[id]> and
    `<|name|>`; choice, a JSON array of strings. `field` is what errors name.

    Raises:
      RequestError: a text of the wrong form. Whether llguidance can express it is known when it is compiled.
    """

    kind: GrammarKind
    text: str = ""
    field: str = field(default="response_format", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise RequestError(self.field, f"found kind {self.kind!r}, expected one of {list(get_args(GrammarKind))}")
        if len(self.text) > MAX_TEXT:
            raise RequestError(
                self.field, f"found a {self.kind} of {len(self.text)} characters, expected at most {MAX_TEXT}"
            )
        if self.kind == "json_object" and self.text:
            raise RequestError(self.field, f"found the text {self.text[:60]!r}, expected none for json_object")
        if self.kind == "json_schema":
            schema = self._json()
            if not isinstance(schema, dict):
                raise RequestError(
                    self.field, f"found a schema of type {type(schema).__name__}, expected a JSON object"
                )
            if "x-guidance" in schema:
                raise RequestError(
                    self.field, "found `x-guidance`, options of the parser that are set here; leave it out"
                )
        if self.kind == "choice" and not self.choices:
            raise RequestError(self.field, "found no choices, expected at least one string")

    @staticmethod
    def of_json_schema(schema: Mapping[str, object], field: str = "response_format") -> "GrammarSpec":
        """The properties of objects are written in the schema's order."""
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as e:
            raise RequestError(field, f"the schema cannot be written as JSON ({e})") from e
        return GrammarSpec("json_schema", text, field)

    @staticmethod
    def of_choices(choices: Sequence[str], field: str = "choice") -> "GrammarSpec":
        """Exactly one of these texts."""
        return GrammarSpec("choice", json.dumps(list(choices)), field)

    @property
    def choices(self) -> list[str]:
        """Of kind choice."""
        found = self._json()
        if not isinstance(found, list) or not all(isinstance(choice, str) for choice in found):
            raise RequestError(self.field, f"found {self.text[:60]!r}, expected a JSON array of strings")
        return found

    def _json(self) -> object:
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as e:
            raise RequestError(self.field, f"the {self.kind} cannot be read as JSON ({e})") from e


class Grammars:
    """Makes the constraints of requests for one tokenizer. Built once a server; used from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """
        Args:
          tokenizer: of the target.
          vocab_size: V, ids of the model; those above the tokenizer's are never allowed.

        Raises:
          ConfigError: a vocabulary smaller than the tokenizer's.
        """
        if vocab_size < tokenizer.vocab_size:
            raise ConfigError("vocab_size", vocab_size, f"at least the tokenizer's {tokenizer.vocab_size} ids")
        bpe = tiktoken.Encoding(
            "kimi",
            pat_str=SPLIT_PATTERN,
            mergeable_ranks=dict(tokenizer.ranks),
            special_tokens=dict(tokenizer.special_ids),
        )
        # The parser wants an end token. It is given one that ends nothing: the ends of an answer are a request's own.
        self._ll = lltokenizer_from_encoding(bpe, n_vocab=vocab_size, eos_token=tokenizer.n_ranks)
        self._n_ranks, self._vocab_size = tokenizer.n_ranks, vocab_size
        self._compiled = functools.lru_cache(_N_KEPT)(self._compile)
        self._deep = _thread_with_stack(_STACK)

    def constraint(
        self, spec: GrammarSpec, stop_ids: Collection[int], *, think_end: int | None, thinking: bool
    ) -> "Matcher":
        """A request's constraint; every request, and every one of its n answers, needs its own.

        Args:
          spec: what its text has to fit.
          stop_ids: the request's; they end the text where it is complete.
          think_end: id of `</think>`, if the tokenizer has it.
          thinking: whether the prompt ended inside thinking; the text then starts after `think_end`.

        Raises:
          RequestError: a grammar that llguidance cannot express or that no text fits, no stop ids, or `think_end`
            among them.
        """
        if thinking and think_end is None:
            raise ValueError("thinking: found True without think_end; the text would never start")
        if not stop_ids:
            raise RequestError(
                spec.field, "found no stop ids, and nothing else may follow a complete text; leave ignore_eos off"
            )
        if thinking and think_end in stop_ids:
            raise RequestError(
                "stop_token_ids", f"found {think_end}, which ends thinking; the text of `{spec.field}` comes after it"
            )
        fresh = self._compiled(spec)
        return Matcher(fresh, _Rows.of(stop_ids, think_end, self._n_ranks, self._vocab_size), thinking)

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        """A matcher that nobody moves: requests take copies. RequestError."""
        return self._deep.submit(self._compile_deep, spec).result()

    def _compile_deep(self, spec: GrammarSpec) -> LLMatcher:
        try:
            grammar = _grammar(spec)
        except ValueError as e:
            raise RequestError(spec.field, f"the {spec.kind} cannot be expressed: {_short(str(e))}") from e
        matcher = LLMatcher(self._ll, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        found = [matcher.get_error(), *matcher.get_grammar_warnings()]  # a warning: some of it would be ignored
        if not any(found):
            matcher.compute_bitmask()  # finds a grammar that no text fits, and leaves the lexer's states to the copies
            found = [matcher.get_error().replace("NoExtensionBias", "no text fits it")]
        if any(found):
            raise RequestError(spec.field, f"the {spec.kind} cannot be expressed: {_short(' '.join(found))}")
        return matcher


def _thread_with_stack(size: int) -> ThreadPoolExecutor:
    """One worker with a stack of `size` bytes. llguidance recurses, and a stack that ends takes the process with it."""
    worker = ThreadPoolExecutor(1, thread_name_prefix="grammar")
    before = threading.stack_size(size)
    try:
        worker.submit(
            int
        ).result()  # starts the thread; one that starts elsewhere meanwhile reserves more than it needs
    finally:
        threading.stack_size(before)
    return worker


def _grammar(spec: GrammarSpec) -> str:
    """llguidance's own form. ValueError."""
    make: dict[GrammarKind, Callable[[], str]] = {
        "json_schema": lambda: _json_grammar(spec.text),
        "json_object": lambda: _json_grammar('{"type": "object"}'),
        "regex": lambda: LLMatcher.grammar_from_regex(spec.text),
        "lark": lambda: LLMatcher.grammar_from_lark(spec.text),
        "choice": lambda: LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, spec.choices))),
    }
    return make[spec.kind]()


def _json_grammar(schema: str) -> str:
    # Neither lenient nor coerce_one_of: they let through what the schema does not.
    return LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
    )


def _short(message: str) -> str:
    message = message.replace("<non-verbose/>", "").strip()
    return message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + " ..."


@dataclass(frozen=True, eq=False)
class _Rows:
    """Masks of one request that no grammar changes: uint32 [ceil(V / 32)]."""

    stop_ids: frozenset[int]
    think_end: int | None
    thought: np.ndarray  # while thinking
    ends: np.ndarray  # the stop ids
    kept: np.ndarray  # of the parser's masks

    @staticmethod
    def of(stop_ids: Collection[int], think_end: int | None, n_ranks: int, vocab_size: int) -> "_Rows":
        stops = np.asarray(sorted(stop_ids), np.int64)
        # No stop id, or no answer would come. No other control token either: it may open a turn or a tool call, which
        # readers take for the end of thinking, and the grammar would never begin.
        thought = np.arange(vocab_size) < n_ranks
        thought[stops] = False
        if think_end is not None:
            thought[think_end] = True
        # A stop id that is text may be the only way on in the grammar, so it stays, and cuts the text short as its
        # request wants. The first control token is the parser's end.
        kept = np.ones(vocab_size, bool)
        kept[stops[stops >= n_ranks]] = False
        kept[n_ranks] = False
        ends = np.isin(np.arange(vocab_size), stops)
        return _Rows(frozenset(stop_ids), think_end, *map(_packed, (thought, ends, kept)))


def _packed(allowed: np.ndarray) -> np.ndarray:
    """bool [V] to uint32 [ceil(V / 32)], bit i of word w is id 32 w + i."""
    padded = np.pad(allowed, (0, -len(allowed) % 32))
    return np.packbits(padded, bitorder="little").view("<u4")


def _has(row: np.ndarray, token: int) -> bool:
    return 0 <= token < 32 * len(row) and bool(row[token >> 5] >> (token & 31) & 1)


class _Part(enum.Enum):
    """Of a request's output, by the tokens before a position."""

    THINKING = enum.auto()
    TEXT = enum.auto()  # what the grammar is about
    ENDED = enum.auto()  # after a stop id


class Matcher:
    """A request's place in its grammar; an `engine.request.Constraint`. For one thread, that of the engine.

    Allowed are, while thinking, text and `think_end`; after that what the grammar allows, and the stop ids where the
    text is complete; after a stop id, stop ids. Control tokens are allowed only where a lark grammar names them.
    """

    def __init__(self, fresh: LLMatcher, rows: _Rows, thinking: bool) -> None:
        """`fresh` is copied, and has to stay as it is."""
        self._fresh, self._rows = fresh, rows
        self._matcher = fresh.deep_copy()
        self._part = _Part.THINKING if thinking else _Part.TEXT
        self._text: list[int] = []  # committed ids that the parser has taken
        self._next: np.ndarray | None = None  # the mask after what is committed, once it is known

    def masks(self, guesses: Sequence[int]) -> np.ndarray:
        """Allowed ids along a draft, uint32 [len(guesses) + 1, ceil(V / 32)]: see `Constraint`.

        Rows behind a guess that is not allowed are 0.

        Raises:
          ConstraintError: nothing may come next: the grammar leads nowhere from here, or past the parser's limits.
        """
        rows = np.zeros((len(guesses) + 1, len(self._rows.ends)), np.uint32)
        rows[0] = self._next_mask()
        part, moved = self._part, 0
        for i, guess in enumerate(guesses):
            if not _has(rows[i], guess):
                break
            if self._is_text(part, guess):
                if not self._matcher.consume_token(guess):
                    break
                moved += 1
            part = self._after(part, guess)
            if not self._fill(rows[i + 1], part):
                break
        if self._matcher.is_error() or not self._matcher.rollback(moved):
            # A guess led past the parser's limits. An error stays in a matcher, and the guess may yet be rejected.
            self._matcher = self._fresh.deep_copy()
            self._matcher.consume_tokens(self._text)
        return rows

    def commit(self, tokens: Sequence[int]) -> None:
        """These tokens came next in the output. Raises ConstraintError for one that its mask does not allow."""
        for token in tokens:
            if not _has(self._next_mask(), token):
                raise ConstraintError(
                    f"found token {token} after {len(self._text)} tokens of a constrained text ({self._part.name}), "
                    "expected one that its mask allows"
                )
            self._next = None
            if self._is_text(self._part, token):
                if not self._matcher.consume_token(token):
                    raise ConstraintError(f"token {token} cannot be parsed: {_short(self._matcher.get_error())}")
                self._text.append(token)
            self._part = self._after(self._part, token)

    def _next_mask(self) -> np.ndarray:
        if self._next is None:
            row = np.zeros_like(self._rows.ends)
            if not self._fill(row, self._part):
                raise ConstraintError(
                    f"no token is allowed after {len(self._text)} tokens of a constrained text: "
                    + (_short(self._matcher.get_error()) or "its grammar leads nowhere")
                )
            self._next = row
        return self._next

    def _is_text(self, part: _Part, token: int) -> bool:
        return part is _Part.TEXT and token not in self._rows.stop_ids

    def _after(self, part: _Part, token: int) -> _Part:
        if part is _Part.THINKING:
            return _Part.TEXT if token == self._rows.think_end else part
        return _Part.ENDED if token in self._rows.stop_ids else part

    def _fill(self, row: np.ndarray, part: _Part) -> bool:
        """The mask where the parser stands; False, and 0 in the row, if nothing is allowed."""
        if part is not _Part.TEXT:
            row[:] = self._rows.thought if part is _Part.THINKING else self._rows.ends
            return True
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        row &= self._rows.kept  # which leaves nothing of an error: the mask is then the parser's end alone
        if self._matcher.is_accepting():
            row |= self._rows.ends
        return bool(row.any())
