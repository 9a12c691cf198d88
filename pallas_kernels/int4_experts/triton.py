"""INT4 experts in Pallas for its Triton backend: a kernel for gate and up, one for down.

The product is swapped, out^T[BN, BM] = W[BN, W] x^T[W, BM]: the weights' rows are on the side of the tensor core's
product that is 16 wide, the tokens on the side that is 8 wide. For the position j of the nibbles of a block of words
(`layout.py`), with q + 136 the bf16 number that a nibble makes (`dequantise.py`), s the scale of the group and x the
slice of inputs, tile "sum" adds

    s * (dot(q + 136, x) + dot(-136, x))

to the float32 sums. The second product takes the offset off exactly where it is added to the first; both matrices of
gate and up share it. The scale, too, is a product: of the block's scales [BN, 16] with a column that picks one, because
a product's result lies where the sums lie, and because an operand of a product is fetched ahead, as the words are.
Tile "weight" makes the weights q * s first, in bf16, as the checkpoint's own reference does.

The weight of a (token, slot) row is multiplied into its row of silu(gate) * up, so that combining is a sum. No sum
depends on the order in which programs run.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..route import WorkList
from .dequantise import OFFSET, multiply_add, nibble
from .layout import GROUP, NIBBLES, block_width
from .tiles import Plan, Tiles

type Ref = Any  # a reference within a kernel: JAX's own type for it is not public

SCALES = 16  # columns of a tile of scales: the least that a product takes


class _Step(NamedTuple):
    """Static sizes of a product."""

    tiles: Tiles
    k: int  # inputs
    dtype: jnp.dtype  # of x
    interpret: bool

    @property
    def block(self) -> int:
        return block_width(self.k)

    @property
    def n_blocks(self) -> int:
        return self.k // self.block


def _range(start: jax.Array | int, size: int) -> jax.Array:
    return start + jnp.arange(size, dtype=jnp.int32)


def _quotient(a: jax.Array, n: int) -> jax.Array:
    """a // n of what is never negative: without the instructions that make a quotient round down."""
    return lax.div(a, jnp.full_like(a, n))


