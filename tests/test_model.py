"""The target model against transformers' golden files and the plain NumPy reference, in every program it has."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimijax import checkpoint
from kimijax.cache import PagedCache, PagedView
from kimijax.config import load_config
from kimijax.model import Target, check_taps, declare_target
from kimijax.sharding import Preset, make_mesh

from . import golden, reference
from .golden.families import Quantization

FAMILIES = tuple(golden.FAMILIES)
GATHERS = re.compile(r"= \w+\[([\d,]*)\]\S* all-gather")
LIMIT = 1e-4  # largest error relative to the largest logit


def relative_error(found: np.ndarray, right: np.ndarray) -> float:
    return float(np.abs(np.asarray(found, np.float64) - right).max() / np.abs(right).max())


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Target]:
    """Loads a family's golden checkpoint in float32; written once a module."""
    directories: dict[tuple[str, Quantization | None], Path] = {}

    def get(
        family: str,
        *,
        quantization: Quantization | None = None,
        mesh: jax.sharding.Mesh | None = None,
        dtype: Any = jnp.float32,
    ) -> Target:
        key = (family, quantization)
        if key not in directories:
            directories[key] = tmp_path_factory.mktemp(family)
            golden.write_checkpoint(family, directories[key], dtype="float32", quantization=quantization)
        config = load_config(directories[key])
        return checkpoint.load(directories[key], config, mesh=mesh, dtype=dtype)

    return get


def run_forward(model: Target, ids: np.ndarray, taps: tuple[int, ...] = ()) -> tuple[np.ndarray, dict, list]:
    graph, state = nnx.split(model)

    @jax.jit
    def forward(state: nnx.State, ids: jax.Array):
        out = nnx.merge(graph, state)(ids, taps=taps)
        return out.logits, out.taps, [(r.experts, r.weights) for r in out.routing]

    return forward(state, jnp.asarray(ids, jnp.int32)[None])


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_equals_transformers(family: str, load: Callable[..., Target]) -> None:
    """Logits, every tap, every expert choice and its weight, far beyond the original context."""
    g = golden.load_golden(family)
    model = load(family)
    n = model.config.n_layers
    logits, taps, routing = run_forward(model, g["ids"], tuple(range(n + 1)))
    assert relative_error(logits[0], g["logits"]) < LIMIT
    for tap in range(n + 1):
        assert relative_error(taps[tap][0][g["tap_positions"]], g["taps"][tap]) < LIMIT, f"tap {tap}"
    assert len(routing) == len(g["moe_layers"])
    for (experts, weights), right, right_weights in zip(routing, g["experts"], g["expert_weights"], strict=True):
        order = np.argsort(experts, axis=1)
        np.testing.assert_array_equal(np.take_along_axis(np.asarray(experts), order, 1), right)
        np.testing.assert_allclose(np.take_along_axis(np.asarray(weights), order, 1), right_weights, rtol=1e-4)
    logits, _, routing = run_forward(model, g["long_ids"])
    assert relative_error(logits[0][g["long_positions"]], g["long_logits"]) < LIMIT
    for (experts, _), right in zip(routing, g["long_experts"], strict=True):
        np.testing.assert_array_equal(np.sort(experts, axis=1), right)


