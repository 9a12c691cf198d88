"""What the engine keeps on the devices between two programs. Every program takes all of it, donated, and returns it.

The state of a running request has a place: programs take the rows that they work on and put them back, so that the host
need not know what a program did before it plans the next. A padding row has the place behind the last: it reads some
row, idles, and is put nowhere.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..cache import LATENT_AXES, CacheView, PagedCache
from ..drafter import Drafter
from ..model import Target
from ..penalties import History
from ..sampling import SamplingRows
from ..sharding import named_sharding
from ..speculation import ChainState, RowState
from ..verification import NO_TOKEN
from .request import WIDEST, Request

MAX_ENDS = 16  # ids that end a request on the device; the host cuts at the others


class Chain(NamedTuple):
    """`ChainState` without its cache: [N, D], [N, D] and bool [N]."""

    feedback: jax.Array
    normed: jax.Array
    ready: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Running requests, N places."""

    token: jax.Array  # int32 [N], the last token, not cached yet
    length: jax.Array  # int32 [N], tokens cached
    left: jax.Array  # int32 [N], tokens that may still be drawn; 0: the request has ended
    rows: SamplingRows
    ends: jax.Array  # int32 [N, MAX_ENDS], padded with NO_TOKEN
    chain: Chain | None  # None: no drafter


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """All of it."""

    cache: PagedCache
    draft: PagedCache | None
    slots: Slots
    history: History  # N places, kept up for requests that need rules

    @staticmethod
    def empty(target: Target, drafter: Drafter | None, n_pages: int, page_size: int, n: int) -> "DeviceState":
        """Before any request."""
        c, dtype = target.config, target.layers[0].attention.kv_a.get_value().dtype
        chain = draft = None
        if drafter is not None:
            size = (n, drafter.config.hidden)
            chain = Chain(jnp.zeros(size, drafter.dtype), jnp.zeros(size, drafter.dtype), jnp.zeros(n, jnp.bool))
            shape = (n_pages, page_size, drafter.config.cache_width)
            draft = PagedCache((jnp.zeros(shape, drafter.dtype),), drafter.cache_axes)

        def counts() -> jax.Array:  # each an array of its own: one that stood twice here could not be donated
            return jnp.zeros(n, jnp.int32)

        rows = SamplingRows(
            temperature=jnp.zeros(n, jnp.float32),
            top_k=counts(),
            top_p=jnp.ones(n, jnp.float32),
            min_p=jnp.zeros(n, jnp.float32),
            seed=jnp.zeros((n, 2), jnp.uint32),
            coupled=jnp.zeros(n, jnp.bool),
        )
        ends = jnp.full((n, MAX_ENDS), NO_TOKEN, jnp.int32)
        return DeviceState(
            PagedCache.create(c, n_pages, page_size, dtype),
            draft,
            Slots(counts(), counts(), counts(), rows, ends, chain),
            History.empty(n, c.vocab_size, WIDEST.word_length),
        )


def state_sharding(target: Target, drafter: Drafter | None, mesh: Mesh, n_pages: int, page_size: int) -> Any:
    """Placement of a `DeviceState`: a prefix of its tree. Caches lie as their axes say, the rest on every device.

    Raises:
      ConfigError: pages that do not come out even.
    """
    whole = NamedSharding(mesh, PartitionSpec())

    def pages(n_layers: int, axes: tuple[str, str, str]) -> PagedCache:
        return PagedCache((named_sharding(mesh, axes, (n_pages, page_size)),) * n_layers, axes)  # pyright: ignore[reportArgumentType]

    draft = None if drafter is None else pages(1, drafter.cache_axes)
    return DeviceState(pages(target.config.n_layers, LATENT_AXES), draft, whole, whole)  # pyright: ignore[reportArgumentType]


class Start(NamedTuple):
    """Host values of a request that begins to decode; each becomes a row of `Slots`."""

    token: np.int32
    length: np.int32
    left: np.int32
    rows: SamplingRows  # one row
    ends: np.ndarray

    @staticmethod
    def of(request: Request) -> "Start":
        ends = np.full(MAX_ENDS, NO_TOKEN, np.int32)
        known = sorted(request.stop_ids)[:MAX_ENDS]
        ends[: len(known)] = known
        n = request.n_tokens - 1
        left = request.limit - len(request.output)
        return Start(np.int32(request.token(n)), np.int32(n), np.int32(left), settings([request]), ends)

    @staticmethod
    def blank(length: int = 0, left: int = 0) -> "Start":
        """Of no request: a greedy row over an empty cache, for warm-up."""
        rows = SamplingRows.of([0.0], [0], [1.0], [0.0], [0])
        ends = np.full(MAX_ENDS, NO_TOKEN, np.int32)
        return Start(np.int32(0), np.int32(length), np.int32(left), rows, ends)


def settings(requests: list[Request]) -> SamplingRows:
    """Sampling settings, one row each. Tokens of a request with a seed depend on that alone."""
    s = [r.sampling for r in requests]
    return SamplingRows.of(
        [x.temperature for x in s],
        [x.top_k for x in s],
        [x.top_p for x in s],
        [x.min_p for x in s],
        [r.seed for r in requests],
        [x.seed is not None for x in s],
    )


def put_start(slots: Slots, place: jax.Array, start: Start) -> Slots:
    """With a request at a place, int32."""
    chain = slots.chain
    if chain is not None:
        chain = chain._replace(ready=chain.ready.at[place].set(False))
    return Slots(
        slots.token.at[place].set(start.token),
        slots.length.at[place].set(start.length),
        slots.left.at[place].set(start.left),
        jax.tree.map(lambda x, new: x.at[place].set(new[0]), slots.rows, start.rows),
        slots.ends.at[place].set(start.ends),
        chain,
    )


def take_rows(slots: Slots, places: jax.Array) -> Slots:
    """The rows at int32 [B]; those of padding have nothing left to draw.

    Rows that idle are greedy: one temperature would cost the whole batch the sampler.
    """
    rows = jax.tree.map(lambda x: jnp.take(x, places, axis=0, mode="clip"), slots)
    left = jnp.where(places < slots.left.shape[0], rows.left, 0)
    settings = replace(rows.rows, temperature=jnp.where(left > 0, rows.rows.temperature, 0.0))
    return replace(rows, left=left, rows=settings)


def put_rows(slots: Slots, places: jax.Array, rows: Slots) -> Slots:
    """With rows at int32 [B], each place once; those of padding are dropped."""
    return jax.tree.map(lambda x, new: x.at[places].set(new, mode="drop"), slots, rows)


def row_state[View: CacheView](rows: Slots, view: View, draft: View | None) -> RowState[Any, View]:
    """As rounds work on it."""
    proposer = () if rows.chain is None or draft is None else ChainState(*rows.chain, draft)
    return RowState(rows.token, rows.length, view, proposer)


def after_rounds(rows: Slots, state: RowState[Any, Any], produced: jax.Array, ended: jax.Array) -> Slots:
    """The rows once rounds have drawn `produced` tokens (int32 [B]); `ended`: bool [B]."""
    chain = None if rows.chain is None else Chain(state.proposer.feedback, state.proposer.normed, state.proposer.ready)
    left = jnp.where(ended, 0, rows.left - produced)
    return Slots(state.token, state.length, left, rows.rows, rows.ends, chain)
