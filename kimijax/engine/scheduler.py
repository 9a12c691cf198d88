"""Who runs next: admission, chunked prefill, decoding, preemption. Holds requests and pages, no arrays.

What a step that is under way does to a request is not known when the next one is planned: `Request.cached` is what is
known, `Request.in_flight` how many tokens may have come on top.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import RequestError
from .config import EngineConfig
from .pages import PagePool
from .prefix import PageCopy, PrefixCache
from .request import Phase, Request


class QueueFullError(RequestError):
    """The waiting queue is at its limit; try again later."""


@dataclass(frozen=True)
class PrefillPlan:
    """Compute rows start ... stop - 1 of a request, after the copy; `last`: then it decodes. There may be no rows."""

    request: Request
    start: int
    stop: int
    pages: tuple[int, ...]  # the request's when this was planned: it may change over to others' while this is under way
    copy: PageCopy | None

    @property
    def last(self) -> bool:
        return self.stop == self.request.n_tokens - 1


def _order(request: Request) -> tuple[int, int]:
    """Who comes first, and gives way last."""
    return request.sampling.priority, request.arrival


class Scheduler:
    """First come, first served, among requests of one priority. A request holds pages for all its computed tokens; when
    pages run out, the request that comes last gives its pages back and is computed again later, its output kept: what
    of its pages nobody needed meanwhile is found in the prefix cache.

    Where requests are spread over groups of devices each group has its own places and pages: an equal share of them,
    in order. A request stays in its group while it runs."""

    def __init__(
        self,
        config: EngineConfig,
        n_pages: int,
        *,
        drafter: bool,
        reach: int = 1,
        room: int = 1,
        n_groups: int = 1,
    ) -> None:
        """Args:
        config: sizes.
        n_pages: of all pools.
        drafter: whether pages hold a drafter's rows, too.
        reach: rows from its length on that a request's first step may write: it is admitted with pages for them.
        room: rows from a request's last token on that its last round may write.
        n_groups: of devices; it divides places and pages.
        """
        self.config, self._reach, self._room = config, reach, room
        share, self._n_places = n_pages // n_groups, config.max_batch // n_groups
        pools = [PagePool(share, i * share) for i in range(n_groups)]
        self.prefixes = [PrefixCache(pool, config.page_size, drafter=drafter) for pool in pools]
        self.waiting: list[Request] = []  # in their order
        self.running: list[Request] = []  # in their order
        self.n_preempted = self.n_prompt_tokens = self.n_cached_tokens = 0
        self._refused: Request | None = None  # the last that asked to be admitted, if in vain
        self._by_id: dict[str, Request] = {}
        of_group = [range(i * self._n_places, (i + 1) * self._n_places) for i in range(n_groups)]
        self._places = [list(reversed(places)) for places in of_group]  # free ones, popped from the end
        self._arrivals = itertools.count()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def n_available(self) -> int:
        """Pages that requests could get now, in all groups."""
        return sum(prefix.n_available for prefix in self.prefixes)

    @property
    def n_pages(self) -> int:
        return sum(prefix.pool.n_pages for prefix in self.prefixes)

    def group_of(self, request: Request) -> int:
        """Where a running request is."""
        return request.place // self._n_places

    def prefix_of(self, request: Request) -> PrefixCache:
        """Of a running request's group."""
        return self.prefixes[request.place // self._n_places]

    def clear(self) -> None:
        """Forget all prefixes, as when the cache's arrays are new; nothing may be running."""
        for prefix in self.prefixes:
            prefix.clear()

    def add(self, request: Request) -> None:
        """Raises QueueFullError when a full batch and `max_queued` requests more are here already.

        All of them are counted, whether they run or wait: requests that come in one go have not been admitted yet, and
        when pages are short the batch never fills up.
        """
        limit = self.config.max_batch + self.config.max_queued
        if len(self._by_id) >= limit:
            raise QueueFullError("queue", f"{limit} requests are running or waiting, the limit; try again later")
        if request.id in self._by_id:
            raise RuntimeError(f"a request with id {request.id!r} is here already")
        request.arrival = next(self._arrivals)
        self._by_id[request.id] = request
        bisect.insort(self.waiting, request, key=_order)

    def find(self, request_id: str) -> Request | None:
        return self._by_id.get(request_id)

    def finish(self, request: Request) -> None:
        """Remove a request and free its pages, whatever it was doing."""
        if self._by_id.pop(request.id, None) is None:
            return
        (self.running if request.place >= 0 else self.waiting).remove(request)
        self._release(request)
        request.phase = Phase.FINISHED

    def plan_prefill(self) -> list[PrefillPlan]:
        """Chunks of prompts, up to `chunk_size` tokens in all; waiting requests are admitted for what is left of that.

        A request that is planned for counts as computed: its plan must be carried out before the next is made.
        """
        plans: list[PrefillPlan] = []
        budget = self.config.chunk_size
        begun = deque(r for r in self.running if r.phase is Phase.PREFILL)
        while budget > 0:
            outranked = bool(begun and self.waiting) and _order(self.waiting[0]) < _order(begun[0])
            request = self._admit() if outranked or not begun else None
            if request is None and begun:
                request = begun.popleft()
            if request is None:
                break
            start = request.cached
            stop = min(start + budget, request.n_tokens - 1)
            lease, prefix = request.lease, self.prefix_of(request)
            assert lease is not None
            # The state behind the plan, although it is not carried out: programs run in the order of their plans.
            plans.append(PrefillPlan(request, start, stop, tuple(lease.pages), prefix.copy(lease)))
            prefix.copied(lease)
            request.cached = stop
            if self.config.prefix_cache:
                prefix.insert(lease, request, stop)
            # A prompt that needs no computing costs a program, too.
            budget -= max(stop - start, 1)
            if plans[-1].last:
                request.phase = Phase.DECODE
        return plans

    def ready(self) -> list[Request]:
        """Requests that decode and may have tokens left to draw when the steps under way are done."""
        return [r for r in self.running if r.phase is Phase.DECODE and len(r.output) + r.in_flight_least < r.limit]

    @property
    def wants_prefill(self) -> bool:
        """Whether a prompt waits that could be computed now: it is not kept waiting by a long step."""
        return any(r.phase is Phase.PREFILL for r in self.running) or self._can_admit()

    def grow(self, requests: Iterable[Request], reach: int) -> list[Request]:
        """Pages for `reach` rows more of each, as far as it can come. Returns those that found none."""
        short: list[Request] = []
        size = self.config.page_size
        for r in requests:
            lease = r.lease
            assert lease is not None
            rows = r.cached + r.in_flight + reach
            # Asked in every step, and nearly always there.
            if rows > len(lease.pages) * size and not self.prefix_of(r).grow(lease, min(rows, self._most_rows(r))):
                short.append(r)
        return short

    def preempt(self, group: int | None = None) -> Request:
        """Take its pages from the request that comes last, in one group or in all; there must be nothing under way."""
        request = next(r for r in reversed(self.running) if group is None or self.group_of(r) == group)
        if request.in_flight:
            raise RuntimeError(f"request {request.id} is preempted with {request.in_flight} tokens under way")
        self.running.remove(request)
        self._release(request)
        request.phase = Phase.WAITING
        bisect.insort(self.waiting, request, key=_order)
        self.n_preempted += 1
        return request

    def begin(self, requests: Iterable[Request], most: int, least: int) -> None:
        """A step is under way that adds so many tokens to each request; `commit` ends it."""
        for r in requests:
            r.in_flight += most
            r.in_flight_least += least

    def commit(self, request: Request, n_new: int, most: int, least: int) -> None:
        """A step that brought `n_new` tokens is read: all but the last are cached; others may find its full pages."""
        request.in_flight -= most
        request.in_flight_least -= least
        request.cached = cached = request.cached + n_new
        lease = request.lease
        # Asked in every step, and true once a page.
        if lease is not None and cached >= (lease.n_cached + 1) * self.config.page_size and self.config.prefix_cache:
            self.prefix_of(request).insert(lease, request, request.cached)

    def _can_admit(self) -> bool:
        """Whether the first waiting request finds a place, and about enough pages for all its tokens."""
        if not self.waiting:
            return False
        n = -(-self._first_rows(self.waiting[0]) // self.config.page_size)
        pairs = zip(self._places, self.prefixes, strict=True)
        return any(places and n <= prefix.n_available for places, prefix in pairs)

    def _admit(self) -> Request | None:
        """Start the first waiting request. It gets the pages of its whole prompt: half a prompt is work for nothing."""
        if not self.waiting:
            return None
        request = self._refused = self.waiting[0]
        rows = self._first_rows(request)
        leases = ((group, self.prefixes[group].admit(request, rows)) for group in self._groups_for(request))
        group, lease = next((found for found in leases if found[1] is not None), (0, None))
        if lease is None:
            return None
        self._refused = None
        del self.waiting[0]
        if not request.was_admitted:
            request.was_admitted, request.cached_at_start = True, lease.start
            self.n_prompt_tokens += request.n_tokens
            self.n_cached_tokens += lease.start
        request.lease, request.cached = lease, lease.start
        request.place = self._places[group].pop()
        request.phase = Phase.PREFILL
        bisect.insort(self.running, request, key=_order)
        return request

    def _groups_for(self, request: Request) -> list[int]:
        """Groups with a free place, the best first: where most of it is cached, then where most pages are free."""
        free = [group for group, places in enumerate(self._places) if places]
        if len(free) < 2:
            return free
        found = {group: self.prefixes[group].n_cached(request) for group in free}
        return sorted(free, key=lambda group: (-found[group], -self.prefixes[group].n_available))

    def _first_rows(self, request: Request) -> int:
        """Rows that it is admitted with: those of a first step too, or it would have to give way at once."""
        return min(request.n_tokens - 1 + self._reach, self._most_rows(request))

    def _most_rows(self, request: Request) -> int:
        """Rows that it can ever write."""
        return len(request.prompt) + request.limit - 1 + self._room

    def _release(self, request: Request) -> None:
        if request.lease is not None:
            self.prefix_of(request).release(request.lease)
            request.lease = None
        if request.place >= 0:
            self._places[self.group_of(request)].append(request.place)
            request.place = -1
        request.cached = request.in_flight = request.in_flight_least = 0

    def outranked(self) -> bool:
        """Whether the first waiting request, which found no place or too few pages, comes before one that runs."""
        if self._refused is None or not self.waiting or self.waiting[0] is not self._refused or not self.running:
            return False
        return self._refused.sampling.priority < self.running[-1].sampling.priority

    def check_integrity(self) -> None:
        """Raises RuntimeError on a leaked, shared or foreign page, or a request in two places."""
        if any(r.lease is None for r in self.running):
            raise RuntimeError("a running request holds no pages")
        for group, prefix in enumerate(self.prefixes):
            own = [r.lease for r in self.running if r.lease is not None and self.group_of(r) == group]
            prefix.check_integrity(own)
        held = [r.id for r in self.waiting if r.lease is not None or r.place >= 0]
        if held:
            raise RuntimeError(f"waiting requests hold pages or places: {held}")
        ids = [r.id for r in (*self.running, *self.waiting)]
        if sorted(ids) != sorted(self._by_id):
            raise RuntimeError("the queues do not hold each request once")
        free = [place for places in self._places for place in places]
        if sorted([*free, *(r.place for r in self.running)]) != list(range(self.config.max_batch)):
            raise RuntimeError("free and taken places are not all places, each once")
        for queue in (self.waiting, self.running):
            if queue != sorted(queue, key=_order):
                raise RuntimeError("a queue is out of order")
