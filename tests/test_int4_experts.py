"""INT4 experts: the GPU's order of words; the kernels, interpreted, against float64, and lowered for CUDA."""

import functools
import importlib
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

from kimijax import quant

pytestmark = pytest.mark.slow  # the interpreter takes half a minute

# By name: in the package above, `int4_experts` is the function, and type checkers know the folder by another name.
op = importlib.import_module("kimijax.pallas_kernels.int4_experts")
tiles = importlib.import_module("kimijax.pallas_kernels.int4_experts.tiles")
dequantise = importlib.import_module("kimijax.pallas_kernels.int4_experts.dequantise")
shapes = importlib.import_module("kimijax.pallas_kernels.int4_experts.shapes")
int4_experts, to_gpu_layout, from_gpu_layout = op.int4_experts, op.to_gpu_layout, op.from_gpu_layout
type Operands = tuple[jax.Array, ...]

product = jax.jit(int4_experts, static_argnames=("implementation", "partial", "chip"))


def operands(t: int, k: int, e: int, d: int, f: int, dtype: str = "bfloat16", kind: str = "random") -> Operands:
    """What `int4_experts` takes, words in the GPU's order; routing of a `kind`."""
    rng = np.random.default_rng([t, k, e, d, f])
    gate_up, gate_up_scale = random_words(rng, (e, 2, f), d)
    down, down_scale = random_words(rng, (e, d), f)
    if kind == "one":  # the last expert has a row of each token; of the others only k - 1 have any
        chosen = np.tile(np.arange(e - 1, e - 1 - k, -1), (t, 1))
    else:
        chosen = np.stack([rng.permutation(e)[:k] for _ in range(t)])
    if kind == "partial":
        chosen = np.where(rng.random((t, k)) < 0.6, -1, chosen)
    x = jnp.asarray(rng.standard_normal((t, d)), dtype)
    weights = jnp.asarray(rng.random((t, k)), jnp.float32)
    return x, jnp.asarray(chosen, jnp.int32), weights, gate_up, down, gate_up_scale, down_scale


