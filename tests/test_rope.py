"""Rotary frequencies and scales of the published models, against figures worked out apart from this code."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kimijax.config import TargetConfig, YarnConfig, parse_config
from kimijax.rope import inverse_frequencies, rope_gain, rotate, rotation, softmax_scale

from . import golden

# Family: the pairs first and last of YaRN's ramp (None: no scaling), softmax scale, and 1 / frequency of some pairs.
PUBLISHED: dict[str, tuple[tuple[int, int] | None, float, dict[int, float]]] = {
    "kimi_k25": (
        (8, 20),
        0.14467963,
        {8: 6.687403e-2, 9: 4.377666e-2, 12: 1.161916e-2, 16: 1.537297e-3, 19: 1.58375e-4, 20: 1.807023e-5,
         31: 4.382206e-7},
    ),
    "kimi_k2_thinking": (
        (19, 20),
        0.14467963,
        {8: 6.687403e-2, 9: 4.768861e-2, 12: 1.729363e-2, 16: 4.472136e-3, 19: 1.62176e-3, 20: 1.807023e-5,
         31: 4.382206e-7},
    ),
    "kimi_k2": (
        (19, 20),
        0.13086080,
        {8: 6.687403e-2, 9: 4.768861e-2, 12: 1.729363e-2, 16: 4.472136e-3, 19: 1.62176e-3, 20: 3.614047e-5,
         31: 8.764413e-7},
    ),
    "deepseek_v3": (
        (10, 23),
        0.13523378,
        {9: 7.498942e-2, 12: 2.687936e-2, 16: 5.5e-3, 19: 1.370514e-3, 20: 7.905694e-4, 31: 3.333804e-6},
    ),
    "deepseek_v2_lite": (
        (10, 23),
        0.11472139,
        {9: 7.498942e-2, 12: 2.687936e-2, 16: 5.5e-3, 19: 1.370514e-3, 20: 7.905694e-4, 31: 3.333804e-6},
    ),
    "moonlight": (None, 0.07216878, {0: 1.0, 9: 4.768861e-2, 16: 4.472136e-3, 20: 50000.0**-0.625}),
}  # fmt: skip


def published(family: str) -> TargetConfig:
    """The golden config of a family with the head and context sizes of the published models."""
    config: dict[str, Any] = golden.with_quantization(golden.FAMILIES[family], None)
    text = golden.text_config(config)
    text.update(qk_nope_head_dim=128, qk_rope_head_dim=64)
    if text["rope_scaling"]:
        text["rope_scaling"]["original_max_position_embeddings"] = 4096
    return parse_config(config)


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_figures(family: str) -> None:
    ramp, scale, values = PUBLISHED[family]
    config = published(family)
    frequencies = inverse_frequencies(config)
    assert frequencies.dtype == np.float32
    assert frequencies.shape == (32,)
    for pair, value in values.items():
        assert frequencies[pair] == pytest.approx(value, rel=1e-6), pair
    assert softmax_scale(config) == pytest.approx(scale, rel=1e-7)
    assert rope_gain(config) == 1.0
    plain = config.rope_theta ** (-np.arange(0, 64, 2) / 64)
    factor = 1.0 if config.yarn is None else config.yarn.factor
    first, last = ramp or (31, 31)
    np.testing.assert_allclose(frequencies[: first + 1], plain[: first + 1], rtol=1e-6)
    np.testing.assert_allclose(frequencies[last:], plain[last:] / factor, rtol=1e-6)
    if last - first > 1:
        between = frequencies[first + 1 : last]
        assert (between < plain[first + 1 : last] * 0.999).all()
        assert (between > plain[first + 1 : last] / factor * 1.001).all()


def test_every_family_has_figures() -> None:
    assert set(PUBLISHED) == set(golden.FAMILIES)


def test_gain_is_the_ratio_of_the_two_scales() -> None:
    config = published("kimi_k25")
    yarn = YarnConfig(40.0, 4096, 32.0, 1.0, mscale=0.707, mscale_all_dim=0.0)
    changed = TargetConfig(**{**vars(config), "yarn": yarn})
    assert rope_gain(changed) == pytest.approx(1 + 0.0707 * math.log(40), rel=1e-9)
    assert softmax_scale(changed) == pytest.approx(192**-0.5)


def test_rotation_turns_adjacent_pairs() -> None:
    """Pair i of a vector is a complex number times exp(i * position * frequency); the angle is a float32 product."""
    config = published("kimi_k25")
    positions = np.asarray([[0, 1, 31], [4095, 65_537, 262_143]], np.int32)
    cos, sin = rotation(jnp.asarray(positions), config)
    angle = positions[..., None].astype(np.float32) * inverse_frequencies(config)
    np.testing.assert_allclose(cos, np.cos(angle.astype(np.float64)), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angle.astype(np.float64)), atol=1e-6)
    x = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle.astype(np.float64))
    found = np.asarray(rotate(jnp.asarray(x), cos, sin))
    np.testing.assert_allclose(found[..., 0::2], turned.real, atol=1e-5)
    np.testing.assert_allclose(found[..., 1::2], turned.imag, atol=1e-5)
    np.testing.assert_array_equal(found[0, 0], x[0, 0])
    assert rotate(jnp.asarray(x, jnp.bfloat16), cos, sin).dtype == jnp.bfloat16


def test_scores_depend_on_the_distance_only() -> None:
    config = published("kimi_k25")
    x = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)

    def score(query_at: int, key_at: int) -> float:
        cos, sin = rotation(jnp.asarray([query_at, key_at], jnp.int32), config)
        q, k = rotate(jnp.asarray(x), cos, sin)
        return float(q @ k)

    assert score(17, 5) == pytest.approx(score(1012, 1000), abs=1e-2)
    assert score(17, 5) != pytest.approx(score(18, 5), abs=1e-2)
