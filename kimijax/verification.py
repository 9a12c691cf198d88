"""Accepting guesses so that nothing is lost: the tokens are distributed as the target alone would draw them."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from .sampling import (
    Purpose,
    SamplingRows,
    argmax,
    distribution,
    draw_from,
    is_greedy,
    only_tokens,
    sample,
    uniform,
)

NO_TOKEN = -1  # in place of a token: logits were not a number, or a proposer has no guess


class Proposal(NamedTuple):
    """Guesses for the next k tokens of each row, and the distribution that they were drawn from."""

    tokens: jax.Array  # int32 [B, k], target ids; NO_TOKEN: none from there on
    q: jax.Array | None  # float32 [B, k, Vq], rows that sum to 1; None: the guesses were not drawn but certain
    vocabulary: jax.Array | None = None  # int32 [Vq], the ids of q's columns, strictly ascending; None: all, in order

    def chances(self) -> jax.Array:
        """q of the guesses, [B, k]."""
        if self.q is None:
            return jnp.ones(self.tokens.shape, jnp.float32)
        column = self.tokens if self.vocabulary is None else jnp.searchsorted(self.vocabulary, self.tokens)
        column = jnp.clip(column, 0, self.q.shape[-1] - 1).astype(jnp.int32)
        return jnp.take_along_axis(self.q, column[..., None], axis=-1)[..., 0]

    def over_tokens(self, i: jax.Array, size: int) -> jax.Array:
        """q at position i (int32 [B]) over all target ids: [B, size]."""
        if self.q is None:
            return jax.nn.one_hot(entry(self.tokens, i), size, dtype=jnp.float32)
        q = entry(self.q, i)
        if self.vocabulary is None:
            return q
        return jnp.zeros((q.shape[0], size), q.dtype).at[:, self.vocabulary].set(q)


class Verified(NamedTuple):
    """What a block became."""

    tokens: jax.Array  # int32 [B, k + 1]: the accepted guesses, the target's own token, then NO_TOKEN
    accepted: jax.Array  # int32 [B], guesses


class Rule(Protocol):
    """How many guesses rows that sample accept, and what replaces the next one, so that the target's distribution is
    left. `TOKEN_BY_TOKEN`, or `block_verification.BLOCK`."""

    def draws(self, rows: SamplingRows, position: jax.Array) -> SamplingRows:
        """The settings with the seeds that the block's guesses, their acceptance and their replacement are drawn with.

        Args:
          rows: settings.
          position: int32 [B], of guess 0.
        """
        ...

    def accept(
        self, p: jax.Array, proposal: Proposal, usable: jax.Array, draws: SamplingRows, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Decide.

        Args:
          p: float32 [B, k, V], the target's distribution that guess i is for.
          proposal: the guesses.
          usable: bool [B, k], which of them may be accepted at all.
          draws: settings of `draws`.
          position: int32 [B], of guess 0.
        Returns:
          How many guesses pass, int32 [B], and weights [B, V] that the token after them is drawn with if another guess
          stood there.
        """
        ...


