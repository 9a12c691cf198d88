"""Routing and the work list: reference and interpreted kernels against NumPy and against the model's own routing."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

from kimijax.config import MoEConfig
from kimijax.moe import route as model_route

# By name: in the package above, `route` is the function, and type checkers know the folder by another name.
op = importlib.import_module("kimijax.pallas_kernels.route")
route, router_logits, work_list, n_items = op.route, op.router_logits, op.work_list, op.n_items

# tokens, experts, chosen, groups, groups kept, scoring, bias, rows of an item
CASES = {
    "kimi, 1 token": (1, 384, 8, 1, 1, "sigmoid", True, None),
    "kimi, 8 tokens": (8, 384, 8, 1, 1, "sigmoid", True, None),
    "kimi, 19 tokens with a list": (19, 384, 8, 1, 1, "sigmoid", True, 8),
    "kimi, 64 tokens with a list": (64, 384, 8, 1, 1, "sigmoid", True, 8),
    "nano with a list": (33, 16, 2, 1, 1, "sigmoid", True, 16),
    "groups with a list": (17, 256, 8, 8, 4, "sigmoid", True, 8),
    "softmax, groups, no bias": (3, 64, 6, 8, 3, "softmax", False, None),
    "one expert": (2, 8, 1, 1, 1, "softmax", False, None),
}


def logits_of(t: int, e: int) -> jax.Array:
    """float32 [t, e] with many ties."""
    return jnp.asarray(np.round(np.random.default_rng([t, e]).standard_normal((t, e)) * 4) / 4, jnp.float32)


def run(case: str, implementation: str, renormalise: bool = True) -> tuple:
    t, e, k, n_groups, kept, scoring, has_bias, block = CASES[case]
    bias = jnp.asarray(np.round(np.random.default_rng(e).standard_normal(e)) / 8, jnp.float32) if has_bias else None
    rule = functools.partial(
        route,
        n_chosen=k,
        scoring=scoring,
        n_groups=n_groups,
        n_groups_kept=kept,
        renormalise=renormalise,
        scale=2.5,
        block=block,
        implementation=implementation,
    )
    return jax.jit(rule)(logits_of(t, e), bias), bias


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
@pytest.mark.parametrize("case", CASES)
def test_choice_is_the_models(case: str, implementation: str) -> None:
    t, e, k, n_groups, kept, scoring, _, _ = CASES[case]
    for renormalise in (True, False) if t == 1 else (True,):
        found, bias = run(case, implementation, renormalise)
        config = MoEConfig(
            n_experts=e,
            n_chosen=k,
            n_shared=0,
            expert_width=32,
            n_groups=n_groups,
            n_groups_kept=kept,
            scoring=scoring,
            renormalise=renormalise,
            scale=2.5,
        )
        right = model_route(logits_of(t, e), jnp.eye(e, dtype=jnp.float32), bias, config)
        np.testing.assert_array_equal(found.chosen, right.experts)
        np.testing.assert_allclose(found.weights, right.weights, rtol=1e-6)
        np.testing.assert_allclose(found.scores, right.scores, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
@pytest.mark.parametrize(("t", "n_parts"), [(3, 2), (9, 1)])
def test_the_routers_product_in_parts(t: int, n_parts: int, implementation: str) -> None:
    rng = np.random.default_rng(t)
    x, router = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((t, 256), (16, 256)))
    router = router / 16
    logits = router_logits(x, router)
    assert logits.shape == ((n_parts, t, 16) if n_parts > 1 else (t, 16))
    whole = np.asarray(x, np.float64) @ np.asarray(router, np.float64).T
    np.testing.assert_allclose(logits.sum(axis=0) if n_parts > 1 else logits, whole, atol=1e-4)
    found = route(
        logits, None, n_chosen=2, scoring="sigmoid", renormalise=False, scale=1.0, implementation=implementation
    )
    np.testing.assert_array_equal(found.chosen, np.argsort(-whole, axis=1)[:, :2])
    np.testing.assert_allclose(found.scores, 1 / (1 + np.exp(-whole)), atol=1e-5)


def naive_list(chosen: np.ndarray, n_experts: int, block: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    rows = sorted(range(chosen.size), key=lambda r: (chosen.flat[r] < 0, chosen.flat[r], r))
    items = []
    for e in range(n_experts):
        positions = [p for p, r in enumerate(rows) if chosen.flat[r] == e]
        items += [(e, p, min(p + block, positions[-1] + 1)) for p in positions[::block]]
    return rows, items


def check_list(found: Any, chosen: np.ndarray, n_experts: int, block: int) -> None:
    rows, items = naive_list(chosen, n_experts, block)
    static = n_items(chosen.size, n_experts, block)
    assert len(items) <= static
    # items where no rows stand begin after those that exist
    np.testing.assert_array_equal(found.items, np.array(items + [(0, 0, 0)] * (static - len(items))).T)
    kept = (chosen >= 0).sum()
    np.testing.assert_array_equal(found.order[:kept], rows[:kept])
    assert sorted(found.order.tolist()) == list(range(chosen.size))


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
@pytest.mark.parametrize("case", [name for name in CASES if CASES[name][-1]])
def test_work_list_of_a_choice(case: str, implementation: str) -> None:
    found, _ = run(case, implementation)
    check_list(found.work, np.asarray(found.chosen), CASES[case][1], CASES[case][-1] or 0)


list_of = jax.jit(work_list, static_argnums=(1, 2), static_argnames="implementation")


@settings(max_examples=25)
@given(st.sampled_from([(1, 1), (5, 3), (40, 2)]), st.sampled_from([1, 16]), st.integers(0, 2**16))
def test_work_list_of_any_experts(shape: tuple[int, int], n_experts: int, seed: int) -> None:
    """Some experts have no rows, one may have all, and -1 is another device's."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(rng.integers(-1, n_experts), n_experts, shape).astype(np.int32)
    for implementation in ("reference", "interpret"):
        check_list(list_of(jnp.asarray(chosen), n_experts, 8, implementation=implementation), chosen, n_experts, 8)


