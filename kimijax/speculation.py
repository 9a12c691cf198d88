"""Draft, verify, accept: the round that decodes several tokens with one pass of the target, and loses nothing.

A request with n tokens in the target's cache has one token more, x[n], drawn but not cached. A round

    1  lets a proposer guess x[n+1] ... x[n+k],
    2  runs the target over x[n] and the guesses at positions n ... n+k, with the wiring's taps,
    3  accepts the leading guesses that the target's distribution allows, and draws one more token from it,
    4  tells the proposer what the target computed at the positions that stayed: between two rounds its cache, too, has
       a row for each token that the target's has, made of the target's own features.

Rejected guesses are rolled back by the length alone: their cache rows lie at or past it. Every program stores its rows
before it attends, from the length on, and a query at position t reads rows up to t only: what a rejected guess left
behind is overwritten before any query can see it. That holds for both caches. A round needs room for k + 1 rows from
the length on; only the host knows the view's size, so keeping it is the caller's duty (`Window` would shift a block
that sticks out, `PagedView` would drop it).

All of it is pure functions of arrays of fixed shapes, for any view of a cache; `speculator` compiles them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from .cache import CacheView
from .draft_config import DraftConfig
from .drafter import Drafter
from .model import Target
from .sampling import SamplingRows, argmax, distribution, draw_guess, is_greedy, only_tokens, sample
from .simulated import simulated_accepts
from .verification import NO_TOKEN, TOKEN_BY_TOKEN, Proposal, Rule, Verified, entry, leading, verify

# From a drafter's logits [B, C], the guesses before them int32 [B, i] and the ids of the columns to logits [B, C].
DraftProcess = Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]


class Proposer[S](Protocol):
    """Guesses tokens. `S` is what it keeps for B rows, a pytree; it sees of the target its taps and nothing else."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The residual streams that it wants to see."""
        ...

    def prefill(
        self, state: S, taps: Mapping[int, jax.Array], following: jax.Array, start: jax.Array, last: jax.Array
    ) -> S:
        """See a chunk of prompt.

        Args:
          state: of the rows.
          taps: tap -> [B, T, D] of positions start ... start + T - 1.
          following: int32 [B, T], the token after each of these positions.
          start: int32 [B].
          last: int32 [B], which row of the chunk is the prompt's last; outside 0 ... T-1 if none is. Rows of the chunk
            after it are padding.
        """
        ...

    def propose(
        self, state: S, length: jax.Array, rows: SamplingRows, k: int, process: DraftProcess | None = None
    ) -> tuple[Proposal, S]:
        """Guess tokens length + 1 ... length + k of rows that have `length` (int32 [B]) tokens cached; k may be 0.

        `process` is what the request's rules make of the guesses' logits.
        """
        ...

    def observe(
        self,
        state: S,
        taps: Mapping[int, jax.Array],
        tokens: jax.Array,
        start: jax.Array,
        committed: jax.Array,
        prepare: jax.Array | None = None,
    ) -> S:
        """See what became of the guesses, or of tokens that were decoded without any.

        Args:
          state: as `propose` returned it.
          taps: tap -> [B, T, D] of the positions start ... start + T - 1.
          tokens: int32 [B, T], the token after each of these positions.
          start: int32 [B], tokens that were cached before.
          committed: int32 [B], how many of `tokens` are true; 0: the row stays as it was.
          prepare: bool []; false: the next round will not guess, and need not be able to. None: it may.
        """
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChainState[View: CacheView]:
    """The EAGLE-3 chain's rows: its cache, and what the head gave at each row's newest position.

    Row t of the cache belongs to position t and token x[t+1]. Between rounds rows 0 ... length - 1 hold what the
    target's features make them, `length` being that of the target's cache.
    """

    feedback: jax.Array  # [B, D], of row length - 1: the features of the second guess
    normed: jax.Array  # [B, D], of the same row: the first guess is the head's output for it
    ready: jax.Array  # bool [B]; without it there is no such output yet, and the next round guesses nothing
    view: View

    @staticmethod
    def empty(view: View, batch: int, config: DraftConfig, dtype: Any) -> "ChainState[View]":
        """Before a prompt."""
        zeros = jnp.zeros((batch, config.hidden), dtype)
        return ChainState(zeros, zeros, jnp.zeros(batch, jnp.bool), view)


