"""The order of INT4 words that the GPU kernels read: compressed-tensors' bits, permuted within blocks.

A row of K inputs is cut into blocks of 256, or of 128 where 256 does not divide K. A block of 8 * W inputs is W int32
words (W = 32 or 16), and

    nibble j of word i holds the input W * j + i of the block, stored q + 8.

The nibbles of one position j in the W words of a block are W neighbouring inputs, which lie within one quantisation
group of 32: a kernel loads the words once, peels off the eight positions in registers, and multiplies each position by
a contiguous slice of x, with one scale per row.

No block crosses a device if each device arranges what it holds (`to_gpu_layout` within `shard_map`), or if each holds a
multiple of the block.
"""

import jax
import jax.numpy as jnp

GROUP = 32  # inputs that share a scale
NIBBLES = 8  # in a word
BLOCKS = (256, 128)  # inputs a block; the first that divides K


def block_width(k: int) -> int:
    """Inputs in a block of rows of `k` inputs: 256 or 128.

    Raises ValueError where neither divides k: a block of 64 would be eight words, and eight inputs are fewer than the
    16 that a tensor core multiplies at once.
    """
    for width in BLOCKS:
        if k > 0 and k % width == 0:
            return width
    raise ValueError(f"inputs of INT4 weights: found {k}, expected a multiple of {BLOCKS[-1]} on each device")


def to_gpu_layout(words: jax.Array) -> jax.Array:
    """int32 words [..., K / 8] in compressed-tensors order (nibble j of word i is input 8 i + j) to the GPU's order."""
    nibbles = _nibbles(words)  # [..., blocks, inputs of a block], inputs ascending
    return _words(nibbles.reshape(*nibbles.shape[:-1], NIBBLES, -1), words.shape)


def from_gpu_layout(words: jax.Array) -> jax.Array:
    """The inverse of `to_gpu_layout`."""
    blocks = _blocks(words)[..., None, :]
    planes = (blocks >> _shifts(blocks.ndim, -2)) & 0xF  # [..., blocks, 8, W]: inputs ascending
    nibbles = planes.reshape(*planes.shape[:-2], -1, NIBBLES)
    return _words(jnp.swapaxes(nibbles, -1, -2), words.shape)


def _blocks(words: jax.Array) -> jax.Array:
    """[..., K / 8] to [..., blocks, W]."""
    if words.dtype != jnp.int32:
        raise ValueError(f"INT4 words: found {words.dtype}, expected int32")
    return words.reshape(*words.shape[:-1], -1, block_width(words.shape[-1] * NIBBLES) // NIBBLES)


def _shifts(ndim: int, axis: int) -> jax.Array:
    """0, 4, .. 28 along `axis` of an array with `ndim` axes."""
    shape = [1] * ndim
    shape[axis] = NIBBLES
    return (jnp.arange(NIBBLES, dtype=jnp.int32) * 4).reshape(shape)


def _nibbles(words: jax.Array) -> jax.Array:
    """Words in compressed-tensors order to int32 nibbles [..., blocks, inputs of a block]."""
    blocks = _blocks(words)[..., None]
    nibbles = (blocks >> _shifts(blocks.ndim, -1)) & 0xF
    return nibbles.reshape(*nibbles.shape[:-2], -1)


def _words(nibbles: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[..., 8, W], nibble j of word i at [j, i], to words of `shape`."""
    parts = nibbles << _shifts(nibbles.ndim, -2)
    return jax.lax.reduce(parts, jnp.int32(0), jax.lax.bitwise_or, (parts.ndim - 2,)).reshape(shape)