def test_longer_lists_are_sorted_by_the_reference() -> None:
    chosen = np.random.default_rng(0).integers(-1, 5, (op.LISTED_ROWS // 2 + 1, 2)).astype(np.int32)
    check_list(work_list(jnp.asarray(chosen), 5, 16, implementation="interpret"), chosen, 5, 16)


def test_what_cannot_run_is_refused_by_name() -> None:
    logits = logits_of(2, 12)
    rule = functools.partial(route, scoring="sigmoid", renormalise=True, scale=1.0)
    with pytest.raises(NotImplementedError, match="route implementation 'fast': this build has"):
        rule(logits, None, n_chosen=2, implementation="fast")
    with pytest.raises(NotImplementedError, match="work_list implementation 'fast': this build has"):
        work_list(jnp.zeros((1, 1), jnp.int32), 2, 8, implementation="fast")
    with pytest.raises(ValueError, match="found float32 and bfloat16"):
        rule(logits, jnp.zeros(12, jnp.bfloat16), n_chosen=2, implementation="reference")
    with pytest.raises(ValueError, match="found 2 of 12 experts in 1 of 5 groups"):
        rule(logits, None, n_chosen=2, n_groups=5, implementation="reference")
    with pytest.raises(ValueError, match="found 1 groups of 4 experts, expected 5"):
        rule(logits, None, n_chosen=5, n_groups=3, implementation="interpret")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Pallas' Triton backend, which these kernels are for
@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA RTX PRO 6000 Blackwell"])
@pytest.mark.parametrize("t", [1, 8, 16, 64, 2048])
def test_routing_is_one_kernel_for_cuda(t: int, kind: str) -> None:
    block = 8 if 8 < t <= 64 else None
    rule = functools.partial(
        route, n_chosen=8, scoring="sigmoid", renormalise=True, scale=2.827, block=block, implementation="pallas"
    )
    args = (jax.ShapeDtypeStruct((t, 384), jnp.float32), jax.ShapeDtypeStruct((384,), jnp.float32))
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        text = jax.jit(rule).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 1
    assert "sort" not in text
