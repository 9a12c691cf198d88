"""Pallas Triton kernels of `mla_decode`: attention over one split of a row's pages, and the merge of the splits.

Letters: B batch rows, T new tokens, N heads, M = T * N rows of queries (token first), R latent rank, P pages, C = R +
rope, n pages of a table row, S splits. C is no power of two, so latent and rotated key are two loads and two products.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from .plan import Sizes

type Ref = Any  # of an array in the device's memory

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
LOWEST = -1e30  # below every score, and finite: a difference of two is a number


def _live(end: jax.Array, first: jax.Array | int, s: Sizes) -> jax.Array:
    """How many of the window's rows on this device stand before position `end`, int32."""
    if s.part == s.page:
        return end
    return end // s.page * s.part + jnp.clip(end % s.page - first, 0, s.part)


def _blocks(live: jax.Array, s: Sizes) -> jax.Array:
    return pl.cdiv(live, s.plan.block)


def _places(
    table_ref: Ref, b: jax.Array, start: jax.Array, first: jax.Array | int, s: Sizes
) -> tuple[jax.Array, jax.Array]:
    """int32 [block] of a window's rows from `start` on: which of all pages' rows they are, and their positions."""
    within = jnp.arange(s.plan.block, dtype=jnp.int32)
    if s.part % s.plan.block == 0:  # a block lies in one page
        slot, offset = start // s.part, start % s.part + within
        page = table_ref[b, slot]
    else:
        slot, offset = (start + within) // s.part, (start + within) % s.part
        page = plt.load(table_ref.at[b, jnp.minimum(slot, s.table - 1)])
    return page * s.part + offset, slot * s.page + first + offset


def _keys(ref: Ref, row: jax.Array, is_live: jax.Array, start: int, width: int) -> jax.Array:
    """[block, width] columns of cached rows; 0 where a row is not live, since 0 times what lies there may be NaN."""
    shape = row.shape[0], width
    # An index for every element, which interpret mode wants; the compiler sees that columns are neighbours.
    column = jnp.arange(start, start + width, dtype=jnp.int32)
    index = jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None], shape)
    return plt.load(ref.at[*index], mask=jnp.broadcast_to(is_live[:, None], shape), other=0.0)


