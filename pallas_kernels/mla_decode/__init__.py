"""Attention of new tokens over the paged latent cache, in the latent space (MLA's weight-absorbed form).

DeepSeek-V2 (arXiv:2405.04434), section 2.1.2: with the up-projections absorbed into queries and outputs, all heads
share one cached row [R + rope] per token, which is the key, and whose first R columns are the value. The cached rows
are read once for all heads and new tokens of a device, or once for each tile of 32 or 64 of them. A row's window is
split over programs, and what they found is merged by the logs of their sums (FlashAttention, arXiv:2205.14135, section
3.1), which is exact.

Implementations by name:
  reference   plain jax.numpy; gathers the whole window.
  pallas      two Pallas Triton kernels on CUDA, one where a plan has a single split; bfloat16 or float16.
  interpret   the same kernels run as jax.numpy, on any device; float32, too.

`mla_decode` is for a device that has all positions. A device that has some positions of every page (decode context
parallelism) calls `mla_decode_part`, and `merge_over_devices` or `merge_parts` brings the parts together.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from . import reference as _reference
from . import triton as _triton
from .plan import ANY_CHIP, CHIPS, H200, RTX_PRO_6000, Chip, Plan, Sizes, chip_here, plan_for

IMPLEMENTATIONS = {
    "reference": _reference.attend,
    "pallas": functools.partial(_triton.attend, interpret=False),
    "interpret": functools.partial(_triton.attend, interpret=True),
}
MAX_TOKENS = 32  # the bits of a tree's row; more tokens than that are prefill


def mla_decode(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    length: jax.Array,
    *,
    rank: int,
    scale: float,
    implementation: str,
    tree: jax.Array | None = None,
    plan: Plan | None = None,
) -> jax.Array:
    """sum_s softmax_s(scale * q . row_s) row_s[:R] over the rows that a new token sees.

    Token t of batch row b stands at cached row length[b] + t, where its own latent lies already. It sees the rows
    before length[b], and of the new ones those up to itself, or those that `tree` says. Rows from length[b] + T on,
    and whatever a padded entry of the table stands for, may hold anything.

    Args:
      q: [B, T, N, R + rope], queries in latent space, then the rotated part; T up to MAX_TOKENS.
      pages: [P, page, R + rope] of one layer, dtype as q.
      table: int32 [B, n], a row's pages in order, padded with -1. Positions from the first -1 on are seen by no
        token.
      length: int32 [B], cached rows before the new tokens.
      rank: R; R and rope are powers of two from 16.
      scale: of the scores.
      implementation: a name of `IMPLEMENTATIONS`.
      tree: bool [B, T, T], whether token t sees token u; None: u <= t.
      plan: tile and grid of the kernels; None: `plan_for` the shapes and the chip that is compiled for.
    Returns:
      [B, T, N, R] in q's dtype; zeros where a token sees nothing.
    Raises:
      ValueError: shapes or dtypes that do not fit together.
      NotImplementedError: no such implementation, or it cannot take these sizes or this dtype.
    """
    s = _sizes(q, pages, table, length, tree, rank, scale, pages.shape[1], implementation, plan)
    run = IMPLEMENTATIONS[implementation]
    return run(q, pages, table, length, _end(table, length, s), _bits(tree), None, s, q.dtype, with_lse=False)[0]


def mla_decode_part(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    length: jax.Array,
    *,
    rank: int,
    scale: float,
    page_size: int,
    first: jax.Array,
    implementation: str,
    tree: jax.Array | None = None,
    plan: Plan | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`mla_decode` over the positions that one device has of every page, and the log of their sum.

    Args:
      q, table, length, rank, scale, implementation, tree, plan: as for `mla_decode`.
      pages: [P, page_size / c, R + rope]; row o of a table's p-th page stands at position p * page_size + first + o.
      page_size: positions of a whole page.
      first: int32 [], from 0 to page_size - page_size / c.
    Returns:
      float32 [B, T, N, R], the softmax over these positions times their rows, and float32 [B, T, N], log sum_s
      exp(scale * q . row_s); zeros and -inf where a token sees none of them.
    Raises:
      As `mla_decode`.
    """
    s = _sizes(q, pages, table, length, tree, rank, scale, page_size, implementation, plan)
    if first.shape or first.dtype != jnp.int32:
        raise ValueError(f"mla_decode_part: first is {first.dtype}{list(first.shape)}, expected int32[]")
    at = None if s.part == s.page else first.reshape(1)
    run = IMPLEMENTATIONS[implementation]
    out, lse = run(
        q, pages, table, length, _end(table, length, s), _bits(tree), at, s, jnp.dtype(jnp.float32), with_lse=True
    )
    assert lse is not None
    return out, lse


