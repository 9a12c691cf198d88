"""INT4 weights with one scale per group of inputs: the compressed-tensors `pack-quantized` format.

A weight `w [..., out, in]` is stored as integers q in [-8, 7] and scales s, one a run of `group` inputs of a row:

    w[..., o, i] = q[..., o, i] * s[..., o, i // group]

q is written as the offset-binary nibble n = q + 8 (so the nibble 0 is -8, and two's complement is NOT used). Word j of
a row holds the columns 8j .. 8j+7, column 8j+i in the bits 4i .. 4i+3: the low nibble comes first. Read as bytes, byte
b of a row holds the columns 2b (low) and 2b+1 (high).

Every function below takes NumPy or JAX arrays and returns the same kind: the loader's on the host, JAX's
inside jitted functions too. Unpacking of JAX arrays is defined in `pallas_kernels.int4`, which the reference of the
experts' product shares; the tests hold both kinds to the same golden files, bit for bit.
"""

import sys
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .pallas_kernels import dequantize_int4, round_to, unpack_int4

GROUP_SIZE = 32
NIBBLES_PER_WORD = 8
Q_MIN, Q_MAX = -8, 7

Rounding = Literal["reference", "exact"]

# f16 is left out: its subnormals cannot be rounded to inside a jitted function (see `pallas_kernels.round_to`).
_FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedTensor:
    """An INT4 weight of logical shape [..., out, in].

    Invariants, verified by `check` (not on construction: JAX builds the type with placeholders as members too):
      - `packed` is int32 [..., out, in/8]; `scale` is bf16 or f32 [..., out, in/group]; the leading dims are equal;
      - `in` is a multiple of 8 and of the group size; the group size is a multiple of 8, so that no word is split;
      - every scale is finite and positive: a group of zeros has the smallest step of the scale's dtype, never 0.

    The members may also be `jax.ShapeDtypeStruct`s (an abstract declaration); the properties and `check` work on both.
    """

    packed: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., out, in]."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * NIBBLES_PER_WORD)

    @property
    def ndim(self) -> int:
        return len(self.packed.shape)

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]

    def check(self) -> None:
        """Raises ValueError naming the first broken invariant (the values too, where the members are concrete)."""
        _check_layout(self.packed, self.scale)
        if isinstance(self.scale, jax.Array | np.ndarray) and not isinstance(self.scale, Tracer):
            scale = np.asarray(self.scale)
            bad = first_bad_scale(scale)
            if bad is not None:
                raise ValueError(f"scale: found {scale.flat[bad]}, not finite and positive, expected only such values")


def quantize(w: jax.Array, group: int = GROUP_SIZE) -> QuantizedTensor:
    """`quantize_words` as a QuantizedTensor."""
    return QuantizedTensor(*quantize_words(w, group))


def unpack(q: QuantizedTensor) -> jax.Array:
    """The integers in [-8, 7] of a quantised tensor, int8 [..., out, in]."""
    return unpack_words(q.packed)


def dequantize(q: QuantizedTensor, dtype: Any, rounding: Rounding = "reference") -> jax.Array:
    """`dequantize_words` of a QuantizedTensor."""
    return dequantize_words(q.packed, q.scale, dtype, rounding)


