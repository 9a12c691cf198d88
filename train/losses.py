"""How far a draft's distribution is from the target's: the losses of the training-time test, and what is counted.

With p the target's distribution, p' the same over the draft vocabulary alone (renormalised), q the draft's:

    soft_ce   - sum p' log q                                      (EAGLE-3)
    kl        sum p' log(p' / q): soft_ce less the entropy of p'
    lk        w * kl + (1 - w) * (1 - a),  a = sum min(p, q),  w = exp(-rate * a), w not differentiated

a is one less the total variation: the probability that a sampled draft is accepted. lk is the hybrid objective of LK
losses (arXiv:2602.23881; rate 3 there, a weight for each row): its first term has a gradient from the start, its second
one is what is wanted in the end.

Arrays of vocabulary size are made for a chunk of positions at a time, with the chunk's gradient, in one pass forward.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from kimijax.layers import linear, matmul_precision
from kimijax.model import Tables

Loss = Literal["soft_ce", "kl", "lk"]

# Rows of draft logits, of all steps together, that one chunk makes on a device: enough for the products with the head
# to run at full speed, and for the sum of its gradient to cost little beside them. At Kimi's sizes (7 steps, 163,840
# target and 32,000 draft tokens) a chunk's logits take 0.7 GB.
CHUNK_ROWS = 2048


class TargetRows(NamedTuple):
    """What the target says at each position, short of its distribution."""

    label: jax.Array  # int32 [B, T], the draft id of its most likely token; -1 where the draft vocabulary has it not
    normaliser: jax.Array  # float32 [B, T], log-sum-exp of its logits over the whole vocabulary


class LossSums(NamedTuple):
    """Of each step, over the rows that count; float32 [J]."""

    loss: jax.Array  # of rows that learn
    accepted: jax.Array  # a, of all valid rows
    correct: jax.Array  # valid rows whose most likely draft token is the target's


class Settings(NamedTuple):
    """What of a loss is known to the compiler."""

    loss: Loss
    rate: float
    n_chunks: int
    wants_head: bool  # whether the head is trained


def chunks_of(batch: int, length: int, n_steps: int) -> int:
    """Into how many chunks the positions of a batch are cut; see `CHUNK_ROWS`.

    Args:
      batch: rows on one device.
      length: tokens a row.
      n_steps: of the unrolling.
    """
    return min(length, -(-length * batch * n_steps // CHUNK_ROWS))


def target_rows(tables: Tables, normed: jax.Array, target_ids: jax.Array, n_chunks: int) -> TargetRows:
    """The target's most likely token and normaliser at each position, a chunk at a time.

    Args:
      tables: the target's head.
      normed: [B, T, D], its last hidden states, through the final norm.
      target_ids: int32 [Vd], the target's id of each draft id.
      n_chunks: see `chunks_of`.
    """
    v = tables.config.vocab_size
    draft_ids = jnp.full(v, -1, jnp.int32).at[target_ids].set(jnp.arange(target_ids.shape[0], dtype=jnp.int32))

    def rows(_: None, x: jax.Array) -> tuple[None, TargetRows]:
        logits = tables.head(x)
        top = logits.max(axis=-1, keepdims=True)
        normaliser = top[..., 0] + jnp.log(jnp.exp(logits - top).sum(axis=-1))
        # The first of the most likely tokens. XLA's argmax is a scalar loop on a CPU, a minimum is not.
        numbers = jnp.arange(v, dtype=jnp.int32)[None, None]
        best = jnp.where(logits == top, numbers, v - 1).min(axis=-1)
        return None, TargetRows(draft_ids[best], normaliser)

    _, out = jax.lax.scan(rows, None, _split(normed, n_chunks, axis=1))
    return TargetRows(*(_join(x, normed.shape[1], axis=1) for x in out))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def distance(
    settings: Settings,
    hidden: tuple[jax.Array, ...],
    head: jax.Array,
    normed: jax.Array,
    target_head: jax.Array,
    target: TargetRows,
    weight: jax.Array,
    valid: jax.Array,
) -> tuple[jax.Array, LossSums]:
    """The weighted sum of all rows' losses. Only `hidden` and `head` get a gradient.

    Args:
      settings: the loss, and how it is computed.
      hidden: J arrays [B, T, D], what the head takes in each step; row t of step j speaks about position t + 1 + j.
      head: [Vd, D].
      normed: [B, T, target width], the target's last hidden states, through its final norm.
      target_head: [Vd, target width], the target's head of the draft vocabulary.
      target: of each position.
      weight: float32 [J, B, T], factor of each row's loss; 0 for rows that do not learn.
      valid: bool [J, B, T], rows that are counted.
    """
    return _distance(settings, hidden, head, normed, target_head, target, weight, valid)[0]


def _distance(
    settings: Settings,
    hidden: tuple[jax.Array, ...],
    head: jax.Array,
    normed: jax.Array,
    target_head: jax.Array,
    target: TargetRows,
    weight: jax.Array,
    valid: jax.Array,
) -> tuple[tuple[jax.Array, LossSums], tuple[Any, ...]]:
    n, t, f32 = settings.n_chunks, normed.shape[1], jnp.dtype(jnp.float32)
    # Every step is moved to the position that it speaks about, so that all of them share a chunk's target.
    hidden = jax.lax.optimization_barrier(hidden)  # or XLA makes them in the loop that moves them
    states = jnp.stack([_behind(x, 1 + j) for j, x in enumerate(hidden)])  # [J, B, T, D]
    weights = jnp.stack([_behind(x, 1 + j) for j, x in enumerate(weight)])
    counted = jnp.stack([_behind(x, 1 + j) for j, x in enumerate(valid)])

    def chunk(carry: tuple[jax.Array, LossSums, jax.Array], xs: tuple[jax.Array, ...]):
        total, sums, d_head = carry
        x, w, c, last, label, normaliser = xs
        with matmul_precision(head.dtype):
            logits = linear(x, head, f32)  # [J, B, t, Vd]
            wanted = linear(last, target_head, f32)  # [B, t, Vd]
        loss, d_logits, accepted, correct = _rows(settings, logits, wanted, label, normaliser)
        d_logits = (d_logits * w[..., None]).astype(head.dtype)
        with matmul_precision(head.dtype):
            d_x = jnp.einsum("jbtv,vd->jbtd", d_logits, head)
            if settings.wants_head:
                d_head = d_head + jnp.einsum("jbtv,jbtd->vd", d_logits, x, preferred_element_type=f32)
        new = LossSums(
            jnp.where(w > 0, loss, 0.0).sum(axis=(1, 2)),
            jnp.where(c, accepted, 0.0).sum(axis=(1, 2)),
            (c & correct).astype(f32).sum(axis=(1, 2)),
        )
        total = total + jnp.where(w > 0, w * loss, 0.0).sum()
        return (total, LossSums(*(a + b for a, b in zip(sums, new, strict=True))), d_head), d_x

    zero = jnp.zeros(len(hidden), f32)
    start = (jnp.float32(0), LossSums(zero, zero, zero), jnp.zeros(head.shape if settings.wants_head else (), f32))
    xs = (
        _split(states, n, axis=2),
        _split(weights, n, axis=2),
        _split(counted, n, axis=2),
        _split(normed, n, axis=1),
        _split(target.label, n, axis=1),
        _split(target.normaliser, n, axis=1),
    )
    (total, sums, d_head), d_states = jax.lax.scan(chunk, start, xs)
    d_states = _join(d_states, t, axis=2)
    d_hidden = tuple(_ahead(x, 1 + j) for j, x in enumerate(d_states))
    return (total, sums), (d_hidden, d_head.astype(head.dtype), head)


def _distance_gradient(settings: Settings, saved: tuple[Any, ...], cotangent: tuple[jax.Array, LossSums]):
    d_hidden, d_head, head = saved
    scale = cotangent[0]
    d_head = d_head * scale.astype(d_head.dtype) if settings.wants_head else jnp.zeros_like(head)
    return tuple(x * scale.astype(x.dtype) for x in d_hidden), d_head, None, None, None, None, None


distance.defvjp(_distance, _distance_gradient)


def _rows(
    settings: Settings, logits: jax.Array, wanted: jax.Array, label: jax.Array, normaliser: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Of each row: loss [J, B, T], its gradient by the logits [J, B, T, Vd], a [J, B, T], and whether it is correct.

    Args:
      logits: float32 [J, B, T, Vd], the draft's.
      wanted: float32 [B, T, Vd], the target's of the same tokens.
      label: int32 [B, T].
      normaliser: float32 [B, T].
    """
    top = wanted.max(axis=-1, keepdims=True)
    e = jnp.exp(wanted - top)
    share = e.sum(axis=-1, keepdims=True)
    p_draft = (e / share)[None]  # p'
    p = jnp.exp(wanted - normaliser[..., None])[None]
    best = logits.max(axis=-1, keepdims=True)
    e = jnp.exp(logits - best)
    total = e.sum(axis=-1, keepdims=True)
    q = e / total
    log_total = jnp.log(total)[..., 0] + best[..., 0]
    loss = log_total - (p_draft * logits).sum(axis=-1)
    accepted = jnp.minimum(p, q).sum(axis=-1)
    # Correct: the label's logit is the largest, and the first of that value.
    numbers = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None, None]
    first = jnp.where(logits == best, numbers, logits.shape[-1]).min(axis=-1)
    correct = first == label[None]
    d_logits = q - p_draft
    if settings.loss == "soft_ce":
        return loss, d_logits, accepted, correct
    entropy = top[..., 0] + jnp.log(share[..., 0]) - (p_draft[0] * wanted).sum(axis=-1)
    loss = loss - entropy[None]
    if settings.loss == "kl":
        return loss, d_logits, accepted, correct
    w = jnp.exp(-jnp.float32(settings.rate) * accepted)
    # min(p, q) follows q where q is smaller; then through the softmax.
    below = jnp.where(q < p, q, 0.0)
    d_accepted = below - q * below.sum(axis=-1, keepdims=True)
    return (
        w * loss + (1.0 - w) * (1.0 - accepted),
        w[..., None] * d_logits - (1.0 - w)[..., None] * d_accepted,
        accepted,
        correct,
    )


def _split(x: jax.Array, n: int, axis: int) -> jax.Array:
    """n pieces of an axis, padded with zeros to a multiple, in front: [n, ..., length / n, ...]."""
    if n == 1:
        return x[None]
    size = -(-x.shape[axis] // n)
    widths = [(0, n * size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)]
    x = jnp.pad(x, widths)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], n, size, *x.shape[axis + 1 :]), axis, 0)


def _join(x: jax.Array, length: int, axis: int) -> jax.Array:
    """What `_split` has split; `axis` without the one in front."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def _behind(x: jax.Array, by: int) -> jax.Array:
    """x [B, T, ...] moved to the right, zeros in front."""
    by = min(by, x.shape[1])
    return jnp.concatenate([jnp.zeros_like(x[:, :by]), x[:, : x.shape[1] - by]], axis=1)


def _ahead(x: jax.Array, by: int) -> jax.Array:
    """x [B, T, ...] moved to the left, zeros after the end."""
    by = min(by, x.shape[1])
    return jnp.concatenate([x[:, by:], jnp.zeros_like(x[:, :by])], axis=1)