@dataclass(frozen=True)
class TokenByToken:
    """A guess x passes with chance min(1, p(x) / q(x)); where one is rejected, a token is drawn from max(0, p - q)
    (arXiv:2211.17192 and 2302.01318). What is drawn for guesses after the first rejected one decides nothing, so that
    the next round may draw with the same numbers."""

    def draws(self, rows: SamplingRows, position: jax.Array) -> SamplingRows:
        return rows

    def accept(
        self, p: jax.Array, proposal: Proposal, usable: jax.Array, draws: SamplingRows, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        passed = usable & (acceptance_draws(draws, position, p.shape[1]) * proposal.chances() < of_guesses(p, proposal))
        n = leading(passed)
        i = jnp.minimum(n, p.shape[1] - 1)
        return n, jnp.maximum(entry(p, i) - proposal.over_tokens(i, p.shape[-1]), 0.0)


TOKEN_BY_TOKEN = TokenByToken()


def verify(
    logits: jax.Array,
    proposal: Proposal,
    rows: SamplingRows,
    position: jax.Array,
    n_tokens: int,
    rule: Rule = TOKEN_BY_TOKEN,
) -> Verified:
    """Accept or replace guesses so that the tokens are distributed as the target alone would draw them.

    Greedy rows accept a guess that is the most probable token (the lowest id of a tie). Coupled rows accept one that is
    the token which decoding without guesses draws there, with the same random numbers: their text is that of k = 0,
    whatever was guessed. For others the rule decides, on p, the target's distribution after the row's temperature and
    filters. After k accepted guesses the block's last token is drawn from p, with the random numbers that decoding
    without guesses has at that position.

    Args:
      logits: float32 [B, k + 1, V], of entry i after the context and guesses 0 ... i - 1.
      proposal: the guesses, drawn with `rule.draws`.
      rows: settings.
      position: int32 [B], index in its request of the token that guess 0 is for.
      n_tokens: ids from here on are never drawn.
      rule: of acceptance.
    """
    b, width, v = logits.shape
    k = width - 1
    logits = only_tokens(logits, n_tokens)
    if k == 0:
        return Verified(sample(logits[:, 0], rows, position, n_tokens)[:, None], jnp.zeros(b, jnp.int32))
    known = is_greedy(rows) | rows.coupled
    alone = _tokens_without_guesses(logits, rows, position, n_tokens)
    usable = (proposal.tokens >= 0) & (alone[:, :k] >= 0)
    exact = leading(usable & (proposal.tokens == alone[:, :k]))

    def all_known() -> tuple[jax.Array, jax.Array]:
        return exact, entry(alone, exact)

    def mixed() -> tuple[jax.Array, jax.Array]:
        draws = rule.draws(rows, position)
        each = jax.tree.map(lambda x: jnp.repeat(x, k, axis=0), _only(rows, ~known))
        p = distribution(logits[:, :k].reshape(b * k, v), each).reshape(b, k, v)
        passed, left = rule.accept(p, proposal, usable, draws, position)
        n = jnp.where(known, exact, passed)
        plain = sample(entry(logits, n), _only(rows, ~known), position + n, n_tokens)
        i = jnp.minimum(n, k - 1)
        # p and q that differ by rounding alone leave nothing, if a guess is rejected then at all.
        left = jnp.where(left.sum(axis=-1, keepdims=True) > 0, left, entry(p, i))
        instead = draw_from(left, draws, position + i, Purpose.RESIDUAL)
        drawn = jnp.where((n < k) & entry(usable, i), instead, plain)
        return n, jnp.where(known, entry(alone, n), drawn)

    n, last = jax.lax.cond(known.all(), all_known, mixed)
    offset = jnp.arange(width, dtype=jnp.int32)[None]
    guesses = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(offset < n[:, None], guesses, jnp.where(offset == n[:, None], last[:, None], NO_TOKEN))
    return Verified(tokens, n)


def _tokens_without_guesses(logits: jax.Array, rows: SamplingRows, position: jax.Array, n_tokens: int) -> jax.Array:
    """The token after each entry of a block as decoding without guesses draws it, int32 [B, k + 1], of greedy and of
    coupled rows. Of others it is the most probable one. NO_TOKEN where logits are not a number."""
    b, width, v = logits.shape
    drawing = rows.coupled & ~is_greedy(rows)

    def most_probable() -> jax.Array:
        return jnp.where(jnp.isnan(logits).any(axis=-1), NO_TOKEN, argmax(logits))

    def drawn() -> jax.Array:
        each = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), _only(rows, drawing))
        at = position[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        return sample(logits.reshape(b * width, v), each, at.reshape(-1), n_tokens).reshape(b, width)

    return jax.lax.cond(drawing.any(), drawn, most_probable)


def _only(rows: SamplingRows, some: jax.Array) -> SamplingRows:
    """Settings with all but `some` rows (bool [B]) greedy, so that no work is done for their filters."""
    return dataclasses.replace(rows, temperature=jnp.where(some, rows.temperature, 0.0))


def acceptance_draws(draws: SamplingRows, position: jax.Array, k: int) -> jax.Array:
    """A number in [0, 1) for each of k guesses, the first for `position`: float32 [B, k]."""
    at = position[:, None] + jnp.arange(k, dtype=jnp.int32)[None]
    return uniform(jnp.repeat(draws.seed, k, axis=0), at.reshape(-1), Purpose.ACCEPT).reshape(at.shape)


def of_guesses(p: jax.Array, proposal: Proposal) -> jax.Array:
    """p [B, k, V] of the guesses: [B, k]."""
    return jnp.take_along_axis(p, jnp.maximum(proposal.tokens, 0)[..., None], axis=-1)[..., 0]


def entry(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [B, T, ...] at int32 [B] of axis 1: [B, ...]."""
    shaped = index.reshape((-1,) + (1,) * (x.ndim - 1))
    return jnp.take_along_axis(x, shaped, axis=1)[:, 0]


def leading(passed: jax.Array) -> jax.Array:
    """How many entries of each row come before its first False: bool [B, k] to int32 [B]."""
    return jnp.cumprod(passed.astype(jnp.int32), axis=1).sum(axis=1)
