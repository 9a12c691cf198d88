"""INT4: the packing, bit for bit what compressed-tensors writes, and the invariants of the quantised type."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kimijax import quant
from kimijax.pallas_kernels import dequantize_int4, unpack_int4
from kimijax.quant import QuantizedTensor

from .golden import load_int4_golden

BF16 = np.dtype(ml_dtypes.bfloat16)
GOLDEN = load_int4_golden()
CASES = sorted({name.partition("/")[0] for name in GOLDEN})
QUANTISED = [c for c in CASES if f"{c}/scale" in GOLDEN]

# Every function is one definition for three ways of running it.
WAYS: dict[str, Callable[..., Any]] = {
    "numpy": lambda f, *xs: f(*xs),
    "jax": lambda f, *xs: f(*map(jnp.asarray, xs)),
    "jit": lambda f, *xs: jax.jit(f)(*map(jnp.asarray, xs)),
}


@pytest.fixture(params=WAYS)
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return WAYS[request.param]


def golden(case: str, field: str) -> np.ndarray:
    value = GOLDEN[f"{case}/{field}"]
    return value.view(BF16) if value.dtype == np.uint16 else value


def same_bits(a: Any, b: np.ndarray) -> bool:
    a = np.asarray(a)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == np.ascontiguousarray(b).tobytes()


def test_offset_binary_low_nibble_first_and_trimmed(run: Callable[..., Any]) -> None:
    packed = np.array([[1274644240, 109]], np.int32)
    values = run(lambda p: quant.unpack_words(p, 10), packed)
    # two's complement would begin with 0, 1, 7, -8; high nibble first would reverse each eight
    assert np.asarray(values).tolist() == [[-8, -7, -1, 0, 1, 7, 3, -4, 5, -2]]
    assert np.asarray(run(quant.pack, np.asarray(values))).tolist() == packed.tolist()


def test_scale_belongs_to_a_group_of_inputs(run: Callable[..., Any]) -> None:
    packed = np.array([[-1717986919] * 4 + [1431655765] * 4], np.int32)
    scale = np.array([[0.5, 2.0]], BF16)
    out = run(lambda p, s: quant.dequantize_words(p, s, jnp.float32), packed, scale)
    assert np.asarray(out).tolist() == [[0.5] * 32 + [-6.0] * 32]


def test_worked_example(run: Callable[..., Any]) -> None:
    floats = """1.875 -1.875 0 .25 -.25 .6015625 .6484375 -.875 .875 .12255859 .125 .375 .625 -.125 -.375 -.625
        1 1.25 1.5 1.75 -1 -1.25 -1.5 -1.75 .02502441 -.02502441 1.8515625 -1.8515625 1.625 -1.625 1.375 -1.375"""
    w = np.array([[float(x) for x in floats.split()]], np.float32).astype(BF16)
    packed, scale = run(quant.quantize_words, w)
    assert [f"{x & 0xFFFFFFFF:08x}" for x in np.asarray(packed)[0].tolist()] == [
        "4ba7980f",
        "668aa88c",
        "1234fedc",
        "2e2e1f88",
    ]
    assert np.asarray(scale).astype(np.float32).tolist() == [[0.25]]
    values = "7 -8 0 1 -1 2 3 -4 4 0 0 2 2 0 -2 -2 4 5 6 7 -4 -5 -6 -7 0 0 7 -7 6 -6 6 -6"
    assert np.asarray(quant.unpack_words(packed)).tolist() == [[int(x) for x in values.split()]]


@pytest.mark.parametrize("case", CASES)
def test_packing_is_that_of_compressed_tensors(case: str, run: Callable[..., Any]) -> None:
    codes, width = golden(case, "codes"), int(golden(case, "shape")[1])
    assert same_bits(run(quant.pack, codes), golden(case, "packed"))
    assert same_bits(run(lambda p: quant.unpack_words(p, width), golden(case, "packed")), codes)


@pytest.mark.parametrize("case", QUANTISED)
def test_quantisation_is_that_of_compressed_tensors(case: str, run: Callable[..., Any]) -> None:
    packed, scale = run(quant.quantize_words, golden(case, "weight"))
    assert same_bits(scale, golden(case, "scale"))
    assert same_bits(packed, golden(case, "packed"))


@pytest.mark.parametrize("case", QUANTISED)
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
def test_reference_dequantisation_is_that_of_compressed_tensors(
    case: str, dtype: np.dtype, run: Callable[..., Any]
) -> None:
    # as float32 too: the product is rounded to bf16 first, which XLA must not optimise away
    out = run(lambda p, s: quant.dequantize_words(p, s, dtype), golden(case, "packed"), golden(case, "scale"))
    assert same_bits(out, golden(case, "dequantised").astype(dtype))


@pytest.mark.parametrize("case", QUANTISED)
def test_exact_dequantisation_has_no_error(case: str, run: Callable[..., Any]) -> None:
    packed, scale = golden(case, "packed"), golden(case, "scale")
    out = np.asarray(run(lambda p, s: quant.dequantize_words(p, s, jnp.float32, "exact"), packed, scale))
    codes = golden(case, "codes").astype(np.float64)
    expected = codes * np.repeat(scale.astype(np.float64), quant.GROUP_SIZE, axis=1)
    assert np.array_equal(out.astype(np.float64), expected)
    reference = golden(case, "dequantised").astype(np.float64)
    assert np.all(np.abs(reference - expected) <= np.abs(expected) * 2.0**-8)


def test_the_two_roundings_differ_only_beyond_the_scale_dtype() -> None:
    packed, scale = golden("uniform", "packed"), golden("uniform", "scale")
    wide = [quant.dequantize_words(packed, scale, np.float32, r) for r in ("reference", "exact")]
    narrow = [quant.dequantize_words(packed, scale, BF16, r) for r in ("reference", "exact")]
    assert not np.array_equal(wide[0], wide[1])
    assert same_bits(narrow[0], narrow[1])


@given(arrays(np.int8, st.tuples(st.integers(1, 3), st.integers(1, 40)), elements=st.integers(-8, 7)))
def test_pack_and_unpack_are_inverse(values: np.ndarray) -> None:
    packed = quant.pack(values)
    assert packed.shape == (values.shape[0], -(-values.shape[1] // 8))
    assert np.array_equal(quant.unpack_words(packed, values.shape[1]), values)


@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 5, 96), (64, 4096)], ids=str)
def test_jit_and_numpy_quantise_bf16_alike(shape: tuple[int, ...]) -> None:
    w = (np.random.default_rng(0).standard_normal(shape) * 0.02).astype(BF16)
    packed, scale = quant.quantize_words(w)
    q = jax.jit(quant.quantize)(jnp.asarray(w))
    assert same_bits(q.packed, packed)
    assert same_bits(q.scale, scale)


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
def test_no_value_is_further_off_than_half_a_step(dtype: np.dtype, run: Callable[..., Any]) -> None:
    w = (np.random.default_rng(1).standard_normal((8, 256)) * 0.02).astype(dtype)
    packed, scale = (np.asarray(x) for x in run(quant.quantize_words, w))
    # the largest value lies 7.5 steps from zero and gets 7 or -8; scale and quotient are each off by eps / 2 at most
    slack = 8 * float(jnp.finfo(dtype).eps)
    step = np.repeat(scale.astype(np.float32), 32, axis=-1)
    back = quant.dequantize_words(packed, scale, np.float32, "exact")
    assert np.all(np.abs(back - w.astype(np.float32)) <= step * (0.5 + slack))


def test_quantised_tensor_is_a_pytree_with_logical_shape() -> None:
    q = quant.quantize(jnp.ones((3, 4, 64), jnp.float32))
    assert (q.shape, q.ndim, q.group_size) == ((3, 4, 64), 3, 32)
    q.check()
    assert len(jax.tree.leaves(q)) == 2
    out = jax.jit(lambda q: quant.dequantize(q, jnp.float32))(q)
    assert out.shape == q.shape
    assert np.array_equal(jax.jit(quant.unpack)(q), quant.unpack(q))
    first = jax.tree.map(lambda x: x[0], q)
    assert isinstance(first, QuantizedTensor)
    assert first.shape == (4, 64)


def test_quantised_tensor_may_be_abstract() -> None:
    packed = jax.ShapeDtypeStruct((2, 8, 4), jnp.int32)
    q = QuantizedTensor(packed, jax.ShapeDtypeStruct((2, 8, 1), jnp.bfloat16))  # pyright: ignore[reportArgumentType]
    q.check()
    assert q.shape == (2, 8, 32)
    assert jax.eval_shape(lambda q: quant.dequantize(q, jnp.float32), q).shape == (2, 8, 32)


@pytest.mark.parametrize(
    ("packed", "scale", "message"),
    [
        (np.zeros((2, 4), np.uint32), np.ones((2, 1), BF16), "packed: found dtype uint32, expected int32"),
        (np.zeros((2, 4), np.int32), np.ones((2, 1), np.float16), "scale: found dtype float16"),
        (np.zeros((2, 4), np.int32), np.ones((3, 1), BF16), r"scale: found shape \(3, 1\), expected leading dims"),
        (np.zeros((2, 4), np.int32), np.ones((2, 3), BF16), "scale: found 3 groups for 32 inputs"),
        (np.zeros((2, 4), np.int32), np.ones((2, 0), BF16), "scale: found 0 groups"),
        (np.zeros((2, 1), np.int32), np.ones((2, 2), BF16), "groups of a multiple of 8"),
        (np.zeros(4, np.int32), np.ones(1, BF16), "leading dims"),
        (np.zeros((2, 4), np.int32), np.array([[1], [np.nan]], BF16), "not finite and positive"),
        (np.zeros((2, 4), np.int32), np.array([[1], [0]], BF16), "not finite and positive"),
        (np.zeros((2, 4), np.int32), np.array([[1], [-2]], np.float32), "found -2.0, not finite and positive"),
    ],
)
def test_broken_invariants_are_named(packed: Any, scale: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizedTensor(packed, scale).check()


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
def test_first_bad_scale(dtype: np.dtype) -> None:
    """Every value that the dtype's smallest and largest steps, and its special values, could confuse."""
    good = np.array([[jnp.finfo(dtype).smallest_subnormal, jnp.finfo(dtype).max], [1, 0.25]], dtype)
    assert quant.first_bad_scale(good) is None
    assert quant.first_bad_scale(good[:0]) is None
    for value in (0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, -1.0):
        scale = good.copy()
        scale[1] = value
        assert quant.first_bad_scale(scale) == 2


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("rounded", [True, False])
def test_the_kernels_unpack_as_the_host_does(dtype: np.dtype, rounded: bool) -> None:
    """Bit for bit for either dtype of scales, which is what the product is rounded to, inside a jitted function too."""
    w = (np.random.default_rng(2).standard_normal((3, 8, 256)) * 0.02).astype(dtype)
    packed, scale = quant.quantize_words(w)
    run = jax.jit(functools.partial(dequantize_int4, dtype=jnp.dtype(jnp.float32), rounded=rounded))
    wanted = quant.dequantize_words(packed, scale, np.float32, "reference" if rounded else "exact")
    assert same_bits(run(jnp.asarray(packed), jnp.asarray(scale)), wanted)
    q = np.asarray(unpack_int4(jnp.asarray(packed)))
    assert same_bits(q, quant.unpack_words(packed))


def test_unusable_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="group: found 32, expected a multiple of 8 that divides the 40 inputs"):
        quant.quantize(jnp.ones((2, 40), jnp.float32))
    with pytest.raises(ValueError, match="group: found 12"):
        quant.quantize(jnp.ones((2, 24), jnp.float32), group=12)
    with pytest.raises(ValueError, match="w: found dtype float16"):
        quant.quantize_words(np.ones((2, 32), np.float16))
    with pytest.raises(ValueError, match="width: found 8, expected 9 to 16"):
        quant.unpack_words(np.zeros((1, 2), np.int32), 8)
    with pytest.raises(ValueError, match="values: found dtype int32, expected int8"):
        quant.pack(np.zeros((1, 8), np.int32))
    with pytest.raises(ValueError, match="rounding: found 'fast'"):
        quant.dequantize_words(np.zeros((1, 4), np.int32), np.ones((1, 1), BF16), np.float32, "fast")  # pyright: ignore[reportArgumentType]
