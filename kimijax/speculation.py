"""Draft, verify, accept: the round that decodes several tokens with one pass of the target, and loses nothing.

A request with n tokens in the target's cache has one token more, x[n], drawn but not cached. A round

    1  lets a proposer guess x[n+1] ... x[n+k],
    2  runs the target over x[n] and the guesses at positions n ... n+k, with the wiring's taps,
    3  accepts the leading guesses that the target's distribution allows, and draws one more token from it,
    4  tells the proposer what the target computed at the positions that stayed.

Rejected guesses are rolled back by the length alone: their cache rows lie at or past it. Every program stores its rows
before it attends, from the length on, and a query at position t reads rows up to t only: what a rejected guess left
behind is overwritten before any query can see it. That holds for both caches. A round needs room for k + 1 rows from
the length on; only the host knows the view's size, so keeping it is the caller's duty (`Window` would shift a block
that sticks out, `PagedView` would drop it).

All of it is pure functions of arrays of fixed shapes, for any view of a cache; `speculator` compiles them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from .cache import CacheView
from .draft_config import DraftConfig
from .drafter import Drafter
from .model import Target
from .sampling import Purpose, SamplingRows, argmax, distribution, draw_from, is_greedy, sample
from .verification import NO_TOKEN, TOKEN_BY_TOKEN, Proposal, Rule, Verified, entry, verify


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

    def propose(self, state: S, length: jax.Array, rows: SamplingRows, k: int) -> tuple[Proposal, S]:
        """Guess tokens length + 1 ... length + k of rows that have `length` (int32 [B]) tokens cached; k may be 0."""
        ...

    def observe(self, state: S, taps: Mapping[int, jax.Array], tokens: jax.Array, committed: jax.Array) -> S:
        """See what became of the guesses.

        Args:
          state: as `propose` returned it.
          taps: tap -> [B, k + 1, D] of the positions length ... length + k.
          tokens: int32 [B, k + 1], the token after each of these positions.
          committed: int32 [B], how many of these are true; 0: the row stays as it was.
        """
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChainState[View: CacheView]:
    """The EAGLE-3 chain's rows: its cache, and the block of true features that is not in it yet.

    Row t of the cache belongs to position t and token x[t+1]. Those before the block were made from true features.
    """

    features: jax.Array  # [B, W, D], fused; entries from `count` on hold anything
    tokens: jax.Array  # int32 [B, W], the token after each
    count: jax.Array  # int32 [B], 1 ... W; the block ends at the row before the target's length
    view: View

    @staticmethod
    def empty(view: View, batch: int, block: int, config: DraftConfig, dtype: Any) -> "ChainState[View]":
        """Before a prompt; `block` is W, the k + 1 of the rounds to come."""
        features, ids = jnp.zeros((batch, block, config.hidden), dtype), jnp.zeros((batch, block), jnp.int32)
        return ChainState(features, ids, jnp.ones(batch, jnp.int32), view)


class DraftChain[View: CacheView]:
    """The chain of an EAGLE-3 head. A `Proposer`; W of its state is the k + 1 of the round before."""

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
        features = self.drafter.fuse(taps)
        _, view = self.drafter.decode(following, features, start, state.view)
        t = following.shape[1]
        here, at = ((last >= 0) & (last < t))[:, None], jnp.clip(last, 0, t - 1)
        block = state.features.at[:, 0].set(jnp.where(here, entry(features, at), state.features[:, 0]))
        tokens = state.tokens.at[:, 0].set(jnp.where(here[:, 0], entry(following, at), state.tokens[:, 0]))
        return ChainState(block, tokens, state.count, view)

    def propose(
        self, state: ChainState[View], length: jax.Array, rows: SamplingRows, k: int
    ) -> tuple[Proposal, ChainState[View]]:
        """Extends the cache by the block, then feeds each guess and the output before it back for the next.

        The extension writes rows past the block's true ones where fewer were committed than W; the chain's steps and
        the next extension, which begins right behind the true ones, overwrite them before they are seen.
        """
        d = self.drafter
        hidden, view = d.decode(state.tokens, state.features, length - state.count, state.view)
        own = d.target_ids[...] if d.config.is_reduced else None
        tokens: list[jax.Array] = []
        q: list[jax.Array] = []
        feedback = entry(hidden.feedback, state.count - 1)
        for i in range(k):
            if i == 0:
                logits = d.logits(entry(hidden.normed, state.count - 1)[:, None])[:, 0]
            else:
                guess = jnp.maximum(tokens[-1], 0)
                out, view = d.step(guess, feedback, length + (i - 1), view)
                feedback, logits = out.feedback, out.logits
            ids, p = self._draw(logits, rows, length + (i + 1))
            tokens.append(jnp.where(ids >= 0, d.to_target(jnp.maximum(ids, 0)), NO_TOKEN))
            q.append(p)
        state = ChainState(state.features, state.tokens, state.count, view)
        if k == 0:
            return Proposal(jnp.zeros((length.shape[0], 0), jnp.int32), None), state
        return Proposal(jnp.stack(tokens, axis=1), jnp.stack(q, axis=1), own), state

    def observe(
        self, state: ChainState[View], taps: Mapping[int, jax.Array], tokens: jax.Array, committed: jax.Array
    ) -> ChainState[View]:
        """The block of the next round. A row that stays keeps its last entry: the others are in the cache by now."""
        features, moved = self.drafter.fuse(taps), (committed > 0)[:, None]
        wide = ((0, 0), (0, tokens.shape[1] - 1))
        kept = jnp.pad(entry(state.features, state.count - 1)[:, None], (*wide, (0, 0)))
        kept_token = jnp.pad(entry(state.tokens, state.count - 1)[:, None], wide)
        return ChainState(
            jnp.where(moved[..., None], features, kept),
            jnp.where(moved, jnp.maximum(tokens, 0), kept_token),
            jnp.maximum(committed, 1),
            state.view,
        )

    def _draw(self, logits: jax.Array, rows: SamplingRows, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draft ids int32 [B] (NO_TOKEN where logits are not a number) and what they were drawn from, [B, Vd]."""
        d = self.drafter
        if self.n_tokens < d.config.vocab_size:
            real = d.to_target(jnp.arange(logits.shape[-1], dtype=jnp.int32)) < self.n_tokens
            logits = jnp.where(real[None], logits, -jnp.inf)
        best, greedy = argmax(logits), is_greedy(rows)

        def drawn() -> tuple[jax.Array, jax.Array]:
            p = distribution(logits, rows)
            return jnp.where(greedy, best, draw_from(p, rows, position, Purpose.DRAFT)), p

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
    """
    draws = rule.draws(rows, state.length + 1)
    proposal, draft = proposer.propose(state.proposer, state.length, draws, k)
    ids = jnp.maximum(jnp.concatenate([state.token[:, None], proposal.tokens], axis=1), 0)
    hidden, view = target.decode(ids, state.length, state.view, taps=proposer.taps, experts=experts)
    found = verify(target.logits(hidden.last), proposal, rows, state.length + 1, n_tokens, rule)
    committed = committed_tokens(found, budget, ends)
    proposed = proposer.observe(draft, hidden.taps, found.tokens, committed)
    made = Round(proposal.tokens, found.accepted, found.tokens, committed)
    return made, after_round(state, found, committed, view, proposed)


def committed_tokens(found: Verified, budget: jax.Array, ends: jax.Array) -> jax.Array:
    """How many tokens of a verified block count, int32 [B]: up to the budget and the first end; `speculative_round`."""
    width = found.tokens.shape[1]
    offset = jnp.arange(width, dtype=jnp.int32)[None]
    # A token that is none ends the row as well: what followed it would be drawn after nothing.
    last = (found.tokens[..., None] == ends[:, None]).any(axis=-1) | (found.tokens < 0)
    until_end = jnp.where(last, offset + 1, width).min(axis=-1)
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
    context = None if first else state.view
    hidden, latents = target.prefill(chunk, start, context, taps=proposer.taps, experts=experts)
    view = state.view
    for layer, new in enumerate(latents):
        view = view.store(layer, new, start)
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