class PagedDecoder:
    """One sequence through pages in shuffled order: chunks of 1 or 2 tokens absorbed, longer ones expanded."""

    def __init__(self, model: Target, n_tokens: int, page: int = 16) -> None:
        n_pages = -(-n_tokens // page)
        self.table = np.full((1, n_pages + 2), -1, np.int32)
        self.table[0, :n_pages] = np.random.default_rng(0).permutation(n_pages) + 1
        self.new_cache = partial(PagedCache.create, model.config, n_pages + 3, page, jnp.dtype(jnp.float32))
        self.graph, self.state = nnx.split(model)
        self.step = jax.jit(self._step, static_argnames="absorbed")
        self.tap = model.config.n_layers - 1

    def _step(self, state: nnx.State, cache: PagedCache, ids: jax.Array, start: jax.Array, absorbed: bool):
        """Logits [T, V], a tap [T, D], and the cache. One token goes through a dense window, two through pages."""
        model, table = nnx.merge(self.graph, state), jnp.asarray(self.table)
        positions = start[:, None] + jnp.arange(ids.shape[1])[None]
        taps = (self.tap,)
        if not absorbed:
            hidden, rows = model.prefill(ids, start, PagedView(cache, table), taps=taps)
            cache = cache.write(rows, table, positions)
        elif ids.shape[1] > 1:
            hidden, view = model.decode(ids, start, PagedView(cache, table), taps=taps)
            cache = view.cache
        else:
            hidden, window = model.decode(ids, start, cache.read(table), taps=taps)
            cache = cache.write(window.take(positions), table, positions)
        return model.logits(hidden.last)[0], hidden.taps[self.tap][0], cache

    def run(self, ids: np.ndarray, chunks: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Logits [T, V] and tap [T, D] of ids [T], cut into `chunks`."""
        out, taps, at, cache = [], [], 0, self.new_cache()
        for size in chunks:
            part, start = jnp.asarray(ids[at : at + size], jnp.int32)[None], jnp.asarray([at], jnp.int32)
            logits, tap, cache = self.step(self.state, cache, part, start, absorbed=size <= 2)
            out.append(np.asarray(logits))
            taps.append(np.asarray(tap))
            at += size
        assert at == len(ids)
        return np.concatenate(out), np.concatenate(taps)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_to_the_same_logits(family: str, load: Callable[..., Target]) -> None:
    """Prefill = chunked prefill = token-by-token decode = several query tokens a step; expanded = absorbed."""
    g = golden.load_golden(family)
    ids, right = g["ids"][:96], g["logits"][:96]
    decoder = PagedDecoder(load(family), len(ids))
    tapped = g["tap_positions"][g["tap_positions"] < len(ids)]
    for chunks in ([96], [48, 48], [1] * 96, [48] + [2] * 12 + [1] * 24):
        logits, tap = decoder.run(ids, chunks)
        assert relative_error(logits, right) < LIMIT, chunks
        assert relative_error(tap[tapped], g["taps"][decoder.tap][: len(tapped)]) < LIMIT, chunks


@pytest.mark.parametrize(
    ("preset", "quantization"),
    [
        ("tp", "int4"),
        pytest.param("tp", None, marks=pytest.mark.slow),
        ("ep", "int4"),
        ("dcp", "int4"),
        ("dp-attention", None),
    ],
)
def test_eight_devices_give_one_device_s_logits(
    preset: Preset, quantization: str | None, load: Callable[..., Target]
) -> None:
    family = "kimi_k25"
    g = golden.load_golden(family)
    mesh = make_mesh(preset=preset)
    model = load(family, quantization=quantization, mesh=mesh)
    with jax.set_mesh(mesh):
        logits, _, _ = run_forward(model, g["ids"])
        assert relative_error(logits[0], g["logits"]) < LIMIT
        if preset == "dp-attention":
            return  # each group has rows and pages of its own: an engine's business
        decoded = PagedDecoder(model, 24).run(g["ids"][:24], [16, 1, 1, 2, 2, 1, 1])[0]
    assert relative_error(decoded, g["logits"][:24]) < LIMIT


def test_no_device_gathers_a_weight(load: Callable[..., Target]) -> None:
    """The compiled decoding step of eight devices: sums of partial outputs, but no weight is put together anywhere."""
    mesh = make_mesh()
    model = load("kimi_k25", mesh=mesh)
    graph, state = nnx.split(model)
    sizes = {int(np.prod(x.shape)) for x in jax.tree.leaves(state) if x.ndim > 1}
    table = jnp.asarray([[0, 1]], jnp.int32)

    def step(state: nnx.State, cache: PagedCache, ids: jax.Array, start: jax.Array):
        model = nnx.merge(graph, state)
        hidden, view = model.decode(ids, start, PagedView(cache, table))
        return model.logits(hidden.last), view.cache

    for rows in (1, 2):
        cache = PagedCache.create(model.config, 4, 16, jnp.dtype(jnp.float32))
        ids, start = jnp.zeros((rows, 1), jnp.int32), jnp.zeros(rows, jnp.int32)
        with jax.set_mesh(mesh):
            text = jax.jit(step).lower(state, cache, ids, start).compile().as_text()
        assert text is not None
        gathered = [int(np.prod([int(n) for n in dims.split(",") if n])) for dims in GATHERS.findall(text)]
        assert not sizes & set(gathered), f"gathered arrays of {gathered} elements"


@pytest.mark.parametrize("quantization", ["int4", "fp8"])
def test_stored_forms_give_the_same_logits(quantization: str, load: Callable[..., Target]) -> None:
    family = {"int4": "kimi_k25", "fp8": "deepseek_v3"}[quantization]
    g = golden.load_golden(family)
    logits, _, _ = run_forward(load(family, quantization=quantization), g["ids"])
    assert relative_error(logits[0], g["logits"]) < LIMIT


def test_greedy_text_equals_the_reference(load: Callable[..., Target]) -> None:
    config = golden.FAMILIES["kimi_k25"]
    prompt = golden.load_golden("kimi_k25")["ids"][:20].tolist()
    right = list(reference.greedy(config, golden.hf_weights(config), prompt, 12))
    decoder = PagedDecoder(load("kimi_k25"), len(prompt) + len(right))
    chunks = [len(prompt)] + [1] * (len(right) - 1)
    logits, _ = decoder.run(np.asarray(prompt + right[:-1]), chunks)  # fed the right tokens: each must be the argmax
    assert np.argmax(logits[len(prompt) - 1 :], axis=1).tolist() == right


def test_packed_documents_do_not_see_each_other(load: Callable[..., Target]) -> None:
    model = load("kimi_k25")
    a, b = np.arange(9) % 100, (np.arange(7) * 5) % 100
    graph, state = nnx.split(model)
    row = jnp.asarray(np.concatenate([a, b]), jnp.int32)[None]
    positions = jnp.asarray(np.concatenate([np.arange(9), np.arange(7)]), jnp.int32)[None]
    segments = jnp.asarray([[0] * 9 + [1] * 7], jnp.int32)
    packed = jax.jit(lambda s: nnx.merge(graph, s)(row, positions=positions, segments=segments).logits)(state)[0]
    for part, found in ((a, packed[:9]), (b, packed[9:])):
        alone, _, _ = run_forward(model, part)
        assert relative_error(found, np.asarray(alone[0])) < 1e-5


def test_bf16_stays_near_float32(load: Callable[..., Target]) -> None:
    """bf16 weights and activations: where no expert choice flips, logits are a few bf16 steps off; routing is f32."""
    g = golden.load_golden("kimi_k25")
    logits, _, routing = run_forward(load("kimi_k25", dtype=jnp.bfloat16), g["ids"])
    same = np.all([(np.sort(e, axis=1) == r).all(axis=1) for (e, _), r in zip(routing, g["experts"], strict=True)], 0)
    error = np.abs(np.asarray(logits[0]) - g["logits"])[same] / g["logits"].std()
    assert same.mean() > 0.5
    assert 1e-4 < error.mean() < 0.05
    assert routing[0][1].dtype == jnp.float32


def test_taps_out_of_range_are_refused() -> None:
    config = load_config_of("moonlight")
    with pytest.raises(ValueError, match="tap 99: expected 0"):
        check_taps((99,), config)
    with pytest.raises(ValueError, match="int4: the config declares"):
        declare_target(config, dtype=jnp.dtype(jnp.float32), int4=True)


def load_config_of(family: str):
    from kimijax.config import parse_config

    return parse_config(golden.FAMILIES[family])
