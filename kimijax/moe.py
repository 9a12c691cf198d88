"""Routing and the routed experts of one layer (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from .config import MoEConfig
from .layers import MLP, declare
from .pallas_kernels import dropped_share as dropped_share
from .pallas_kernels import experts as expert_product
from .sharding import partition


class Routing(NamedTuple):
    """The router's choice for T tokens."""

    experts: jax.Array  # int32 [T, K]
    weights: jax.Array  # float32 [T, K], what each chosen expert's output is multiplied by
    scores: jax.Array  # float32 [T, E], un-biased sigmoid or softmax scores


def route(x: jax.Array, router: jax.Array, bias: jax.Array | None, config: MoEConfig) -> Routing:
    """Choose K of E experts for each row of x [T, D]; everything in float32.

    Sigmoid scores plus `bias` pick the experts (after keeping the `n_groups_kept` groups whose two best biased scores
    sum highest); the un-biased scores weigh them. Ties go to the lower index.
    """
    logits = jnp.matmul(x.astype(jnp.float32), router.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)
    scores = jax.nn.sigmoid(logits) if config.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    choice = scores if bias is None else scores + bias[None]
    if config.n_groups > 1:
        grouped = choice.reshape(-1, config.n_groups, config.n_experts // config.n_groups)
        group_score = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
        _, kept = jax.lax.top_k(group_score, config.n_groups_kept)
        mask = jax.nn.one_hot(kept, config.n_groups, dtype=jnp.bool_).any(axis=-2)
        choice = jnp.where(mask[..., None], grouped, -jnp.inf).reshape(choice.shape)
    _, chosen = jax.lax.top_k(choice, config.n_chosen)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.renormalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + jnp.float32(1e-20))
    return Routing(chosen.astype(jnp.int32), weights * jnp.float32(config.scale), scores)


class Experts(nnx.Module):
    """Weights of the routed experts, gate before up; INT4 words and bf16 scales where the checkpoint is INT4."""

    def __init__(self, hidden: int, config: MoEConfig, dtype: jnp.dtype, int4_group: int | None) -> None:
        self.int4 = int4_group is not None
        e, f = config.n_experts, config.expert_width
        up_axes, down_axes = ("experts", "gate_up", "ffn"), ("experts", "hidden")
        if int4_group is None:
            self.gate_up = declare((e, 2, f, hidden), dtype, (*up_axes, "hidden"))
            self.down = declare((e, hidden, f), dtype, (*down_axes, "ffn"))
            return
        words, groups = jnp.dtype(jnp.int32), jnp.dtype(jnp.bfloat16)
        self.gate_up_packed = declare((e, 2, f, hidden // 8), words, (*up_axes, "replicated"))
        self.gate_up_scale = declare((e, 2, f, hidden // int4_group), groups, (*up_axes, "replicated"))
        self.down_packed = declare((e, hidden, f // 8), words, (*down_axes, "words"))
        self.down_scale = declare((e, hidden, f // int4_group), groups, (*down_axes, "groups"))

    def __call__(self, x: jax.Array, routing: Routing, implementation: str) -> jax.Array:
        """Weighted sum of the chosen experts' outputs: x [T, D] to [T, D].

        Under a mesh each device multiplies its slice of every expert and the partial outputs are summed once.
        """
        if self.int4:
            params = (self.gate_up_packed, self.down_packed, self.gate_up_scale, self.down_scale)
        else:
            params = (self.gate_up, self.down)
        product = functools.partial(expert_product, implementation=implementation)
        operands = (x, routing.experts, routing.weights, *(p[...] for p in params))
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return product(*operands)
        specs = (P(), P(), P(), *(partition(p.get_metadata()["axes"]) for p in params))

        def local(*args: jax.Array) -> jax.Array:
            return jax.lax.psum(product(*args), "tensor")

        return jax.shard_map(local, in_specs=specs, out_specs=P(), check_vma=False)(*operands)


class MoE(nnx.Module):
    """Routed experts plus the shared MLP, which sees the same normed input and is not scaled."""

    def __init__(self, hidden: int, config: MoEConfig, dtype: jnp.dtype, int4_group: int | None) -> None:
        self.config = config
        f32 = jnp.dtype(jnp.float32)
        self.router = declare((config.n_experts, hidden), dtype, ("experts", "hidden"), std=0.2 * hidden**-0.5)
        if config.has_bias:
            self.router_bias = declare((config.n_experts,), f32, ("experts",), std=0.0)
        self.experts = Experts(hidden, config, dtype, int4_group)
        if config.n_shared:
            self.shared = MLP(hidden, config.n_shared * config.expert_width, dtype)

    def route(self, x: jax.Array) -> Routing:
        """Routing of x [T, D]."""
        bias = self.router_bias[...] if self.config.has_bias else None
        return route(x, self.router[...], bias, self.config)

    def __call__(self, x: jax.Array, implementation: str) -> tuple[jax.Array, Routing]:
        """[B, T, D] to [B, T, D], and the routing of the B*T rows."""
        rows = x.reshape(-1, x.shape[-1])
        routing = self.route(rows)
        out = self.experts(rows, routing, implementation).reshape(x.shape)
        return (out + self.shared(x) if self.config.n_shared else out), routing
