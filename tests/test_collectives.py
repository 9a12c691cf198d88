"""What the devices send each other in a layer, counted in the compiled programs of every preset."""

import dataclasses
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from kimijax.attention import masked_softmax, over_split_positions
from kimijax.cache import LATENT_AXES, PagedCache, PagedView
from kimijax.config import parse_config
from kimijax.model import declare_target
from kimijax.sharding import PRESETS, Preset, make_mesh, named_sharding
from kimijax.split_pages import gather_pages, gather_rows, scatter_rows

from . import golden

CONFIG = parse_config(golden.FAMILIES["kimi_k25"])
KINDS = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")

# Attention's output and the experts' are summed over the devices. Groups with requests of their own exchange rows
# before the experts, and sums after them. With the cache split by position queries are gathered by head, maxima and
# outputs brought together.
DECODE: dict[Preset, dict[str, int]] = {
    "tp": {"all-reduce": 2},
    "ep": {"all-reduce": 2},
    "dp-attention": {"all-gather": 1, "reduce-scatter": 1},
    "dcp": {"all-reduce": 3, "all-gather": 1, "reduce-scatter": 1},
}
PREFILL = DECODE | {"dcp": {"all-reduce": 2, "all-gather": 1}}  # a chunk gathers the cache of what is before it


def compiled(preset: Preset, n_layers: int, rows: int, tokens: int, *, prefill: bool) -> str:
    """The optimised program of the target alone, from shapes."""
    config, mesh = dataclasses.replace(CONFIG, n_layers=n_layers), make_mesh(preset=preset)
    graph, state = nnx.split(declare_target(config, dtype=jnp.dtype(jnp.float32), int4=False))

    def on(shape: tuple[int, ...], dtype: jnp.dtype, axes: tuple[str, ...] = ()) -> jax.ShapeDtypeStruct:
        axes = axes or ("replicated",) * len(shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, axes, shape))

    def placed(v: nnx.Variable) -> nnx.Variable:
        s = v.get_value()
        return v.replace(on(s.shape, s.dtype, v.get_metadata()["axes"]))

    state = nnx.from_flat_state([(path, placed(v)) for path, v in nnx.to_flat_state(state)])
    f32, i32 = jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)
    pages = on((32, 16, config.latent_dim), f32, LATENT_AXES)

    def step(state: nnx.State, cache: PagedCache, ids: jax.Array, start: jax.Array, table: jax.Array):
        model, view = nnx.merge(graph, state), PagedView(cache, table, start)
        if prefill:
            hidden, view = model.prefill_into(ids, start, view, first=False)
            return hidden.last, view.cache
        hidden, view = model.decode(ids, start, view)
        return model.logits(hidden.last), view.cache

    out = NamedSharding(mesh, PartitionSpec()), PagedCache((pages.sharding,) * n_layers)  # pyright: ignore[reportArgumentType]
    operands = on((rows, tokens), i32), on((rows,), i32), on((rows, 4), i32)
    with jax.set_mesh(mesh):
        program = jax.jit(step, donate_argnums=1, out_shardings=out)
        text = program.lower(state, PagedCache((pages,) * n_layers), *operands).compile().as_text()  # pyright: ignore[reportArgumentType]
    assert text is not None
    return text


def of_a_layer(preset: Preset, rows: int, tokens: int, *, prefill: bool) -> dict[str, int]:
    three, four = (Counter(KINDS.findall(compiled(preset, n, rows, tokens, prefill=prefill))) for n in (3, 4))
    return {kind: four[kind] - three[kind] for kind in four if four[kind] > three[kind]}


@pytest.mark.parametrize("preset", PRESETS)
def test_decoding_and_verification(preset: Preset) -> None:
    assert of_a_layer(preset, 8, 4, prefill=False) == DECODE[preset]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_decoding_one_token(preset: Preset) -> None:
    assert of_a_layer(preset, 8, 1, prefill=False) == DECODE[preset]


@pytest.mark.parametrize("preset", PRESETS)
def test_prefill(preset: Preset) -> None:
    rows = 8 if preset == "dp-attention" else 1
    assert of_a_layer(preset, rows, 32, prefill=True) == PREFILL[preset]


@pytest.mark.parametrize("preset", ["dp-attention", "dcp"])
def test_pages_are_read_and_written_where_they_lie(preset: Preset) -> None:
    """By page and by position: the same values as without a mesh, padding dropped."""
    rng = np.random.default_rng(0)
    pages = rng.standard_normal((16, 8, 4)).astype(np.float32)
    table = np.arange(16, dtype=np.int32).reshape(8, 2)  # row b has pages of group b
    table[3, 1] = -1
    index = np.take_along_axis(table, rng.integers(0, 2, (8, 5)), axis=1)
    offset = np.tile(np.asarray([0, 7, 3, 4, 1], np.int32), (8, 1))
    new = rng.standard_normal((8, 5, 4)).astype(np.float32)
    written = np.where(index < 0, 16, index).astype(np.int32)

    def run() -> list[jax.Array]:
        return [
            jax.jit(gather_pages, static_argnums=2)(pages, table, LATENT_AXES),
            jax.jit(gather_rows, static_argnums=3)(pages, np.maximum(index, 0), offset, LATENT_AXES),
            jax.jit(scatter_rows, static_argnums=4)(pages, new, written, offset, LATENT_AXES),
        ]

    alone, mesh = run(), make_mesh(preset=preset)
    with jax.set_mesh(mesh):
        split = run()
    here = (table >= 0)[..., None, None]
    np.testing.assert_array_equal(np.asarray(split[0]) * here, np.asarray(alone[0]) * here)
    if preset == "dcp":  # in the other, a page that is nobody's is read from another group
        np.testing.assert_array_equal(split[1], alone[1])
    np.testing.assert_array_equal(np.asarray(split[1])[index >= 0], np.asarray(alone[1])[index >= 0])
    np.testing.assert_array_equal(split[2], alone[2])
    assert not np.array_equal(split[2], pages)


def test_attention_over_split_positions_equals_the_whole() -> None:
    """Also for a query that sees one device's positions alone, and for one that sees nothing."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 3, 8, 12)).astype(np.float32) * 3
    keys = rng.standard_normal((2, 4, 16, 12)).astype(np.float32)
    visible = rng.random((2, 3, 64)) < 0.5
    visible[0, 0] = np.arange(64) < 2
    visible[1, 2] = False
    score = np.einsum("btnc,bsc->btns", q, keys.reshape(2, 64, 12)) * 0.4
    p = masked_softmax(jnp.asarray(score), jnp.asarray(visible)[:, :, None])
    right = np.einsum("btns,bsc->btnc", p, keys.reshape(2, 64, 12))
    with jax.set_mesh(make_mesh(preset="dcp")):
        found = jax.jit(over_split_positions, static_argnums=3)(q, keys, visible, 0.4)
    np.testing.assert_allclose(found, right, atol=1e-5)
    assert not np.asarray(found)[1, 2].any()
