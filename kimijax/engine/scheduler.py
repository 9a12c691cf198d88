"""Who runs next: admission, chunked prefill, decoding, preemption. Holds requests and pages, no arrays."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import RequestError
from .config import EngineConfig
from .pages import PagePool
from .request import Phase, Request


class QueueFullError(RequestError):
    """The waiting queue is at its limit; try again later."""


@dataclass(frozen=True)
class PrefillPlan:
    """Compute tokens start ... stop-1 of a request; `last` when the next token is then drawn."""

    request: Request
    start: int
    stop: int

    @property
    def last(self) -> bool:
        return self.stop == self.request.n_tokens


@dataclass(frozen=True)
class DecodePlan:
    """Draw up to `n_steps` tokens for each request."""

    requests: tuple[Request, ...]
    n_steps: int


class Scheduler:
    """First come, first served. A request holds pages for all its computed tokens; when pages run out, the request
    that came last gives its pages back and is computed again later, its output kept."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = PagePool(config.total_pages)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Raises QueueFullError when a full batch and `max_queued` requests more are here already.

        All of them are counted, whether they run or wait: requests that come in one go have not been admitted yet, and
        when pages are short the batch never fills up.
        """
        limit = self.config.max_batch + self.config.max_queued
        if len(self.running) + len(self.waiting) >= limit:
            raise QueueFullError("queue", f"{limit} requests are running or waiting, the limit; try again later")
        self.waiting.append(request)

    def find(self, request_id: str) -> Request | None:
        return next((r for r in (*self.running, *self.waiting) if r.id == request_id), None)

    def finish(self, request: Request) -> None:
        """Remove a request and free its pages, whatever it was doing."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)
        request.phase = Phase.FINISHED

    def plan_prefill(self) -> PrefillPlan | None:
        """The next chunk of prompt, admitting a waiting request if none is half way."""
        request = next((r for r in self.running if r.phase is Phase.PREFILL), None) or self._admit()
        if request is None:
            return None
        return PrefillPlan(request, request.cached, min(request.cached + self.config.chunk_size, request.n_tokens))

    def plan_decode(self) -> DecodePlan | None:
        """All requests that decode, with pages for every token of the burst."""
        pending = self._can_admit() or any(r.phase is Phase.PREFILL for r in self.running)
        n_steps = 1 if pending else self.config.burst  # a waiting prompt is not kept waiting by a whole burst
        for request in [r for r in self.running if r.phase is Phase.DECODE]:
            while request.phase is Phase.DECODE and not self._grow(request, self._reach(request, n_steps)):
                self._preempt(self.running[-1])
        ready = tuple(r for r in self.running if r.phase is Phase.DECODE)
        return DecodePlan(ready, n_steps) if ready else None

    def _reach(self, request: Request, n_steps: int) -> int:
        """Tokens cached after a burst; never more than the context, whose last token is not computed."""
        return min(request.cached + n_steps, self.config.context_length)

    def _can_admit(self) -> bool:
        """Whether the first waiting request finds a place, and pages for all its tokens."""
        if not self.waiting or len(self.running) >= self.config.max_batch:
            return False
        return self._pages_for(self.waiting[0].n_tokens) <= self.pool.n_free

    def _admit(self) -> Request | None:
        """Start the first waiting request. It gets the pages of its whole prompt: half a prompt is work for nothing."""
        if not self._can_admit():
            return None
        request = self.waiting.popleft()
        self._grow(request, request.n_tokens)
        request.phase = Phase.PREFILL
        self.running.append(request)
        return request

    def _pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.config.page_size)

    def _grow(self, request: Request, n_tokens: int) -> bool:
        """Give a request pages for n_tokens; False when there are too few."""
        missing = self._pages_for(n_tokens) - len(request.pages)
        if missing <= 0:
            return True
        pages = self.pool.take(missing)
        if pages is None:
            return False
        request.pages.extend(pages)
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.phase = Phase.WAITING
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.pool.give_back(request.pages)
        request.pages = []
        request.cached = 0

    def check_integrity(self) -> None:
        """Raises RuntimeError on a leaked, shared or foreign page, or a request in two places."""
        self.pool.check_integrity([r.pages for r in self.running])
        held = [r.id for r in self.waiting if r.pages]
        if held:
            raise RuntimeError(f"waiting requests hold pages: {held}")
        everyone: Iterable[Request] = (*self.running, *self.waiting)
        ids = [r.id for r in everyone]
        if len(ids) != len(set(ids)):
            raise RuntimeError("a request is queued twice")
