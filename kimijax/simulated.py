"""Pretended acceptance, for measuring an engine without a drafter that is any good.

The tokens of such a run are no model's output: whoever turns it on must mark what comes out of it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from .errors import ConfigError
from .sampling import Purpose, uniform


def simulated_chances(length: float, most: int) -> np.ndarray:
    """Unconditional acceptance by position, float32 [most], that gives rounds of `most` drafts a mean length.

    Every draft passes with the same chance c if those before it did: position i has c ** (i + 1), as a drafter that
    gets no worse along the chain. Rounds of fewer drafts use the first of them, and so fit the same drafter.

    Args:
      length: wanted mean of tokens a round, the target's own included.
      most: largest k.
    Raises:
      ConfigError: a length that rounds of `most` drafts cannot have.
    """
    if most < 1 or not 1 <= length <= most + 1:
        expected = f"1 ... {most + 1}: with {most} drafts a round gives one token at least and {most + 1} at most"
        raise ConfigError("speculative_simulate_acc_len", length, expected, "or raise --speculative-num-steps")
    powers = np.arange(1, most + 1)
    low, high = 0.0, 1.0
    for _ in range(60):  # halvings: the mean rises with c
        c = (low + high) / 2
        low, high = (c, high) if (c**powers).sum() < length - 1 else (low, c)
    return (low**powers).astype(np.float32)


def simulated_accepts(chances: jax.Array, seed: jax.Array, round: jax.Array) -> jax.Array:
    """Accepted drafts of one round of each row: int32 [B], the same for the same seed and round whatever else runs.

    Args:
      chances: float32 [k], the first k of `simulated_chances`.
      seed: uint32 [B, 2], as in `SamplingRows`.
      round: int32 [B], any number that differs from round to round, such as the position of its first draft.
    """
    u = uniform(seed, round, Purpose.ACCEPT)  # free: nothing is verified in such a run
    return (u[:, None] < chances[None]).sum(axis=1, dtype=jnp.int32)
