"""The routed experts' product: gate and up, SiLU, down, and the weighted sum over the K chosen experts.

Implementations by name:
  reference   plain jax.numpy: a map over (token, slot) rows for few rows; for many, a loop over blocks of rows of one
              expert, so that an expert without rows costs nothing. Float experts with several rows on average get
              their first rows multiplied in one batched product; INT4 ones are unpacked one at a time.
  capacity    plain jax.numpy, differentiable: every expert gets the same number of rows in one batched product, and
              rows beyond an expert's capacity are dropped. For training only.
"""

import jax

from .reference import CAPACITY_FACTOR, ExpertList, capacity, dropped_share, reference

IMPLEMENTATIONS = {"reference": reference, "capacity": capacity}


def experts(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array | ExpertList,
    down: jax.Array | ExpertList,
    gate_up_scale: jax.Array | None = None,
    down_scale: jax.Array | None = None,
    *,
    implementation: str,
    partial: bool = False,
) -> jax.Array:
    """sum_k weights[t, k] * down_e(silu(gate_e x_t) * up_e x_t) with e = chosen[t, k].

    Args:
      x: [T, D] float.
      chosen: int32 [T, K], distinct experts per token.
      weights: float32 [T, K].
      gate_up: [E, 2, F, D] float, or int32 words [E, 2, F, D / 8] (compressed-tensors order) with `gate_up_scale`;
        or an `ExpertList`, then `down` is one too.
      down: [E, D, F] float, or int32 words [E, D, F / 8] with `down_scale`.
      gate_up_scale: bf16 [E, 2, F, D / 32] for INT4 words, else None.
      down_scale: bf16 [E, D, F / 32] for INT4 words, else None.
      implementation: a name of `IMPLEMENTATIONS`.
      partial: the weights are those of some experts only; `chosen` is -1 where another device has the expert, and
        such a term is left out of the sum.
    Returns:
      [T, D] in x's dtype; the sum over k is taken in float32.
    Raises:
      NotImplementedError: no such implementation, or it cannot take INT4 words.
    """
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise NotImplementedError(f"experts implementation {implementation!r}: this build has {names}")
    return IMPLEMENTATIONS[implementation](x, chosen, weights, gate_up, down, gate_up_scale, down_scale, partial)


__all__ = ["CAPACITY_FACTOR", "IMPLEMENTATIONS", "ExpertList", "dropped_share", "experts"]