def pack[A: (jax.Array, np.ndarray)](values: A) -> A:
    """Integers in [-8, 7] as words.

    Args:
      values: int8 [..., in]; values outside [-8, 7] are the caller's fault and spill into their neighbour.
    Returns:
      int32 [..., ceil(in/8)]; a last, partly used word is filled up with the nibble 0.
    """
    _expect_dtype("values", values, (jnp.dtype(jnp.int8),))
    xp = _namespace(values)
    nibbles = (values + xp.int8(-Q_MIN)).astype(xp.uint8)
    missing = -values.shape[-1] % NIBBLES_PER_WORD
    if missing:
        nibbles = xp.pad(nibbles, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    pairs = nibbles.reshape(*nibbles.shape[:-1], -1, 2)
    return _words_of_bytes(pairs[..., 0] | (pairs[..., 1] << xp.uint8(4)))


def unpack_words[A: (jax.Array, np.ndarray)](packed: A, width: int | None = None) -> A:
    """The integers in words: the inverse of `pack`.

    Args:
      packed: int32 [..., words].
      width: logical number of columns (the file's `weight_shape`), which trims the filling of the last word; None: all.
    Returns:
      int8 [..., width], values in [-8, 7].
    """
    _expect_dtype("packed", packed, (jnp.dtype(jnp.int32),))
    full = packed.shape[-1] * NIBBLES_PER_WORD
    columns = full if width is None else width
    if columns > full or columns <= full - NIBBLES_PER_WORD:
        raise ValueError(f"width: found {columns}, expected {full - NIBBLES_PER_WORD + 1} to {full}: 8 to a word")
    if isinstance(packed, jax.Array):
        return unpack_int4(packed)[..., :columns]
    raw = _bytes_of_words(packed)
    nibbles = np.stack([raw & np.uint8(15), raw >> np.uint8(4)], axis=-1)
    values = nibbles.reshape(*packed.shape[:-1], full).astype(np.int8) + np.int8(Q_MIN)
    return values[..., :columns]


def quantize_words[A: (jax.Array, np.ndarray)](w: A, group: int = GROUP_SIZE) -> tuple[A, A]:
    """compressed-tensors' symmetric minmax rule, bit for bit for bf16 weights.

    scale = max|w| / 7.5 over the group, rounded to w's dtype (a group of zeros: that dtype's eps); q = clamp(round half
    to even(w / scale), -8, 7), the quotient too rounded to w's dtype first. XLA's float32 division may be off in the
    last bit; a quotient of bf16 numbers is never that close to the middle between two others, so it rounds alike. For
    f32 weights inside a jitted function the last bit of a scale, and a code at a tie, may differ from NumPy's.

    Args:
      w: bf16 or f32 [..., out, in]; `in` a multiple of `group`.
      group: inputs a scale, a multiple of 8.
    Returns:
      packed int32 [..., out, in/8] and scale of w's dtype [..., out, in/group].
    """
    _expect_dtype("w", w, _FLOATS)
    if group <= 0 or group % NIBBLES_PER_WORD or w.shape[-1] % group:
        raise ValueError(f"group: found {group}, expected a multiple of 8 that divides the {w.shape[-1]} inputs")
    xp = _namespace(w)
    grouped = w.astype(xp.float32).reshape(*w.shape[:-1], -1, group)
    scale = _round_to(abs(grouped).max(axis=-1) / xp.float32((Q_MAX - Q_MIN) / 2), w.dtype)
    scale = xp.where(scale == 0, xp.float32(jnp.finfo(w.dtype).eps), scale)
    quotient = _round_to(grouped / scale[..., None], w.dtype)
    q = xp.clip(xp.round(quotient), Q_MIN, Q_MAX).astype(xp.int8)
    return pack(q.reshape(w.shape)), scale.astype(w.dtype)


def dequantize_words[A: (jax.Array, np.ndarray)](
    packed: A, scale: A, dtype: Any, rounding: Rounding = "reference"
) -> A:
    """The float weight q * scale.

    Args:
      packed: int32 [..., out, in/8].
      scale: bf16 or f32 [..., out, in/group].
      dtype: float dtype of the result.
      rounding: "reference" rounds the product to the scale's dtype and then converts, as compressed-tensors and the
        serving stacks do (q * s needs up to 12 bits, so for a bf16 scale it does round). "exact" keeps the f32 product,
        which is free of error: what a kernel computes that applies the scale after an integer dot product. The two
        differ by less than 2^-8 relative, and not at all where `dtype` is the scale's.
    Returns:
      [..., out, in] of `dtype`.
    """
    if rounding not in ("reference", "exact"):
        raise ValueError(f"rounding: found {rounding!r}, expected 'reference' or 'exact'")
    _check_layout(packed, scale)
    if isinstance(packed, jax.Array):
        return dequantize_int4(packed, jnp.asarray(scale), dtype, rounded=rounding == "reference")
    q = unpack_words(packed).astype(np.float32)
    grouped = q.reshape(*scale.shape, -1) * scale.astype(np.float32)[..., None]
    if rounding == "reference":
        grouped = _round_to(grouped, scale.dtype)
    return grouped.reshape(q.shape).astype(dtype)


def first_bad_scale(scale: np.ndarray) -> int | None:
    """Flat index of the first scale (bf16 or f32) that is 0, negative, infinite or not a number; None: all are good.

    By the bits, without a copy: a good scale has no sign bit and lies above 0 and below infinity.
    """
    _expect_dtype("scale", scale, _FLOATS)
    bits = scale.view(np.uint16 if scale.dtype.itemsize == 2 else np.uint32)
    infinity = np.array(np.inf, scale.dtype).view(bits.dtype)
    if bits.size == 0 or (bits.min() > 0 and bits.max() < infinity):
        return None
    return int(np.argmax((bits == 0) | (bits >= infinity)))


def _check_layout(packed: Any, scale: Any) -> None:
    """Shapes and dtypes of the two members of a quantised tensor."""
    _expect_dtype("packed", packed, (jnp.dtype(jnp.int32),))
    _expect_dtype("scale", scale, _FLOATS)
    if len(packed.shape) < 2 or packed.shape[:-1] != scale.shape[:-1]:
        raise ValueError(f"scale: found shape {scale.shape}, expected leading dims of packed {packed.shape}")
    width, groups = packed.shape[-1] * NIBBLES_PER_WORD, scale.shape[-1]
    if groups == 0 or width % groups or (width // groups) % NIBBLES_PER_WORD:
        raise ValueError(f"scale: found {groups} groups for {width} inputs, expected groups of a multiple of 8 inputs")


def _expect_dtype(name: str, array: Any, allowed: tuple[Any, ...]) -> None:
    if jnp.dtype(array.dtype) not in allowed:
        names = " or ".join(str(d) for d in allowed)
        raise ValueError(f"{name}: found dtype {array.dtype}, expected {names}")


def _namespace(array: Any) -> Any:
    """jax.numpy or numpy, by the kind of array."""
    return jnp if isinstance(array, jax.Array) else np


def _bytes_of_words(packed: np.ndarray) -> np.ndarray:
    """int32 [..., words] -> uint8 [..., 4 words], least significant byte first."""
    _require_little_endian()
    return np.ascontiguousarray(packed).view(np.uint8)


def _words_of_bytes(raw: Any) -> Any:
    """uint8 [..., 4 words] -> int32 [..., words], least significant byte first."""
    if isinstance(raw, jax.Array):
        return jax.lax.bitcast_convert_type(raw.reshape(*raw.shape[:-1], -1, 4), jnp.int32)
    _require_little_endian()
    return np.ascontiguousarray(raw).view(np.int32)


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise NotImplementedError("INT4 words are read as little-endian bytes; this host is big-endian")


def _round_to(x: Any, dtype: Any) -> Any:
    """f32 values rounded to those that `dtype` (bf16 or f32) can hold, still as f32."""
    if isinstance(x, jax.Array):
        return round_to(x, dtype)
    return x.astype(dtype).astype(np.float32)
