"""Attention of an EAGLE-3 head: Llama's and DeepSeek's (MLA), behind one interface.

The input u is twice as wide as the head: the normed embedding of a token, then the normed features of the position
before it. `project` makes each token's query and its cache row, `expand` turns rows into keys and values for training,
`over` attends to cached rows for decoding. Both ways give the same numbers up to rounding.

Axes as in `model.py`; M key-value heads, N a multiple of M; C the width of a cache row.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .attention import MLA, Query, masked_softmax
from .chained_attention import by_head, chained
from .config import TargetConfig
from .draft_config import Llama3Scaling, LlamaAttentionConfig, LlamaYarn
from .layers import declare, linear
from .rope import rotation, softmax_scale
from .sharding import shard

MOST_APART = 16  # key heads that are attended to one after the other on a CPU: each is compiled

type Inputs = tuple[jax.Array, ...]  # linear maps of u, [B, T, ...] each


class LlamaAttention(nnx.Module):
    """Grouped-query attention. A cache row is [M, key | value], flattened: split by heads, it splits into runs."""

    def __init__(self, config: LlamaAttentionConfig, hidden: int, dtype: jnp.dtype) -> None:
        c, axes = config, ("heads", "head_dim", "hidden")
        self.config = config
        self.scale = c.head_dim**-0.5
        self.q = declare((c.n_heads, c.head_dim, 2 * hidden), dtype, axes, inputs=1)
        self.k = declare((c.n_kv_heads, c.head_dim, 2 * hidden), dtype, axes, inputs=1)
        self.v = declare((c.n_kv_heads, c.head_dim, 2 * hidden), dtype, axes, inputs=1)
        std = (c.n_heads * c.head_dim) ** -0.5
        self.o = declare((hidden, c.n_heads, c.head_dim), dtype, ("hidden", "heads", "head_dim"), std=std, inputs=2)

    def inputs(self, x: jax.Array, columns: slice = slice(None)) -> Inputs:
        """Queries, keys and values before rotation, of u [B, T, 2D] or of those of its columns that x is."""
        parts = (linear(x, w[..., columns]) for w in (self.q[...], self.k[...], self.v[...]))
        return tuple(shard(part, "batch", "replicated", "heads", "head_dim") for part in parts)

    def project(self, inputs: Inputs, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries [B, T, N, H] and cache rows [B, T, C] at int32 positions [B, T]."""
        q, k, v = inputs
        return rotate_halves(q, *llama_rotation(positions, self.config)), self._rows(k, v, positions)

    def cache_rows(self, u: jax.Array, positions: jax.Array) -> jax.Array:
        """The rows alone, [B, T, C], of u [B, T, 2D]."""
        k, v = (shard(linear(u, w), "batch", "replicated", "heads", "head_dim") for w in (self.k[...], self.v[...]))
        return self._rows(k, v, positions)

    def _rows(self, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
        rows = jnp.concatenate([rotate_halves(k, *llama_rotation(positions, self.config)), v], axis=-1)
        return rows.reshape(*rows.shape[:2], -1)

    def expand(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, M, H] of cache rows [B, S, C]."""
        heads = rows.reshape(*rows.shape[:2], self.config.n_kv_heads, 2 * self.config.head_dim)
        return heads[..., : self.config.head_dim], heads[..., self.config.head_dim :]

    def over(self, query: jax.Array, rows: jax.Array, visible: jax.Array) -> jax.Array:
        """Attention of queries [B, T, N, H] to rows [B, S, C], visible bool [B, T, S]: [B, T, N, H].

        On a CPU one key head after the other: XLA's compiler would transpose all rows to bring the heads to the front,
        element by element, which takes longer than the attention.
        """
        keys, values = self.expand(rows)
        m, g = self.config.n_kv_heads, self.config.n_heads // self.config.n_kv_heads
        on_cpu = jax.default_backend() == "cpu" and jax.sharding.get_abstract_mesh().empty
        if not on_cpu or m > MOST_APART:
            return attend(query, keys, values, self.scale, visible)
        heads = [
            _attend_to_head(query[:, :, i * g : (i + 1) * g], keys[:, :, i], values[:, :, i], self.scale, visible)
            for i in range(m)
        ]
        return jnp.concatenate(heads, axis=2)

    def output(self, heads: jax.Array) -> jax.Array:
        """[B, T, N, H] to [B, T, D]."""
        return linear(heads, self.o[...], n_inputs=2)


class DraftMLA(MLA):
    """Latent attention, fed 2D wide. A cache row is the normed latent and the rotated key, as in the target's cache."""

    def __init__(self, config: TargetConfig, hidden: int, dtype: jnp.dtype) -> None:
        c = config
        super().__init__(dataclasses.replace(c, hidden=2 * hidden), dtype)
        shape, std = (hidden, c.n_heads, c.v_dim), (c.n_heads * c.v_dim) ** -0.5
        self.o = declare(shape, dtype, ("hidden", "heads", "head_dim"), std=std, inputs=2)
        self.scale = softmax_scale(c)

    def inputs(self, x: jax.Array, columns: slice = slice(None)) -> Inputs:
        """The first products of queries and of latents, of u [B, T, 2D] or of those of its columns that x is."""
        return tuple(linear(x, w[..., columns]) for w in (self.query_weight(), self.kv_a[...]))

    def project(self, inputs: Inputs, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries [B, T, N, nope + rope] and cache rows [B, T, R + rope] at int32 positions [B, T]."""
        cos, sin = rotation(positions, self.config)
        query, latents = inputs
        return jnp.concatenate(self.finish_queries(query, cos, sin), axis=-1), self.finish_latents(latents, cos, sin)

    def cache_rows(self, u: jax.Array, positions: jax.Array) -> jax.Array:
        """The rows alone, [B, T, R + rope], of u [B, T, 2D]."""
        return self.finish_latents(linear(u, self.kv_a[...]), *rotation(positions, self.config))

    def expand(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys [B, S, N, nope + rope] and values [B, S, N, v] of cache rows [B, S, R + rope]."""
        r = self.config.kv_lora_rank
        nope = jnp.einsum("bsr,nhr->bsnh", rows[..., :r], self.k_up[...])
        value = jnp.einsum("bsr,nhr->bsnh", rows[..., :r], self.v_up[...])
        rope = jnp.broadcast_to(rows[:, :, None, r:], (*nope.shape[:3], rows.shape[-1] - r))
        return jnp.concatenate([nope, rope], axis=-1), value

    def over(self, query: jax.Array, rows: jax.Array, visible: jax.Array) -> jax.Array:
        """Attention of queries [B, T, N, nope + rope] to rows [B, S, R + rope], visible bool [B, T, S]: [B, T, N, v].

        In the latent space, so that the rows are read once for all heads.
        """
        nope = self.config.nope_dim
        return self.absorbed(Query(query[..., :nope], query[..., nope:]), rows, visible)


type DraftAttention = LlamaAttention | DraftMLA


def attend(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, visible: jax.Array) -> jax.Array:
    """Grouped-query attention, softmax in float32.

    Args:
      q: [B, T, N, H]; query head n reads key head n * M // N.
      k: [B, S, M, H].
      v: [B, S, M, V].
      scale: of the scores.
      visible: bool [B or 1, T, S].
    Returns:
      [B, T, N, V].
    """
    b, t, n, h = q.shape
    m = k.shape[2]
    grouped = q.reshape(b, t, m, n // m, h)
    score = jnp.einsum("btmgh,bsmh->bmgts", grouped, k, preferred_element_type=jnp.float32)
    p = masked_softmax(score * jnp.float32(scale), visible[:, None, None]).astype(v.dtype)
    heads = jnp.einsum("bmgts,bsmv->btmgv", p, v).reshape(b, t, n, v.shape[-1])
    return shard(heads, "batch", "replicated", "heads", "head_dim")


def _attend_to_head(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, visible: jax.Array) -> jax.Array:
    """`attend` of queries [B, T, G, H] to one key head [B, S, H] and its values [B, S, V]: [B, T, G, V]."""
    b, t, g, _ = q.shape
    score = jnp.einsum("bqh,bsh->bqs", q.reshape(b, t * g, -1), k, preferred_element_type=jnp.float32)
    p = masked_softmax(score.reshape(b, t, g, -1) * jnp.float32(scale), visible[:, :, None]).astype(v.dtype)
    return jnp.einsum("bqs,bsv->bqv", p.reshape(b, t * g, -1), v).reshape(b, t, g, -1)


def causal(
    attention: DraftAttention,
    query: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    segments: jax.Array | None,
    window: int | None,
) -> jax.Array:
    """Attention of T tokens among themselves.

    Args:
      attention: whose rows these are.
      query: [B, T, N, H].
      rows: [B, T, C].
      positions: int32 [B, T], rising by one within a document.
      segments: int32 [B, T]; tokens of different documents in one row do not see each other.
      window: a query sees positions less than this far back.
    Returns:
      [B, T, N, V].
    """
    keys, values = map(by_head, attention.expand(rows))
    segments = jnp.zeros_like(positions) if segments is None else segments
    return chained(query, keys, values, (), (), positions, segments, attention.scale, window)


def llama_frequencies(config: LlamaAttentionConfig) -> tuple[np.ndarray, float]:
    """Angle per position of each rotated pair, float32 [head_dim / 2], and the factor on cos and sin.

    Llama 3.1's ramp is linear in the number of turns over the original context, YaRN's in the pair's index.
    """
    dim, theta, s = config.head_dim, config.rope_theta, config.scaling
    plain = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if isinstance(s, Llama3Scaling):
        turns = s.original_max_positions * plain / (2 * math.pi)
        kept = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
        return (plain * kept + plain / s.factor * (1.0 - kept)).astype(np.float32), 1.0
    if isinstance(s, LlamaYarn):
        # The pair that makes a given number of turns over the original context.
        low, high = (
            dim * math.log(s.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (s.beta_fast, s.beta_slow)
        )
        first, last = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
        slowed = np.clip((np.arange(dim // 2) - first) / (last - first if last != first else 0.001), 0.0, 1.0)
        gain = 0.1 * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0
        return (plain * (1.0 - slowed) + plain / s.factor * slowed).astype(np.float32), gain
    return plain.astype(np.float32), 1.0


def llama_rotation(positions: jax.Array, config: LlamaAttentionConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., 1, head_dim / 2], of int32 positions [...]; the angle is a float32 product."""
    frequencies, gain = llama_frequencies(config)
    shaped = jnp.asarray(frequencies).reshape((1,) * positions.ndim + (-1,))
    angle = positions[..., None].astype(jnp.float32) * shaped
    return jnp.cos(angle)[..., None, :] * jnp.float32(gain), jnp.sin(angle)[..., None, :] * jnp.float32(gain)


def rotate_halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + head_dim / 2) of the last axis; x [B, T, N, H], cos and sin [B, T, 1, H / 2]."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
