"""jax.numpy implementation of the INT4 experts: the experts op's own, on words brought back to its order."""

import jax

from ..experts.reference import reference as experts_reference
from .layout import from_gpu_layout


def reference(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gate_up_scale: jax.Array,
    down_scale: jax.Array,
    partial: bool,
) -> jax.Array:
    """See `int4_experts`."""
    words = from_gpu_layout(gate_up), from_gpu_layout(down)
    return experts_reference(x, chosen, weights, *words, gate_up_scale, down_scale, partial)