def merge_parts(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The whole of parts over disjoint positions: their out float32 [c, ..., R] and lse [c, ...] to [..., R], [...]."""
    top, weight = _weights(lse, jnp.max(lse, axis=0))
    total = weight.sum(axis=0)
    safe = jnp.where(total > 0, total, 1.0)
    return (out * weight[..., None]).sum(axis=0) / safe[..., None], top + jnp.log(total)


def merge_over_devices(out: jax.Array, lse: jax.Array, names: str | tuple[str, ...]) -> jax.Array:
    """`merge_parts` of what the devices of some mesh axes have, each keeping its own heads; within `shard_map`.

    Args:
      out: float32 [B, T, N, R] of all heads over a device's positions.
      lse: float32 [B, T, N].
      names: mesh axes that the positions are split over; N is a multiple of their devices.
    Returns:
      float32 [B, T, N / devices, R].
    """
    _, weight = _weights(lse, lax.pmax(lse, names))
    part = jnp.concatenate([out * weight[..., None], weight[..., None]], axis=-1)
    whole = lax.psum_scatter(part, names, scatter_dimension=2, tiled=True)
    total = whole[..., -1:]
    return whole[..., :-1] / jnp.where(total > 0, total, 1.0)


def _weights(lse: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The top as a number where no part has one, and exp(lse - top)."""
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    return top, jnp.exp(lse - jnp.broadcast_to(top, lse.shape))


def _end(table: jax.Array, length: jax.Array, s: Sizes) -> jax.Array:
    """int32 [B], where a row's cached tokens end: behind the new ones, or with its pages."""
    slot = jnp.where(table < 0, jnp.arange(s.table, dtype=jnp.int32)[None], s.table)
    return jnp.minimum(length + s.tokens, slot.min(axis=1) * s.page)


def _bits(tree: jax.Array | None) -> jax.Array | None:
    """bool [B, T, T] to int32 [B, T], token u in bit u."""
    if tree is None:
        return None
    bit = jnp.left_shift(jnp.int32(1), jnp.arange(tree.shape[2], dtype=jnp.int32))
    return jnp.where(tree, bit[None, None], 0).sum(axis=2, dtype=jnp.int32)


def _sizes(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    length: jax.Array,
    tree: jax.Array | None,
    rank: int,
    scale: float,
    page_size: int,
    implementation: str,
    plan: Plan | None,
) -> Sizes:
    """Checks the operands, and gathers what is static of them."""
    batch, tokens, heads, width = q.shape
    n_pages, part, _ = pages.shape
    shapes = {
        "pages": (pages, (n_pages, part, width), q.dtype),
        "table": (table, (batch, table.shape[-1]), jnp.dtype(jnp.int32)),
        "length": (length, (batch,), jnp.dtype(jnp.int32)),
    }
    if tree is not None:
        shapes["tree"] = tree, (batch, tokens, tokens), jnp.dtype(jnp.bool)
    for name, (array, shape, dtype) in shapes.items():
        if array.shape != shape or array.dtype != dtype:
            found = f"{array.dtype}{list(array.shape)}"
            raise ValueError(f"mla_decode: {name} is {found}, expected {dtype}{list(shape)} beside q {list(q.shape)}")
    if page_size % part:
        raise ValueError(f"mla_decode: pages of {part} positions, expected a divisor of page_size={page_size}")
    if not 1 <= tokens <= MAX_TOKENS:
        raise NotImplementedError(f"mla_decode: T={tokens} new tokens, expected 1 to {MAX_TOKENS}; more are prefill")
    _check_implementation(implementation, rank, width - rank, q.dtype)
    if plan is None:
        chip = chip_here() if implementation == "pallas" else ANY_CHIP
        plan = plan_for(batch, tokens * heads, table.shape[1], part, chip)
    return Sizes(tokens, heads, rank, width - rank, table.shape[1], part, page_size, scale, tree is not None, plan)


def _check_implementation(implementation: str, rank: int, rope: int, dtype: jnp.dtype) -> None:
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise NotImplementedError(f"mla_decode implementation {implementation!r}: this build has {names}")
    if implementation == "reference":
        return
    for name, size in (("rank", rank), ("rope", rope)):
        if size < 16 or size & (size - 1):
            what = f"mla_decode implementation {implementation!r}: {name} {size}"
            raise NotImplementedError(f"{what}, expected a power of two from 16; 'reference' takes any")
    dtypes = (jnp.bfloat16, jnp.float16) if implementation == "pallas" else (jnp.bfloat16, jnp.float16, jnp.float32)
    if dtype not in dtypes:
        names = ", ".join(jnp.dtype(one).name for one in dtypes)
        raise NotImplementedError(f"mla_decode implementation {implementation!r}: pages of {dtype}, expected {names}")


__all__ = [
    "ANY_CHIP",
    "CHIPS",
    "H200",
    "IMPLEMENTATIONS",
    "MAX_TOKENS",
    "RTX_PRO_6000",
    "Chip",
    "Plan",
    "chip_here",
    "merge_over_devices",
    "merge_parts",
    "mla_decode",
    "mla_decode_part",
    "plan_for",
]
