"""Several rounds on the device without the host: the loops that the engine and `evaluate` share.

A row idles from its end on: it is computed like the others, and stays as it was. The loop stops when all rows idle.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .cache import CacheView
from .model import Target
from .sampling import SamplingRows, sample
from .speculation import Proposer, Round, RowState, is_end
from .verification import NO_TOKEN


class Record(NamedTuple):
    """What a loop over rounds wrote down; R rounds at most, `room` tokens a row."""

    tokens: jax.Array  # int32 [B, room], NO_TOKEN behind a row's last
    produced: jax.Array  # int32 [B]
    ended: jax.Array  # bool [B], by a token of `ends`, or one that is none
    guesses: jax.Array  # int32 [R, B, G]
    accepted: jax.Array  # int32 [R, B], -1 where the row idled, or had no guesses
    n_rounds: jax.Array  # int32, that were run

    @staticmethod
    def empty(batch: int, room: int, most: int, n_guesses: int) -> "Record":
        """Before the first of `most` rounds."""
        return Record(
            jnp.full((batch, room), NO_TOKEN, jnp.int32),
            jnp.zeros(batch, jnp.int32),
            jnp.zeros(batch, jnp.bool),
            jnp.full((most, batch, n_guesses), NO_TOKEN, jnp.int32),
            jnp.full((most, batch), -1, jnp.int32),
            jnp.int32(0),
        )

    def after(self, made: Round, budget: jax.Array, ends: jax.Array) -> "Record":
        """With one round more, of rows with a budget int32 [B] that end at `ends` int32 [B, E]."""
        b, room = self.tokens.shape
        offset = jnp.arange(made.tokens.shape[1], dtype=jnp.int32)[None]
        counts = offset < made.committed[:, None]
        places = jnp.where(counts, self.produced[:, None] + offset, room)  # past the end: dropped
        guessed = (budget > 0) & (made.guesses >= 0).any(axis=1)
        return Record(
            self.tokens.at[jnp.arange(b)[:, None], places].set(made.tokens, mode="drop"),
            self.produced + made.committed,
            self.ended | (is_end(made.tokens, ends) & counts).any(axis=1),
            self.guesses.at[self.n_rounds].set(made.guesses),
            self.accepted.at[self.n_rounds].set(jnp.where(guessed, made.accepted, -1)),
            self.n_rounds + 1,
        )


def decode_rounds[S, View: CacheView](
    step: Callable[[RowState[S, View], jax.Array], tuple[Round, RowState[S, View]]],
    state: RowState[S, View],
    left: jax.Array,
    ends: jax.Array,
    *,
    n_guesses: int,
    room: int,
    most: int,
    n_rounds: jax.Array | int | None = None,
) -> tuple[Record, RowState[S, View]]:
    """Rounds until every row has ended, `n_rounds` at the most.

    Args:
      step: one round, of rows and their budget int32 [B]: `speculative_round` or `tree_round`.
      state: both views have room for all rows that the rounds can write.
      left: int32 [B], most tokens of each row, at most `room`; 0: the row idles.
      ends: int32 [B, E], ids that end a row, padded with NO_TOKEN.
      n_guesses: of a round.
      room: tokens of a row that are kept.
      most: R.
      n_rounds: at most R; None: R.
    """

    def busy(record: Record) -> jax.Array:
        return ~record.ended & (record.produced < left)

    def go_on(carry: tuple[Record, RowState[S, View]]) -> jax.Array:
        return busy(carry[0]).any() & (carry[0].n_rounds < (most if n_rounds is None else n_rounds))

    def run(carry: tuple[Record, RowState[S, View]]) -> tuple[Record, RowState[S, View]]:
        record, state = carry
        budget = jnp.where(busy(record), left - record.produced, 0)
        made, state = step(state, budget)
        return record.after(made, budget, ends), state

    record = Record.empty(left.shape[0], room, most, n_guesses)
    return jax.lax.while_loop(go_on, run, (record, state))


def plain_rounds[S, View: CacheView](
    target: Target,
    proposer: Proposer[S] | None,
    state: RowState[S, View],
    rows: SamplingRows,
    left: jax.Array,
    ends: jax.Array,
    *,
    most: int,
    n_tokens: int,
    n_rounds: jax.Array | int,
    prepare: jax.Array | None = None,
    experts: str = "reference",
) -> tuple[Record, RowState[S, View]]:
    """Rounds without guesses. The proposer, if there is one, sees all of them at once at the end, which costs it one
    pass instead of one a token, and less if it need not `prepare` for guessing; `decode_rounds` otherwise."""
    b, d = left.shape[0], target.config.hidden
    taps = () if proposer is None else proposer.taps
    begin, seen = state.length, {tap: jnp.zeros((b, most, d), target.embed.get_value().dtype) for tap in taps}
    tokens = jnp.full((b, most), NO_TOKEN, jnp.int32)
    ended, nothing = jnp.zeros(b, jnp.bool), jnp.zeros(b, jnp.int32)

    def go_on(carry: tuple[Any, ...]) -> jax.Array:
        i, _, produced, ended, *_ = carry
        return (i < n_rounds) & (~ended & (produced < left)).any()

    def run(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        i, tokens, produced, ended, seen, view, token = carry
        busy = ~ended & (produced < left)
        hidden, view = target.decode(token[:, None], begin + produced, view, taps=taps, experts=experts)
        drawn = sample(target.logits(hidden.last)[:, 0], rows, begin + produced + 1, n_tokens)
        seen = {tap: jax.lax.dynamic_update_slice(seen[tap], hidden.taps[tap], (0, i, 0)) for tap in taps}
        new = jnp.where(busy, drawn, NO_TOKEN)
        tokens = jax.lax.dynamic_update_slice(tokens, new[:, None], (0, i))
        ended = ended | (busy & is_end(drawn[:, None], ends)[:, 0])
        return i + 1, tokens, produced + busy.astype(jnp.int32), ended, seen, view, jnp.where(busy, drawn, token)

    carry = (jnp.int32(0), tokens, nothing, ended, seen, state.view, state.token)
    n, tokens, produced, ended, seen, view, token = jax.lax.while_loop(go_on, run, carry)
    kept = state.proposer
    if proposer is not None:
        kept = proposer.observe(kept, seen, tokens, begin, produced, prepare)
    record = Record.empty(b, most, most, 0)._replace(tokens=tokens, produced=produced, ended=ended, n_rounds=n)
    return record, RowState(token, begin + produced, view, kept)
