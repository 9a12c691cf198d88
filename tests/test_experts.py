"""The expert product: every form against a naive NumPy loop, its training form against a dense formulation."""

import functools
import importlib
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimijax import quant
from kimijax.pallas_kernels import ExpertList, dropped_share, experts

# By name: inside the package `reference` is the function, and type checkers know the folder by another name.
forms = importlib.import_module("kimijax.pallas_kernels.experts.reference")

E, F, D = 6, 32, 64
RNG = np.random.default_rng(0)
GATE_UP = (RNG.standard_normal((E, 2, F, D)) / 8).astype(np.float32)
DOWN = (RNG.standard_normal((E, D, F)) / 6).astype(np.float32)
GATE_UP_WORDS, GATE_UP_SCALE = quant.quantize_words(jnp.asarray(GATE_UP, jnp.bfloat16), 32)
DOWN_WORDS, DOWN_SCALE = quant.quantize_words(jnp.asarray(DOWN, jnp.bfloat16), 32)

LISTED = ExpertList.of(jnp.asarray(GATE_UP)), ExpertList.of(jnp.asarray(DOWN))

product = jax.jit(experts, static_argnames="implementation")


def reference_with(limit: int) -> Callable[..., jax.Array]:
    """The reference as compiled with another limit for its row map."""

    def run(*operands: jax.Array) -> jax.Array:
        with mock.patch.object(forms, "ROW_MAP_LIMIT", limit):
            return experts(*operands, implementation="reference")

    return jax.jit(run)


row_map, expert_loop = reference_with(10**9), reference_with(0)


def naive(x: np.ndarray, chosen: np.ndarray, weights: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """The op's definition, one (token, slot) at a time, float64 [T, D]."""
    out = np.zeros(x.shape)
    for t, k in np.ndindex(*chosen.shape):
        gate, up = gate_up[chosen[t, k]].astype(np.float64) @ x[t]
        out[t] += weights[t, k] * (down[chosen[t, k]].astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up))
    return out


