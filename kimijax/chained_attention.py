"""Attention of the unrolled steps of a drafter's training, without the scores of a whole step at once.

In step j a row's query sees the keys of step 0 of its document's rows up to its own, and the row's own keys of steps
1 ... j: what the server's cache holds after j drafted tokens, all of them accepted. One softmax runs over both.

Queries are taken in blocks: keys after a block's last row are not multiplied, and only the log of each query's
normaliser is kept for the backward pass, which makes the scores anew (FlashAttention, arXiv:2205.14135, section 3.1).
Axes as in `model.py`; M key-value heads, G = N / M query heads on each.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .attention import MAX_BLOCKS, QUERY_BLOCK
from .sharding import shard


class _Block(NamedTuple):
    """Queries `start` to `stop`, and the keys of step 0 that at least one of them may see."""

    start: int
    stop: int
    first: int  # the keys are first ... stop - 1


def chained(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    own_keys: tuple[jax.Array, ...],
    own_values: tuple[jax.Array, ...],
    positions: jax.Array,
    segments: jax.Array,
    scale: float,
    window: int | None,
) -> jax.Array:
    """Heads of one step: causal attention where nothing is a row's own.

    Args:
      query: [B, T, N, H]; query head n reads key head n * M // N.
      keys: [B, M, T, H] of step 0 (`by_head`).
      values: [B, M, T, V] of step 0.
      own_keys: [B, M, T, H] of each step from 1 to this one, seen by their own row alone.
      own_values: [B, M, T, V], likewise.
      positions: int32 [B, T] of step 0, rising by one within a document.
      segments: int32 [B, T], the rows' documents; keys of a negative one, padding, are seen by none.
      scale: of the scores.
      window: a query sees positions less than this far back.
    Returns:
      [B, T, N, V]; zeros where a query sees no key.
    """
    b, t, n, h = query.shape
    m = keys.shape[1]
    grouped = query.reshape(b, t, m, n // m, h).transpose(0, 2, 3, 1, 4)
    # The barriers keep XLA from moving the transposition into the products, where it costs more than on its own.
    grouped = jax.lax.optimization_barrier(grouped)
    out = _chained(grouped, keys, values, own_keys, own_values, positions, segments, scale, window)
    out = jax.lax.optimization_barrier(out).transpose(0, 3, 1, 2, 4).reshape(b, t, n, -1)
    return shard(out, "batch", "replicated", "heads", "head_dim")


def by_head(x: jax.Array) -> jax.Array:
    """Keys or values [B, T, M, H] as `chained` takes them, [B, M, T, H]."""
    return jax.lax.optimization_barrier(x.swapaxes(1, 2))


@partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _chained(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    own_keys: tuple[jax.Array, ...],
    own_values: tuple[jax.Array, ...],
    positions: jax.Array,
    segments: jax.Array,
    scale: float,
    window: int | None,
) -> jax.Array:
    """`chained` with query [B, M, G, T, H], keys and values [B, M, T, H or V], to [B, M, G, T, V]."""
    return _forward(query, keys, values, own_keys, own_values, positions, segments, scale, window)[0]


def _forward(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    own_keys: tuple[jax.Array, ...],
    own_values: tuple[jax.Array, ...],
    positions: jax.Array,
    segments: jax.Array,
    scale: float,
    window: int | None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    n_own, f32 = len(own_keys), jnp.float32
    seen = _seen_own(n_own, window)
    own = [_own_scores(query, own_keys[i], scale) for i in seen]  # [B, M, G, T] each
    sums: list[jax.Array] = []
    tops: list[jax.Array] = []
    totals: list[jax.Array] = []
    for block in _blocks(query.shape[3], n_own, window):
        rows, among = slice(block.start, block.stop), slice(block.first, block.stop)
        query, sums = _after(query, sums)
        score = _scores(query[..., rows, :], keys[:, :, among], scale)  # [B, M, G, t, S]
        score = jnp.where(_visible(positions, segments, block, n_own, window), score, -jnp.inf)
        top = score.max(axis=-1)
        for s in own:
            top = jnp.maximum(top, s[..., rows])
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        e = jnp.exp(score - top[..., None])
        totals.append(e.sum(axis=-1))
        # Divided by the total at the end: a product with p = e / total would be made of every score once more.
        sums.append(jnp.einsum("bmgts,bmsv->bmgtv", e.astype(values.dtype), values[:, :, among]))
        tops.append(top)
    top, total = jnp.concatenate(tops, axis=-1), jnp.concatenate(totals, axis=-1)
    heads = jnp.concatenate(sums, axis=-2).astype(f32)
    for i, s in zip(seen, own, strict=True):
        e = jnp.exp(s - top)
        total = total + e
        heads = heads + e[..., None] * own_values[i].astype(f32)[:, :, None]
    total = jnp.where(total > 0, total, 1.0)
    heads = (heads / total[..., None]).astype(values.dtype)
    saved = query, keys, values, own_keys, own_values, positions, segments, heads, top + jnp.log(total)
    return heads, saved


def _backward(scale: float, window: int | None, saved: tuple[Any, ...], d_out: jax.Array) -> tuple[Any, ...]:
    query, keys, values, own_keys, own_values, positions, segments, heads, normaliser = saved
    n_own, f32 = len(own_keys), jnp.float32
    # The gradient of a softmax is p * (dp - sum of p * dp), and that sum is the product of output and its gradient.
    share = (heads.astype(f32) * d_out.astype(f32)).sum(axis=-1)
    d_queries: list[jax.Array] = []
    d_keys, d_values = jnp.zeros(keys.shape, f32), jnp.zeros(values.shape, f32)
    for block in _blocks(query.shape[3], n_own, window):
        rows, among = slice(block.start, block.stop), slice(block.first, block.stop)
        query, (d_queries, d_keys, d_values) = _after(query, (d_queries, d_keys, d_values))
        q, d, k, v = query[..., rows, :], d_out[..., rows, :], keys[:, :, among], values[:, :, among]
        score = _scores(q, k, scale) - normaliser[..., rows, None]
        p = jnp.exp(jnp.where(_visible(positions, segments, block, n_own, window), score, -jnp.inf))
        d_p = jnp.einsum("bmgtv,bmsv->bmgts", d, v, preferred_element_type=f32)
        d_score = (p * (d_p - share[..., rows, None]) * f32(scale)).astype(q.dtype)
        # Without the barrier XLA's CPU compiler makes these anew within each of the products that take them.
        p, d_score = jax.lax.optimization_barrier((p.astype(d.dtype), d_score))
        d_queries.append(jnp.einsum("bmgts,bmsh->bmgth", d_score, k))
        d_k = jnp.einsum("bmgts,bmgth->bmsh", d_score, q, preferred_element_type=f32)
        d_v = jnp.einsum("bmgts,bmgtv->bmsv", p, d, preferred_element_type=f32)
        d_keys, d_values = d_keys.at[:, :, among].add(d_k), d_values.at[:, :, among].add(d_v)
    d_query = jnp.concatenate(d_queries, axis=-2)
    d_own_keys, d_own_values = [jnp.zeros_like(k) for k in own_keys], [jnp.zeros_like(v) for v in own_values]
    for i in _seen_own(n_own, window):
        k, v = own_keys[i][:, :, None], own_values[i][:, :, None]
        p = jnp.exp(_own_scores(query, own_keys[i], scale) - normaliser)
        d_p = (d_out.astype(f32) * v.astype(f32)).sum(axis=-1)
        d_score = p * (d_p - share) * f32(scale)
        d_query = d_query + (d_score[..., None] * k.astype(f32)).astype(query.dtype)
        d_own_keys[i] = (d_score[..., None] * query.astype(f32)).sum(axis=2).astype(k.dtype)
        d_own_values[i] = (p[..., None] * d_out.astype(f32)).sum(axis=2).astype(v.dtype)
    d_own = tuple(d_own_keys), tuple(d_own_values)
    return d_query, d_keys.astype(keys.dtype), d_values.astype(values.dtype), *d_own, None, None


_chained.defvjp(_forward, _backward)


def _after[T](query: jax.Array, done: T) -> tuple[jax.Array, T]:
    """The queries, to be read once the blocks before are done: XLA would make the scores of all blocks together."""
    return jax.lax.optimization_barrier((query, done))


def _blocks(t: int, n_own: int, window: int | None) -> Iterator[_Block]:
    size = max(QUERY_BLOCK, -(-t // MAX_BLOCKS))
    for start in range(0, t, size):
        first = 0 if window is None else max(0, start + n_own - window + 1)
        yield _Block(start, min(start + size, t), min(first, start))


def _visible(positions: jax.Array, segments: jax.Array, block: _Block, n_own: int, window: int | None) -> jax.Array:
    """bool [B, 1, 1, t, S]: which keys of step 0 the block's queries see, `n_own` steps after it."""
    rows, among = slice(block.start, block.stop), slice(block.first, block.stop)
    causal = jnp.arange(block.first, block.stop)[None] <= jnp.arange(block.start, block.stop)[:, None]
    visible = causal[None] & (segments[:, rows, None] == segments[:, None, among]) & (segments >= 0)[:, None, among]
    if window is not None:
        visible = visible & (positions[:, rows, None] + n_own - positions[:, None, among] < window)
    return visible[:, None, None]


def _seen_own(n_own: int, window: int | None) -> list[int]:
    """Indices of a row's own keys that lie in the window: the last is the query's own position."""
    return [i for i in range(n_own) if window is None or n_own - 1 - i < window]


def _scores(q: jax.Array, k: jax.Array, scale: float) -> jax.Array:
    """float32 [B, M, G, t, S] of q [B, M, G, t, H] and k [B, M, S, H]."""
    return jnp.einsum("bmgth,bmsh->bmgts", q, k, preferred_element_type=jnp.float32) * jnp.float32(scale)


def _own_scores(q: jax.Array, k: jax.Array, scale: float) -> jax.Array:
    """float32 [B, M, G, T] of q [B, M, G, T, H] and each row's own k [B, M, T, H]."""
    return (q.astype(jnp.float32) * k.astype(jnp.float32)[:, :, None]).sum(axis=-1) * jnp.float32(scale)
