"""Paged latents: what is written comes back through any block table, and padding never touches a live page."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimijax.cache import PagedCache, Window
from kimijax.config import parse_config

from . import golden

CONFIG = parse_config(golden.FAMILIES["kimi_k2"])
N_PAGES, N_COLUMNS = 7, 4  # pages in all, entries of a block table row
WIDTH = CONFIG.latent_dim

write, read = jax.jit(PagedCache.write), jax.jit(PagedCache.read)


def filled(page_size: int) -> PagedCache:
    """A cache whose every value is -1 - its page number: nothing that a test writes."""
    empty = PagedCache.create(CONFIG, N_PAGES, page_size, jnp.dtype(jnp.float32))
    page = jnp.broadcast_to(-1.0 - jnp.arange(N_PAGES, dtype=jnp.float32)[:, None, None], empty.layers[0].shape)
    return PagedCache(tuple(page for _ in empty.layers))


def latents(shape: tuple[int, int], seed: int = 0) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.random((*shape, WIDTH), np.float32)) for _ in range(CONFIG.n_layers))


def test_create() -> None:
    cache = PagedCache.create(CONFIG, 3, 16, jnp.dtype(jnp.bfloat16))
    assert (len(cache.layers), cache.n_pages, cache.page_size) == (CONFIG.n_layers, 3, 16)
    assert all(x.shape == (3, 16, 48 + 16) and x.dtype == jnp.bfloat16 for x in cache.layers)


@pytest.mark.parametrize("page_size", [1, 3, 8])
def test_what_is_written_comes_back(page_size: int) -> None:
    """Two rows with shuffled pages, written in two pieces that cut pages in the middle."""
    cache = filled(page_size)
    table = jnp.asarray([[6, 0, 3, -1], [2, 5, 1, -1]], jnp.int32)  # page 4 belongs to nobody
    n = 3 * page_size
    rows = latents((2, n))
    split = n // 2
    positions = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None], (2, n))
    cache = write(cache, tuple(x[:, :split] for x in rows), table, positions[:, :split])
    cache = write(cache, tuple(x[:, split:] for x in rows), table, positions[:, split:])
    window = read(cache, table)
    assert window.length == N_COLUMNS * page_size
    for layer in range(CONFIG.n_layers):
        np.testing.assert_array_equal(window.layers[layer][:, :n], rows[layer])
        pages = np.asarray(cache.layers[layer])
        np.testing.assert_array_equal(pages[[6, 0, 3]].reshape(n, WIDTH), rows[layer][0])
        assert (pages[4] == -5).all()


@pytest.mark.parametrize("page_size", [1, 4])
def test_padding_touches_no_page(page_size: int) -> None:
    """An empty row, a row whose next page is not mapped, positions beyond the table: page 0 and the last one stay."""
    cache = filled(page_size)
    before = np.asarray(cache.layers[0])
    table = jnp.asarray([[-1] * N_COLUMNS, [3, -1, -1, -1], [4, 5, 1, 2]], jnp.int32)
    far = N_COLUMNS * page_size
    positions = jnp.asarray([[0, 1, far - 1], [-1, page_size, far], [far, far + 1, 2**30]], jnp.int32)
    after = write(cache, latents((3, 3)), table, positions)
    for pages in after.layers:
        np.testing.assert_array_equal(pages, before)
    assert np.isfinite(read(after, table).layers[0]).all()


def test_live_and_padded_rows_in_one_write() -> None:
    """Of a batch with padding exactly the live tokens are stored, on page 0 and the last page as on any other."""
    page_size = 4
    cache = filled(page_size)
    table = jnp.asarray([[0, N_PAGES - 1, -1, -1], [-1] * 4, [2, -1, -1, -1]], jnp.int32)
    positions = jnp.asarray([[3, 4, -1], [0, 1, 2], [0, -1, 4]], jnp.int32)
    rows = latents((3, 3))
    after = write(cache, rows, table, positions)
    for layer in range(CONFIG.n_layers):
        right = np.asarray(cache.layers[layer]).copy()
        right[0, 3], right[N_PAGES - 1, 0], right[2, 0] = rows[layer][0, 0], rows[layer][0, 1], rows[layer][2, 0]
        np.testing.assert_array_equal(after.layers[layer], right)


def test_written_values_take_the_cache_s_dtype() -> None:
    cache = PagedCache.create(CONFIG, 2, 4, jnp.dtype(jnp.bfloat16))
    rows = latents((1, 4))
    after = write(cache, rows, jnp.asarray([[1]], jnp.int32), jnp.arange(4, dtype=jnp.int32)[None])
    assert after.layers[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(after.layers[0][1], rows[0][0].astype(jnp.bfloat16))


@pytest.mark.parametrize("batch", [1, 3])
def test_window_store_and_take(batch: int) -> None:
    length, t = 12, 2
    window = Window(latents((batch, length)))
    new = latents((batch, t), seed=1)[0]
    start = jnp.asarray([10, 0, 5][:batch], jnp.int32)
    layer = 1
    after = jax.jit(Window.store, static_argnums=1)(window, layer, new, start)
    right = np.asarray(window.layers[layer]).copy()
    for row, at in enumerate(start.tolist()):
        right[row, at : at + t] = new[row]
    np.testing.assert_array_equal(after.layers[layer], right)
    for other in (0, 2):
        np.testing.assert_array_equal(after.layers[other], window.layers[other])
    positions = start[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    np.testing.assert_array_equal(after.take(positions)[layer], new)
    ends = after.take(jnp.asarray([[-1, length, 2**30]] * batch, jnp.int32))[layer]
    np.testing.assert_array_equal(ends, right[:, [0, length - 1, length - 1]])
