"""Routing and the routed experts of one layer (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from .config import MoEConfig
from .layers import MLP, declare, gated_mlp
from .pallas_kernels import dropped_share as dropped_share
from .pallas_kernels import experts as expert_product
from .sharding import AnyMesh, current_mesh, is_even, partition, placement, split_axes


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
        up_axes, down_axes = ("experts", "gate_up", "expert_ffn"), ("experts", "hidden")
        if int4_group is None:
            self.gate_up = declare((e, 2, f, hidden), dtype, (*up_axes, "hidden"))
            self.down = declare((e, hidden, f), dtype, (*down_axes, "expert_ffn"))
            return
        words, groups = jnp.dtype(jnp.int32), jnp.dtype(jnp.bfloat16)
        self.gate_up_packed = declare((e, 2, f, hidden // 8), words, (*up_axes, "replicated"))
        self.gate_up_scale = declare((e, 2, f, hidden // int4_group), groups, (*up_axes, "replicated"))
        self.down_packed = declare((e, hidden, f // 8), words, (*down_axes, "expert_words"))
        self.down_scale = declare((e, hidden, f // int4_group), groups, (*down_axes, "expert_groups"))

    @property
    def parameters(self) -> tuple[nnx.Param, ...]:
        """In the order in which the product takes them."""
        if self.int4:
            return self.gate_up_packed, self.down_packed, self.gate_up_scale, self.down_scale
        return self.gate_up, self.down


class MoE(nnx.Module):
    """Routed experts plus the shared MLP, which sees the same normed input and is not scaled."""

    def __init__(self, hidden: int, config: MoEConfig, dtype: jnp.dtype, int4_group: int | None) -> None:
        self.config = config
        f32 = jnp.dtype(jnp.float32)
        self.router = declare((config.n_experts, hidden), dtype, ("replicated", "hidden"), std=0.2 * hidden**-0.5)
        if config.has_bias:
            self.router_bias = declare((config.n_experts,), f32, ("replicated",), std=0.0)
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
        mesh = current_mesh()
        if mesh is not None and mesh.size > 1:
            return self._on_mesh(x, routing, implementation, mesh), routing
        weights = (p[...] for p in self.experts.parameters)
        out = expert_product(rows, routing.experts, routing.weights, *weights, implementation=implementation)
        out = out.reshape(x.shape)
        return (out + self.shared(x) if self.config.n_shared else out), routing

    def _on_mesh(self, x: jax.Array, routing: Routing, implementation: str, mesh: AnyMesh) -> jax.Array:
        """Each device multiplies what it holds of every expert, or the experts that it holds, and of the shared MLP;
        the partial outputs are summed once.

        Attention groups hold different rows and different experts: they gather each other's rows first, which each
        routes anew, and scatter the sums. For the few rows of a decoding step that is cheaper than sending rows to
        experts.
        """
        groups, holders = split_axes("batch", mesh), split_axes("experts", mesh)
        exchanged = tuple(name for name in groups if name in holders) if is_even("batch", x.shape[0], mesh) else ()
        batch = placement(("batch",), x.shape[:1], mesh)
        routed = self.experts.parameters
        shared = (self.shared.gate_up, self.shared.down) if self.config.n_shared else ()
        specs = [partition(p.get_metadata()["axes"], mesh) for p in (*routed, *shared)]
        partial_sums = tuple(name for name in mesh.axis_names if name not in groups and mesh.shape[name] > 1)

        def local(
            x: jax.Array, chosen: jax.Array, weights: jax.Array, router: tuple[jax.Array, ...], *params: jax.Array
        ) -> jax.Array:
            rows = every = x.reshape(-1, x.shape[-1])
            if exchanged:
                every = jax.lax.all_gather(rows, exchanged, axis=0, tiled=True)
                chosen, weights, _ = route(every, router[0], router[1] if len(router) > 1 else None, self.config)
            out = _product_of_own(every, chosen, weights, params[: len(routed)], implementation, holders)
            if exchanged:
                out = jax.lax.psum_scatter(out, exchanged, scatter_dimension=0, tiled=True)
            elif inside := tuple(name for name in holders if name in groups):
                out = jax.lax.psum(out, inside)
            if shared:
                out = out + gated_mlp(rows, *params[len(routed) :])
            out = jax.lax.psum(out, partial_sums) if partial_sums else out
            return out.reshape(x.shape)

        router = (self.router[...], self.router_bias[...]) if self.config.has_bias else (self.router[...],)
        in_specs = (batch, batch, batch, PartitionSpec(), *specs)
        operands = (x, routing.experts, routing.weights, router, *(p[...] for p in (*routed, *shared)))
        return jax.shard_map(local, in_specs=in_specs, out_specs=batch, check_vma=False)(*operands)


def _product_of_own(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    params: tuple[jax.Array, ...],
    implementation: str,
    holders: tuple[str, ...],
) -> jax.Array:
    """The part of the experts' sum that this device can make, within a local function.

    `holders`: mesh axes over which whole experts are split.
    """
    if not holders:
        return expert_product(x, chosen, weights, *params, implementation=implementation)
    n = params[0].shape[0]
    own = chosen - jax.lax.axis_index(holders) * n
    own = jnp.where((own >= 0) & (own < n), own, -1)
    return expert_product(x, own, weights, *params, implementation=implementation, partial=True)
