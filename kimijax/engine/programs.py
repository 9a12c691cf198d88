"""The engine's compiled programs. Each takes the weights and the donated `DeviceState`, and returns the state.

    prefill   a chunk of prompt: for each chunk length, and for each window that a later chunk attends to
    start     a request whose prompt is cached takes its place among those that decode
    copy      one page, where a prompt shares part of a page with an earlier one
    rounds    several rounds of draft and verify: for each batch size, window and number of drafts
    propose, verify, begin_rules   the same in two halves, one round, for requests that need more (`rule_programs`)

Prefill fills the caches with all but a prompt's last token, and draws nothing: that token is the first round's, as
every later one is its round's, so that one program family draws all tokens. Host arrays go in, device arrays come out;
nothing is read back here.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..block_verification import BLOCK
from ..cache import CacheView, PagedCache, PagedView, Window
from ..draft_tree import DraftTree, TreeShape, tree_round
from ..drafter import Drafter
from ..errors import ConfigError
from ..model import Target
from ..rounds import Record, decode_rounds, plain_rounds
from ..sharding import n_parts, preset_on
from ..simulated import simulated_chances
from ..speculation import DraftChain, Round, RowState, speculative_round
from ..speculative_options import SpeculativeOptions
from ..split_pages import PAGE_AXES
from ..verification import TOKEN_BY_TOKEN
from .config import EngineConfig, bucket
from .device import DeviceState, Slots, Start, after_rounds, put_rows, put_start, row_state, state_sharding, take_rows
from .prefix import Lease
from .request import Request
from .wire import Held


class Caller(Protocol):
    """Has other processes call a program; see `remote.Leader`."""

    def call(self, program: str, args: tuple[Any, ...], static: Mapping[str, Any]) -> None: ...


Kind = Literal["prefill", "rounds", "propose", "verify", "other"]


class Batch(NamedTuple):
    """Host arrays that name a batch to a program."""

    places: np.ndarray  # int32 [B], past the last place where it is padding
    table: np.ndarray  # int32 [B, n], pages in order, padded with -1


class Chunk(Protocol):
    """Rows start ... stop - 1 of a running request, all of whose tokens before `stop + 1` are known."""

    @property
    def request(self) -> Request: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def pages(self) -> Sequence[int]: ...


class BlockTables:
    """The pages of running requests as arrays, one row a place; most steps change no request's."""

    def __init__(self, n_places: int, n_pages: int) -> None:
        """n_pages: that a request may hold."""
        self._rows = np.full((n_places, n_pages), -1, np.int32)
        self._copied: list[tuple[Lease, int] | None] = [None] * n_places  # of whom, and as of which change

    def of(self, requests: Sequence[Request], places: np.ndarray, n_pages: int) -> np.ndarray:
        """int32 [n, n_pages] of requests at int32 places [n], padded with -1; what one holds beyond is left out."""
        for r in requests:
            lease = r.lease
            assert lease is not None
            if self._copied[r.place] != (lease, lease.n_changes):
                self._copied[r.place] = lease, lease.n_changes
                self._rows[r.place] = -1
                self._rows[r.place, : len(lease.pages)] = lease.pages
        return self._rows[places, :n_pages]


