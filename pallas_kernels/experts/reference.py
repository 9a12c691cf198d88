"""jax.numpy implementations of the experts op. Letters: T tokens, K chosen, E experts, D width, F expert width."""

import functools
import math
from dataclasses import dataclass
from types import EllipsisType
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from ..int4 import dequantize_int4

# Measured on a CPU with XLA 0.12, float32, 16 and 64 experts.
ROW_MAP_LIMIT = 64  # (token, slot) rows up to which one product per row beats a loop over the rows' experts
HEAD_MEAN = 2  # mean rows per expert from which a batched product for the first rows of all experts beats both
CAPACITY_FACTOR = 1.5


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertList:
    """Float weights [E, *F, D] of E experts as E arrays [D, F], the axes F merged, inputs first.

    XLA's CPU compiler copies a slice of a stacked array before it multiplies by it, which takes as long as the product
    with one row. An array of its own is read where it lies, by the branch of a conditional.
    """

    arrays: tuple[jax.Array, ...]

    @classmethod
    def of(cls, stacked: jax.Array) -> Self:
        """A copy of [E, *F, D]."""
        return cls(tuple(one.reshape(-1, one.shape[-1]).T.copy() for one in stacked))

    @property
    def dtype(self) -> jnp.dtype:
        return self.arrays[0].dtype

    def __getitem__(self, key: EllipsisType) -> Self:
        """Itself: a parameter's value is asked for at [...]."""
        return self


class _Weights(NamedTuple):
    """All experts' weights as `experts` takes them."""

    gate_up: jax.Array
    down: jax.Array
    gate_up_scale: jax.Array | None
    down_scale: jax.Array | None

    @property
    def n_experts(self) -> int:
        return self.gate_up.shape[0]

    def head_rows(self, n_rows: int) -> int:
        """See `_head_rows`. INT4 experts are unpacked one at a time, so they have the loop alone."""
        return 0 if self.gate_up_scale is not None else _head_rows(n_rows, self.n_experts)

    def is_few(self, n_rows: int) -> bool:
        return _is_few(n_rows, self.n_experts, self.gate_up_scale is not None)

    def product(self, e: jax.Array, x: jax.Array) -> jax.Array:
        """x [D] or [n, D] through expert e: [D] or [n, D]."""
        up = _expert(self.gate_up, self.gate_up_scale, e, x.dtype)
        h = _times(x, up.reshape(-1, up.shape[-1]))
        return _times(_gated(h.reshape(*x.shape[:-1], 2, -1)), _expert(self.down, self.down_scale, e, x.dtype))


