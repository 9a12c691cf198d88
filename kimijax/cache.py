"""The latent cache: pages on the device, and two views of a batch's pages that a program attends to.

A page holds `page_size` tokens of one layer, [R + rope] values each: the normed latent and the rotated key. A block
table row lists a request's pages in order, padded with -1. JAX wraps index -1 to the last row on reads and drops writes
out of range, so -1 never reaches an index here: reads of padding are clamped and masked by length, writes of padding go
to an index past the end and are dropped.
"""

from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import jax
import jax.numpy as jnp

from .config import TargetConfig
from .sharding import shard
from .split_pages import gather_pages, gather_rows, is_split, scatter_rows

LATENT_AXES = ("pages", "positions", "latent")  # of [P, page, C]


class CacheView(Protocol):
    """A batch's cached latents, position s of row b at [b, s]."""

    @property
    def length(self) -> int:
        """S, tokens a row can hold."""
        ...

    def rows(self, layer: int) -> jax.Array:
        """[B, S, R + rope] of one layer; rows beyond a request's tokens hold anything."""
        ...

    def keys(self, layer: int) -> jax.Array:
        """What attention reads: `rows`, or [B, n, page, R + rope] where the mesh splits positions within a page."""
        ...

    def at(self, layer: int, positions: jax.Array) -> jax.Array:
        """[B, T, R + rope] of one layer at int32 positions [B, T]; positions are clamped into the view."""
        ...

    def store(self, layer: int, new: jax.Array, start: jax.Array) -> Self:
        """Write `new` [B, T, R + rope] of one layer at positions start[b] ... start[b] + T - 1 (start: int32 [B])."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """Latents of all requests, one array a layer: a stacked array would be copied layer by layer by XLA."""

    layers: tuple[jax.Array, ...]  # L arrays [P, page, R + rope]
    axes: tuple[str, str, str] = field(default=LATENT_AXES, metadata={"static": True})  # logical, of each

    @staticmethod
    def create(config: TargetConfig, n_pages: int, page_size: int, dtype: jnp.dtype) -> "PagedCache":
        shape = (n_pages, page_size, config.latent_dim)
        return PagedCache(tuple(jnp.zeros(shape, dtype) for _ in range(config.n_layers)))

    @property
    def n_pages(self) -> int:
        return self.layers[0].shape[0]

    @property
    def page_size(self) -> int:
        return self.layers[0].shape[1]

    def read(self, table: jax.Array, valid: jax.Array | None = None) -> "Window":
        """All layers' pages of `table` int32 [B, n] as dense rows [B, n * page, R + rope]; cf. `PagedView`."""
        view = PagedView(self, table, valid)
        return Window(tuple(view.rows(layer) for layer in range(len(self.layers))))

    def write(self, rows: tuple[jax.Array, ...], table: jax.Array, positions: jax.Array) -> "PagedCache":
        """Store new latents of all layers.

        Args:
          rows: L arrays [B, T, R + rope].
          table: int32 [B, n] pages of each row, padded with -1.
          positions: int32 [B, T]; a negative position, or one whose page is padding, is not written.
        """
        index, offset = self._places(table, positions)
        pairs = zip(self.layers, rows, strict=True)
        layers = tuple(scatter_rows(pages, new, index, offset, self.axes) for pages, new in pairs)
        return replace(self, layers=layers)

    def write_layer(self, layer: int, rows: jax.Array, table: jax.Array, positions: jax.Array) -> "PagedCache":
        """`write` of one layer."""
        pages = scatter_rows(self.layers[layer], rows, *self._places(table, positions), self.axes)
        return replace(self, layers=(*self.layers[:layer], pages, *self.layers[layer + 1 :]))

    def _places(self, table: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Page (n_pages, past the end, where nothing is to be written) and offset of each position, int32 [B, T]."""
        page, offset = positions // self.page_size, positions % self.page_size
        index = jnp.take_along_axis(table, jnp.clip(page, 0, table.shape[1] - 1), axis=1)
        live = (positions >= 0) & (page < table.shape[1]) & (index >= 0)
        return jnp.where(live, index, self.n_pages), offset


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedView:
    """A view that gathers one layer's pages when that layer asks: it needs room for one layer at a time.

    Rows behind the valid ones are read as zeros. What lies there is another request's, or what one left behind, and the
    attention's mask does not keep it out if it is no number: 0 times NaN is NaN.
    """

    cache: PagedCache
    table: jax.Array  # int32 [B, n], padded with -1
    valid: jax.Array | None = None  # int32 [B], rows that hold this row's tokens; None: all of them

    @property
    def length(self) -> int:
        return self.table.shape[1] * self.cache.page_size

    def rows(self, layer: int) -> jax.Array:
        rows = shard(self._blocks(layer), "batch", "replicated", "replicated", self.cache.axes[2])
        return rows.reshape(rows.shape[0], self.length, -1)

    def keys(self, layer: int) -> jax.Array:
        return self._blocks(layer) if is_split(self.cache.axes[1:2]) else self.rows(layer)

    def _blocks(self, layer: int) -> jax.Array:
        """[B, n, page, R + rope], split as the pages are."""
        rows = gather_pages(self.cache.layers[layer], self.table, self.cache.axes)
        if self.valid is None:
            return rows
        positions = jnp.arange(self.length, dtype=jnp.int32).reshape(1, *rows.shape[1:3])
        is_valid = positions < self.valid[:, None, None]
        return jnp.where(is_valid[..., None], rows, jnp.zeros((), rows.dtype))

    def at(self, layer: int, positions: jax.Array) -> jax.Array:
        positions, size = jnp.clip(positions, 0, self.length - 1), self.cache.page_size
        page = jnp.clip(jnp.take_along_axis(self.table, positions // size, axis=1), 0, self.cache.n_pages - 1)
        return gather_rows(self.cache.layers[layer], page, positions % size, self.cache.axes)

    def store(self, layer: int, new: jax.Array, start: jax.Array) -> "PagedView":
        positions = start[:, None] + jnp.arange(new.shape[1], dtype=start.dtype)[None]
        cache = self.cache.write_layer(layer, new, self.table, positions)
        valid = None if self.valid is None else jnp.maximum(self.valid, start + new.shape[1])
        return PagedView(cache, self.table, valid)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Window:
    """A dense copy of a batch's pages: gathered once, it serves many decoding steps, at the price of all layers."""

    layers: tuple[jax.Array, ...]  # L arrays [B, S, R + rope]

    @property
    def length(self) -> int:
        return self.layers[0].shape[1]

    def rows(self, layer: int) -> jax.Array:
        return self.layers[layer]

    def keys(self, layer: int) -> jax.Array:
        return self.layers[layer]

    def at(self, layer: int, positions: jax.Array) -> jax.Array:
        index = jnp.clip(positions, 0, self.length - 1)[..., None]
        return jnp.take_along_axis(self.layers[layer], index, axis=1)

    def store(self, layer: int, new: jax.Array, start: jax.Array) -> "Window":
        """The caller keeps start + T within the window; `dynamic_update_slice` would shift a block that sticks out."""
        rows = self.layers[layer]
        new = new.astype(rows.dtype)
        if rows.shape[0] == 1:
            rows = jax.lax.dynamic_update_slice(rows, new, (0, start[0], 0))
        else:
            index = start[:, None] + jnp.arange(new.shape[1], dtype=start.dtype)[None]
            rows = rows.at[jnp.arange(rows.shape[0])[:, None], index].set(new, mode="drop")
        # Without the barrier XLA's CPU compiler clones the update into its consumers and copies the rows for each.
        rows = jax.lax.optimization_barrier(rows)
        return Window((*self.layers[:layer], rows, *self.layers[layer + 1 :]))

    def take(self, positions: jax.Array) -> tuple[jax.Array, ...]:
        """L arrays [B, T, R + rope] at int32 positions [B, T]; positions are clamped into the window."""
        return tuple(self.at(layer, positions) for layer in range(len(self.layers)))
