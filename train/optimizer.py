"""The optimiser of pre-training: Muon for matrices, AdamW for embeddings, head, router and norms."""

from typing import Any

import jax
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon

from .config import PretrainConfig

# (input axes, output axes) of each matrix parameter; axes in neither are a batch of matrices.
_MATRICES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "q": ((2,), (0, 1)),
    "q_a": ((1,), (0,)),
    "q_b": ((2,), (0, 1)),
    "kv_a": ((1,), (0,)),
    "k_up": ((2,), (0, 1)),
    "v_up": ((2,), (0, 1)),
    "o": ((1, 2), (0,)),
    "gate_up": ((-1,), (-2,)),
    "down": ((-1,), (-2,)),
}
FROZEN = "router_bias"  # moved by load, not by gradient


def schedule(config: PretrainConfig, peak: float) -> optax.Schedule:
    """Warm-up, constant, linear to zero."""
    stable = config.steps - config.warmup_steps - config.decay_steps
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, config.warmup_steps),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, config.decay_steps),
        ],
        [config.warmup_steps, config.warmup_steps + stable],
    )


def parameter_name(path: tuple[Any, ...]) -> str:
    """Name of a parameter from its path in the state's tree (`jax.tree_util` key path)."""
    keys = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
    return str(keys[-1])


def matrix_axes(params: optax.Params) -> Any:
    """Muon's axes for every matrix, None for what AdamW trains."""

    def axes(path: tuple[Any, ...], x: jax.Array) -> MuonDimensionNumbers | None:
        found = _MATRICES.get(parameter_name(path))
        if found is None:
            return None
        reduce, output = (tuple(a % x.ndim for a in side) for side in found)
        return MuonDimensionNumbers(reduction_axis=reduce, output_axis=output)

    return jax.tree_util.tree_map_with_path(axes, params)


def make_optimizer(config: PretrainConfig) -> optax.GradientTransformation:
    """Clipped Muon + AdamW; Muon's updates have the root mean square of AdamW's (arXiv:2502.16982)."""

    def matrices_decay(params: nnx.State) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, params)

    def frozen(params: nnx.State) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: parameter_name(path) == FROZEN, params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        muon(
            learning_rate=schedule(config, config.learning_rate),
            weight_decay=config.weight_decay,
            weight_decay_mask=matrices_decay,
            adam_b2=0.95,
            adam_learning_rate=schedule(config, config.embed_learning_rate),
            muon_weight_dimension_numbers=matrix_axes,
            consistent_rms=0.2,
        ),
        optax.masked(optax.set_to_zero(), frozen),
    )
