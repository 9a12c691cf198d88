"""Drawing tokens: pure functions of logits and per-row settings.

A row's randomness is a function of (seed, position, purpose) alone, so that it does not depend on batch row, engine
step or padding. Filters find their threshold by bisection over the bits of a float instead of sorting the vocabulary.

A token is the argmax of log p plus Gumbel noise. A drafter that adds the same noise to log q guesses the same token
more often than one that draws for itself, and the token stays what the target draws without any guess: such rows are
`coupled` (Gumbel coupling: arXiv:2408.07978).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np


class Purpose(IntEnum):
    """Independent streams of random numbers for one position of a request.

    TOKEN is the position's own key, as every program has drawn with that decodes without drafts; the others are folded
    in. They lie above every id: the key that is folded with c is made of the same bits as TOKEN's noise for id c.
    """

    TOKEN = 0
    DRAFT = 0x80000000  # what the drafter proposes
    ACCEPT = 0x80000001  # whether that is accepted
    RESIDUAL = 0x80000002  # what replaces it otherwise
    BLOCK = 0x80000010  # the seeds of a block that is verified as a whole


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """Settings of B rows, on the device. A temperature of 0 is greedy, and so is top_k 1."""

    temperature: jax.Array  # float32 [B]
    top_k: jax.Array  # int32 [B], 0 off
    top_p: jax.Array  # float32 [B], 1 off
    min_p: jax.Array  # float32 [B], 0 off
    seed: jax.Array  # uint32 [B, 2], high and low word
    coupled: jax.Array  # bool [B]; tokens depend on (seed, position) alone, whatever was guessed

    @staticmethod
    def of(
        temperature: list[float],
        top_k: list[int],
        top_p: list[float],
        min_p: list[float],
        seed: list[int],
        coupled: list[bool] | None = None,
    ) -> "SamplingRows":
        """From one value a row; `seed` below 2**64; `coupled` None: no row is."""
        words = [[s >> 32, s & 0xFFFFFFFF] for s in seed]
        return SamplingRows(
            np.asarray(temperature, np.float32),  # type: ignore[arg-type]  # NumPy in, moved by the jitted call
            np.asarray(top_k, np.int32),  # type: ignore[arg-type]
            np.asarray(top_p, np.float32),  # type: ignore[arg-type]
            np.asarray(min_p, np.float32),  # type: ignore[arg-type]
            np.asarray(words, np.uint32),  # type: ignore[arg-type]
            np.asarray([False] * len(seed) if coupled is None else coupled, np.bool_),  # type: ignore[arg-type]
        )


def _largest_threshold(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest float32 threshold >= 0 per row for which `holds(threshold [B])` is true; it must hold at 0.

    Non-negative floats are ordered as their bits are: 31 halvings find the exact value.
    """

    def halve(i: jax.Array, bits: jax.Array) -> jax.Array:
        candidate = bits | (jnp.uint32(1) << (jnp.uint32(30) - i.astype(jnp.uint32)))
        threshold = jax.lax.bitcast_convert_type(candidate, jnp.float32)
        return jnp.where(jnp.isfinite(threshold) & holds(threshold), candidate, bits)

    bits = jax.lax.fori_loop(0, 31, halve, jnp.zeros(rows, jnp.uint32))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _threshold_where(on: jax.Array, holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`_largest_threshold` of the rows that are `on` (bool [B]), 0 of the others; no search where all are off."""
    n = on.shape[0]
    return jax.lax.cond(
        on.any(), lambda: jnp.where(on, _largest_threshold(holds, n), 0.0), lambda: jnp.zeros(n, jnp.float32)
    )


def argmax(x: jax.Array) -> jax.Array:
    """Index of the largest entry of each row, the lowest of a tie: [..., V] to int32 [...]; some index for a NaN.

    jnp.argmax reduces pairs, which XLA does one by one on a CPU: seven times as slow for a large vocabulary.
    """
    v = x.shape[-1]
    index = jnp.arange(v, dtype=jnp.int32).reshape((1,) * (x.ndim - 1) + (v,))
    return jnp.where(x == x.max(axis=-1, keepdims=True), index, v - 1).min(axis=-1)


# Below the smallest normal float32 a temperature would divide as 0, or overflow: such a row is greedy.
_COLDEST = float(np.finfo(np.float32).tiny)


def _tempered(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """logits / temperature, float32 [B, V], with the top at 0: it does not overflow, and is exact for cold rows."""
    t = jnp.where(rows.temperature >= _COLDEST, rows.temperature, 1.0)[:, None]
    logits = logits.astype(jnp.float32)
    return (logits - logits.max(axis=-1, keepdims=True)) / t


def filtered(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Tempered probabilities [B, V] after top_k, top_p and min_p, renormalised.

    top_k keeps the k most probable tokens, top_p the smallest set of most probable tokens whose sum reaches p, min_p
    those with at least min_p times the top's probability; tokens tied at a threshold are all kept. Rows too cold to
    divide by (`_COLDEST`) are treated as temperature 1: their draw ignores this.
    """
    p = jax.nn.softmax(_tempered(logits, rows), axis=-1)

    def at_least_k(threshold: jax.Array) -> jax.Array:
        return (p >= threshold[:, None]).sum(axis=-1) >= jnp.maximum(rows.top_k, 1)

    p = _keep(p, _threshold_where(rows.top_k > 0, at_least_k))

    def at_least_p(threshold: jax.Array) -> jax.Array:
        return jnp.where(p >= threshold[:, None], p, 0.0).sum(axis=-1) >= rows.top_p

    p = _keep(p, _threshold_where(rows.top_p < 1, at_least_p))
    return _keep(p, rows.min_p * p.max(axis=-1))


def _keep(p: jax.Array, threshold: jax.Array) -> jax.Array:
    p = jnp.where(p >= threshold[:, None], p, 0.0)
    return p / p.sum(axis=-1, keepdims=True)


def is_unfiltered(rows: SamplingRows) -> jax.Array:
    """Rows without top_k, top_p and min_p: bool [B]."""
    return (rows.top_k == 0) & (rows.top_p >= 1) & (rows.min_p <= 0)


def is_greedy(rows: SamplingRows) -> jax.Array:
    """Rows that take the most probable token: bool [B]. top_k 1 keeps all that tie for it, but means one token."""
    return (rows.temperature < _COLDEST) | (rows.top_k == 1)


def distribution(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Probabilities float32 [B, V] that rows draw from, those without filters to the bit whatever others ask for.

    Args:
      logits: float32 [B, V]; -inf where a token is ruled out.
      rows: settings; greedy rows have no distribution, what they get means nothing.
    """
    unfiltered = is_unfiltered(rows)

    def plain() -> jax.Array:
        return jax.nn.softmax(_tempered(logits, rows), axis=-1)

    def with_filters() -> jax.Array:
        return jnp.where(unfiltered[:, None], plain(), filtered(logits, rows))

    return jax.lax.cond((unfiltered | is_greedy(rows)).all(), plain, with_filters)


def only_tokens(logits: jax.Array, n_tokens: int) -> jax.Array:
    """Logits [..., V] with -inf at ids from `n_tokens` on, which belong to no token (a padded vocabulary)."""
    v = logits.shape[-1]
    if n_tokens >= v:
        return logits
    real = (jnp.arange(v) < n_tokens).reshape((1,) * (logits.ndim - 1) + (v,))
    return jnp.where(real, logits, -jnp.inf)


def gumbel(seed: jax.Array, position: jax.Array, size: int, purpose: Purpose = Purpose.TOKEN) -> jax.Array:
    """Gumbel noise float32 [B, size] of seeds uint32 [B, 2] at positions int32 [B]."""
    return jax.vmap(lambda words, at: jax.random.gumbel(key_at(words, at, purpose), (size,), jnp.float32))(
        seed, position
    )


def uniform(seed: jax.Array, position: jax.Array, purpose: Purpose) -> jax.Array:
    """One number float32 in [0, 1) for each of seeds uint32 [B, 2] at positions int32 [B]."""
    return jax.vmap(lambda words, at: jax.random.uniform(key_at(words, at, purpose), (), jnp.float32))(seed, position)


def key_at(words: jax.Array, position: jax.Array, purpose: Purpose) -> jax.Array:
    """The key of one seed uint32 [2] at a position, int32."""
    key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
    return key if purpose is Purpose.TOKEN else jax.random.fold_in(key, np.uint32(purpose))


def draw_from(p: jax.Array, rows: SamplingRows, position: jax.Array, purpose: Purpose) -> jax.Array:
    """One id a row, int32 [B], of weights p [B, V]: 0 is never drawn, and their sum does not matter."""
    return _drawn_with(p, gumbel(rows.seed, position, p.shape[-1], purpose))


def _drawn_with(p: jax.Array, noise: jax.Array) -> jax.Array:
    return argmax(jnp.where(p > 0, jnp.log(p), -jnp.inf) + noise)


def draw_guess(
    p: jax.Array, rows: SamplingRows, position: jax.Array, ids: jax.Array | None, vocab_size: int
) -> jax.Array:
    """What a drafter guesses: one column of p a row, int32 [B].

    A row that is not coupled draws with noise of its own (`Purpose.DRAFT`). A coupled one draws with the noise that
    `sample` adds to the target's scores. Guess and token are then the same with chance

        sum over x of 1 / sum over y of max(p(y) / p(x), q(y) / q(x)),

    no less than (1 - d) / (1 + d) for distributions of total variation distance d; with separate noise it is
    sum over x of p(x) q(x).

    Args:
      p: float32 [B, Vd], what the guesses are drawn from.
      rows: settings; what greedy rows get means nothing.
      position: int32 [B], index in its request of the token that is guessed.
      ids: int32 [Vd], the target's id of each column; None: columns are the target's ids.
      vocab_size: columns of the target's logits.
    """
    if ids is None and p.shape[-1] != vocab_size:
        raise ValueError(f"p has {p.shape[-1]} columns, and the target's logits {vocab_size}: `ids` must say which")
    samples = ~is_greedy(rows)

    def separate() -> jax.Array:
        return gumbel(rows.seed, position, p.shape[-1], Purpose.DRAFT)

    def shared() -> jax.Array:
        noise = gumbel(rows.seed, position, vocab_size)
        return noise if ids is None else noise[:, ids]

    def either() -> jax.Array:
        return jnp.where(rows.coupled[:, None], shared(), separate())

    one, other = (rows.coupled & samples).any(), (~rows.coupled & samples).any()
    noise = jax.lax.cond(one, lambda: jax.lax.cond(other, either, shared), separate)
    return _drawn_with(p, noise)


def sample(logits: jax.Array, rows: SamplingRows, position: jax.Array, n_tokens: int) -> jax.Array:
    """One token a row, int32 [B].

    Args:
      logits: float32 [B, V]; a row with a NaN draws -1, which is no token.
      rows: settings.
      position: int32 [B], index of the token being drawn in its request (prompt included).
      n_tokens: ids from here on belong to no token (a padded vocabulary) and are never drawn.
    """
    logits = only_tokens(logits, n_tokens)
    best = argmax(logits)
    greedy, unfiltered = is_greedy(rows), is_unfiltered(rows)

    def draw(scores: jax.Array) -> jax.Array:
        noise = gumbel(rows.seed, position, logits.shape[-1])
        return jnp.where(greedy, best, argmax(scores + noise))

    def plain() -> jax.Array:
        return draw(_tempered(logits, rows))

    def with_filters() -> jax.Array:
        # Not log(filtered): a row without filters must draw the same, to the bit, beside rows that have some.
        return draw(jnp.where(filtered(logits, rows) > 0, _tempered(logits, rows), -jnp.inf))

    broken = jnp.isnan(logits).any(axis=-1)  # not of the maximum: XLA on a CPU may leave a NaN out of it
    # The two conditions skip work on the device; the draw itself is the same with or without them.
    drawn = jax.lax.cond(
        greedy.all(),
        lambda: best,
        lambda: jax.lax.cond((unfiltered | greedy).all(), plain, with_filters),
    )
    return jnp.where(broken, -1, drawn)
