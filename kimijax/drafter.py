"""The EAGLE-3 drafter (arXiv:2503.01840, and EAGLE-3.1): one layer that continues the target's hidden states.

Row t pairs the token *after* position t with the features of position t, at rotary position t. In the first step the
features are `fuse(taps)`, in later steps the row's own previous output:

    e = embed(next token);  g = features
    u = [embed_norm(e), hidden_norm(g)]
    y = r + attention(u)           r = g, or hidden_norm(g) with `norm_before_residual`
    z = y + mlp(post_norm(y))
    features of the next step: z, or norm(z) with `norm_output`;  logits = head(norm(z))

Forward, decode and the training loop share `run`; only how attention sees other tokens differs. Fusing is a step of its
own that always happens and checks its width: no array is ever taken for features because its width happens to fit.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .cache import LATENT_AXES, CacheView, Window
from .config import TargetConfig
from .draft_attention import DraftAttention, DraftMLA, Inputs, LlamaAttention, causal
from .draft_config import DraftConfig
from .errors import ConfigError
from .layers import MLP, declare, declare_norm, linear, matmul_precision, rms_norm
from .model import Tables
from .names import parameters
from .sharding import shard
from .wiring import Wiring

Attend = Callable[[DraftAttention, jax.Array, jax.Array], jax.Array]  # (projections, query, rows) -> [B, T, N, v]


class Borrowed(nnx.Variable):
    """An array of the target's that the drafter reads. It is no `nnx.Param`: neither trained nor exported."""


class DraftVocabulary(nnx.Variable):
    """The target's id of each draft id: int32 [Vd], strictly ascending."""


class DraftHidden(NamedTuple):
    """What the layer returns."""

    feedback: jax.Array  # [B, T, D], the features of the next step
    normed: jax.Array  # [B, T, D], what the head takes


class DraftOutput(NamedTuple):
    """A step's features for the next one and its logits."""

    feedback: jax.Array  # [B, T, D], or [B, D] of `step`
    logits: jax.Array  # float32 [B, T, Vd], or [B, Vd] of `step`; over the draft vocabulary, see `to_target`