def case(t: int, k: int, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x float32 [t, D], chosen int32 [t, k] and weights float32 [t, k] of a sort of routing."""
    rng = np.random.default_rng([t, k, len(kind)])
    x = rng.standard_normal((t, D)).astype(np.float32)
    if kind == "random":
        chosen = np.stack([rng.permutation(E)[:k] for _ in range(t)])
    elif kind == "one":  # the last expert has a row of each token, k - 1 others as well, the rest none
        chosen = np.tile(np.arange(E - 1, E - 1 - k, -1), (t, 1))
    else:  # "ends": only the first and the last expert have rows
        chosen = np.where(rng.random((t, 1)) < 0.3, 0, E - 1).repeat(k, axis=1)
        chosen[:, 1:] = 0 if k > 1 else chosen[:, 1:]
        chosen[:, 0] = E - 1 if k > 1 else chosen[:, 0]
    return x, chosen.astype(np.int32), rng.random((t, k)).astype(np.float32)


# The loop's blocks have 16 rows and more: fewer rows, exactly one block, one more, many. From 12 rows (two for each of
# the six experts) the first 8 and more rows of an expert go through the batched product.
CASES = [
    (1, 1, "random"),
    (3, 3, "random"),
    (4, 3, "random"),  # 12 rows
    (16, 1, "one"),  # one expert: 8 rows batched, 8 in the loop
    (17, 1, "one"),
    (5, 3, "one"),
    (33, 2, "ends"),
    (37, 3, "random"),
    (64, 1, "one"),
    (131, 4, "random"),
]


@pytest.mark.parametrize(
    ("n_experts", "int4", "few"), [(16, False, 31), (384, False, 64), (16, True, 16), (384, True, 64)]
)
def test_row_map_is_for_few_rows(n_experts: int, int4: bool, few: int) -> None:
    assert forms._is_few(few, n_experts, int4)
    assert not forms._is_few(few + 1, n_experts, int4)


def test_batched_rows_are_a_little_more_than_the_mean() -> None:
    assert [forms._head_rows(n, 16) for n in (31, 32, 64, 128, 2048)] == [0, 8, 8, 16, 152]
    assert forms._head_rows(512, 384) == 0


@pytest.mark.parametrize("int4", [False, True], ids=["float", "int4"])
@pytest.mark.parametrize(("t", "k", "kind"), CASES)
def test_row_map_and_expert_loop_equal_numpy(t: int, k: int, kind: str, int4: bool) -> None:
    x, chosen, weights = case(t, k, kind)
    if int4:
        operands = (GATE_UP_WORDS, DOWN_WORDS, GATE_UP_SCALE, DOWN_SCALE)
        # dequantised by kimijax.quant, whose own oracle is compressed-tensors
        gate_up = np.asarray(quant.dequantize_words(GATE_UP_WORDS, GATE_UP_SCALE, jnp.float32))
        down = np.asarray(quant.dequantize_words(DOWN_WORDS, DOWN_SCALE, jnp.float32))
    else:
        operands = (jnp.asarray(GATE_UP), jnp.asarray(DOWN), None, None)
        gate_up, down = GATE_UP, DOWN
    right = naive(x, chosen, weights, gate_up, down)
    for form in (functools.partial(product, implementation="reference"), row_map, expert_loop):
        found = form(x, chosen, weights, *operands)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, right, atol=2e-5 * np.abs(right).max())


@pytest.mark.parametrize(("t", "k", "kind"), CASES)
def test_listed_experts_equal_stacked_ones(t: int, k: int, kind: str) -> None:
    x, chosen, weights = case(t, k, kind)
    right = naive(x, chosen, weights, GATE_UP, DOWN)
    for form in (row_map, expert_loop):
        np.testing.assert_allclose(
            form(x, chosen, weights, *LISTED, None, None), right, atol=2e-5 * np.abs(right).max()
        )


def test_a_row_of_listed_experts_is_the_same_whatever_the_others_are() -> None:
    x, chosen, weights = case(5, 3, "random")
    others = case(5, 3, "one")
    mixed = [np.concatenate([a[:2], b[2:]]) for a, b in zip((x, chosen, weights), others, strict=True)]
    a, b = (product(*rows, *LISTED, implementation="reference") for rows in ((x, chosen, weights), mixed))
    np.testing.assert_array_equal(a[:2], b[:2])
    assert not np.array_equal(a[2:], b[2:])


@pytest.mark.parametrize("int4", [False, True], ids=["float", "int4"])
@pytest.mark.parametrize(("t", "k", "kind"), [(3, 3, "random"), (37, 3, "random"), (33, 2, "ends"), (64, 1, "one")])
def test_devices_with_some_experts_each_make_parts_of_the_sum(t: int, k: int, kind: str, int4: bool) -> None:
    """Of three devices each has two experts; -1 stands for those of the others. One may have no row at all."""
    x, chosen, weights = case(t, k, kind)
    operands = (GATE_UP_WORDS, DOWN_WORDS, GATE_UP_SCALE, DOWN_SCALE) if int4 else (GATE_UP, DOWN)
    whole = product(x, chosen, weights, *operands, implementation="reference")
    for limit in (10**9, 0):
        with mock.patch.object(forms, "ROW_MAP_LIMIT", limit):
            part = jax.jit(functools.partial(experts, implementation="reference", partial=True))
            parts = []
            for first in range(0, E, 2):
                own = np.where((chosen >= first) & (chosen < first + 2), chosen - first, -1).astype(np.int32)
                parts.append(part(x, own, weights, *(a[first : first + 2] for a in operands)))
        np.testing.assert_allclose(sum(parts), whole, atol=2e-5 * float(jnp.abs(whole).max()))
        if kind == "ends":
            assert not np.asarray(parts[1]).any()


def test_an_expert_without_rows_is_never_read() -> None:
    x, chosen, weights = case(33, 2, "ends")
    gate_up, down = GATE_UP.copy(), DOWN.copy()
    gate_up[1:-1], down[1:-1] = np.nan, np.nan
    right = naive(x, chosen, weights, GATE_UP, DOWN)
    for form in (row_map, expert_loop):
        found = form(x, chosen, weights, gate_up, down, None, None)
        np.testing.assert_allclose(found, right, atol=2e-5 * np.abs(right).max())


def test_result_in_x_s_dtype() -> None:
    x, chosen, weights = case(5, 3, "random")
    bf16 = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    right = naive(x, chosen, weights, GATE_UP, DOWN)
    for implementation in ("reference", "capacity"):
        found = product(bf16(x), chosen, weights, bf16(GATE_UP), bf16(DOWN), implementation=implementation)
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(found.astype(jnp.float32), right, atol=0.03 * np.abs(right).max())


@pytest.mark.parametrize("n_rows", [1, 6, 8, 16, 17, 48, 100, 512, 4096, 65536])
@pytest.mark.parametrize("n_experts", [1, 6, 16, 64])
def test_capacity_is_the_factor_times_the_mean(n_rows: int, n_experts: int) -> None:
    """Rounded up to 8 rows; never 0, never fewer than an even spread needs."""
    wanted = forms.CAPACITY_FACTOR * n_rows / n_experts
    found = forms._capacity(n_rows, n_experts)
    assert min(n_rows, wanted) <= found < wanted + 8


def spread(t: int, k: int) -> np.ndarray:
    """An even routing int32 [t, k], with which nothing is dropped."""
    return ((np.arange(t)[:, None] * k + np.arange(k)[None]) % E).astype(np.int32)


@pytest.mark.parametrize(("t", "k"), [(1, 1), (5, 3), (24, 2), (53, 4)])
def test_capacity_equals_numpy_when_nothing_is_dropped(t: int, k: int) -> None:
    x, _, weights = case(t, k, "random")
    chosen = spread(t, k)
    assert dropped_share(jnp.bincount(chosen.reshape(-1), length=E), chosen.size) == 0
    right = naive(x, chosen, weights, GATE_UP, DOWN)
    found = product(x, chosen, weights, GATE_UP, DOWN, implementation="capacity")
    np.testing.assert_allclose(found, right, atol=2e-5 * np.abs(right).max())


def test_capacity_drops_exactly_the_overflow() -> None:
    """The first rows of a crowded expert, in order of token, are kept; a token without a place gets zeros."""
    t, k = 40, 1
    x, chosen, weights = case(t, k, "one")
    chosen[::10] = 2  # a few go elsewhere, the middle experts get no rows at all
    size = forms._capacity(t * k, E)
    crowd = np.flatnonzero(chosen[:, 0] == E - 1)
    dropped = crowd[size:]
    assert 0 < len(dropped) < t
    counts = jnp.bincount(chosen.reshape(-1), length=E)
    assert dropped_share(counts, chosen.size) == pytest.approx(len(dropped) / (t * k))
    weights[dropped] = 0.0
    right = naive(x, chosen, weights, GATE_UP, DOWN)
    found = np.asarray(product(x, chosen, case(t, k, "one")[2], GATE_UP, DOWN, implementation="capacity"))
    np.testing.assert_allclose(found, right, atol=2e-5 * np.abs(right).max())
    assert (found[dropped] == 0).all()


@pytest.mark.parametrize("kind", ["spread", "one"])
def test_capacity_gradient_equals_dense(kind: str) -> None:
    """With respect to every operand, dropped rows included (their gradient is zero)."""
    t, k = 24, 2
    x, chosen, weights = case(t, k, "one")
    if kind == "spread":
        chosen = spread(t, k)
    routed = jnp.asarray(chosen)
    rank = np.zeros((t, k), np.int64)  # how many earlier (token, slot) rows the expert has
    counts = np.zeros(E, np.int64)
    for at in np.ndindex(t, k):
        rank[at] = counts[chosen[at]]
        counts[chosen[at]] += 1
    kept = (rank < forms._capacity(t * k, E)).astype(np.float32)
    assert kept.all() == (kind == "spread")
    target = jnp.asarray(np.random.default_rng(1).standard_normal((t, D)).astype(np.float32))

    def loss(x: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        return (experts(x, routed, weights, gate_up, down, implementation="capacity") * target).sum()

    def dense_loss(x: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        h = jnp.einsum("td,ecfd->tecf", x, gate_up)
        y = jnp.einsum("tef,edf->ted", jax.nn.silu(h[:, :, 0]) * h[:, :, 1], down)
        share = (jax.nn.one_hot(routed, E) * (weights * kept)[..., None]).sum(axis=1)  # [T, E]
        return (jnp.einsum("ted,te->td", y, share) * target).sum()

    operands = tuple(map(jnp.asarray, (x, weights, GATE_UP, DOWN)))
    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*operands)
    right = jax.jit(jax.grad(dense_loss, argnums=(0, 1, 2, 3)))(*operands)
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()))


def test_what_cannot_run_is_refused() -> None:
    x, chosen, weights = case(5, 3, "random")
    with pytest.raises(NotImplementedError, match="'cuda': this build has reference, capacity"):
        experts(x, chosen, weights, GATE_UP, DOWN, implementation="cuda")  # pyright: ignore[reportArgumentType]
    with pytest.raises(NotImplementedError, match="INT4"):
        product(x, chosen, weights, GATE_UP_WORDS, DOWN_WORDS, GATE_UP_SCALE, DOWN_SCALE, implementation="capacity")
    with pytest.raises(NotImplementedError, match="stacked weights"):
        product(x, chosen, weights, *LISTED, implementation="capacity")
    with pytest.raises(NotImplementedError, match="not those of one device"):
        experts(x, chosen, weights, GATE_UP, DOWN, implementation="capacity", partial=True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="down: found an array"):
        product(x, chosen, weights, LISTED[0], DOWN, implementation="reference")
