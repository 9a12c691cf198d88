"""Rotary positions in DeepSeek's interleaved layout, and YaRN (arXiv:2309.00071) as DeepSeek-V3 applies it."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from .config import TargetConfig, YarnConfig


def inverse_frequencies(config: TargetConfig) -> np.ndarray:
    """Angle per position of each rotated pair, float32 [rope_dim / 2]; YaRN applies at every length."""
    dim, theta = config.rope_dim, config.rope_theta
    period = theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if config.yarn is None:
        return (1.0 / period).astype(np.float32)
    y = config.yarn

    def correction(rotations: float) -> float:
        return dim * math.log(y.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(y.beta_fast)), 0)
    high = min(math.ceil(correction(y.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    return ((1.0 - ramp) / period + ramp / (y.factor * period)).astype(np.float32)


def _mscale(yarn: YarnConfig, k: float) -> float:
    return 0.1 * k * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0


def softmax_scale(config: TargetConfig) -> float:
    """Scale of attention scores: qk_dim ** -0.5, times YaRN's mscale_all_dim squared."""
    scale = config.qk_dim**-0.5
    return scale if config.yarn is None else scale * _mscale(config.yarn, config.yarn.mscale_all_dim) ** 2


def rope_gain(config: TargetConfig) -> float:
    """Factor on cos and sin: mscale over mscale_all_dim (1 for every published model of the family)."""
    y = config.yarn
    return 1.0 if y is None else _mscale(y, y.mscale) / _mscale(y, y.mscale_all_dim)


def rotation(positions: jax.Array, config: TargetConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., rope_dim / 2], of int32 positions [...].

    The angle is the float32 product of position and frequency, as the serving stacks compute it: at 262k tokens it is
    good to about 0.016 rad, and a float64 angle would differ from theirs.
    """
    frequencies = jnp.asarray(inverse_frequencies(config)).reshape((1,) * positions.ndim + (-1,))
    angle = positions[..., None].astype(jnp.float32) * frequencies
    gain = jnp.float32(rope_gain(config))
    return jnp.cos(angle) * gain, jnp.sin(angle) * gain


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate adjacent pairs (0,1), (2,3), ... of the last axis; x [..., rope_dim], cos and sin [..., rope_dim / 2]."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    return jnp.stack((even * cos - odd * sin, odd * cos + even * sin), axis=-1).reshape(x.shape).astype(x.dtype)
