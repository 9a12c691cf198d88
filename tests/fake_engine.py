"""An engine without a model: it says what it is told to, through the real request type and the real checks."""

import threading
from collections.abc import Callable, Sequence
from typing import cast

from kimijax.engine.config import EngineConfig
from kimijax.engine.engine import Engine, EngineStats
from kimijax.engine.request import Request, Sampling, StepOutput
from kimijax.engine.scheduler import QueueFullError

SMALL = EngineConfig(max_batch=2, context_length=64, page_size=8, chunk_size=64, max_queued=2)


class FakeEngine:
    """`script` gives the tokens of a request's answer; after them comes `end`. Each running request gets `per_step`
    tokens a step. With `gate` set, a step waits for one `release()`."""

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
            request.pages = [0]
            self.free_pages -= 1
            self.running.append(request)
        if self.failures:
            raise self.failures.pop(0)
        return [self._advance(request) for request in list(self.running)]

    def _advance(self, request: Request) -> StepOutput:
        script = self.script(request)
        new: list[int] = []
        for _ in range(self.per_step):
            at = len(request.output)
            new.append(script[at] if at < len(script) else self.end)
            if request.append(new[-1]):
                self._finish(request)
                break
        return StepOutput(request.id, tuple(new), request.finish_reason)

    def _finish(self, request: Request) -> None:
        self.running.remove(request)
        self.free_pages += len(request.pages)

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
