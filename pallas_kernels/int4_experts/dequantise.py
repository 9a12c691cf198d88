"""Nibbles of int32 words as floats, in PTX and in plain operations.

A nibble n put into the low bits of the bf16 number 128 = 0x4300 is the number 128 + n exactly: a bf16 number between
128 and 256 has steps of 1. So prmt (the bytes of two words that hold the nibble), shr and lop3 make two weights at a
time, and what is left to subtract, 128 + 8, is the same for all of them: see `triton.py` for where it goes.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

OFFSET = 136  # 128 + n = q + 136 for a weight q stored as n = q + 8


def nibble_ptx(j: int) -> str:
    """PTX of two bf16 numbers 128 + nibble j, the low half of $0 from the word $1 and the high half from $2.

    Which two words Triton puts together is its own affair: each half depends on its own word alone.
    """
    byte = j // 2
    low, high = byte, byte + 4  # prmt numbers the bytes of its second operand from 4
    select = low | low << 4 | high << 8 | high << 12
    shift = "shr.u32 t, t, 4; " if j % 2 else ""
    return (
        f"{{ .reg .b32 t; prmt.b32 t, $1, $2, 0x{select:04x}; {shift}lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea; }}"
    )


def nibble(words: jax.Array, j: int, dtype: jnp.dtype, interpret: bool) -> jax.Array:
    """136 + q of nibble j of int32 `words`, in `dtype`: bf16, or anything wider when interpreted."""
    if interpret:
        bits = (((words >> (4 * j)) & 0xF) | 0x4300).astype(jnp.int16)
        return lax.bitcast_convert_type(bits, jnp.bfloat16).astype(dtype)
    [out] = plt.elementwise_inline_asm(
        nibble_ptx(j),
        args=[words],
        constraints="=r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
    )
    return out


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array, interpret: bool) -> jax.Array:
    """a * b + c in float32. XLA's Triton compiler keeps the multiplication and the addition apart unless told."""
    if interpret:
        return a * b + c
    [out] = plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[a, b, c],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(c.shape, jnp.float32)],
    )
    return out
