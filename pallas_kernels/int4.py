"""INT4 words with one scale per group of inputs, as floats: what every jax.numpy implementation here unpacks with.

Word j of a row holds the columns 8j .. 8j+7 as offset-binary nibbles n = q + 8, column 8j+i in the bits 4i .. 4i+3.
"""

import jax
import jax.numpy as jnp
from jax import lax


def unpack_int4(words: jax.Array) -> jax.Array:
    """The integers q in [-8, 7] of int32 words [..., N / 8]: int8 [..., N]."""
    return _integers(words).astype(jnp.int8)


def dequantize_int4(words: jax.Array, scale: jax.Array, dtype: jnp.dtype, *, rounded: bool = True) -> jax.Array:
    """The float weights q * scale.

    Args:
      words: int32 [..., N / 8].
      scale: bf16 or f32 [..., N / group], the group a multiple of 8.
      dtype: float dtype of the result.
      rounded: the product is rounded to the scale's dtype before it is converted, as in the checkpoint's reference
        dequantisation; False: the float32 product, which is free of error.
    Returns:
      [..., N] of `dtype`.
    """
    q = _integers(words)
    w = q.reshape(*scale.shape, -1).astype(jnp.float32) * scale.astype(jnp.float32)[..., None]  # [..., groups, group]
    if rounded:
        w = round_to(w, scale.dtype)
    return w.reshape(q.shape).astype(dtype)


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float32 values rounded to those that `dtype` (bf16 or f32) can hold, still as float32.

    Not two casts: inside a jitted function XLA may drop f32 -> bf16 -> f32, which would keep the unrounded value.
    """
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def _integers(words: jax.Array) -> jax.Array:
    """int32 [..., N / 8] words to int32 [..., N] integers in [-8, 7]."""
    shifts = (jnp.arange(8, dtype=jnp.int32) * 4).reshape((1,) * words.ndim + (8,))
    return (((words[..., None] >> shifts) & 0xF) - 8).reshape(*words.shape[:-1], -1)