def _attend(*refs: Ref, s: Sizes, has_first: bool, has_lse: bool) -> None:
    """One split of M rows, `plan.rows` of them; grid (B, S, tiles), tiles fastest: they read the same pages."""
    names = iter(refs)
    length_ref, end_ref, table_ref = next(names), next(names), next(names)
    first_ref = next(names) if has_first else None
    bits_ref = next(names) if s.is_tree else None
    q_ref, pages_ref, out_ref = next(names), next(names), next(names)
    lse_ref = next(names) if has_lse else None

    b, split, tile = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    p = s.plan
    length, end = length_ref[b], end_ref[b]
    first = 0 if first_ref is None else first_ref[0]
    live = _live(end, first, s)
    row = tile * p.rows + jnp.arange(p.rows, dtype=jnp.int32)
    is_row = row < s.rows
    token = jnp.minimum(row // s.heads, s.tokens - 1)
    bits = None if bits_ref is None else plt.load(bits_ref.at[b, token])

    def query(start: int, width: int) -> jax.Array:
        mask = jnp.broadcast_to(is_row[:, None], (p.rows, width))
        return plt.load(q_ref.at[b, pl.ds(tile * p.rows, p.rows), pl.ds(start, width)], mask=mask, other=0.0)

    q_latent, q_rope = query(0, s.rank), query(s.rank, s.rope)
    factor = jnp.float32(s.scale * LOG2_E)

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        acc, top, total = carry
        start = (split + i * p.splits) * p.block
        cached, position = _places(table_ref, b, start, first, s)
        is_live = start + jnp.arange(p.block, dtype=jnp.int32) < live
        latent = _keys(pages_ref, cached, is_live, 0, s.rank)
        rope = _keys(pages_ref, cached, is_live, s.rank, s.rope)
        score = _dot(q_latent, latent.T) + _dot(q_rope, rope.T)
        score = jnp.where(_visible(position, length, end, token, bits), score * factor, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(score, axis=1))
        shrink = jnp.exp2(top - new_top)
        e = jnp.exp2(score - new_top[:, None])
        acc = acc * shrink[:, None] + _dot(e.astype(latent.dtype), latent)
        return acc, new_top, total * shrink + jnp.sum(e, axis=1)

    n_steps = pl.cdiv(jnp.maximum(_blocks(live, s) - split, 0), p.splits)
    start = (
        jnp.zeros((p.rows, s.rank), jnp.float32),
        jnp.full((p.rows,), LOWEST, jnp.float32),
        jnp.zeros((p.rows,), jnp.float32),
    )
    acc, top, total = lax.fori_loop(0, n_steps, step, start)
    out = acc / jnp.where(total > 0, total, 1.0)[:, None]
    lse = jnp.where(total > 0, (top + jnp.log2(total)) * jnp.float32(LN_2), -jnp.inf)

    rows = pl.ds(tile * p.rows, p.rows)
    mask = jnp.broadcast_to(is_row[:, None], out.shape)
    # Of a split without steps the merge reads nothing; a call without a merge has one split, which always writes.
    is_used = n_steps > 0 if p.splits > 1 else None
    if is_used is not None:
        mask, is_row = mask & is_used, is_row & is_used
    plt.store(out_ref.at[b, split, rows, pl.ds(0, s.rank)], out.astype(out_ref.dtype), mask=mask)
    if lse_ref is not None:
        plt.store(lse_ref.at[b, split, rows], lse, mask=is_row)


def _visible(
    position: jax.Array, length: jax.Array, end: jax.Array, token: jax.Array, bits: jax.Array | None
) -> jax.Array:
    """bool [rows, block]: whether the row's token sees the position, of which those from `end` on are seen by none."""
    if bits is None:
        return position[None, :] <= jnp.minimum(length + token, end - 1)[:, None]
    ahead = position - length
    bit = (bits[:, None] >> jnp.clip(ahead, 0, 31)[None, :]) & 1
    return ((ahead < 0)[None, :] | (bit == 1)) & (position < end)[None, :]


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot(a, b, preferred_element_type=jnp.float32)


def _merge(*refs: Ref, s: Sizes, has_first: bool, has_lse: bool, columns: int) -> None:
    """One row's splits, `columns` of its R at a time; grid (B, M, R / columns).

    With l_s the log of a split's sum: out = sum_s exp(l_s - l) out_s, l = log sum_s exp(l_s); exact but for rounding.
    """
    names = iter(refs)
    end_ref = next(names)
    first_ref = next(names) if has_first else None
    parts_ref, part_lse_ref, out_ref = next(names), next(names), next(names)
    lse_ref = next(names) if has_lse else None

    b, row, column = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    live = _live(end_ref[b], 0 if first_ref is None else first_ref[0], s)
    n_splits = 1 << (s.plan.splits - 1).bit_length()
    split = jnp.arange(n_splits, dtype=jnp.int32)
    is_used = split < jnp.minimum(_blocks(live, s), s.plan.splits)
    here = jnp.minimum(split, s.plan.splits - 1)
    lse = plt.load(part_lse_ref.at[b, here, row], mask=is_used, other=-jnp.inf)
    top = jnp.maximum(jnp.max(lse), LOWEST)
    weight = jnp.exp2((lse - top) * jnp.float32(LOG2_E))
    total = jnp.sum(weight)
    mask = jnp.broadcast_to(is_used[:, None], (n_splits, columns))
    at = column * columns + jnp.arange(columns, dtype=jnp.int32)
    index = jnp.broadcast_to(here[:, None], mask.shape), row, jnp.broadcast_to(at[None], mask.shape)
    parts = plt.load(parts_ref.at[b, *index], mask=mask, other=0.0)
    out = jnp.sum(parts * weight[:, None], axis=0) / jnp.where(total > 0, total, 1.0)
    plt.store(out_ref.at[b, row, at], out.astype(out_ref.dtype))
    if lse_ref is not None:  # every column's program stores the same number
        value = jnp.where(total > 0, top + jnp.log2(total) * jnp.float32(LN_2), -jnp.inf)
        plt.store(lse_ref.at[b, row], value)


def attend(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    length: jax.Array,
    end: jax.Array,
    tree: jax.Array | None,
    first: jax.Array | None,
    s: Sizes,
    dtype: jnp.dtype,
    *,
    with_lse: bool,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """See `mla_decode` and `mla_decode_part`.

    Args:
      end: int32 [B], no position from here on is seen; at most length + T, and what the pages of the table hold.
      tree: int32 [B, T], bit u of token t says whether t sees u; None: causal.
      first: int32 [1], or None for 0.
      s: what is static.
      dtype: of the output.
      with_lse: return the log of the sums, too.
      interpret: run the kernels as jax.numpy on whatever device there is.
    """
    batch, p = q.shape[0], s.plan
    merged = p.splits > 1
    operands = [length, end, table, *([] if first is None else [first]), *([] if tree is None else [tree])]
    operands += [q.reshape(batch, s.rows, s.rank + s.rope), pages.reshape(-1, s.rank + s.rope)]
    whole = [jax.ShapeDtypeStruct((batch, s.rows, s.rank), dtype)]
    whole += [jax.ShapeDtypeStruct((batch, s.rows), jnp.float32)] if with_lse else []
    shapes = [jax.ShapeDtypeStruct((batch, p.splits, s.rows, s.rank), jnp.float32 if merged else dtype)]
    shapes += [jax.ShapeDtypeStruct((batch, p.splits, s.rows), jnp.float32)] if merged or with_lse else []
    kernel = functools.partial(_attend, s=s, has_first=first is not None, has_lse=len(shapes) == 2)
    grid = (batch, p.splits, pl.cdiv(s.rows, p.rows))
    found = _call(kernel, "mla_decode", grid, operands, shapes, p.num_warps, p.num_stages, interpret)
    if merged:
        columns = max(16, min(s.rank, 8192 >> (p.splits - 1).bit_length()))
        kernel = functools.partial(_merge, s=s, has_first=first is not None, has_lse=with_lse, columns=columns)
        operands = [end, *([] if first is None else [first]), *found]
        grid = (batch, s.rows, s.rank // columns)
        found = _call(kernel, "mla_decode_merge", grid, operands, whole, 4, 1, interpret)
    shape = batch, s.tokens, s.heads
    return found[0].reshape(*shape, s.rank), found[1].reshape(shape) if with_lse else None


def _call(
    kernel: Any,
    name: str,
    grid: tuple[int, ...],
    operands: list[jax.Array],
    shapes: list[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int,
    interpret: bool,
) -> list[jax.Array]:
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[whole] * len(operands),
        out_specs=[whole] * len(shapes),
        out_shape=shapes,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*operands)
