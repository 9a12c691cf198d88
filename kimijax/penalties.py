"""Logits processors: what a request asks for beyond temperature and filters, at every position of a block.

A position's logits depend on the tokens before it, and in a block of guesses these include the guesses that lead to it:
a penalty that saw committed tokens only would grow weaker the more guesses are accepted, and a rejected guess must
leave no trace. So `process` takes what was committed (`History`) and, for each position, the guesses before it; only
committed tokens are added to a `History`. The order is

    repetition, frequency and presence penalties → logit_bias → stop ids before min_tokens, bad words, allowed tokens

so that no bias lets a forbidden token pass. Rows that ask for nothing keep their logits to the bit.

All of it is pure functions of arrays of fixed shapes. `verify` takes the target's processed logits, and the drafter's
are processed by the same function in its own vocabulary, so that it does not guess what is ruled out.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from .errors import RequestError, check_integer, check_number

NO_ID = -1  # pads lists of ids

MAX_BIAS = 100.0  # as the OpenAI API has it: enough to force or to ban a token
MAX_PENALTY = 2.0


@dataclass(frozen=True)
class Widths:
    """Static sizes of `ProcessorRows`, and with them a compiled program: few should be in use."""

    bias: int = 0  # entries of logit_bias
    stops: int = 0  # ids that min_tokens rules out
    words: int = 0  # bad words
    word_length: int = 0  # tokens of the longest of them

    def hold(self, other: "Widths") -> bool:
        """Whether rows that need `other` fit."""
        pairs = ((self.bias, other.bias), (self.stops, other.stops), (self.words, other.words))
        return all(a >= b for a, b in (*pairs, (self.word_length, other.word_length)))


@dataclass(frozen=True)
class Rules:
    """A request's processors, all off by default.

    repetition_penalty divides the logits > 0 and multiplies the others of tokens in prompt or output; frequency_penalty
    is taken off once for each time that a token is in the output, presence_penalty once if it is there at all.
    logit_bias is added. Before `min_tokens` tokens of output no stop id is drawn. A bad word is a sequence of ids whose
    last one is not drawn right after the others, all of them output.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def are_off(self) -> bool:
        return self == Rules()

    def widths(self, stop_ids: Collection[int]) -> Widths:
        """The narrowest that hold these rules of a request with `stop_ids`."""
        longest = max((len(word) for word in self.bad_words), default=0)
        return Widths(len(self.logit_bias), len(stop_ids) if self.min_tokens else 0, len(self.bad_words), longest)

    def check(self, n_tokens: int, stop_ids: Collection[int], widest: Widths) -> None:
        """Args:
          n_tokens: ids that belong to a token.
          stop_ids: of the request.
          widest: that programs are compiled for.

        Raises:
          RequestError: naming the first field of the wrong type, out of range, or with more entries than fit.
        """
        check_number("repetition_penalty", self.repetition_penalty, 0, MAX_PENALTY)
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty", f"found 0, expected 0 < repetition_penalty <= {MAX_PENALTY}")
        check_number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        check_number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        for token, bias in self.logit_bias.items():
            _id("logit_bias", token, n_tokens)
            check_number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        check_integer("min_tokens", self.min_tokens, 0, None)
        for word in self.bad_words:
            if not word:
                raise RequestError("bad_words", "found a word without tokens, expected at least one")
            for token in word:
                _id("bad_words", token, n_tokens)
        need = self.widths(stop_ids)
        _fits("logit_bias", need.bias, widest.bias, "entries")
        _fits("min_tokens", need.stops, widest.stops, "stop ids")
        _fits("bad_words", need.words, widest.words, "words")
        _fits("bad_words", need.word_length, widest.word_length, "tokens in a word")


def _id(name: str, token: object, n_tokens: int) -> None:
    if type(token) is not int or not 0 <= token < n_tokens:
        raise RequestError(name, f"found token id {token!r}, expected an integer in 0 ... {n_tokens - 1}")