class ProgramSet:
    """What all program families share: the models' weights, sizes, the way from a batch's rows to views and back."""

    def __init__(
        self,
        model: Target,
        drafter: Drafter | None,
        config: EngineConfig,
        options: SpeculativeOptions | None,
        n_tokens: int,
        mesh: Mesh | None,
        experts: str,
    ) -> None:
        self.config, self.mesh, self.n_tokens, self.experts = config, mesh, n_tokens, experts
        self.leader: Caller | None = None  # where this process leads others
        self._by_name: dict[str, Any] = {}
        self._held: tuple[Any, ...] = ()  # what the latest call returned beside the state
        self.target_config = model.config
        self._models = (model, drafter)
        self._graph, state = nnx.split((model, drafter))
        self.leaves, self._tree = jax.tree.flatten(state)  # a flat list keeps the jit call on its fast path
        self.dense = is_dense(config, mesh)
        self.shape: TreeShape | None = None
        self.rule, self.simulated = TOKEN_BY_TOKEN, None
        self.most_drafts, self.is_adaptive = 0, options is not None and options.adaptive
        if options is not None and drafter is not None:
            self.most_drafts = options.num_steps
            if options.eagle_topk > 1:
                self.shape = TreeShape(options.num_steps, options.eagle_topk, options.num_draft_tokens - 1)
            if options.block_verification:
                self.rule = BLOCK
            if options.simulate_acc_len is not None:
                self.simulated = simulated_chances(options.simulate_acc_len, options.num_steps)
        self.room = 1 if options is None or drafter is None else options.room
        spare = self.room if self.room > 1 else 0
        self.n_groups = 1 if mesh is None else n_parts("pages", mesh)
        self.n_pages = config.pages(spare, self.n_groups)
        self.windows = config.windows(max(spare, config.burst) if self.has_drafter else spare)
        self.tables = BlockTables(config.max_batch, self.windows[-1] // config.page_size)

    @property
    def has_drafter(self) -> bool:
        return self._models[1] is not None

    def jit(self, program: Any, *, static: Sequence[str] = (), results: int = 0) -> Any:
        """Compiled with the state donated and returned in its place, or a second call would compile anew.

        Args:
          program: takes the weights' leaves, the state, and host arrays; returns the state, or a tuple with it first.
          static: names of arguments that are compiled in.
          results: that it returns after the state, each on every device.
        """
        where: Any = None
        if self.mesh is not None:
            where = self._placed(self.mesh)
            if results:
                where = (where, *[NamedSharding(self.mesh, P())] * results)
        jitted: Any = jax.jit(program, donate_argnames="state", static_argnames=static, out_shardings=where)
        self._by_name[jitted.__name__] = jitted
        return jitted

    def simulated_of(self, k: int) -> jax.Array | None:
        """Pretended acceptance of a round of k drafts; None: it is real."""
        return jnp.asarray(self.simulated[:k]) if k and self.simulated is not None else None

    def call(self, program: Any, state: DeviceState, *args: Any, **static: Any) -> Any:
        """Call a program made by `jit`, here and, where this process leads others, there.

        Args:
          program: gets the weights before all else.
          state: donated.
          args: host arrays, and results of the call before.
          static: names and values of arguments that are compiled in.
        """
        if self.leader is not None:
            sent = tuple(self._as_held(x) for x in args)
            self.leader.call(program.__name__, sent, static)
        return self._run(program, state, args, static)

    def _as_held(self, value: Any) -> Any:
        return next((Held(i) for i, x in enumerate(self._held) if x is value), value)

    def repeat(self, program: str, state: DeviceState, args: Sequence[Any], static: Mapping[str, Any]) -> DeviceState:
        """What the leading process has called: the same here; `Held` stands for what the call before returned."""
        args = [self._held[x.number] if isinstance(x, Held) else x for x in args]
        result = self._run(self._by_name[program], state, args, static)
        return result[0] if isinstance(result, tuple) else result

    def _run(self, program: Any, state: DeviceState, args: Sequence[Any], static: Mapping[str, Any]) -> Any:
        if self.mesh is None:
            return program(self.leaves, state, *args, **static)
        with jax.set_mesh(self.mesh):
            result = program(self.leaves, state, *args, **static)
        self._held = result[1:] if isinstance(result, tuple) else ()
        return result

    def new_state(self) -> DeviceState:
        """Empty, on the devices."""
        c = self.config
        make = functools.partial(DeviceState.empty, *self._models, self.n_pages, c.page_size, c.max_batch)
        mesh = self.mesh
        where = self.leaves[0].sharding if mesh is None else self._placed(mesh)
        return jax.jit(make, out_shardings=where)()

    def _placed(self, mesh: Mesh) -> Any:
        """Where the state lies."""
        return state_sharding(*self._models, mesh, self.n_pages, self.config.page_size)

    def models(self, leaves: list[jax.Array]) -> tuple[Target, Drafter | None]:
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Rows of a batch; each group of devices has as many of them."""
        return self.config.batch_sizes(self.n_groups)

    def group_of(self, request: Request) -> int:
        """Of devices, which a running request's rows and pages are on."""
        return request.place * self.n_groups // self.config.max_batch

    def batch_size(self, requests: Sequence[Request]) -> int:
        """The smallest that has rows for all of them."""
        most = len(requests)
        if self.n_groups > 1:
            most = self.n_groups * max(Counter(map(self.group_of, requests)).values(), default=0)
        return bucket(most, self.batch_sizes)

    def rows(self, requests: Sequence[Request], size: int) -> np.ndarray:
        """int [n], the row of each in a batch: the first of its group that is free."""
        if self.n_groups == 1:
            return np.arange(len(requests))
        following = [itertools.count(group * size // self.n_groups) for group in range(self.n_groups)]
        return np.asarray([next(following[self.group_of(r)]) for r in requests], np.int64)

    def batch(self, requests: Sequence[Request], size: int, window: int) -> Batch:
        """Of running requests at their `rows`; the other rows are padding."""
        rows = self.rows(requests, size)
        places = np.full(size, self.config.max_batch, np.int32)
        places[rows] = own = np.asarray([r.place for r in requests], np.int32)
        table = np.full((size, window // self.config.page_size), -1, np.int32)
        table[rows] = self.tables.of(requests, own, table.shape[1])
        return Batch(places, table)

    def views(self, state: DeviceState, table: jax.Array, length: jax.Array) -> tuple[Any, Any]:
        """Of both caches: copies of the batch's pages, or the pages themselves; `length`: rows that are valid, [B]."""

        def view(cache: PagedCache | None) -> Any:
            if cache is None:
                return None
            return cache.read(table, length) if self.dense else PagedView(cache, table, length)

        return view(state.cache), view(state.draft)

    def stored(
        self, state: DeviceState, before: Slots, rows: RowState[Any, Any], table: jax.Array, room: int
    ) -> tuple[PagedCache, PagedCache | None]:
        """Both caches with the rows that were committed, of the `room` rows that may have been."""
        draft = rows.proposer.view if self.has_drafter else None
        offsets = jnp.arange(room, dtype=jnp.int32)[None]
        positions = before.length[:, None] + offsets
        positions = jnp.where(positions < rows.length[:, None], positions, -1)
        cache = _stored(state.cache, rows.view, table, positions)
        assert cache is not None
        return cache, _stored(state.draft, draft, table, positions)


def is_dense(config: EngineConfig, mesh: Mesh | None) -> bool:
    """Whether decoding works on a copy of the batch's pages.

    Raises:
      ConfigError: it was asked for where the mesh splits the cache.
    """
    split = mesh is not None and any(n_parts(axis, mesh) > 1 for axis in PAGE_AXES)
    if mesh is not None and split and config.decode_view == "dense":
        raise ConfigError("decode_view", "dense", f"paged: preset {preset_on(mesh)} splits the cache", "or auto")
    if config.decode_view == "auto":
        return not split and jax.default_backend() == "cpu"
    return config.decode_view == "dense"


def _stored(
    cache: PagedCache | None, view: CacheView | None, table: jax.Array, positions: jax.Array
) -> PagedCache | None:
    if cache is None:
        return None
    if isinstance(view, PagedView):
        return view.cache
    assert isinstance(view, Window)
    return cache.write(view.take(positions), table, positions)


class Programs(ProgramSet):
    """The programs that every request runs through."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._prefill = self.jit(self._prefill_program, static=("first",))
        self._start = self.jit(self._start_program)
        self._copy = self.jit(self._copy_program)
        self._rounds = self.jit(self._rounds_program, static=("k",), results=1)

    def n_compiled(self) -> int:
        return sum(n_compiled(p) for p in (self._prefill, self._start, self._copy, self._rounds))

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """The k that rounds are compiled for: 0 and the most; where a chain's is chosen step by step 1, 3, 7 too."""
        if self.most_drafts == 0:
            return (0,)
        if self.shape is not None or not self.is_adaptive:
            return (0, self.most_drafts)
        powers = [2**i - 1 for i in range(self.most_drafts.bit_length() + 1)]
        return (*(k for k in powers if k < self.most_drafts), self.most_drafts)

    def most_rounds(self, k: int) -> int:
        """Rounds of one program: as many as make about `burst` tokens if half of the drafts pass, one at least."""
        return self.config.burst if k == 0 else max(1, 2 * self.config.burst // (k + 1))

    def reach(self, k: int, n_rounds: int) -> int:
        """Rows from a request's length on that `n_rounds` may write."""
        if k and self.shape is not None:
            return (n_rounds - 1) * (k + 1) + self.shape.room
        return n_rounds * (k + 1)

    def touched(self, k: int, n_rounds: int) -> int:
        """Rows from a request's length on that the view of such a program must hold, whether or not they are kept."""
        if k == 0 and self.has_drafter:
            return self.most_rounds(0)  # the drafter is shown so many tokens, be there fewer
        return self.reach(k, n_rounds)

    def prefill_shapes(self) -> list[tuple[int, int]]:
        """(chunk length, window) of all prefill programs; window 0: a prompt's first chunk."""
        c = self.config
        first = [(n, 0) for n in c.chunk_lengths]
        later = [(n, w) for n in c.chunk_lengths for w in self.windows if self._is_used(n, w)]
        return [*first, *later]

    def _is_used(self, length: int, window: int) -> bool:
        """Whether a later chunk can have these sizes: it takes the smallest of each that hold it."""
        c = self.config
        shorter = [n for n in c.chunk_lengths if n < length]
        least = (shorter[-1] if shorter else 0) + 2  # tokens in it, after one row that is there already
        return least <= window

    def prefill(self, state: DeviceState, chunks: Sequence[Chunk]) -> DeviceState:
        """Compute rows of requests, in both caches: one chunk a group of devices at the most, all of them the first of
        their prompts, or none."""
        length = bucket(max(c.stop - c.start for c in chunks), self.config.chunk_lengths)
        is_first = chunks[0].start == 0
        window = 0 if is_first else bucket(max(c.stop for c in chunks), self.windows)
        return self.run_prefill(state, chunks, length, window)

    def run_prefill(self, state: DeviceState, chunks: Sequence[Chunk], length: int, window: int) -> DeviceState:
        """`prefill` by a program of these sizes; window 0: the chunks are the first."""
        size, n = self.config.page_size, self.n_groups
        ids, start = np.zeros((n, length + 1), np.int32), np.zeros(n, np.int32)
        table = np.full((n, (window or -(-length // size) * size) // size), -1, np.int32)
        for c in chunks:
            row = self.group_of(c.request)
            own, pages = c.request.tokens(c.start, c.stop + 1), c.pages[: table.shape[1]]
            ids[row, : len(own)], start[row], table[row, : len(pages)] = own, c.start, pages
        return self.call(self._prefill, state, ids, start, table, first=window == 0)

    def start(self, state: DeviceState, request: Request) -> DeviceState:
        """A request begins to decode at its place."""
        return self.call(self._start, state, np.int32(request.place), Start.of(request))

    def start_blank(self, state: DeviceState, place: int, start: Start) -> DeviceState:
        """`start` of no request, for warm-up."""
        return self.call(self._start, state, np.int32(place), start)

    def copy(self, state: DeviceState, source: int, target: int) -> DeviceState:
        """Copy a page in both caches."""
        return self.call(self._copy, state, np.int32(source), np.int32(target))

    def rounds(
        self, state: DeviceState, batch: Batch, n_rounds: int, k: int, *, prepare: bool = True
    ) -> tuple[DeviceState, Record]:
        """Rounds of k drafts (the tree, if there is one and k is not 0); `prepare`: the next ones may have drafts."""
        return self.call(self._rounds, state, *batch, np.int32(n_rounds), np.bool_(prepare), k=k)

    def _prefill_program(
        self,
        leaves: list[jax.Array],
        state: DeviceState,
        ids: jax.Array,  # int32 [B, T + 1], a row for each group of devices
        start: jax.Array,  # int32 [B]
        table: jax.Array,  # int32 [B, n]
        *,
        first: bool,
    ) -> DeviceState:
        target, drafter = self.models(leaves)
        chunk, following = ids[:, :-1], ids[:, 1:]
        taps = () if drafter is None else drafter.wiring.taps
        # Rows of padding land behind the prompt, where the rounds write theirs before they look.
        cached = PagedView(state.cache, table, start)
        hidden, cached = target.prefill_into(chunk, start, cached, first=first, taps=taps, experts=self.experts)
        state = replace(state, cache=cached.cache)
        if drafter is None or state.draft is None:
            return state
        view = drafter.fill(following, drafter.fuse(hidden.taps), start, PagedView(state.draft, table, start))
        return replace(state, draft=view.cache)

    def _start_program(self, leaves: list[jax.Array], state: DeviceState, place: jax.Array, start: Start) -> Any:
        return replace(state, slots=put_start(state.slots, place, start))

    def _copy_program(self, leaves: list[jax.Array], state: DeviceState, source: jax.Array, to: jax.Array) -> Any:
        def copied(cache: PagedCache | None) -> PagedCache | None:
            return jax.tree.map(lambda x: x.at[to].set(x[source]), cache)

        return replace(state, cache=copied(state.cache), draft=copied(state.draft))

    def _rounds_program(
        self,
        leaves: list[jax.Array],
        state: DeviceState,
        places: jax.Array,  # int32 [B]
        table: jax.Array,  # int32 [B, n]
        n_rounds: jax.Array,  # int32
        prepare: jax.Array,  # bool
        *,
        k: int,
    ) -> tuple[DeviceState, Record]:
        target, drafter = self.models(leaves)
        slots = take_rows(state.slots, places)
        view, draft_view = self.views(state, table, slots.length)
        if k == 0 and state.draft is not None:
            draft_view = PagedView(state.draft, table, slots.length)  # written once, and read if at all once
        rows = row_state(slots, view, draft_view)
        most = self.most_rounds(k)
        if k == 0:
            chain = None if drafter is None else DraftChain(drafter, self.n_tokens)
            options: dict[str, Any] = {"n_tokens": self.n_tokens, "experts": self.experts}
            options |= {"most": most, "n_rounds": n_rounds, "prepare": prepare}
            record, rows = plain_rounds(target, chain, rows, slots.rows, slots.left, slots.ends, **options)
        else:
            assert drafter is not None
            n_guesses = k if self.shape is None else self.shape.budget
            sizes = {"n_guesses": n_guesses, "room": most * (k + 1), "most": most}
            step = self._step(target, drafter, slots, k)
            record, rows = decode_rounds(step, rows, slots.left, slots.ends, n_rounds=n_rounds, **sizes)
        cache, draft = self.stored(state, slots, rows, table, most * (k + 1))
        after = put_rows(state.slots, places, after_rounds(slots, rows, record.produced, record.ended))
        return DeviceState(cache, draft, after, state.history), record

    def _step(self, target: Target, drafter: Drafter, slots: Slots, k: int) -> Any:
        options: dict[str, Any] = {"n_tokens": self.n_tokens, "experts": self.experts}
        if self.shape is not None:
            tree = DraftTree(drafter, self.n_tokens, self.shape)

            def branch(rows: RowState[Any, Any], budget: jax.Array) -> tuple[Round, RowState[Any, Any]]:
                return tree_round(target, tree, rows, slots.rows, budget, slots.ends, **options)

            return branch
        chain = DraftChain(drafter, self.n_tokens)
        options |= {"k": k, "rule": self.rule, "simulated": self.simulated_of(k)}

        def step(rows: RowState[Any, Any], budget: jax.Array) -> tuple[Round, RowState[Any, Any]]:
            return speculative_round(target, chain, rows, slots.rows, budget, slots.ends, **options)

        return step


def n_compiled(program: Any) -> int:
    """Entries in the cache of a jitted function."""
    return program._cache_size()