class Drafter(nnx.Module):
    """The head. Declared abstractly by `declare_drafter`, then filled by a loader or by `initialise_drafter`."""

    def __init__(
        self, config: DraftConfig, wiring: Wiring, dtype: jnp.dtype, *, own_embed: bool, own_head: bool
    ) -> None:
        c, d = config, config.hidden
        self.config, self.wiring = config, wiring
        table, axes = (c.vocab_size, d), ("vocab", "hidden")
        if own_embed:
            self.embed = declare(table, dtype, axes, std=1.0)
        else:
            self.embed = Borrowed(jax.ShapeDtypeStruct(table, dtype), axes=axes)
        if c.norm_before_fc:
            self.feature_norm = declare_norm(c.fused_width, dtype)
        if c.fc_norm:
            shape = (c.n_taps, c.target_hidden)
            self.fc_norm = declare(shape, dtype, ("replicated", "hidden"), mean=1.0, std=0.0)
        self.fc = declare((d, c.fused_width), dtype, ("hidden", "replicated"), inputs=1)
        self.embed_norm = declare_norm(d, dtype)
        self.hidden_norm = declare_norm(d, dtype)
        if isinstance(c.attention, TargetConfig):
            self.attention = DraftMLA(c.attention, d, dtype)
        else:
            self.attention = LlamaAttention(c.attention, d, dtype)
        self.post_norm = declare_norm(d, dtype)
        self.mlp = MLP(d, c.mlp_width, dtype)
        self.norm = declare_norm(d, dtype)
        if own_head:
            self.lm_head = declare((c.draft_vocab_size, d), dtype, axes, inputs=1)
        else:
            self.lm_head = Borrowed(jax.ShapeDtypeStruct((c.draft_vocab_size, d), dtype), axes=axes)
        self.target_ids = DraftVocabulary(jax.ShapeDtypeStruct((c.draft_vocab_size,), jnp.int32), axes=("replicated",))

    @property
    def dtype(self) -> jnp.dtype:
        """What the layer computes in: that of its matrices, whoever cast them."""
        return self.fc.get_value().dtype

    @property
    def cache_axes(self) -> tuple[str, str, str]:
        """Logical axes of the pages [P, page, C] of its cache: latents as the target's, keys and values by head."""
        return LATENT_AXES if isinstance(self.attention, DraftMLA) else ("pages", "replicated", "heads")

    def fuse(self, taps: Mapping[int, jax.Array]) -> jax.Array:
        """The features of the first step, from what the target returned: always through fc.

        Args:
          taps: tap -> [B, T, target_hidden]; others than the wiring's are not read.
        Returns:
          [B, T, D].
        Raises:
          ValueError: a tap that is missing or of another width.
        """
        c = self.config
        for tap in self.wiring.taps:
            if tap not in taps:
                raise ValueError(f"taps: found {sorted(taps)}, expected the wiring's {self.wiring.taps}: pass them all")
            if taps[tap].shape[-1] != c.target_hidden:
                found = taps[tap].shape[-1]
                raise ValueError(f"tap {tap}: found width {found}, expected {c.target_hidden}, the target's")
        x = jnp.concatenate([taps[tap].astype(self.dtype) for tap in self.wiring.taps], axis=-1)
        with matmul_precision(self.dtype):
            if c.norm_before_fc:
                x = rms_norm(x, self.feature_norm[...], c.norm_eps)
            if c.fc_norm:
                chunks = jnp.split(x, c.n_taps, axis=-1)
                normed = [rms_norm(chunk, self.fc_norm[i], c.norm_eps) for i, chunk in enumerate(chunks)]
                x = jnp.concatenate(normed, axis=-1)
            return shard(linear(x, self.fc[...]), "batch", "replicated", "hidden")

    def forward(
        self,
        ids: jax.Array,
        features: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> DraftOutput:
        """One step for every position of whole sequences, without a cache.

        Args:
          ids: int32 [B, T], of row t the token that follows position t.
          features: [B, T, D]: `fuse(taps)`, or the `feedback` of the step before.
          positions: int32 [B, T], rising by one within a document; default 0 ... T-1.
          segments: int32 [B, T], documents packed into one row; default one document a row.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)

        def among(attention: DraftAttention, query: jax.Array, rows: jax.Array) -> jax.Array:
            return causal(attention, query, rows, positions, segments, self.config.window)

        hidden = self.run(ids, features, positions, among)
        return DraftOutput(hidden.feedback, self.logits(hidden.normed))

    def decode[View: CacheView](
        self, ids: jax.Array, features: jax.Array, start: jax.Array, cached: View, *, filled: bool = False
    ) -> tuple[DraftHidden, View]:
        """T rows for each request over its cache: tokens just accepted, with true features, or the chain's next one.

        Args:
          ids: int32 [B, T], of row t the token that follows position start + t.
          features: [B, T, D].
          start: int32 [B], the position of the first row: rows from there on are overwritten, whatever wrote them.
          cached: view of the draft's cache, one layer of `config.cache_width` values; start + T must fit into it.
          filled: the rows are there already (`fill`), and nothing is stored.
        Returns:
          Hidden states (`logits` of those rows that are wanted), and the view with the new rows stored.
        """
        positions = start[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        distance = positions[..., None] - jnp.arange(cached.length, dtype=jnp.int32)[None, None]  # [B, T, S]
        visible = distance >= 0
        if self.config.window is not None:
            visible = visible & (distance < self.config.window)

        def over(attention: DraftAttention, query: jax.Array, rows: jax.Array) -> jax.Array:
            nonlocal cached
            cached = cached if filled else cached.store(0, rows, start)
            return attention.over(query, cached.keys(0).astype(rows.dtype), visible)

        hidden = self.run(ids, features, positions, over)
        return hidden, cached

    def fill[View: CacheView](self, ids: jax.Array, features: jax.Array, start: jax.Array, cached: View) -> View:
        """`decode` without hidden states. The head has one layer, so that a cache row is made of its own token and
        features alone: no attention is needed for it, nor anything behind it."""
        positions = start[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        with matmul_precision(self.dtype), jax.named_scope("drafter"):
            normed = rms_norm(features.astype(self.dtype), self.hidden_norm[...], self.config.norm_eps)
            u = jnp.concatenate([self._embedded(ids), normed], axis=-1)
            return cached.store(0, self.attention.cache_rows(u, positions), start)

    def step[View: CacheView](
        self, ids: jax.Array, features: jax.Array, start: jax.Array, cached: View
    ) -> tuple[DraftOutput, View]:
        """`decode` of one row with its logits: ids int32 [B], features [B, D], start int32 [B]."""
        hidden, cached = self.decode(ids[:, None], features[:, None], start, cached)
        return DraftOutput(hidden.feedback[:, 0], self.logits(hidden.normed)[:, 0]), cached

    def run(self, ids: jax.Array, features: jax.Array, positions: jax.Array, attend: Attend) -> DraftHidden:
        """The layer, that every program shares; `attend` decides which rows a query sees.

        Args:
          ids: int32 [B, T].
          features: [B, T, D].
          positions: int32 [B, T].
          attend: from the layer's attention, queries and cache rows to the output of its heads.
        Raises:
          ValueError: features of another shape, such as taps that were not fused.
        """

        def inputs(normed: jax.Array) -> Inputs:
            return self.attention.inputs(jnp.concatenate([self._embedded(ids), normed], axis=-1))

        return self._layer(ids.shape, features, positions, attend, inputs)

    def token_inputs(self, ids: jax.Array) -> Inputs:
        """What the tokens int32 [B, T] add to the attention's inputs, for `run_on`: the same in every unrolled step."""
        with matmul_precision(self.dtype), jax.named_scope("drafter"):
            return self.attention.inputs(self._embedded(ids), slice(0, self.config.hidden))

    def run_on(self, tokens: Inputs, features: jax.Array, positions: jax.Array, attend: Attend) -> DraftHidden:
        """`run` on `token_inputs`, in place of the tokens."""

        def inputs(normed: jax.Array) -> Inputs:
            of_features = self.attention.inputs(normed, slice(self.config.hidden, None))
            return tuple(a + b for a, b in zip(tokens, of_features, strict=True))

        return self._layer(positions.shape, features, positions, attend, inputs)

    def _embedded(self, ids: jax.Array) -> jax.Array:
        e = shard(self.embed[...][ids].astype(self.dtype), "batch", "replicated", "hidden")
        return rms_norm(e, self.embed_norm[...], self.config.norm_eps)

    def _layer(
        self,
        shape: tuple[int, ...],
        features: jax.Array,
        positions: jax.Array,
        attend: Attend,
        inputs: Callable[[jax.Array], Inputs],
    ) -> DraftHidden:
        """`inputs`: from the normed features to the attention's inputs."""
        c = self.config
        if features.shape != (*shape, c.hidden):
            found, expected = list(features.shape), [*shape, c.hidden]
            raise ValueError(f"features: found {found}, expected {expected}: taps go through `fuse` first")
        features = features.astype(self.dtype)
        with matmul_precision(self.dtype), jax.named_scope("drafter"):
            normed = rms_norm(features, self.hidden_norm[...], c.norm_eps)
            query, rows = self.attention.project(inputs(normed), positions)
            residual = normed if c.norm_before_residual else features
            y = residual + self.attention.output(attend(self.attention, query, rows))
            z = y + self.mlp(rms_norm(y, self.post_norm[...], c.norm_eps))
            z = shard(z, "batch", "replicated", "hidden")
            last = rms_norm(z, self.norm[...], c.norm_eps)
        return DraftHidden(last if c.norm_output else z, last)

    def logits(self, normed: jax.Array) -> jax.Array:
        """The head: `DraftHidden.normed` [B, T, D] to float32 [B, T, Vd]."""
        head = self.lm_head[...]
        with matmul_precision(head.dtype):
            normed = shard(normed.astype(head.dtype), "replica", "replicated", "hidden")
            logits = linear(normed, head, jnp.dtype(jnp.float32))
        return shard(logits, "replica", "replicated", "vocab")

    def to_target(self, ids: jax.Array) -> jax.Array:
        """Target ids of draft ids, int32 of any shape."""
        return self.target_ids[...][ids] if self.config.is_reduced else ids


def declare_drafter(
    config: DraftConfig, wiring: Wiring, *, dtype: jnp.dtype, own_embed: bool = False, own_head: bool = True
) -> Drafter:
    """The head as shapes, dtypes and logical axes; nothing is allocated. What it does not own it borrows.

    Raises:
      ConfigError: a wiring of another width, or a table that cannot be the target's: of another width or vocabulary.
    """
    config.check_wiring(wiring)
    same = config.hidden == config.target_hidden
    if not own_embed and not same:
        found = f"borrowed from a target of width {config.target_hidden}"
        raise ConfigError("embedding", found, f"its own, as the draft is {config.hidden} wide")
    if not own_head and (config.is_reduced or not same):
        found = f"borrowed by a draft of {config.draft_vocab_size} tokens and width {config.hidden}"
        raise ConfigError("lm_head", found, f"its own, or {config.vocab_size} tokens and width {config.target_hidden}")
    return Drafter(config, wiring, jnp.dtype(dtype), own_embed=own_embed, own_head=own_head)


def borrow(drafter: Drafter, target: Tables) -> None:
    """Give the drafter the target's own arrays, without a copy, for the tables that it borrows.

    Raises:
      ConfigError: a target of another vocabulary or width.
    """
    c, t = drafter.config, target.config
    if (t.vocab_size, t.hidden) != (c.vocab_size, c.target_hidden):
        found, expected = (t.vocab_size, t.hidden), (c.vocab_size, c.target_hidden)
        raise ConfigError("target (vocab_size, hidden)", found, f"{expected}, the target that the draft was made for")
    for own, lent in ((drafter.embed, target.embed), (drafter.lm_head, target.lm_head)):
        if isinstance(own, Borrowed):
            own.set_value(lent.get_value())


def set_vocabulary(drafter: Drafter, target_ids: Sequence[int] | np.ndarray) -> None:
    """Set the draft vocabulary: target ids [Vd]. ConfigError unless in range and strictly ascending."""
    ids = np.asarray(target_ids, np.int64)
    fault = vocabulary_fault(ids, drafter.config)
    if fault:
        raise ConfigError("target_ids", f"{ids.shape[0]} ids", fault)
    drafter.target_ids.set_value(jnp.asarray(ids, jnp.int32))


def vocabulary_fault(ids: np.ndarray, config: DraftConfig) -> str:
    """What is wrong with target ids int64 [Vd], in the form "expected ..."; empty if nothing is."""
    n, v = config.draft_vocab_size, config.vocab_size
    if ids.shape != (n,):
        return f"{n} ids, the draft vocabulary"
    outside = np.flatnonzero((ids < 0) | (ids >= v))
    if outside.size:
        return f"ids from 0 to {v - 1}; draft id {outside[0]} stands for {ids[outside[0]]}"
    falls = np.flatnonzero(np.diff(ids) <= 0)
    if falls.size:
        i = falls[0]
        return f"strictly ascending ids; draft ids {i} and {i + 1} stand for {ids[i]} and {ids[i + 1]}"
    return ""


def initialise_drafter(drafter: Drafter, target: Tables, target_ids: Sequence[int] | np.ndarray, seed: int) -> Drafter:
    """A fresh drafter for training: norms of ones, the rest normal with the inverse root of the fan-in.

    Args:
      drafter: declared; what it borrows is the target's, an embedding of its own of the same width starts as a copy.
      target: filled.
      target_ids: the draft vocabulary, all ids where it is not reduced.
      seed: of the noise.
    """
    rng = np.random.default_rng(seed)
    for path, param in sorted(parameters(drafter).items(), key=lambda item: str(item[0])):
        struct, meta = param.get_value(), param.get_metadata()
        if path == ("embed",) and struct.shape == target.embed.get_value().shape:
            param.set_value(jnp.array(target.embed.get_value(), struct.dtype))
            continue
        noise = rng.standard_normal(struct.shape, dtype=np.float32) * np.float32(meta["std"])
        param.set_value(jnp.asarray(noise + np.float32(meta["mean"]), struct.dtype))
    set_vocabulary(drafter, target_ids)
    borrow(drafter, target)
    return drafter


def draft_cache(config: DraftConfig, batch: int, length: int, dtype: jnp.dtype) -> Window:
    """An empty dense cache of the draft's one layer, [batch, length, C]."""
    return Window((jnp.zeros((batch, length, config.cache_width), dtype),))