def _fits(name: str, found: int, most: int, what: str) -> None:
    if found > most:
        raise RequestError(name, f"found {found} {what}, expected at most {most}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProcessorRows:
    """Rules of B rows, on the device; widths of `Widths`, lists of ids padded with NO_ID."""

    repetition: jax.Array  # float32 [B], 1 off
    frequency: jax.Array  # float32 [B], 0 off
    presence: jax.Array  # float32 [B], 0 off
    bias_ids: jax.Array  # int32 [B, bias], no id twice in a row
    bias: jax.Array  # float32 [B, bias]
    min_tokens: jax.Array  # int32 [B]
    stop_ids: jax.Array  # int32 [B, stops]
    words: jax.Array  # int32 [B, words, word_length], the padding on the left
    allowed: jax.Array | None = None  # uint32 [B, N, ceil(V / 32)]: bit i of word w is id 32 w + i; None: all

    @staticmethod
    def of(
        rules: Sequence[Rules],
        stop_ids: Sequence[Collection[int]],
        widths: Widths,
        size: int,
        allowed: np.ndarray | None = None,
    ) -> "ProcessorRows":
        """From one `Rules` and the stop ids of each request, padded to `size` rows with rules that are off.

        All but `allowed` stays the same for as long as the batch does.

        Raises:
          ValueError: rules wider than `widths`.
        """
        for rule, ids in zip(rules, stop_ids, strict=True):
            if not widths.hold(rule.widths(ids)):
                raise ValueError(f"rules that need {rule.widths(ids)} do not fit {widths}")
        pad = size - len(rules)
        padded, stops = [*rules, *(Rules() for _ in range(pad))], [*stop_ids, *(() for _ in range(pad))]
        words = np.full((size, widths.words, widths.word_length), NO_ID, np.int32)
        for row, rule in zip(words, padded, strict=True):
            for place, word in zip(row, rule.bad_words, strict=False):
                place[widths.word_length - len(word) :] = word
        used_stops = [sorted(ids) if rule.min_tokens else [] for rule, ids in zip(padded, stops, strict=True)]
        return ProcessorRows(
            np.asarray([r.repetition_penalty for r in padded], np.float32),  # type: ignore[arg-type]  # NumPy in, moved by the jitted call
            np.asarray([r.frequency_penalty for r in padded], np.float32),  # type: ignore[arg-type]
            np.asarray([r.presence_penalty for r in padded], np.float32),  # type: ignore[arg-type]
            _table([list(r.logit_bias) for r in padded], widths.bias, NO_ID, np.int32),  # type: ignore[arg-type]
            _table([list(r.logit_bias.values()) for r in padded], widths.bias, 0.0, np.float32),  # type: ignore[arg-type]
            np.asarray([r.min_tokens for r in padded], np.int32),  # type: ignore[arg-type]
            _table(used_stops, widths.stops, NO_ID, np.int32),  # type: ignore[arg-type]
            words,  # type: ignore[arg-type]
            allowed,  # type: ignore[arg-type]
        )


def _table(rows: Sequence[Sequence[float]], width: int, fill: float, dtype: type[np.generic]) -> np.ndarray:
    """Rows of different length as [B, width], padded on the right."""
    table = np.full((len(rows), width), fill, dtype)
    for place, row in zip(table, rows, strict=True):
        place[: len(row)] = row
    return table


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """What B rows have committed, as processors need it: the token that is drawn but not yet cached is part of it.

    Five bytes a row for each id of the vocabulary, so it stays on the device: a pool with a row for each place of the
    running batch, of which a round takes the rows that it decodes and puts them back.
    """

    output: jax.Array  # int32 [B, V], how often a token is in the output
    prompt: jax.Array  # bool [B, V], whether it is in the prompt
    tail: jax.Array  # int32 [B, L], the output's last tokens, NO_ID before its first
    n_output: jax.Array  # int32 [B]

    @staticmethod
    def empty(batch: int, vocab_size: int, word_length: int) -> "History":
        """Before any token; `word_length` as of the widest `Widths`."""
        return History(
            jnp.zeros((batch, vocab_size), jnp.int32),
            jnp.zeros((batch, vocab_size), jnp.bool_),
            jnp.full((batch, max(word_length - 1, 0)), NO_ID, jnp.int32),
            jnp.zeros(batch, jnp.int32),
        )

    def take(self, places: jax.Array) -> "History":
        """The rows at int32 [n]; some row for a place that does not exist, which pads a batch."""
        return jax.tree.map(lambda x: jnp.take(x, places, axis=0, mode="clip"), self)

    def put(self, places: jax.Array, rows: "History") -> "History":
        """With rows at int32 [n], each place once; those for a place past the last are dropped."""
        return jax.tree.map(lambda x, new: x.at[places].set(new, mode="drop"), self, rows)

    def with_prompt(self, ids: jax.Array) -> "History":
        """A piece of the prompts, int32 [B, T], padded with NO_ID; pieces may come in any order."""
        prompt = self.prompt.at[_rows(ids), _column(ids, None, self.prompt.shape[1])].set(True, mode="drop")
        return History(self.output, prompt, self.tail, self.n_output)

    def with_output(self, tokens: jax.Array, committed: jax.Array) -> "History":
        """The first `committed` (int32 [B]) of tokens int32 [B, T] came next in the output."""
        counts = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < committed[:, None]
        column = _column(jnp.where(counts, tokens, NO_ID), None, self.output.shape[1])
        output = self.output.at[_rows(tokens), column].add(1, mode="drop")
        tail = _last(jnp.concatenate([self.tail, tokens], axis=1), committed, self.tail.shape[1])
        return History(output, self.prompt, tail, self.n_output + committed)


def chain_before(guesses: jax.Array) -> jax.Array:
    """Guesses before each position of a chain: int32 [B, k] to [B, k + 1, k], padded with NO_ID."""
    k = guesses.shape[1]
    earlier = jnp.arange(k)[None] < jnp.arange(k + 1)[:, None]
    return jnp.where(earlier[None], guesses[:, None], NO_ID)


def process(
    logits: jax.Array,
    rows: ProcessorRows,
    history: History,
    before: jax.Array,
    columns: jax.Array | None = None,
) -> jax.Array:
    """Logits as the rules make them, float32 [B, N, C].

    A position that has nothing left to draw is NaN: its row draws no token there, as where a model's logits are broken.

    Args:
      logits: float32 [B, N, C], -inf already at ids of no token.
      rows: the rules; `allowed`, if any, of these N positions.
      history: of the rows, up to the position before the block.
      before: int32 [B, N, A], the guesses between that and each position in their order, padded with NO_ID on the
        right: `chain_before`, or a tree's ancestors.
      columns: int32 [C], the ids of the logits' columns, strictly ascending; None: all of the vocabulary, in order.
    """
    active = (rows.repetition != 1) | (rows.frequency != 0) | (rows.presence != 0)

    def penalised() -> jax.Array:
        return jnp.where(active[:, None, None], _penalised(logits, rows, history, before, columns), logits)

    logits = jax.lax.cond(active.any(), penalised, lambda: logits)
    if rows.bias_ids.shape[1]:
        logits = _biased(logits, rows, columns)
    n_before = (before >= 0).sum(axis=-1, dtype=jnp.int32)
    rules_out = False
    if rows.stop_ids.shape[1]:
        early = history.n_output[:, None] + n_before < rows.min_tokens[:, None]
        logits = _without(logits, jnp.where(early[..., None], rows.stop_ids[:, None], NO_ID), columns)
        rules_out = True
    if rows.words.shape[1]:
        logits = _without(logits, _ends_of_words(rows.words, history.tail, before, n_before), columns)
        rules_out = True
    if rows.allowed is not None:
        logits = jnp.where(_bits(rows.allowed, logits.shape[-1], columns), logits, -jnp.inf)
        rules_out = True
    if not rules_out:
        return logits
    return jnp.where((logits > -jnp.inf).any(axis=-1, keepdims=True), logits, jnp.nan)


def process_draft(
    logits: jax.Array, rows: ProcessorRows, history: History, guesses: jax.Array, columns: jax.Array | None
) -> jax.Array:
    """A drafter's logits float32 [B, C] for the position after `guesses` (int32 [B, i]) of this round; cf. `process`.

    `rows.allowed` is of that one position, [B, 1, ...]: later ones of a grammar are known only once guesses are.
    """
    return process(logits[:, None], rows, history, guesses[:, None], columns)[:, 0]


def _penalised(
    logits: jax.Array, rows: ProcessorRows, history: History, before: jax.Array, columns: jax.Array | None
) -> jax.Array:
    output, prompt = history.output, history.prompt
    if columns is None:
        ids = jnp.arange(output.shape[1], dtype=jnp.int32)
    else:
        ids, output, prompt = columns, output[:, columns], prompt[:, columns]
    count = jnp.broadcast_to(output[:, None], logits.shape)
    for i in range(before.shape[-1]):
        count += (before[..., i, None] == ids[None, None]).astype(jnp.int32)

    def each(x: jax.Array) -> jax.Array:
        return x[:, None, None]

    factor = jnp.where(prompt[:, None] | (count > 0), each(rows.repetition), 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits -= each(rows.frequency) * count.astype(jnp.float32)
    return logits - jnp.where(count > 0, each(rows.presence), 0.0)


def _biased(logits: jax.Array, rows: ProcessorRows, columns: jax.Array | None) -> jax.Array:
    column = _column(rows.bias_ids, columns, logits.shape[-1])[:, None]
    b, n, _ = logits.shape
    row, position = jnp.arange(b)[:, None, None], jnp.arange(n)[None, :, None]
    return logits.at[row, position, column].add(rows.bias[:, None], mode="drop")


def _without(logits: jax.Array, ids: jax.Array, columns: jax.Array | None) -> jax.Array:
    """Logits [B, N, C] with -inf at ids int32 [B, N, M]."""
    b, n, c = logits.shape
    row, position = jnp.arange(b)[:, None, None], jnp.arange(n)[None, :, None]
    return logits.at[row, position, _column(ids, columns, c)].set(-jnp.inf, mode="drop")


def _ends_of_words(words: jax.Array, tail: jax.Array, before: jax.Array, n_before: jax.Array) -> jax.Array:
    """Last tokens of the words whose other tokens were the last ones: int32 [B, N, words], NO_ID for other words."""
    n = words.shape[2] - 1
    if n > tail.shape[1]:
        raise ValueError(f"bad words of {n + 1} tokens need a History of as many, found {tail.shape[1] + 1}")
    start, end = words[:, None, :, :-1], words[:, None, :, -1]
    outputs = jnp.broadcast_to(tail[:, None], (*before.shape[:2], tail.shape[1]))
    outputs = _last(jnp.concatenate([outputs, before], axis=-1), n_before, tail.shape[1])
    recent = outputs[:, :, None, outputs.shape[-1] - n :]
    return jnp.where(((start == NO_ID) | (start == recent)).all(axis=-1), end, NO_ID)


def _last(tokens: jax.Array, added: jax.Array, n: jax.Array | int) -> jax.Array:
    """tokens [..., n + A], of which n + `added` [...] are filled from the left: the last n of these."""
    at = added[..., None] + jnp.arange(n, dtype=jnp.int32).reshape((1,) * added.ndim + (-1,))
    return jnp.take_along_axis(tokens, at, axis=-1)


def _bits(words: jax.Array, size: int, columns: jax.Array | None) -> jax.Array:
    """uint32 [B, N, W] unpacked at the columns: bool [B, N, C]."""
    if columns is not None:
        shift = (columns % 32).astype(jnp.uint32)
        return ((words[..., columns // 32] >> shift[None, None]) & 1).astype(jnp.bool_)
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, None]) & 1
    return bits.reshape(*words.shape[:2], -1)[..., :size].astype(jnp.bool_)


def _column(ids: jax.Array, columns: jax.Array | None, size: int) -> jax.Array:
    """Columns of ids; `size`, which a scatter drops, for ids that have none (a negative index would wrap around)."""
    if columns is None:
        return jnp.where((ids >= 0) & (ids < size), ids, size)
    at = jnp.minimum(jnp.searchsorted(columns, ids), size - 1).astype(jnp.int32)
    return jnp.where(columns[at] == ids, at, size)


def _rows(ids: jax.Array) -> jax.Array:
    return jnp.arange(ids.shape[0])[:, None]
