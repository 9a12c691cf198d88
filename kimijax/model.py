"""The target model: a DeepSeek-V3-style decoder with latent attention and routed experts.

Axis letters, here and everywhere: B batch rows, T query tokens, S cached tokens, D width, N heads, H head dim, R latent
rank, E experts, K experts chosen, F expert width, V vocabulary, L layers, P pages, G quantisation groups.

Tap i is the residual stream entering decoder layer i, before any norm: 0 is the embedding's output, L what enters the
final norm. Every program (forward, prefill, decode) takes its taps from the same loop over the layers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .attention import MLA, Query
from .cache import CacheView
from .config import Int4Config, TargetConfig
from .layers import MLP, declare, declare_norm, linear, matmul_precision, rms_norm
from .moe import MoE, Routing
from .rope import rotation
from .sharding import shard

Attend = Callable[[int, MLA, Query, jax.Array], jax.Array]  # (layer, projections, query, latents) -> [B, T, N, v]


class Layer(nnx.Module):
    """h += attention(norm(h)); h += mlp(norm(h))."""

    def __init__(self, config: TargetConfig, index: int, dtype: jnp.dtype, int4_group: int | None) -> None:
        self.config = config
        self.input_norm = declare_norm(config.hidden, dtype)
        self.attention = MLA(config, dtype)
        self.post_norm = declare_norm(config.hidden, dtype)
        if config.moe is not None and config.is_moe_layer(index):
            self.mlp = MoE(config.hidden, config.moe, dtype, int4_group)
        else:
            self.mlp = MLP(config.hidden, config.dense_width, dtype)


class Hidden(NamedTuple):
    """What the stack of layers returns."""

    last: jax.Array  # [B, T, D], tap L: the residual stream before the final norm
    taps: dict[int, jax.Array]  # tap -> [B, T, D]
    routing: tuple[Routing, ...]  # one a MoE layer, rows are B*T


class Output(NamedTuple):
    """What `Target.__call__` returns."""

    logits: jax.Array  # [B, T, V] float32
    taps: dict[int, jax.Array]
    routing: tuple[Routing, ...]


class Tables(nnx.Module):
    """The target without its layers: embedding, final norm and head, which is all that a drafter needs of it once its
    hidden states are there. Declared abstractly, then filled by `checkpoint.load_tables`."""

    def __init__(self, config: TargetConfig, dtype: jnp.dtype) -> None:
        self.config = config
        self.embed = declare((config.vocab_size, config.hidden), dtype, ("vocab", "hidden"), std=1.0)
        self.norm = declare_norm(config.hidden, dtype)
        self.lm_head = declare((config.vocab_size, config.hidden), dtype, ("vocab", "hidden"), inputs=1)

    def logits(self, h: jax.Array) -> jax.Array:
        """Final norm and head: h [B, T, D] (tap L) to float32 [B, T, V]."""
        return self.head(rms_norm(h, self.norm[...], self.config.norm_eps))

    def head(self, normed: jax.Array) -> jax.Array:
        """The head alone: states [B, T, D] that went through the final norm to float32 [B, T, V]."""
        with matmul_precision(normed.dtype):
            normed = shard(normed, "replica", "replicated", "hidden")
            logits = linear(normed, self.lm_head[...], jnp.dtype(jnp.float32))
        return shard(logits, "replica", "replicated", "vocab")


class Target(Tables):
    """The decoder. Declared abstractly by `declare_target`, then filled by a loader or by `initialise`."""

    def __init__(self, config: TargetConfig, dtype: jnp.dtype, int4_group: int | None) -> None:
        super().__init__(config, dtype)
        self.layers = nnx.List([Layer(config, i, dtype, int4_group) for i in range(config.n_layers)])

    def __call__(
        self,
        ids: jax.Array,
        *,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        taps: Sequence[int] = (),
        experts: str = "reference",
    ) -> Output:
        """Logits of whole sequences without a cache.

        Args:
          ids: int32 [B, T].
          positions: int32 [B, T]; default 0 ... T-1.
          segments: int32 [B, T], documents packed into one row; default one document a row.
          taps: which residual streams to return.
          experts: implementation of the expert product.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)

        def attend(layer: int, mla: MLA, query: Query, latents: jax.Array) -> jax.Array:
            return mla.expanded(query, latents, segments=segments)

        hidden = self.run(ids, positions, attend, taps, experts)
        return Output(self.logits(hidden.last), hidden.taps, hidden.routing)

    def prefill(
        self,
        ids: jax.Array,
        start: jax.Array,
        context: CacheView | None,
        *,
        taps: Sequence[int] = (),
        experts: str = "reference",
    ) -> tuple[Hidden, tuple[jax.Array, ...]]:
        """A chunk of prompt in expanded form.

        Args:
          ids: int32 [B, T]; padding after a row's tokens is harmless: nothing before it can see it.
          start: int32 [B], tokens already cached for each row.
          context: a view of their latents, or None where every start is 0.
        Returns:
          The hidden state, and the chunk's latents: L arrays [B, T, R + rope].
        """
        positions = start[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        new: list[jax.Array] = []

        def attend(layer: int, mla: MLA, query: Query, latents: jax.Array) -> jax.Array:
            new.append(latents)
            if context is None:
                return mla.expanded(query, latents)
            return mla.expanded(query, latents, context.rows(layer).astype(latents.dtype), start)

        return self.run(ids, positions, attend, taps, experts), tuple(new)

    def prefill_into[View: CacheView](
        self,
        ids: jax.Array,
        start: jax.Array,
        cached: View,
        *,
        first: bool,
        taps: Sequence[int] = (),
        experts: str = "reference",
    ) -> tuple[Hidden, View]:
        """`prefill` that stores the chunk's latents, padding and all, at `start` and behind.

        A layer stores before it reads, so that XLA can update a donated cache in place: with all writes at the end it
        would keep a second cache to read from.

        Args:
          ids: int32 [B, T].
          start: int32 [B].
          cached: view of the cache.
          first: every start is 0, and there is no context to attend to.
          taps: which residual streams to return.
          experts: implementation of the expert product.
        """
        positions = start[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)[None]

        def attend(layer: int, mla: MLA, query: Query, latents: jax.Array) -> jax.Array:
            nonlocal cached
            cached = cached.store(layer, latents, start)
            if first:
                return mla.expanded(query, latents)
            return mla.expanded(query, latents, cached.rows(layer).astype(latents.dtype), start)

        hidden = self.run(ids, positions, attend, taps, experts)
        return hidden, cached

    def decode[View: CacheView](
        self,
        ids: jax.Array,
        start: jax.Array,
        cached: View,
        *,
        taps: Sequence[int] = (),
        experts: str = "reference",
        positions: jax.Array | None = None,
        visible: jax.Array | None = None,
    ) -> tuple[Hidden, View]:
        """T new tokens per row in weight-absorbed form, each seeing the cached tokens and its predecessors.

        Args:
          ids: int32 [B, T].
          start: int32 [B], tokens already cached, where the new ones are stored; start + T must fit into the view.
          cached: view of the cache; returned with the new tokens' latents stored.
          taps: which residual streams to return.
          experts: implementation of the expert product.
          positions: int32 [B, T]; default start ... start + T-1. Tokens of a tree stand at their depth.
          visible: bool [B, T, S], which cached rows a token sees, its own among them; default all up to its position.
        """
        if positions is None:
            positions = start[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        if visible is None:
            visible = jnp.arange(cached.length, dtype=jnp.int32)[None, None] <= positions[..., None]

        def attend(layer: int, mla: MLA, query: Query, latents: jax.Array) -> jax.Array:
            nonlocal cached
            cached = cached.store(layer, latents, start)
            return mla.absorbed(query, cached.keys(layer).astype(latents.dtype), visible)

        hidden = self.run(ids, positions, attend, taps, experts)
        return hidden, cached

    def run(self, ids: jax.Array, positions: jax.Array, attend: Attend, taps: Sequence[int], experts: str) -> Hidden:
        """Embedding and all layers; the one loop that every program shares."""
        check_taps(taps, self.config)
        h = shard(self.embed[...][ids], "batch", "replicated", "hidden")
        with matmul_precision(h.dtype):
            return self._layers(h, positions, attend, taps, experts)

    def _layers(self, h: jax.Array, positions: jax.Array, attend: Attend, taps: Sequence[int], experts: str) -> Hidden:
        cos, sin = rotation(positions, self.config)
        found: dict[int, jax.Array] = {}
        routing: list[Routing] = []
        eps = self.config.norm_eps
        for i, layer in enumerate(self.layers):
            if i in taps:
                found[i] = h
            with jax.named_scope(f"layer_{i}"):
                x = rms_norm(h, layer.input_norm[...], eps)
                query, latents = layer.attention.queries(x, cos, sin), layer.attention.latents(x, cos, sin)
                h = h + layer.attention.output(attend(i, layer.attention, query, latents))
                x = rms_norm(h, layer.post_norm[...], eps)
                if isinstance(layer.mlp, MoE):
                    y, chosen = layer.mlp(x, experts)
                    routing.append(chosen)
                else:
                    y = layer.mlp(x)
                h = shard(h + y, "batch", "replicated", "hidden")
        if self.config.n_layers in taps:
            found[self.config.n_layers] = h
        return Hidden(h, found, tuple(routing))


def check_taps(taps: Sequence[int], config: TargetConfig) -> None:
    """Refuse taps that no layer has.

    Raises:
      ValueError: names the tap and the range.
    """
    for tap in taps:
        if not 0 <= tap <= config.n_layers:
            raise ValueError(f"tap {tap}: expected 0 (embedding) to {config.n_layers} (before the final norm)")


def declare_target(config: TargetConfig, *, dtype: jnp.dtype, int4: bool) -> Target:
    """The model as shapes, dtypes and logical axes; nothing is allocated.

    Args:
      config: the model.
      dtype: of all weights but the router bias (float32) and INT4 experts.
      int4: keep the routed experts as INT4 words and scales; needs `config.quantization` to be INT4.
    """
    group = config.quantization.group_size if isinstance(config.quantization, Int4Config) else None
    if int4 and group is None:
        raise ValueError(f"int4: the config declares quantization {config.quantization!r}, expected INT4 experts")
    return Target(config, jnp.dtype(dtype), group if int4 else None)


def initialise(target: Target, seed: int) -> Target:
    """Fill a float declaration with fresh weights, for training from scratch."""
    graph, state = nnx.split(target)
    flat = nnx.to_flat_state(state)
    rng = np.random.default_rng(seed)

    def draw(param: nnx.Variable) -> nnx.Variable:
        struct, meta = param.get_value(), param.get_metadata()
        noise = rng.standard_normal(struct.shape, dtype=np.float32) * np.float32(meta["std"])
        return param.replace(jnp.asarray(noise + np.float32(meta["mean"]), struct.dtype))

    filled = [(path, draw(param)) for path, param in flat]
    return nnx.merge(graph, nnx.from_flat_state(filled))