class DraftChain[View: CacheView]:
    """The chain of an EAGLE-3 head. A `Proposer`."""

    def __init__(self, drafter: Drafter, n_tokens: int) -> None:
        self.drafter, self.n_tokens = drafter, n_tokens

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.wiring.taps

    def prefill(
        self,
        state: ChainState[View],
        taps: Mapping[int, jax.Array],
        following: jax.Array,
        start: jax.Array,
        last: jax.Array,
    ) -> ChainState[View]:
        t = following.shape[1]
        here = (last >= 0) & (last < t)
        return self._seen(state, taps, following, start, jnp.clip(last, 0, t - 1), here)

    def propose(
        self,
        state: ChainState[View],
        length: jax.Array,
        rows: SamplingRows,
        k: int,
        process: DraftProcess | None = None,
    ) -> tuple[Proposal, ChainState[View]]:
        """Feeds each guess, and the output that it was drawn from, back for the next.

        The rows that this leaves in the cache lie at the length and behind it, where `observe` overwrites them.
        """
        d = self.drafter
        if k == 0:
            return Proposal(jnp.zeros((length.shape[0], 0), jnp.int32), None), state
        own = d.target_ids[...] if d.config.is_reduced else None
        tokens: list[jax.Array] = []
        q: list[jax.Array] = []
        feedback, view = state.feedback, state.view
        logits = d.logits(state.normed[:, None])[:, 0]
        for i in range(k):
            if i > 0:
                out, view = d.step(jnp.maximum(tokens[-1], 0), feedback, length + (i - 1), view)
                feedback, logits = out.feedback, out.logits
            if process is not None:
                guesses = jnp.stack(tokens, axis=1) if tokens else jnp.zeros((length.shape[0], 0), jnp.int32)
                logits = process(self._only_tokens(logits), guesses, own)
            ids, p = self._draw(logits, rows, length + (i + 1))
            known = state.ready & (ids >= 0)
            tokens.append(jnp.where(known, d.to_target(jnp.maximum(ids, 0)), NO_TOKEN))
            q.append(p)
        # On with the view, although what the guesses left in it counts for nothing: XLA would copy the one before.
        return Proposal(jnp.stack(tokens, axis=1), jnp.stack(q, axis=1), own), replace(state, view=view)

    def observe(
        self,
        state: ChainState[View],
        taps: Mapping[int, jax.Array],
        tokens: jax.Array,
        start: jax.Array,
        committed: jax.Array,
        prepare: jax.Array | None = None,
    ) -> ChainState[View]:
        """Computes the rows of the committed tokens. Those behind them are overwritten before they are seen."""
        return self._seen(state, taps, tokens, start, jnp.maximum(committed - 1, 0), committed > 0, prepare)

    def _seen(
        self,
        state: ChainState[View],
        taps: Mapping[int, jax.Array],
        tokens: jax.Array,
        start: jax.Array,
        row: jax.Array,
        here: jax.Array,
        prepare: jax.Array | None = None,
    ) -> ChainState[View]:
        """With the cache rows of a block, and the head's output at one of them, int32 [B], where `here`, bool [B]."""
        d, features, ids = self.drafter, self.drafter.fuse(taps), jnp.maximum(tokens, 0)
        view = d.fill(ids, features, start, state.view)

        def newest() -> tuple[jax.Array, jax.Array]:
            token, feature = entry(ids, row)[:, None], entry(features, row)[:, None]
            hidden, _ = d.decode(token, feature, start + row, view, filled=True)
            return (
                jnp.where(here[:, None], hidden.feedback[:, 0], state.feedback),
                jnp.where(here[:, None], hidden.normed[:, 0], state.normed),
            )

        if prepare is None:
            feedback, normed = newest()
            return ChainState(feedback, normed, state.ready | here, view)
        # Where nothing is prepared the output that is kept is of an older row, and not to be drafted from.
        feedback, normed = jax.lax.cond(prepare, newest, lambda: (state.feedback, state.normed))
        return ChainState(feedback, normed, jnp.where(here, prepare, state.ready), view)

    def _only_tokens(self, logits: jax.Array) -> jax.Array:
        """Logits [B, Vd], -inf for ids that belong to no token."""
        d = self.drafter
        if self.n_tokens >= d.config.vocab_size:
            return logits
        real = d.to_target(jnp.arange(logits.shape[-1], dtype=jnp.int32)) < self.n_tokens
        return jnp.where(real[None], logits, -jnp.inf)

    def _draw(self, logits: jax.Array, rows: SamplingRows, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draft ids int32 [B] (NO_TOKEN where logits are not a number) and what they were drawn from, [B, Vd]."""
        d, logits = self.drafter, self._only_tokens(logits)
        best, greedy = argmax(logits), is_greedy(rows)
        own = d.target_ids[...] if d.config.is_reduced else None

        def drawn() -> tuple[jax.Array, jax.Array]:
            p = distribution(logits, rows)
            return jnp.where(greedy, best, draw_guess(p, rows, position, own, d.config.vocab_size)), p

        ids, p = jax.lax.cond(greedy.all(), lambda: (best, jnp.zeros_like(logits)), drawn)
        return jnp.where(jnp.isnan(logits).any(axis=-1), NO_TOKEN, ids), p


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowState[S, View: CacheView]:
    """B requests between two rounds."""

    token: jax.Array  # int32 [B], drawn, not yet in the target's cache
    length: jax.Array  # int32 [B], tokens in the target's cache; the token's position
    view: View  # of the target's cache
    proposer: S


class Round(NamedTuple):
    """What one round did."""

    guesses: jax.Array  # int32 [B, k]
    accepted: jax.Array  # int32 [B], guesses that passed, whatever was cut
    tokens: jax.Array  # int32 [B, k + 1]; the first `committed` count
    committed: jax.Array  # int32 [B]


def speculative_round[S, View: CacheView](
    target: Target,
    proposer: Proposer[S],
    state: RowState[S, View],
    rows: SamplingRows,
    budget: jax.Array,
    ends: jax.Array,
    *,
    k: int,
    n_tokens: int,
    experts: str = "reference",
    rule: Rule = TOKEN_BY_TOKEN,
    simulated: jax.Array | None = None,
) -> tuple[Round, RowState[S, View]]:
    """One round of B requests. With k = 0 it is plain decoding, and the proposer still sees what it must.

    Args:
      target: the model.
      proposer: of guesses.
      state: both views have room for k + 1 rows from the length on.
      rows: settings.
      budget: int32 [B], most tokens to commit; 0: the row idles, and stays as it is.
      ends: int32 [B, E], ids that end the row, padded with NO_TOKEN: nothing after the first of them is committed.
      k: guesses.
      n_tokens: ids that belong to a token.
      experts: implementation of the target's expert product.
      rule: of acceptance.
      simulated: float32 [>= k], `simulated.simulated_chances`: so many guesses are taken whatever the target says.
        Costs are those of real rounds; the tokens are nobody's output.
    """
    proposal, draft = proposer.propose(state.proposer, state.length, rule.draws(rows, state.length + 1), k)
    state = RowState(state.token, state.length, state.view, draft)
    made, state, _ = verify_round(
        target,
        proposer,
        state,
        proposal,
        rows,
        budget,
        ends,
        n_tokens=n_tokens,
        experts=experts,
        rule=rule,
        simulated=simulated,
    )
    return made, state


def verify_round[S, View: CacheView](
    target: Target,
    proposer: Proposer[S] | None,
    state: RowState[S, View],
    proposal: Proposal,
    rows: SamplingRows,
    budget: jax.Array,
    ends: jax.Array,
    *,
    n_tokens: int,
    experts: str = "reference",
    rule: Rule = TOKEN_BY_TOKEN,
    process: Callable[[jax.Array], jax.Array] | None = None,
    simulated: jax.Array | None = None,
) -> tuple[Round, RowState[S, View], jax.Array]:
    """The part of `speculative_round` behind the proposal, for rounds whose guesses the host sees before.

    Args:
      proposer: sees what became of the guesses; None: nobody guessed.
      process: what the requests' rules make of the block's logits float32 [B, k + 1, V].
    Returns:
      What was done, the rows after it, and the target's logits before any processing.
    """
    ids = jnp.maximum(jnp.concatenate([state.token[:, None], proposal.tokens], axis=1), 0)
    taps = () if proposer is None else proposer.taps
    hidden, view = target.decode(ids, state.length, state.view, taps=taps, experts=experts)
    raw = only_tokens(target.logits(hidden.last), n_tokens)
    logits = raw if process is None else process(raw)
    found = verify(logits, proposal, rows, state.length + 1, n_tokens, rule)
    if simulated is not None:
        found = _pretended(found, proposal, simulated_accepts(simulated, rows.seed, state.length + 1))
    committed = committed_tokens(found, budget, ends)
    proposed = state.proposer
    if proposer is not None:
        proposed = proposer.observe(proposed, hidden.taps, found.tokens, state.length, committed)
    made = Round(proposal.tokens, found.accepted, found.tokens, committed)
    return made, after_round(state, found, committed, view, proposed), raw


def _pretended(found: Verified, proposal: Proposal, accepted: jax.Array) -> Verified:
    """As if so many guesses (int32 [B]) had passed, at most those there are."""
    n = jnp.minimum(accepted, leading(proposal.tokens >= 0))[:, None]
    offset = jnp.arange(found.tokens.shape[1], dtype=jnp.int32)[None]
    guesses = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(offset < n, guesses, jnp.where(offset == n, found.tokens[:, :1], NO_TOKEN))
    return Verified(tokens, n[:, 0])


def is_end(tokens: jax.Array, ends: jax.Array) -> jax.Array:
    """Which tokens int32 [B, T] end their row: those in ends int32 [B, E], and what is no token. bool [B, T].

    What followed a token that is none would be drawn after nothing.
    """
    return (tokens[..., None] == ends[:, None]).any(axis=-1) | (tokens < 0)


def committed_tokens(found: Verified, budget: jax.Array, ends: jax.Array) -> jax.Array:
    """How many tokens of a verified block count, int32 [B]: up to the budget and the first end; `speculative_round`."""
    width = found.tokens.shape[1]
    offset = jnp.arange(width, dtype=jnp.int32)[None]
    until_end = jnp.where(is_end(found.tokens, ends), offset + 1, width).min(axis=-1)
    return jnp.minimum(jnp.minimum(found.accepted + 1, until_end), jnp.maximum(budget, 0))


def after_round[S, View: CacheView](
    state: RowState[S, View], found: Verified, committed: jax.Array, view: View, proposer: S
) -> RowState[S, View]:
    """The rows once `committed` tokens count; one that stays keeps its token."""
    newest = entry(found.tokens, jnp.maximum(committed - 1, 0))
    return RowState(jnp.where(committed > 0, newest, state.token), state.length + committed, view, proposer)


def prefill_chunk[S, View: CacheView](
    target: Target,
    proposer: Proposer[S],
    state: RowState[S, View],
    ids: jax.Array,
    start: jax.Array,
    n_prompt: jax.Array,
    rows: SamplingRows,
    *,
    n_tokens: int,
    first: bool,
    experts: str = "reference",
) -> RowState[S, View]:
    """A chunk of B prompts. The chunk with a prompt's last token draws the token after it.

    Args:
      target: the model.
      proposer: sees the chunk, each position with the true token after it: at the chunk's end the prompt's next one.
      state: both views have room for start + T rows.
      ids: int32 [B, T + 1], the chunk and the prompt's token after it, anything past a prompt's end.
      start: int32 [B], the chunk's first position.
      n_prompt: int32 [B], tokens of each prompt.
      rows: settings.
      n_tokens: ids that belong to a token.
      first: every start is 0.
      experts: implementation of the target's expert product.
    """
    chunk, following = ids[:, :-1], ids[:, 1:]
    t = chunk.shape[1]
    taps = proposer.taps
    hidden, view = target.prefill_into(chunk, start, state.view, first=first, taps=taps, experts=experts)
    last = n_prompt - 1 - start
    here = (last >= 0) & (last < t)
    logits = target.logits(entry(hidden.last, jnp.clip(last, 0, t - 1))[:, None])[:, 0]
    drawn = sample(logits, rows, n_prompt, n_tokens)
    ended = jnp.arange(t, dtype=jnp.int32)[None] == last[:, None]
    following = jnp.where(ended, jnp.maximum(drawn, 0)[:, None], following)
    return RowState(
        jnp.where(here, drawn, state.token),
        jnp.minimum(start + t, n_prompt),
        view,
        proposer.prefill(state.proposer, hidden.taps, following, start, last),
    )