def _pick(group: int, columns: int, dtype: jnp.dtype) -> jax.Array:
    """[16, columns]: 1 in the row `group`."""
    return (lax.broadcasted_iota(jnp.int32, (SCALES, columns), 0) == group).astype(dtype)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _add_block(
    sums: tuple[jax.Array, ...],
    weights: tuple[tuple[jax.Array, jax.Array], ...],
    x: Callable[[int], jax.Array],
    step: _Step,
) -> tuple[jax.Array, ...]:
    """Sums [BN, BM] of each matrix plus a block's product.

    `weights`: words [BN, W] and scales [BN, 16] of each matrix; x(j) [W, BM] the inputs of position j.
    """
    bn, width = weights[0][0].shape
    bm = sums[0].shape[1]
    for j in range(NIBBLES):
        xj = x(j)
        by_sum = step.tiles.scale == "sum"
        pick = _pick(j * width // GROUP, bm if by_sum else width, step.dtype)
        offset = _dot(jnp.full((bn, width), -OFFSET, step.dtype), xj) if by_sum else None
        out = []
        for acc, (w, s) in zip(sums, weights, strict=True):
            q, scale = nibble(w, j, step.dtype, step.interpret), _dot(s, pick)
            if offset is not None:
                out.append(multiply_add(offset + _dot(q, xj), scale, acc, step.interpret))
            else:
                weight = (q - jnp.asarray(OFFSET, step.dtype)) * scale.astype(step.dtype)
                out.append(acc + _dot(weight, xj))
        sums = tuple(out)
    return sums


def _load_block(
    words_ref: Ref,
    scales_ref: Ref,
    lead: tuple[jax.Array | int, ...],
    n: jax.Array,
    b: jax.Array,
    step: _Step,
) -> tuple[jax.Array, jax.Array]:
    """Words [BN, W] and scales [BN, 16] of the block b of rows n [BN]; columns beyond the block's groups are 0."""
    width, groups = step.block // NIBBLES, step.block // GROUP
    words = plt.load(words_ref.at[(*lead, n[:, None], _range(b * width, width)[None, :])])
    columns = jnp.arange(SCALES, dtype=jnp.int32)
    mask = jnp.broadcast_to(columns[None, :] < groups, (n.shape[0], SCALES))
    at = scales_ref.at[(*lead, n[:, None], (b * groups + columns)[None, :])]
    return words, plt.load(at, mask=mask, other=0).astype(step.dtype)


class _Item(NamedTuple):
    """A work item, within a kernel."""

    expert: jax.Array  # int32
    exists: jax.Array  # bool; False for the rest of a static list and for the experts of other devices
    position: jax.Array  # int32 [BM], of its rows in the list of rows
    mine: jax.Array  # bool [BM], whether the position is this item's
    row: jax.Array  # int32 [BM], which (token, slot) row stands there


def _item(work: tuple[Ref, ...], i: jax.Array, n_rows: int, bm: int) -> _Item:
    """`work` is (chosen [R],), where each row is an item, or (items [3, I], order [R])."""
    if len(work) == 1:
        e, position = work[0][i], _range(i, bm)
        return _Item(e, e >= 0, position, position == i, jnp.full((bm,), i, jnp.int32))
    items, order = work
    e, start, end = items[0, i], items[1, i], items[2, i]
    position = _range(start, bm)
    return _Item(e, start < end, position, position < end, order[jnp.minimum(position, n_rows - 1)])


def _gate_up_kernel(*refs: Ref, step: _Step, n_rows: int, n_chosen: int, n_inner: int) -> None:
    """Grid (items, F / BN, splits of K). Refs: the work, weights [R], x [T, D], words [E, 2, F, D / 8] and scales
    [E, 2, F, D / 32]; out: silu(gate) * up * weight [R, F] where K is not split, else float32 sums [splits, 2, R * F].
    """
    *work, weights_ref, x_ref, words_ref, scales_ref, out_ref = refs
    bm, bn, split = step.tiles.bm, step.tiles.bn, step.tiles.split
    part, n = pl.program_id(2), _range(pl.program_id(1) * bn, bn)
    item = _item(tuple(work), pl.program_id(0), n_rows, bm)

    @pl.when(item.exists)
    def _() -> None:
        per, width = step.n_blocks // split, step.block // NIBBLES
        token = _quotient(item.row, n_chosen)

        def body(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            b = part * per + i
            gate, up = (_load_block(words_ref, scales_ref, (item.expert, m), n, b, step) for m in range(2))

            def x(j: int) -> jax.Array:
                return plt.load(x_ref.at[token[None, :], _range(b * step.block + j * width, width)[:, None]])

            return _add_block(sums, (gate, up), x, step)

        gate, up = lax.fori_loop(0, per, body, (jnp.zeros((bn, bm), jnp.float32),) * 2)
        mask = jnp.broadcast_to(item.mine[None, :], (bn, bm))
        if split == 1:
            h = _gated(gate, up) * weights_ref[item.row][None, :]
            plt.store(out_ref.at[item.position[None, :], n[:, None]], h.astype(step.dtype), mask=mask)
            return
        for m, total in enumerate((gate, up)):
            plt.store(out_ref.at[part, m, item.position[None, :] * n_inner + n[:, None]], total, mask=mask)


def _down_kernel(
    items_ref: Ref,
    order_ref: Ref,
    h_ref: Ref,
    words_ref: Ref,
    scales_ref: Ref,
    out_ref: Ref,
    *,
    step: _Step,
    n_rows: int,
) -> None:
    """Grid (items, D / BN). h [R, F] in the list's order, words [E, D, F / 8], scales [E, D, F / 32]; out [R, D], by
    (token, slot) row."""
    bm, bn = step.tiles.bm, step.tiles.bn
    n = _range(pl.program_id(1) * bn, bn)
    item = _item((items_ref, order_ref), pl.program_id(0), n_rows, bm)

    @pl.when(item.exists)
    def _() -> None:
        position, width = jnp.minimum(item.position, n_rows - 1), step.block // NIBBLES

        def body(b: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            def h(j: int) -> jax.Array:
                return plt.load(h_ref.at[position[None, :], _range(b * step.block + j * width, width)[:, None]])

            return _add_block(sums, (_load_block(words_ref, scales_ref, (item.expert,), n, b, step),), h, step)

        (y,) = lax.fori_loop(0, step.n_blocks, body, (jnp.zeros((bn, bm), jnp.float32),))
        mask = jnp.broadcast_to(item.mine[None, :], (bn, bm))
        # The interpreter writes back what a masked place held: it must not be the place of another row of the item.
        row = jnp.where(item.mine, item.row, n_rows)
        plt.store(out_ref.at[row[None, :], n[:, None]], y.astype(step.dtype), mask=mask)


def _down_direct_kernel(*refs: Ref, step: _Step, n_chosen: int, partial: bool, n_sums: int) -> None:
    """Grid (T, D / BN, splits of a token's slots): the sum over slots of down's product, one token at a time.

    Refs: chosen [R], h [R * F] (or, where `n_sums` > 1, weights [R] and the sums [n_sums, 2, R * F] of which this makes
    h), words [E, D, F / 8], scales [E, D, F / 32]; out [splits, T, D], and where h is made, slots * F for each program.
    """
    chosen_ref, *given, words_ref, scales_ref, out_ref = refs if n_sums == 1 else refs[:-1]
    bm, bn, split = step.tiles.bm, step.tiles.bn, step.tiles.split
    token, tile, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    n, slots, width = _range(tile * bn, bn), n_chosen // split, step.block // NIBBLES
    first = token * n_chosen + part * slots
    if n_sums == 1:
        [h_ref], start = given, first * step.k
    else:
        h_ref, start = refs[-1], ((token * pl.num_programs(1) + tile) * split + part) * (slots * step.k)
        _make_h(h_ref, start, given[1], given[0], first, slots, step, n_sums)
    same = jnp.zeros((1, bm), jnp.int32)  # every column is the same row: one of them is kept

    def add(slot: jax.Array, b: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        def h(j: int) -> jax.Array:
            k = _range(b * step.block + j * width, width)[:, None]
            return plt.load(h_ref.at[start + slot * step.k + k + same])

        e = chosen_ref[first + slot]
        return _add_block(sums, (_load_block(words_ref, scales_ref, (e,), n, b, step),), h, step)

    sums = (jnp.zeros((bn, bm), jnp.float32),)
    if partial:

        def slot_body(slot: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            # Not a choice between two Python numbers: the lowering makes a loop's bound of the wrong type of them.
            own = (chosen_ref[first + slot] >= 0).astype(jnp.int32)
            return lax.fori_loop(0, own * step.n_blocks, functools.partial(add, slot), sums)

        (y,) = lax.fori_loop(0, slots, slot_body, sums)
    else:

        def body(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            slot = _quotient(i, step.n_blocks)
            return add(slot, i - slot * step.n_blocks, sums)

        (y,) = lax.fori_loop(0, slots * step.n_blocks, body, sums)
    column = jnp.arange(bm, dtype=jnp.int32)[None, :]
    mask = jnp.broadcast_to(column == 0, (bn, bm))
    plt.store(out_ref.at[part, token + column, n[:, None]], y.astype(out_ref.dtype), mask=mask)


def _make_h(
    h_ref: Ref,
    start: jax.Array,
    sums_ref: Ref,
    weights_ref: Ref,
    first: jax.Array,
    slots: int,
    step: _Step,
    n_sums: int,
) -> None:
    """silu(gate) * up * weight of the rows first .. first + slots, [slots * F], from their sums [n_sums, 2, R * F].

    The program writes it to memory of its own and reads it back as an operand of the product, which wants other
    threads to have it.
    """
    size = min(1024, (slots * step.k) & -(slots * step.k))

    def body(i: jax.Array, _: None) -> None:
        at = _range(i * size, size)
        gate, up = (
            functools.reduce(jnp.add, [plt.load(sums_ref.at[p, m, first * step.k + at]) for p in range(n_sums)])
            for m in range(2)
        )
        h = _gated(gate, up) * weights_ref[first + _quotient(at, step.k)]
        plt.store(h_ref.at[start + at], h.astype(step.dtype))

    lax.fori_loop(0, slots * step.k // size, body, None)
    if not step.interpret:
        plt.debug_barrier()


def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return gate / (1 + jnp.exp(-gate)) * up


def _call(kernel: Callable[..., None], step: _Step, grid: tuple[int, ...], out: list[jax.ShapeDtypeStruct], name: str):
    """A `pallas_call` whose operands stay where they are: every load names its addresses."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return lambda *operands: pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[anywhere] * len(operands),
        out_specs=[anywhere] * len(out),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=step.tiles.num_warps, num_stages=step.tiles.num_stages),
        interpret=step.interpret,
        name=name,
    )(*operands)


def run(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gate_up_scale: jax.Array,
    down_scale: jax.Array,
    partial: bool,
    *,
    work: WorkList | None,
    plan: Plan,
    interpret: bool,
) -> jax.Array:
    """See `int4_experts`, whose operands these are; `work` is needed where `plan` is not direct."""
    (n_tokens, n_chosen), (_, _, width, _), hidden = chosen.shape, gate_up.shape, x.shape[1]
    n_rows = n_tokens * n_chosen
    up = _Step(plan.gate_up, hidden, x.dtype, interpret)
    lists = (chosen.reshape(-1),) if work is None else (work.items, work.order)
    n_items = n_rows if work is None else work.items.shape[1]
    n_sums = plan.gate_up.split
    h_shape = (n_rows, width) if n_sums == 1 else (n_sums, 2, n_rows * width)
    h_dtype = x.dtype if n_sums == 1 else jnp.float32
    kernel = functools.partial(_gate_up_kernel, step=up, n_rows=n_rows, n_chosen=n_chosen, n_inner=width)
    grid = (n_items, width // plan.gate_up.bn, n_sums)
    flat = weights.reshape(-1)
    (h,) = _call(kernel, up, grid, [jax.ShapeDtypeStruct(h_shape, h_dtype)], "int4_gate_up")(
        *lists, flat, x, gate_up, gate_up_scale
    )
    low = _Step(plan.down, width, x.dtype, interpret)
    tiles = hidden // plan.down.bn
    if work is not None:
        kernel = functools.partial(_down_kernel, step=low, n_rows=n_rows)
        shape = jax.ShapeDtypeStruct((n_rows, hidden), x.dtype)
        (rows,) = _call(kernel, low, (n_items, tiles), [shape], "int4_down")(*lists, h, down, down_scale)
        return _combine(rows.reshape(n_tokens, n_chosen, hidden), chosen if partial else None, x.dtype)
    split = plan.down.split
    kernel = functools.partial(_down_direct_kernel, step=low, n_chosen=n_chosen, partial=partial, n_sums=n_sums)
    out = [jax.ShapeDtypeStruct((split, n_tokens, hidden), x.dtype if split == 1 else jnp.float32)]
    if n_sums > 1:
        out.append(jax.ShapeDtypeStruct((n_rows * tiles * width,), x.dtype))
    given = (h.reshape(-1),) if n_sums == 1 else (flat, h)
    operands = (chosen.reshape(-1), *given, down, down_scale)
    sums, *_ = _call(kernel, low, (n_tokens, tiles, split), out, "int4_down_direct")(*operands)
    return _combine(jnp.swapaxes(sums, 0, 1), None, x.dtype)


def _combine(parts: jax.Array, chosen: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Sum over the second axis of [T, n, D] in float32, without the parts whose `chosen` [T, n] is negative.

    As additions of slices, not as a reduction: XLA puts them into the kernel of whatever is added to the result.
    """
    total = jnp.zeros((parts.shape[0], parts.shape[2]), jnp.float32)
    for i in range(parts.shape[1]):
        part = parts[:, i].astype(jnp.float32)
        if chosen is not None:  # nothing was written there
            part = jnp.where(chosen[:, i, None] >= 0, part, 0.0)
        total = total + part
    return total.astype(dtype)
