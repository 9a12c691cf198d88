"""Runs an engine on a thread of its own, so that whoever submits a request never waits for a step.

Only that thread touches the engine. Everything else reaches it through a queue of commands, read between two steps: a
cancelled request is gone before the next step begins. Results go out through the callback given with each request.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from .request import Request, StepOutput
from .stats import EngineStats

log = logging.getLogger(__name__)

Deliver = Callable[[StepOutput], None]
Watch = Callable[[EngineStats], None]


class SteppedEngine(Protocol):
    """What the runner needs of an engine; see `kimijax.engine.engine.Engine`."""

    def add(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def step(self) -> list[StepOutput]: ...
    @property
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def recover(self) -> list[StepOutput]: ...


class RunnerStoppedError(RuntimeError):
    """A request came after the engine was stopped, or after it failed for good."""


@dataclass(frozen=True)
class _Submit:
    request: Request
    accepted: Future[None]


@dataclass(frozen=True)
class _Cancel:
    request_id: str


class _Stop:
    pass


class EngineRunner:
    """An engine and its thread. All methods may be called from any thread.

    Invariants: a request is in `_live` from `submit` until its last output, its cancellation or its refusal; the engine
    is touched by `_thread` only, once that has started.
    """

    def __init__(self, engine: SteppedEngine, watch: Watch | None = None) -> None:
        """`watch` gets the counters after each step, on the engine's thread: it must be quick, and must not raise."""
        self._engine, self._watch = engine, watch
        self._commands: queue.SimpleQueue[_Submit | _Cancel | _Stop] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards the four fields below
        self._live: dict[str, Deliver] = {}
        self._closed: str | None = None  # why no request is taken any more
        self._failure: Exception | None = None
        self._abandoned = False  # nobody waits for the thread any more
        self._busy_since: float | None = None  # written by the engine's thread alone
        self._stats = engine.stats()
        # A daemon, so that an exception elsewhere cannot keep the process alive; `stop` is the orderly end.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def submit(self, request: Request, deliver: Deliver) -> Future[None]:
        """Queue a request. `deliver` gets each of its outputs, on the engine's thread, and must not block.

        The future is done when the engine has taken the request, or holds the RequestError with which it refused, or a
        RunnerStoppedError. After `cancel` of the request a few outputs that were under way may still be delivered.
        """
        accepted: Future[None] = Future()
        with self._changed:
            if self._closed is not None:
                accepted.set_exception(RunnerStoppedError(self._closed))
                return accepted
            if request.id in self._live:
                raise ValueError(f"request id {request.id!r} is in use; every running request needs its own")
            self._live[request.id] = deliver
            self._commands.put(_Submit(request, accepted))
        return accepted

    def cancel(self, request_id: str) -> None:
        """End a request and free what it holds before the next step. Unknown and finished ids are ignored."""
        self._commands.put(_Cancel(request_id))

    def stats(self) -> EngineStats:
        """The engine's counters after its latest step or command."""
        return self._stats

    @property
    def failure(self) -> Exception | None:
        """What ended the engine for good, if something did."""
        return self._failure

    def last_step_age(self) -> float:
        """Seconds since the engine last made progress on its work; 0.0 while it has none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def drain(self, timeout: float) -> bool:
        """Take no more requests and wait until all that were taken are over; False if some are not within `timeout` s.

        May be called again to wait longer.
        """
        with self._changed:
            self._closed = self._closed or "the server is shutting down"
            return self._changed.wait_for(lambda: not self._live, timeout)

    def fail(self, reason: str) -> None:
        """End every request with an error and take no more, though the engine's thread may never leave its step."""
        with self._changed:
            self._failure, self._closed, self._abandoned = RuntimeError(reason), reason, True
        self._end_all(reason)

    def stop(self) -> None:
        """Cut what still runs (its last output has finish_reason "abort"), end the thread and wait for that."""
        with self._changed:
            self._closed = self._closed or "the engine was stopped"
        if self._thread.is_alive() and not self._abandoned:
            self._commands.put(_Stop())
            self._thread.join()

    def _run(self) -> None:
        reason = "abort"
        try:
            while self._handle_commands():
                if self._engine.has_work:
                    self._busy_since = time.monotonic()
                    self._step()
                    self._stats = self._engine.stats()
                    if self._watch is not None:
                        self._watch(self._stats)
            for request_id in list(self._live):
                self._engine.cancel(request_id)
            self._stats = self._engine.stats()
        except Exception as error:
            # Nothing is known of the engine's state any more. The process stays, to say so when asked for its health.
            log.exception("the engine failed and could not be restored; it takes no more requests")
            reason = f"the engine failed: {error}"
            with self._changed:
                self._failure, self._closed = error, reason
        self._busy_since = None
        self._end_all(None if reason == "abort" else reason)

    def _handle_commands(self) -> bool:
        """Carry out the commands that wait; sleep until there is one when the engine has nothing to do."""
        if not self._engine.has_work:
            self._busy_since = None
            if not self._handle(self._commands.get()):
                return False
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return True
            if not self._handle(command):
                return False

    def _handle(self, command: _Submit | _Cancel | _Stop) -> bool:
        """Carry out one command; False when it was the last."""
        match command:
            case _Submit(request, accepted):
                self._add(request, accepted)
            case _Cancel(request_id):
                self._engine.cancel(request_id)
                self._forget(request_id)
            case _Stop():
                return False
        self._stats = self._engine.stats()
        return True

    def _add(self, request: Request, accepted: Future[None]) -> None:
        if not accepted.set_running_or_notify_cancel():  # the caller has gone already
            self._forget(request.id)
            return
        try:
            self._engine.add(request)
        except ValueError as error:  # RequestError: this request's own fault
            self._forget(request.id)
            accepted.set_exception(error)
        except Exception as error:
            accepted.set_exception(error)
            raise
        else:
            accepted.set_result(None)

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception:
            log.exception("an engine step failed; the requests in it end with an error, the engine is restored")
            outputs = self._engine.recover()
        for output in outputs:
            self._deliver(output)

    def _deliver(self, output: StepOutput) -> None:
        with self._changed:
            deliver = self._live.get(output.request_id)
        if deliver is None:
            return
        try:
            deliver(output)
        except Exception:
            # The receiver's fault, and nobody else's: only its own request ends.
            log.exception("the receiver of request %s failed; the request is cancelled", output.request_id)
            self._engine.cancel(output.request_id)
            self._forget(output.request_id)
            return
        if output.finish_reason is not None:
            self._forget(output.request_id)

    def _forget(self, request_id: str) -> None:
        with self._changed:
            self._live.pop(request_id, None)
            self._changed.notify_all()

    def _end_all(self, error: str | None) -> None:
        """After the last step: every request that is left gets its last output, every waiting submit its refusal."""
        while (command := self._next()) is not None:
            if isinstance(command, _Submit) and command.accepted.set_running_or_notify_cancel():
                command.accepted.set_exception(RunnerStoppedError(self._closed))
                self._forget(command.request.id)
        with self._changed:
            left = list(self._live)
        for request_id in left:
            self._deliver_last(request_id, error)

    def _next(self) -> _Submit | _Cancel | _Stop | None:
        try:
            return self._commands.get_nowait()
        except queue.Empty:
            return None

    def _deliver_last(self, request_id: str, error: str | None) -> None:
        output = StepOutput(request_id, (), "abort", error)
        with self._changed:
            deliver = self._live.get(request_id)
        if deliver is None:
            return
        self._forget(request_id)
        try:
            deliver(output)
        except Exception:
            log.exception("the receiver of request %s failed at its last output", request_id)
