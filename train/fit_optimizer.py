"""The optimiser of a drafter: clipped AdamW in float32, its rate a function of the number of the update."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .draft_recipe import FitTable
from .optimizer import parameter_name

_EPS = 1e-8


def schedule(fit: FitTable, updates: int) -> Callable[[Any], jax.Array]:
    """Learning rate by the number of updates done, float32.

    A linear warm-up that ends at the peak, so that the first update moves already; then half a cosine down to
    `final_share` of the peak at the last update, or (wsd) the peak, and a straight line down over the last updates.

    Args:
      fit: rates and shares.
      updates: of the whole run.
    """
    warmup = round(fit.warmup_share * updates)
    decay = updates - warmup if fit.schedule == "cosine" else round(fit.decay_share * updates)
    peak, final = fit.learning_rate, fit.final_share * fit.learning_rate

    def rate(done: Any) -> jax.Array:
        number = jnp.asarray(done, jnp.float32) + 1  # of the update that this rate is for
        rising = peak * number / max(warmup, 1)
        part = jnp.clip((number - (updates - decay)) / max(decay, 1), 0.0, 1.0)
        fall = 0.5 + 0.5 * jnp.cos(jnp.pi * part) if fit.schedule == "cosine" else 1.0 - part
        return jnp.where(number <= warmup, rising, final + (peak - final) * fall).astype(jnp.float32)

    return rate


def is_matrix(path: tuple[Any, ...], x: Any) -> bool:
    """Whether a parameter is decayed: all but the norms, of which the ones before fc are stacked in two dimensions."""
    return x.ndim > 1 and not parameter_name(path).endswith("norm")


def make_optimizer(fit: FitTable, updates: int) -> optax.GradientTransformation:
    """AdamW on gradients of at most `clip_norm`, decoupled decay on matrices only (arXiv:1711.05101)."""

    def matrices(params: nnx.State) -> Any:
        return jax.tree_util.tree_map_with_path(is_matrix, params)

    return optax.chain(
        optax.clip_by_global_norm(fit.clip_norm),
        optax.adamw(
            schedule(fit, updates),
            b1=fit.beta1,
            b2=fit.beta2,
            eps=_EPS,
            weight_decay=fit.weight_decay,
            mask=matrices,
        ),
    )