class _Listed(NamedTuple):
    """The same of an `ExpertList`."""

    gate_up: ExpertList
    down: ExpertList

    @property
    def n_experts(self) -> int:
        return len(self.gate_up.arrays)

    def head_rows(self, n_rows: int) -> int:
        return 0

    def is_few(self, n_rows: int) -> bool:
        return n_rows <= ROW_MAP_LIMIT

    def product(self, e: jax.Array, x: jax.Array) -> jax.Array:
        def through(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
            return _gated((x @ up).reshape(*x.shape[:-1], 2, -1)) @ down

        pairs = zip(self.gate_up.arrays, self.down.arrays, strict=True)
        return lax.switch(e, [functools.partial(through, up, down) for up, down in pairs], x)


type _AnyWeights = _Weights | _Listed


def _expert(weights: jax.Array, scale: jax.Array | None, e: jax.Array, dtype: jnp.dtype) -> jax.Array:
    one = lax.dynamic_index_in_dim(weights, e, keepdims=False)
    if scale is None:
        return one
    return dequantize_int4(one, lax.dynamic_index_in_dim(scale, e, keepdims=False), dtype)


def _times(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [D] or [n, D] times w [F, D] transposed."""
    return w @ x if x.ndim == 1 else x @ w.T


def _gated(h: jax.Array) -> jax.Array:
    """[..., 2, F] to [..., F]."""
    return jax.nn.silu(h[..., 0, :]) * h[..., 1, :]


def reference(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array | ExpertList,
    down: jax.Array | ExpertList,
    gate_up_scale: jax.Array | None,
    down_scale: jax.Array | None,
    partial: bool,
) -> jax.Array:
    """See `experts`. A row map for few (token, slot) rows, the expert loop for many."""
    w = _weights(gate_up, down, gate_up_scale, down_scale)
    if partial:
        weights = jnp.where(chosen < 0, 0.0, weights)
    form = _row_map if w.is_few(chosen.size) else _expert_loop
    return form(x, chosen, weights, w, partial)


def _weights(
    gate_up: jax.Array | ExpertList,
    down: jax.Array | ExpertList,
    gate_up_scale: jax.Array | None,
    down_scale: jax.Array | None,
) -> _AnyWeights:
    if isinstance(gate_up, ExpertList) and isinstance(down, ExpertList):
        return _Listed(gate_up, down)
    if isinstance(gate_up, ExpertList) or isinstance(down, ExpertList):
        name = "gate_up" if isinstance(down, ExpertList) else "down"
        raise TypeError(f"{name}: found an array, expected an ExpertList as the other is: arrange both or none")
    return _Weights(gate_up, down, gate_up_scale, down_scale)


def _is_few(n_rows: int, n_experts: int, int4: bool) -> bool:
    """Whether the row map is faster. It unpacks an INT4 expert for each row, so there the rows must be fewer still."""
    if int4:
        return n_rows <= min(ROW_MAP_LIMIT, n_experts)
    return n_rows <= ROW_MAP_LIMIT and _head_rows(n_rows, n_experts) == 0


def _row_map(x: jax.Array, chosen: jax.Array, weights: jax.Array, w: _AnyWeights, partial: bool) -> jax.Array:
    k = chosen.shape[1]

    def row(r: jax.Array) -> jax.Array:
        one, e = lax.dynamic_index_in_dim(x, r // k, keepdims=False), chosen.reshape(-1)[r]
        if partial:
            return lax.cond(e >= 0, w.product, lambda _, one: jnp.zeros_like(one), e, one).astype(jnp.float32)
        return w.product(e, one).astype(jnp.float32)

    rows = lax.map(row, jnp.arange(chosen.size, dtype=jnp.int32)).reshape(*chosen.shape, -1)
    return jnp.einsum("tkd,tk->td", rows, weights).astype(x.dtype)


def _block_rows(n_rows: int, n_experts: int) -> int:
    """Rows per block: a power of two near the mean rows per expert, 16 to 128."""
    mean = max(1, n_rows // n_experts)
    return min(128, max(16, 1 << (mean - 1).bit_length()))


def _head_rows(n_rows: int, n_experts: int) -> int:
    """First rows of every expert that one batched product takes; 0 where many experts would have none.

    A batched product copies no weights and has one call's overhead; two standard deviations over the mean of an even
    routing leave little for the loop.
    """
    if n_rows < HEAD_MEAN * n_experts:
        return 0
    mean = n_rows / n_experts
    return math.ceil((mean + 2 * mean**0.5) / 8) * 8


def _expert_loop(x: jax.Array, chosen: jax.Array, weights: jax.Array, w: _AnyWeights, partial: bool) -> jax.Array:
    """Rows sorted by expert, cut into blocks of one expert each; the loop runs over the blocks that exist.

    Where experts have several rows on average, the first rows of stacked float ones go through one batched product and
    the loop takes the rest.
    """
    (t, k), n_experts = chosen.shape, w.n_experts
    head = w.head_rows(t * k)
    block = _block_rows(t * k, n_experts)
    n_blocks = t * k // block + n_experts  # enough for any routing: each expert wastes less than one block
    n_head, n_slots = n_experts * head, n_experts * head + n_blocks * block
    flat = chosen.reshape(-1)
    rank, counts = _ranks(flat, n_experts)
    blocks_per_expert = -(-jnp.maximum(counts - head, 0) // block)
    last_block = jnp.cumsum(blocks_per_expert, dtype=jnp.int32)  # [E], exclusive end of each expert's blocks
    first_row = n_head + (last_block - blocks_per_expert)[flat] * block
    slot = jnp.where(rank < head, flat * head + rank, first_row + rank - head)  # [T*K], place in the padded order
    tokens = jnp.arange(t * k, dtype=jnp.int32) // k
    if partial:
        slot = jnp.where(flat < 0, n_slots, slot)
        token_of_slot = jnp.zeros(n_slots, jnp.int32).at[slot].set(tokens, mode="drop")
        slot = jnp.minimum(slot, n_slots - 1)  # whatever is there, it is finite and weighs nothing
    else:
        in_place = jnp.zeros(n_slots, jnp.int32).at[slot]
        token_of_slot = in_place.set(tokens, mode="promise_in_bounds", unique_indices=True)
    block_ids = jnp.arange(n_blocks, dtype=jnp.int32)
    expert_of_block = (block_ids[:, None] >= last_block[None]).sum(axis=1, dtype=jnp.int32)  # [n_blocks]

    def step(b: jax.Array, out: jax.Array) -> jax.Array:
        e, at = expert_of_block[b], n_head + b * block
        rows = x[lax.dynamic_slice_in_dim(token_of_slot, at, block)]  # [block, D]
        y = w.product(e, rows)
        return lax.dynamic_update_slice_in_dim(out, y, at, 0)

    padded = jnp.zeros((n_slots, x.shape[1]), x.dtype)
    if isinstance(w, _Weights) and head:
        first = _batched(x[token_of_slot[:n_head]].reshape(n_experts, head, -1), w.gate_up, w.down)
        padded = lax.dynamic_update_slice_in_dim(padded, first.reshape(n_head, -1), 0, 0)
    padded = lax.fori_loop(0, last_block[-1], step, padded)
    rows = padded[slot].reshape(t, k, -1).astype(jnp.float32)
    return jnp.einsum("tkd,tk->td", rows, weights).astype(x.dtype)


def _batched(rows: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """Every expert times its own rows [E, C, D]: [E, C, D]."""
    up = gate_up.reshape(gate_up.shape[0], -1, gate_up.shape[-1])  # [E, 2 * F, D]
    h = jnp.einsum("ecd,efd->ecf", rows, up).reshape(*rows.shape[:2], 2, -1)
    return jnp.einsum("ecf,edf->ecd", _gated(h), down)


def _ranks(flat: jax.Array, n_experts: int) -> tuple[jax.Array, jax.Array]:
    """Rank of each row among the rows of its expert, int32 like `flat` [T*K], and rows per expert, int32 [E]."""
    onehot = flat[:, None] == jnp.arange(n_experts, dtype=flat.dtype)[None]
    running = jnp.cumsum(onehot, axis=0, dtype=jnp.int32)
    return jnp.take_along_axis(running, flat[:, None], axis=1)[:, 0] - 1, running[-1]


def _capacity(n_rows: int, n_experts: int) -> int:
    """Rows an expert takes: CAPACITY_FACTOR times the mean, rounded up to a multiple of 8."""
    return min(n_rows, math.ceil(n_rows * CAPACITY_FACTOR / n_experts / 8) * 8)


def dropped_share(counts: jax.Array, n_rows: int) -> jax.Array:
    """Share of (token, slot) rows that `capacity` drops, float32 [...].

    Args:
      counts: int32 [..., E], rows of each expert.
      n_rows: their sum, T * K.
    """
    over = jnp.maximum(counts - _capacity(n_rows, counts.shape[-1]), 0)
    return over.sum(axis=-1).astype(jnp.float32) / jnp.float32(n_rows)


@jax.custom_vjp
def _gather_rows(source: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """source [n, D] at int32 `index` [m]; an index of n reads a row of zeros.

    `inverse` int32 [n, j] lists where each source row went (m where nowhere), so that the gradient is a gather as
    well: a scatter-add of rows runs one element at a time on a CPU.
    """
    return _with_zero_row(source)[index]


def _with_zero_row(rows: jax.Array) -> jax.Array:
    return jnp.concatenate([rows, jnp.zeros((1, rows.shape[1]), rows.dtype)])


def _gather_rows_forward(source: jax.Array, index: jax.Array, inverse: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gather_rows(source, index, inverse), inverse


def _gather_rows_backward(inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    return _with_zero_row(gradient)[inverse].sum(axis=1), None, None


_gather_rows.defvjp(_gather_rows_forward, _gather_rows_backward)


def capacity(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array | ExpertList,
    down: jax.Array | ExpertList,
    gate_up_scale: jax.Array | None,
    down_scale: jax.Array | None,
    partial: bool,
) -> jax.Array:
    """See `experts`: CAPACITY_FACTOR times the mean rows per expert, in one batched product; the rest is dropped."""
    if isinstance(gate_up, ExpertList) or isinstance(down, ExpertList):
        raise NotImplementedError("experts implementation 'capacity' trains stacked weights, not a list of experts")
    if partial:
        raise NotImplementedError("experts implementation 'capacity' trains all experts, not those of one device")
    if gate_up_scale is not None or down_scale is not None:
        raise NotImplementedError("experts implementation 'capacity' trains float weights, not INT4 words")
    n_experts, (t, k) = gate_up.shape[0], chosen.shape
    rank, _ = _ranks(chosen.reshape(-1), n_experts)
    size = _capacity(chosen.size, n_experts)
    n_slots = n_experts * size
    slot = jnp.where(rank < size, chosen.reshape(-1) * size + rank, n_slots)  # [T*K]; n_slots where dropped
    row_of_slot = jnp.full(n_slots, t * k, jnp.int32).at[slot].set(jnp.arange(t * k, dtype=jnp.int32), mode="drop")
    token_of_slot = row_of_slot // k  # T where the slot is empty
    rows = _gather_rows(x, token_of_slot, slot.reshape(t, k)).reshape(n_experts, size, -1)
    y = _batched(rows, gate_up, down).reshape(n_slots, -1)
    y = _gather_rows(y, slot, row_of_slot[:, None]).reshape(t, k, -1)
    return jnp.einsum("tkd,tk->td", y.astype(jnp.float32), weights).astype(x.dtype)
