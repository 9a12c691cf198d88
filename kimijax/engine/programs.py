"""The engine's compiled programs: a prefill per chunk length (and per context length, for the later chunks of a long
prompt), a burst of decoding per (batch, context) size.

Each call donates the cache and returns the new one. Host arrays go in, device arrays come out; nothing is read back
here.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..cache import PagedCache, PagedView, Window
from ..model import Target
from ..sampling import SamplingRows, sample
from .config import EngineConfig, bucket
from .request import Request
from .scheduler import PrefillPlan

ProgramKind = Literal["prefill", "decode"]


@dataclass(frozen=True)
class ProgramSizes:
    """Counts of compiled programs, for the warm-up check."""

    prefill: int
    decode: int


class Programs:
    """Compiled programs over one model. `n_tokens` is how many ids belong to a token."""

    def __init__(self, model: Target, config: EngineConfig, n_tokens: int, mesh: Mesh | None, experts: str) -> None:
        self.config, self.mesh = config, mesh
        self._graph, state = nnx.split(model)
        self._leaves, self._tree = jax.tree.flatten(state)  # a flat list keeps the jit call on its fast path
        self._experts, self._n_tokens = experts, n_tokens
        self._dense = config.decode_view == "dense" or (config.decode_view == "auto" and jax.default_backend() == "cpu")
        self._cache_dtype = model.layers[0].attention.kv_a[...].dtype
        self._target_config = model.config
        self._prefill = jax.jit(self._prefill_program, donate_argnums=1)
        self._decode = jax.jit(self._decode_program, donate_argnums=1)

    def new_cache(self) -> PagedCache:
        """An empty cache on the devices."""
        c = self.config
        make = functools.partial(PagedCache.create, self._target_config, c.total_pages, c.page_size, self._cache_dtype)
        # Placed as the programs return it: a cache placed otherwise would compile each program a second time.
        single = self._leaves[0].sharding
        return jax.jit(make, out_shardings=single if self.mesh is None else NamedSharding(self.mesh, P()))()

    def sizes(self) -> ProgramSizes:
        """Programs compiled so far."""
        return ProgramSizes(_n_compiled(self._prefill), _n_compiled(self._decode))

    def prefill(self, cache: PagedCache, plan: PrefillPlan) -> tuple[PagedCache, jax.Array]:
        """Compute a chunk; returns the cache and the token drawn after it, int32 [1] (meaningless but for the last)."""
        request, n = plan.request, plan.stop - plan.start
        if plan.start == 0:
            length, window = bucket(n, self.config.chunk_lengths), 0
        else:
            length, window = self.config.chunk_lengths[-1], bucket(plan.start, self.config.window_lengths)
        return self._run_prefill(cache, request.tokens(plan.start, plan.stop), plan.start, length, window, [request])

    def decode(self, cache: PagedCache, requests: Sequence[Request], n_steps: int) -> tuple[PagedCache, jax.Array]:
        """Draw n_steps tokens for each request; returns the cache and int32 [batch size, burst]."""
        size = bucket(len(requests), self.config.batch_sizes)
        reach = min(max(r.cached for r in requests) + n_steps, self.config.context_length)
        return self._run_decode(cache, requests, size, bucket(reach, self.config.window_lengths), n_steps)

    def compile(self, cache: PagedCache, kind: ProgramKind, size: int, window: int) -> PagedCache:
        """Compile one program by running it on padding alone, which leaves the cache's pages as they are."""
        if kind == "prefill":
            return self._run_prefill(cache, [], 0, size, window, [])[0]
        return self._run_decode(cache, [], size, window, 1)[0]

    def _run_prefill(
        self, cache: PagedCache, tokens: list[int], start: int, length: int, window: int, requests: Sequence[Request]
    ) -> tuple[PagedCache, jax.Array]:
        ids = np.zeros((1, length), np.int32)
        ids[0, : len(tokens)] = tokens
        context = None if window == 0 else self._table(requests, 1, window)
        table = self._table(requests, 1, self.config.context_length)
        n_valid, at = np.int32(len(tokens)), np.asarray([start], np.int32)
        return self._call(self._prefill, cache, ids, at, n_valid, context, table, _rows(requests, 1))

    def _run_decode(
        self, cache: PagedCache, requests: Sequence[Request], size: int, window: int, n_steps: int
    ) -> tuple[PagedCache, jax.Array]:
        tokens, lengths = np.zeros(size, np.int32), np.zeros(size, np.int32)
        tokens[: len(requests)] = [r.token(r.cached) for r in requests]
        lengths[: len(requests)] = [r.cached for r in requests]
        table = self._table(requests, size, window)
        return self._call(self._decode, cache, tokens, lengths, table, _rows(requests, size), np.int32(n_steps))

    def _call(self, program: Any, cache: PagedCache, *args: Any) -> tuple[PagedCache, jax.Array]:
        if self.mesh is None:
            return program(self._leaves, cache, *args)
        with jax.set_mesh(self.mesh):
            return program(self._leaves, cache, *args)

    def _table(self, requests: Sequence[Request], rows: int, length: int) -> np.ndarray:
        """Block table int32 [rows, length / page_size], padded with -1; pages beyond `length` are left out."""
        table = np.full((rows, length // self.config.page_size), -1, np.int32)
        for row, request in zip(table, requests, strict=False):
            pages = request.pages[: len(row)]
            row[: len(pages)] = pages
        return table

    def _model(self, leaves: list[jax.Array]) -> Target:
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves))

    def _prefill_program(
        self,
        leaves: list[jax.Array],
        cache: PagedCache,
        ids: jax.Array,  # int32 [1, T]
        start: jax.Array,  # int32 [1]
        n_valid: jax.Array,  # int32, ids before the padding
        context_table: jax.Array | None,  # int32 [1, n]
        table: jax.Array,  # int32 [1, n]
        rows: SamplingRows,
    ) -> tuple[PagedCache, jax.Array]:
        model = self._model(leaves)
        context = None if context_table is None else PagedView(cache, context_table)
        hidden, latents = model.prefill(ids, start, context, experts=self._experts)
        offsets = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        positions = jnp.where(offsets < n_valid, start[:, None] + offsets, -1)
        last = jax.lax.dynamic_slice_in_dim(hidden.last, n_valid - 1, 1, axis=1)
        token = sample(model.logits(last)[:, 0], rows, start + n_valid, self._n_tokens)
        return cache.write(latents, table, positions), token

    def _decode_program(
        self,
        leaves: list[jax.Array],
        cache: PagedCache,
        tokens: jax.Array,  # int32 [B], at position `lengths`
        lengths: jax.Array,  # int32 [B], tokens cached
        table: jax.Array,  # int32 [B, n]
        rows: SamplingRows,
        n_steps: jax.Array,  # int32
    ) -> tuple[PagedCache, jax.Array]:
        model, burst = self._model(leaves), self.config.burst

        def step(i: jax.Array, carry: tuple[jax.Array, Any, jax.Array]) -> tuple[jax.Array, Any, jax.Array]:
            tokens, cached, drawn = carry
            hidden, cached = model.decode(tokens[:, None], lengths + i, cached, experts=self._experts)
            tokens = sample(model.logits(hidden.last)[:, 0], rows, lengths + i + 1, self._n_tokens)
            return tokens, cached, jax.lax.dynamic_update_slice(drawn, tokens[:, None], (0, i))

        view = cache.read(table) if self._dense else PagedView(cache, table)
        drawn = jnp.zeros((tokens.shape[0], burst), jnp.int32)
        _, view, drawn = jax.lax.fori_loop(0, n_steps, step, (tokens, view, drawn))
        if isinstance(view, PagedView):
            return view.cache, drawn
        assert isinstance(view, Window)
        offsets = jnp.arange(burst, dtype=jnp.int32)[None]
        positions = jnp.where(offsets < n_steps, lengths[:, None] + offsets, -1)
        return cache.write(view.take(positions), table, positions), drawn


def _n_compiled(program: Any) -> int:
    """Entries in the cache of a jitted function."""
    return program._cache_size()


def _rows(requests: Sequence[Request], size: int) -> SamplingRows:
    """Sampling settings, padded with greedy rows."""
    pad = size - len(requests)
    s = [r.sampling for r in requests]
    return SamplingRows.of(
        [x.temperature for x in s] + [0.0] * pad,
        [x.top_k for x in s] + [0] * pad,
        [x.top_p for x in s] + [1.0] * pad,
        [x.min_p for x in s] + [0.0] * pad,
        [r.seed for r in requests] + [0] * pad,
    )
