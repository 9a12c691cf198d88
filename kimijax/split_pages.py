"""Reading and writing pages of a cache, wherever the mesh keeps them.

Pages [P, page, C] may be split by page over the axes of "pages" (each group of rows has its own) and within each page
over the axes of "positions". Every device then works on what it holds, and drops or masks the rest: left to the
compiler, an index into a split dimension gathers the whole cache. Where neither is split these are plain gathers and
scatters.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .sharding import AnyMesh, current_mesh, partition, split_axes

PAGE_AXES = ("pages", "positions")


def is_split(axes: Sequence[str]) -> bool:
    """Whether the current mesh splits the pages or positions of a cache with these logical axes [P, page, C]."""
    mesh = current_mesh()
    return mesh is not None and any(split_axes(axis, mesh) for axis in axes if axis in PAGE_AXES)


def gather_pages(pages: jax.Array, table: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Pages of int32 `table` [B, n], clamped into range: [B, n, page, C], split as the pages are.

    Args:
      pages: [P, page, C].
      table: where "pages" is split, each part of the rows names pages of its own part.
      axes: logical, of `pages`.
    """
    safe = jnp.clip(table, 0, pages.shape[0] - 1)
    mesh = current_mesh()
    if mesh is None or not is_split(axes):
        return pages[safe]
    rows = partition(("batch", "replicated", axes[1], axes[2]), mesh)

    def local(pages: jax.Array, table: jax.Array) -> jax.Array:
        return pages[jnp.clip(table - _first(axes[0], pages.shape[0]), 0, pages.shape[0] - 1)]

    return _on_each(local, (partition(axes, mesh), _rows(mesh)), rows)(pages, safe)


def gather_rows(pages: jax.Array, index: jax.Array, offset: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Single rows, of int32 page and offset [B, T], both in range: [B, T, C]."""
    mesh = current_mesh()
    if mesh is None or not is_split(axes):
        return pages[index, offset]
    names = split_axes(axes[1], mesh)

    def local(pages: jax.Array, index: jax.Array, offset: jax.Array) -> jax.Array:
        n, size, _ = pages.shape
        at = offset - _first(axes[1], size)
        is_here = (at >= 0) & (at < size)
        rows = pages[jnp.clip(index - _first(axes[0], n), 0, n - 1), jnp.clip(at, 0, size - 1)]
        rows = jnp.where(is_here[..., None], rows, jnp.zeros((), rows.dtype))
        return jax.lax.psum(rows, names) if names else rows

    out = partition(("batch", "replicated", axes[2]), mesh)
    return _on_each(local, (partition(axes, mesh), _rows(mesh), _rows(mesh)), out)(pages, index, offset)


def scatter_rows(
    pages: jax.Array, new: jax.Array, index: jax.Array, offset: jax.Array, axes: Sequence[str]
) -> jax.Array:
    """With rows `new` [B, T, C] written at int32 page and offset [B, T]; a page past the end is dropped."""
    new = new.astype(pages.dtype)
    mesh = current_mesh()
    if mesh is None or not is_split(axes):
        return pages.at[index, offset].set(new, mode="drop")

    def local(pages: jax.Array, new: jax.Array, index: jax.Array, offset: jax.Array) -> jax.Array:
        n, size, _ = pages.shape
        page, at = index - _first(axes[0], n), offset - _first(axes[1], size)
        is_here = (page >= 0) & (page < n) & (at >= 0) & (at < size)
        return pages.at[jnp.where(is_here, page, n), jnp.where(is_here, at, 0)].set(new, mode="drop")

    own = partition(axes, mesh)
    rows = partition(("batch", "replicated", axes[2]), mesh)
    return _on_each(local, (own, rows, _rows(mesh), _rows(mesh)), own)(pages, new, index, offset)


def _rows(mesh: AnyMesh) -> PartitionSpec:
    """Of int32 [B, T]."""
    return partition(("batch", "replicated"), mesh)


def _first(axis: str, size: int) -> jax.Array | int:
    """The first index of this device's part of a logical axis, `size` of them a part; within a local function."""
    mesh = current_mesh()
    names = () if mesh is None else split_axes(axis, mesh)
    return jax.lax.axis_index(names) * size if names else 0


def _on_each(
    function: Callable[..., jax.Array], in_specs: tuple[PartitionSpec, ...], out_specs: PartitionSpec
) -> Callable[..., jax.Array]:
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)
