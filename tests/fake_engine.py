"""An engine without a model: it says what it is told to, through the real request type and the real checks."""

import threading
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from kimijax.engine.config import EngineConfig
from kimijax.engine.engine import Engine
from kimijax.engine.request import Request, Sampling, StepOutput, TokenLogprobs
from kimijax.engine.scheduler import QueueFullError
from kimijax.engine.stats import EngineStats

SMALL = EngineConfig(max_batch=2, context_length=64, page_size=8, chunk_size=64, max_queued=2)


def token_logprobs(request: Request, position: int, token: int) -> TokenLogprobs:
    """Invented, but always the same: the token's own entry, and those of the ids that follow it."""
    own = -0.25 * (1 + (token + position) % 5)
    n = request.sampling.logprobs or 0
    return TokenLogprobs(token, own, tuple((token + i, own - 0.5 * i) for i in range(n)))


class FakeEngine:
    """`script` gives the tokens of a request's answer; after them comes `end`. Each running request gets `per_step`
    tokens a step. With `gate` set, a step waits for one `release()`.

    Where a constraint does not allow the script's token, `end` comes if it is allowed, or else the lowest id that is.
    """

    def __init__(
        self,
        script: Callable[[Request], Sequence[int]],
        *,
        end: int = 0,
        vocab_size: int = 517,
        config: EngineConfig = SMALL,
        per_step: int = 1,
        gate: threading.Semaphore | None = None,
    ) -> None:
        self.config, self.script, self.end, self.per_step, self.gate = config, script, end, per_step, gate
        self.vocab_size = self.n_tokens = vocab_size
        self.stop_ids = frozenset({end})
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.free_pages = config.total_pages
        self.cached_at_start = 0  # of every request
        self.failures: list[Exception] = []  # each is raised by one step
        self.recover_fails = False
        self.threads: set[str] = set()  # names of the threads that touched the engine
        self.cancelled: list[str] = []

    def make_request(self, prompt: Sequence[int], sampling: Sampling, *, id: str | None = None) -> Request:
        return Engine.make_request(cast(Engine, self), prompt, sampling, id=id)

    def add(self, request: Request) -> None:
        self._note_thread()
        if len(self.waiting) + len(self.running) >= self.config.max_queued + self.config.max_batch:
            raise QueueFullError("queue", f"{len(self.waiting)} requests are waiting, the limit")
        self.waiting.append(request)

    def cancel(self, request_id: str) -> None:
        self._note_thread()
        self.cancelled.append(request_id)
        self.waiting = [r for r in self.waiting if r.id != request_id]
        for request in [r for r in self.running if r.id == request_id]:
            self._finish(request)

    def step(self) -> list[StepOutput]:
        self._note_thread()
        if self.gate is not None:
            self.gate.acquire()
        while self.waiting and len(self.running) < self.config.max_batch:
            request = self.waiting.pop(0)
            request.cached_at_start = self.cached_at_start
            self.free_pages -= 1
            self.running.append(request)
        if self.failures:
            raise self.failures.pop(0)
        return [self._advance(request) for request in list(self.running)]

    def _advance(self, request: Request) -> StepOutput:
        script = self.script(request)
        new: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for _ in range(self.per_step):
            at = len(request.output)
            token = self._allowed(request, script[at] if at < len(script) else self.end)
            new.append(token)
            if request.sampling.logprobs is not None:
                logprobs.append(token_logprobs(request, at, token))
            if request.append(token):
                self._finish(request)
                break
        return StepOutput(request.id, tuple(new), request.finish_reason, logprobs=tuple(logprobs))

    def _allowed(self, request: Request, token: int) -> int:
        """What is drawn instead of `token`, or it itself, where there is a constraint; which is told."""
        if request.constraint is None:
            return token
        words = request.constraint.masks(())[0]
        ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        drawn = next((t for t in (token, self.end) if t in ids), int(ids[0]))
        request.constraint.commit((drawn,))
        return drawn

    def _finish(self, request: Request) -> None:
        self.running.remove(request)
        self.free_pages += 1

    def _note_thread(self) -> None:
        self.threads.add(threading.current_thread().name)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def stats(self) -> EngineStats:
        return EngineStats(len(self.running), len(self.waiting), self.free_pages, self.config.total_pages)

    def recover(self) -> list[StepOutput]:
        if self.recover_fails:
            raise RuntimeError("the device is gone")
        dropped = list(self.running)
        for request in dropped:
            self._finish(request)
        return [StepOutput(r.id, (), "abort", "the engine step failed") for r in dropped]