def random_words(rng: np.random.Generator, lead: tuple[int, ...], k: int) -> tuple[jax.Array, jax.Array]:
    """Any words, and scales that make products of k inputs about 1."""
    words = rng.integers(-(2**31), 2**31, (*lead, k // 8), dtype=np.int64).astype(np.int32)
    scales = (0.5 + rng.random((*lead, k // 32))) * k**-0.5 / 4.6
    return jnp.asarray(words), jnp.asarray(scales, jnp.bfloat16)


def exact(x: jax.Array, chosen: jax.Array, weights: jax.Array, *params: jax.Array) -> np.ndarray:
    """The op's definition in float64, one (token, slot) at a time."""
    gate_up, down = (
        quant.unpack_words(np.asarray(from_gpu_layout(words))) * np.repeat(np.asarray(scale, np.float64), 32, -1)
        for words, scale in (params[::2], params[1::2])
    )
    rows, share = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    out = np.zeros(rows.shape)
    for t, k in np.ndindex(*chosen.shape):
        e = int(chosen[t, k])
        if e >= 0:
            gate, up = gate_up[e] @ rows[t]
            out[t] += share[t, k] * (down[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def check(args: Operands, **options: Any) -> None:
    """The interpreted kernels are as near to float64 as bf16 (or float32) between the two products allows."""
    right, found = exact(*args), product(*args, implementation="interpret", **options)
    assert found.dtype == args[0].dtype
    limit = 6e-3 if args[0].dtype == jnp.bfloat16 else 3e-5
    error = np.abs(np.asarray(found, np.float64) - right).max() / np.abs(right).max()
    assert error < limit, f"error {error:.1e} of the greatest output, expected less than {limit:.1e}"


@given(st.sampled_from([128, 256, 384, 512, 768]), st.integers(0, 2**32 - 1))
def test_layout_has_an_inverse_and_is_the_documented_one(k: int, seed: int) -> None:
    words = jnp.asarray(np.random.default_rng(seed).integers(-(2**31), 2**31, (3, k // 8), dtype=np.int64), jnp.int32)
    there = to_gpu_layout(words)
    np.testing.assert_array_equal(from_gpu_layout(there), words)
    width = (256 if k % 256 == 0 else 128) // 8
    nibbles = (np.asarray(there).view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    inputs = nibbles.reshape(3, -1, width, 8).swapaxes(-1, -2).reshape(3, k)  # input `width` j + i: nibble j of word i
    np.testing.assert_array_equal(inputs.astype(np.int32) - 8, quant.unpack_words(np.asarray(words)))


def test_layout_of_a_part_is_the_part_of_the_layout() -> None:
    words = random_words(np.random.default_rng(0), (2,), 2048)[0]
    parts = [to_gpu_layout(part) for part in jnp.split(words, 8, axis=-1)]
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=-1), to_gpu_layout(words))


def test_widths_that_fill_no_block_are_refused() -> None:
    with pytest.raises(ValueError, match="found 64, expected a multiple of 128"):
        to_gpu_layout(jnp.zeros((2, 8), jnp.int32))


@given(st.integers(0, 7), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_ptx_makes_two_numbers_of_two_words(j: int, a: int, b: int) -> None:
    text = dequantise.nibble_ptx(j)
    select = re.search(r"prmt\.b32 t, \$1, \$2, 0x([0-9a-f]{4});", text)
    logic = re.search(r"lop3\.b32 \$0, t, 0x([0-9a-f]{8}), 0x([0-9a-f]{8}), 0x([0-9a-f]{2});", text)
    shift = re.search(r"shr\.u32 t, t, (\d+);", text)
    assert select is not None
    assert logic is not None
    source = [(word >> (8 * i)) & 255 for word in (a, b) for i in range(4)]
    t = sum(source[(int(select[1], 16) >> (4 * i)) & 7] << (8 * i) for i in range(4))
    t >>= int(shift[1]) if shift else 0
    c, d, table = (int(group, 16) for group in logic.groups())
    # bit i of lop3's result is the table's bit number (t_i, c_i, d_i)
    out = sum(((table >> (((t >> i & 1) << 2) | ((c >> i & 1) << 1) | (d >> i & 1))) & 1) << i for i in range(32))
    halves = np.array([out & 0xFFFF, out >> 16], np.uint16).view(jnp.bfloat16).astype(np.int32)
    assert halves.tolist() == [128 + (word >> (4 * j) & 15) for word in (a, b)]
    words = jnp.asarray(np.array([a, b], np.uint32).view(np.int32))
    plain = dequantise.nibble(words, j, jnp.dtype(jnp.bfloat16), interpret=True)
    assert plain.astype(jnp.int32).tolist() == halves.tolist()


# Direct: splits of the inputs and of the slots, one token and several. Sorted: blocks of 8, 16, 32 and 64 rows.
CASES = {
    "one token": (1, 4, 6, 512, 256, "bfloat16", "random"),
    "narrow": (3, 2, 16, 256, 128, "float32", "random"),
    "more tokens": (5, 3, 7, 256, 256, "bfloat16", "random"),
    "blocks of 128 inputs": (2, 2, 4, 384, 128, "float32", "random"),
    "sorted, blocks of 8": (33, 2, 40, 256, 128, "float32", "random"),
    "sorted, blocks of 16": (70, 1, 16, 256, 128, "bfloat16", "random"),
    "sorted, blocks of 32": (40, 3, 8, 128, 128, "float32", "random"),
    "sorted, one expert has all": (66, 2, 64, 256, 128, "bfloat16", "one"),
    "sorted, blocks of 64": (65, 2, 4, 128, 256, "bfloat16", "one"),
}


def slowly(cases: list[Any], fast: list[Any]) -> list[Any]:
    """The cases, marked slow unless they are listed as fast."""
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


FAST = ["one token", "narrow", "sorted, blocks of 8", "sorted, one expert has all", "sorted, blocks of 64"]


@pytest.mark.parametrize("case", slowly(list(CASES), FAST))
def test_kernels_equal_float64(case: str) -> None:
    check(operands(*CASES[case]), chip=tiles.CHIPS["H200"])


@pytest.mark.parametrize("case", ["one token", "sorted, blocks of 32"])
def test_kernels_equal_float64_with_another_chips_tiles(case: str) -> None:
    check(operands(*CASES[case]), chip=tiles.CHIPS["RTX PRO 6000"])


@pytest.mark.parametrize(("t", "k", "e"), [(1, 4, 4), pytest.param(6, 2, 5, marks=pytest.mark.slow), (80, 2, 6)])
def test_experts_of_other_devices_add_nothing(t: int, k: int, e: int) -> None:
    args = operands(t, k, e, 256, 128, "float32", "partial")
    assert (args[1] < 0).any()
    check(args, partial=True)
    nobody = jnp.full_like(args[1], -1)
    out = product(args[0], nobody, *args[2:], implementation="interpret", partial=True)
    assert not out.any()


def test_kernels_equal_the_reference() -> None:
    args = operands(9, 2, 6, 256, 128, "float32")
    found, right = (product(*args, implementation=name) for name in ("interpret", "reference"))
    # the reference's weights are rounded to bf16, the kernels' are not
    np.testing.assert_allclose(found, right, atol=1e-2 * float(jnp.abs(right).max()))


@pytest.mark.parametrize(("t", "k"), [(2, 2), (40, 2)])
def test_results_are_the_same_bits_each_time_and_beside_other_rows(t: int, k: int) -> None:
    args = operands(t, k, 6, 256, 128)
    run = functools.partial(product, implementation="interpret")
    first = run(*args)
    np.testing.assert_array_equal(first, run(*args))
    # the last token with every other token changed: the same plan, other rows in its blocks
    other = jnp.concatenate([args[0][1:], args[0][-1:]]), jnp.concatenate([args[1][1:], args[1][-1:]])
    weights = jnp.concatenate([args[2][1:], args[2][-1:]])
    np.testing.assert_array_equal(run(*other, weights, *args[3:])[-1], first[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("t", "width"), [(1, 256), (2, 2048), (9, 256)])
def test_kernels_at_kimis_widths(t: int, width: int) -> None:
    check(operands(t, 8, 9, shapes.KIMI.hidden, width))


@pytest.mark.parametrize("t", shapes.DECODE_TOKENS + shapes.PREFILL_TOKENS)
@pytest.mark.parametrize("part", [shapes.KIMI, shapes.KIMI_TP8, shapes.KIMI_EP8], ids=["whole", "tp8", "ep8"])
@pytest.mark.parametrize("chip", tiles.CHIPS)
def test_plans_keep_every_multiprocessor_busy(chip: str, part: Any, t: int) -> None:
    n_rows, size = t * part.n_chosen, tiles.CHIPS[chip]
    plan = tiles.plan(n_rows, part.n_chosen, part.hidden, part.n_experts, part.width, part.partial, size)
    assert plan.direct == (op.block_rows(n_rows, part.n_experts, part.partial) is None)
    assert part.hidden // 256 % plan.gate_up.split == 0
    assert part.n_chosen % plan.down.split == 0
    programs = n_rows * (part.width // plan.gate_up.bn) * plan.gate_up.split
    assert programs >= size.multiprocessors, f"{programs} programs for {size.multiprocessors} multiprocessors"
    if plan.direct:
        programs = t * (part.hidden // plan.down.bn) * plan.down.split
        assert programs >= size.multiprocessors, f"{programs} programs for {size.multiprocessors} multiprocessors"


def test_what_cannot_run_is_refused_by_name() -> None:
    args = operands(1, 2, 3, 128, 128, "float32")
    with pytest.raises(NotImplementedError, match="'fast': this build has reference, pallas, interpret"):
        int4_experts(*args, implementation="fast")
    with pytest.raises(ValueError, match="found float32, expected bfloat16"):
        int4_experts(*args, implementation="pallas")
    with pytest.raises(ValueError, match=r"down_scale: found float32 .* expected bfloat16 \[3, 128, 4\]"):
        int4_experts(*args[:-1], args[-1].astype(jnp.float32), implementation="interpret")
    with pytest.raises(NotImplementedError, match="found the device 'NVIDIA T4', known are H100"):
        tiles.chip_of("NVIDIA T4")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Pallas' Triton backend, which these kernels are for
@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA RTX PRO 6000 Blackwell"])
@pytest.mark.parametrize("t", [1, 8, 64, 2048])
def test_kernels_lower_for_cuda_without_a_gpu(t: int, kind: str) -> None:
    names = set()
    for part in (shapes.KIMI_TP8, shapes.KIMI_EP8):
        text = lowered(part, t, kind)
        names |= set(re.findall(r"int4_\w+", text))
        assert text.count("__gpu$xla.gpu.triton") == 2, "one kernel for gate and up, one for down"
    assert {"int4_gate_up", "int4_down_direct" if t <= 8 else "int4_down"} <= names


def lowered(part: Any, t: int, kind: str) -> str:
    """StableHLO of the op for a CUDA device of a `kind`."""
    e, d, f, k = part.n_experts, part.hidden, part.width, part.n_chosen
    sizes = [(t, d), (t, k), (t, k), (e, 2, f, d // 8), (e, d, f // 8), (e, 2, f, d // 32), (e, d, f // 32)]
    dtypes = ("bfloat16", "int32", "float32", "int32", "int32", "bfloat16", "bfloat16")
    args = itertools.starmap(jax.ShapeDtypeStruct, zip(sizes, map(jnp.dtype, dtypes), strict=True))
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    run = functools.partial(int4_experts, implementation="pallas", partial=part.partial)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        return jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
