"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): projections, and the two forms of the product.

Expanded form: keys and values are made from the latents, one per head; for prefill and training. Weight-absorbed form:
queries are mapped into the latent space and attend to the latents themselves; for decoding, where it reads the
cache once for all heads. Both give the same numbers up to rounding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .config import TargetConfig
from .layers import Weight, declare, declare_norm, linear, rms_norm
from .rope import rotate, softmax_scale
from .sharding import current_mesh, partition, shard, split_axes

# The expanded form works on blocks of queries, so that keys which come after a whole block are never multiplied.
QUERY_BLOCK = 128  # smallest block
MAX_BLOCKS = 16  # a longer sequence gets larger blocks: each one is compiled


class Query(NamedTuple):
    """One layer's queries."""

    nope: jax.Array  # [B, T, N, nope]
    rope: jax.Array  # [B, T, N, rope], rotated


class MLA(nnx.Module):
    """Projections of one attention layer; the product itself is chosen by the caller (cached or not, which form)."""

    def __init__(self, config: TargetConfig, dtype: jnp.dtype) -> None:
        c, d, n = config, config.hidden, config.n_heads
        self.config = config
        if c.q_lora_rank is None:
            self.q = declare((n, c.qk_dim, d), dtype, ("heads", "head_dim", "hidden"), inputs=1)
        else:
            self.q_a = declare((c.q_lora_rank, d), dtype, ("q_rank", "hidden"), inputs=1)
            self.q_a_norm = declare_norm(c.q_lora_rank, dtype, "q_rank")
            self.q_b = declare((n, c.qk_dim, c.q_lora_rank), dtype, ("heads", "head_dim", "q_rank"), inputs=1)
        self.kv_a = declare((c.latent_dim, d), dtype, ("latent", "hidden"), inputs=1)
        self.kv_a_norm = declare_norm(c.kv_lora_rank, dtype, "latent")
        self.k_up = declare((n, c.nope_dim, c.kv_lora_rank), dtype, ("heads", "head_dim", "latent"))
        self.v_up = declare((n, c.v_dim, c.kv_lora_rank), dtype, ("heads", "head_dim", "latent"))
        std = (n * c.v_dim) ** -0.5
        self.o = declare((d, n, c.v_dim), dtype, ("hidden", "heads", "head_dim"), std=std, inputs=2)

    def queries(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> Query:
        """x [B, T, D], cos and sin [B, T, rope / 2]."""
        return self.finish_queries(linear(x, self.query_weight()), cos, sin)

    def latents(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """What is cached of x [B, T, D]: the normed latent, then the rotated key: [B, T, R + rope]."""
        return self.finish_latents(linear(x, self.kv_a[...]), cos, sin)

    def query_weight(self) -> Weight:
        """The first matrix of the queries' path: [q rank, D], or [N, nope + rope, D] without q-LoRA."""
        return (self.q if self.config.q_lora_rank is None else self.q_a)[...]

    def finish_queries(self, q: jax.Array, cos: jax.Array, sin: jax.Array) -> Query:
        """From the product with `query_weight`."""
        c = self.config
        if c.q_lora_rank is not None:
            q = linear(rms_norm(q, self.q_a_norm[...], c.latent_norm_eps), self.q_b[...])
        q = shard(q, "batch", "replicated", "heads", "head_dim")  # [B, T, N, nope + rope]
        return Query(q[..., : c.nope_dim], rotate(q[..., c.nope_dim :], cos[..., None, :], sin[..., None, :]))

    def finish_latents(self, kv: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """From the product with `kv_a`."""
        c = self.config
        latent = rms_norm(kv[..., : c.kv_lora_rank], self.kv_a_norm[...], c.latent_norm_eps)
        return jnp.concatenate([latent, rotate(kv[..., c.kv_lora_rank :], cos, sin)], axis=-1)

    def output(self, heads: jax.Array) -> jax.Array:
        """[B, T, N, v] to [B, T, D]."""
        return linear(heads, self.o[...], n_inputs=2)

    def expanded(
        self,
        query: Query,
        latents: jax.Array,
        context: jax.Array | None = None,
        context_length: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        """Causal attention of T new tokens among themselves and over a cached context, in expanded form.

        Args:
          query: of the T new tokens.
          latents: [B, T, R + rope] of the new tokens.
          context: [B, S, R + rope] of earlier tokens, visible to every query up to `context_length`.
          context_length: int32 [B].
          segments: int32 [B, T]; tokens of different documents in one row do not see each other.
        Returns:
          [B, T, N, v].
        """
        keys, n_self = latents, latents.shape[1]
        n_context = 0 if context is None else context.shape[1]
        if context is not None:
            keys = jnp.concatenate([context, latents], axis=1)
        r = self.config.kv_lora_rank
        k_nope = jnp.einsum("bsr,nhr->bnsh", keys[..., :r], self.k_up[...])
        value = jnp.einsum("bsr,nhr->bnsh", keys[..., :r], self.v_up[...])
        k_rope = jnp.broadcast_to(keys[:, None, :, r:], (*k_nope.shape[:3], keys.shape[-1] - r))
        key = jnp.concatenate([k_nope, k_rope], axis=-1)  # [B, N, S, nope + rope]
        q = jnp.concatenate([query.nope, query.rope], axis=-1).swapaxes(1, 2)  # [B, N, T, nope + rope]
        block = max(QUERY_BLOCK, -(-n_self // MAX_BLOCKS))
        out = []
        for start in range(0, n_self, block):
            stop = min(start + block, n_self)
            end = n_context + stop  # keys after the block's last token are invisible to all of it
            score = jnp.einsum(
                "bnth,bnsh->bnts", q[:, :, start:stop], key[:, :, :end], preferred_element_type=jnp.float32
            )
            visible = _visible(start, stop, n_context, context_length, segments)
            p = masked_softmax(score * jnp.float32(softmax_scale(self.config)), visible).astype(value.dtype)
            out.append(jnp.einsum("bnts,bnsh->bnth", p, value[:, :, :end]))
        heads = jnp.concatenate(out, axis=2) if len(out) > 1 else out[0]
        return shard(heads.swapaxes(1, 2), "batch", "replicated", "heads", "head_dim")

    def absorbed(self, query: Query, keys: jax.Array, visible: jax.Array) -> jax.Array:
        """Attention in the latent space: MQA with key width R + rope and value width R.

        Args:
          query: of T new tokens, whose own latents are already among the keys.
          keys: [B, S, R + rope], or [B, n, page, R + rope] where the mesh splits positions within a page.
          visible: bool [B, T, S].
        Returns:
          [B, T, N, v].
        """
        b, t, n, _ = query.nope.shape
        r = self.config.kv_lora_rank
        # Heads first: XLA's CPU compiler then multiplies the rows by the weights, and not the weights by the rows.
        q_latent = jnp.einsum("nbth,nhr->nbtr", jnp.moveaxis(query.nope, 2, 0), self.k_up[...])
        q = jnp.concatenate([jnp.moveaxis(q_latent, 0, 2), query.rope], axis=-1)
        if keys.ndim == 4:
            latent = over_split_positions(q, keys, visible, softmax_scale(self.config))[..., :r]
        elif current_mesh() is not None:  # heads that are merged with another axis would be gathered first
            score = jnp.einsum("btnc,bsc->btns", q, keys, preferred_element_type=jnp.float32)
            p = masked_softmax(score * jnp.float32(softmax_scale(self.config)), visible[:, :, None, :])
            latent = jnp.einsum("btns,bsc->btnc", p.astype(keys.dtype), keys)[..., :r]
        else:
            score = jnp.einsum("bqc,bsc->bqs", q.reshape(b, t * n, -1), keys, preferred_element_type=jnp.float32)
            score = score.reshape(b, t, n, -1) * jnp.float32(softmax_scale(self.config))
            p = masked_softmax(score, visible[:, :, None, :]).astype(keys.dtype).reshape(b, t * n, -1)
            # The values are the first R columns of the keys; multiplying all columns and cutting the product is free
            # of copies.
            latent = jnp.einsum("bqs,bsc->bqc", p, keys)[..., :r].reshape(b, t, n, r)
        return jnp.moveaxis(jnp.einsum("nbtr,nhr->nbth", jnp.moveaxis(latent, 2, 0), self.v_up[...]), 0, 2)


def over_split_positions(q: jax.Array, keys: jax.Array, visible: jax.Array, scale: float) -> jax.Array:
    """Attention over keys whose positions lie on several devices: every device takes its own positions for all heads.

    Softmax over all of them is exact: each part's sums are brought to the common maximum before they are added
    (FlashAttention, arXiv:2205.14135, section 3.1). Queries are gathered and outputs scattered by head, so that what
    follows works on a device's own heads.

    Args:
      q: [B, T, N, C], its heads split as the table says.
      keys: [B, n, page, C], which are the values, too.
      visible: bool [B, T, n * page].
      scale: of the scores.
    Returns:
      [B, T, N, C].
    """
    mesh = current_mesh()
    assert mesh is not None
    names = split_axes("positions", mesh)
    visible = visible.reshape(*visible.shape[:2], *keys.shape[1:3])

    def local(q: jax.Array, keys: jax.Array, visible: jax.Array) -> jax.Array:
        q = jax.lax.all_gather(q, names, axis=2, tiled=True)
        score = jnp.einsum("btnc,bpsc->btnps", q, keys, preferred_element_type=jnp.float32) * jnp.float32(scale)
        score = jnp.where(visible[:, :, None], score, -jnp.inf)
        top = jax.lax.pmax(jnp.max(score, axis=(3, 4), keepdims=True), names)
        e = jnp.exp(score - jnp.where(jnp.isfinite(top), top, 0.0))
        part = jnp.einsum("btnps,bpsc->btnc", e.astype(keys.dtype), keys, preferred_element_type=jnp.float32)
        part = jnp.concatenate([part, e.sum(axis=(3, 4))[..., None]], axis=-1)
        whole = jax.lax.psum_scatter(part, names, scatter_dimension=2, tiled=True)
        total = whole[..., -1:]
        return (whole[..., :-1] / jnp.where(total > 0, total, 1.0)).astype(q.dtype)

    heads = partition(("batch", "replicated", "heads", "latent"), mesh)
    cached = partition(("batch", "replicated", "positions", "latent"), mesh)
    seen = partition(("batch", "replicated", "replicated", "positions"), mesh)
    product = jax.shard_map(local, in_specs=(heads, cached, seen), out_specs=heads, check_vma=False)
    return product(q, keys, visible)


def masked_softmax(score: jax.Array, visible: jax.Array) -> jax.Array:
    """Softmax of the visible scores over the last axis, in float32; a row that sees none gives zeros, not NaN, also in
    its gradient."""
    score = jnp.where(visible, score, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(score, axis=-1, keepdims=True))
    e = jnp.exp(score - jnp.where(jnp.isfinite(top), top, 0.0))
    total = e.sum(axis=-1, keepdims=True)
    return e / jnp.where(total > 0, total, 1.0)


def _visible(
    start: int, stop: int, n_context: int, context_length: jax.Array | None, segments: jax.Array | None
) -> jax.Array:
    """Mask [B or 1, 1, stop - start, n_context + stop] of a block of queries over context and new tokens."""
    causal = (jnp.arange(stop)[None] <= jnp.arange(start, stop)[:, None])[None]  # [1, t, stop]
    if segments is not None:
        causal = causal & (segments[:, start:stop, None] == segments[:, None, :stop])
    if context_length is None:
        return causal[:, None]
    live = jnp.arange(n_context)[None, None] < context_length[:, None, None]  # [B, 1, n_context]
    live = jnp.broadcast_to(live, (live.shape[0], stop - start, n_context))
    causal = jnp.broadcast_to(causal, (live.shape[0], *causal.shape[1:]))
    return jnp.concatenate([live, causal], axis=-1)[:, None]
