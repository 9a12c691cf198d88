"""The engine's thread: order of commands, failures, draining."""

import logging
import queue
import threading
import time

import pytest

from kimijax.engine.request import Request, Sampling, StepOutput
from kimijax.engine.runner import EngineRunner, RunnerStoppedError
from kimijax.engine.scheduler import QueueFullError

from .fake_engine import FakeEngine

WAIT = 10  # seconds; far more than anything here takes


def make_engine(gate: threading.Semaphore | None = None) -> FakeEngine:
    return FakeEngine(lambda request: [65, 66, 67], gate=gate)


def make(engine: FakeEngine, name: str, max_tokens: int | None = None) -> Request:
    return engine.make_request([1, 2, 3], Sampling(max_tokens=max_tokens), id=name)


class Inbox:
    """Collects the outputs of requests."""

    def __init__(self) -> None:
        self.queue: queue.Queue[StepOutput] = queue.Queue()

    def __call__(self, output: StepOutput) -> None:
        self.queue.put(output)

    def until_done(self) -> list[StepOutput]:
        outputs = [self.queue.get(timeout=WAIT)]
        while outputs[-1].finish_reason is None and outputs[-1].error is None:
            outputs.append(self.queue.get(timeout=WAIT))
        return outputs


def wait_until_idle(runner: EngineRunner) -> None:
    deadline = time.monotonic() + WAIT
    while runner.stats().n_running or runner.stats().n_waiting:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_outputs_arrive_in_order_from_the_engines_thread() -> None:
    engine, inbox = make_engine(), Inbox()
    threads: list[str] = []

    def deliver(output: StepOutput) -> None:
        threads.append(threading.current_thread().name)
        inbox(output)

    with EngineRunner(engine) as runner:
        runner.submit(make(engine, "a"), deliver).result(WAIT)
        outputs = inbox.until_done()
        runner.cancel("a")
        runner.cancel("never heard of")
        runner.submit(make(engine, "b"), inbox).result(WAIT)
        inbox.until_done()
        wait_until_idle(runner)
        assert runner.last_step_age() == 0.0
    assert [t for o in outputs for t in o.tokens] == [65, 66, 67, engine.end]
    assert outputs[-1].finish_reason == "stop"
    assert set(threads) == engine.threads == {"engine"}


def test_idle_runner_does_not_step() -> None:
    asked = 0

    class Counting(FakeEngine):
        @property
        def has_work(self) -> bool:
            nonlocal asked
            asked += 1
            return bool(self.running or self.waiting)

    engine = Counting(lambda request: [65])
    with EngineRunner(engine):
        time.sleep(0.1)
        assert asked <= 2


def test_refused_request_reaches_the_caller_only() -> None:
    gate = threading.Semaphore(0)
    engine, inbox = make_engine(gate), Inbox()
    with EngineRunner(engine) as runner:
        accepted = [runner.submit(make(engine, f"r{i}"), inbox) for i in range(5)]
        gate.release(100)
        errors = [f.exception(WAIT) for f in accepted]
        assert [type(e) for e in errors] == [type(None)] * 4 + [QueueFullError]
        finished = [inbox.until_done()[-1].request_id for _ in range(4)]
        assert sorted(finished) == ["r0", "r1", "r2", "r3"]


def test_two_requests_may_not_share_an_id() -> None:
    engine, inbox = make_engine(threading.Semaphore(4)), Inbox()
    runner = EngineRunner(engine)  # not started yet: nothing can finish in between
    runner.submit(make(engine, "a"), inbox)
    with pytest.raises(ValueError, match="'a' is in use"):
        runner.submit(make(engine, "a"), inbox)
    with runner:
        assert inbox.until_done()[-1].finish_reason == "stop"


def test_cancel_frees_pages_before_the_next_step() -> None:
    gate = threading.Semaphore(0)
    engine, inbox = make_engine(gate), Inbox()
    with EngineRunner(engine) as runner:
        before = runner.stats()
        runner.submit(make(engine, "a"), inbox).result(WAIT)
        gate.release()
        inbox.queue.get(timeout=WAIT)
        assert runner.stats().total_pages == before.total_pages
        runner.cancel("a")
        gate.release()  # the step that was under way
        wait_until_idle(runner)
        assert runner.stats() == before
        assert inbox.queue.qsize() <= 1  # from that step
        assert runner.drain(WAIT)


def test_step_age_grows_in_a_step_that_hangs() -> None:
    gate = threading.Semaphore(0)
    engine, inbox = make_engine(gate), Inbox()
    with EngineRunner(engine) as runner:
        runner.submit(make(engine, "a"), inbox).result(WAIT)
        time.sleep(0.05)
        assert runner.last_step_age() > 0.01
        gate.release(100)
        inbox.until_done()


def test_failed_step_ends_its_requests_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Semaphore(0)
    engine, inboxes = make_engine(gate), [Inbox() for _ in range(3)]
    engine.failures.append(RuntimeError("buffer has been deleted or donated"))
    with EngineRunner(engine) as runner, caplog.at_level(logging.CRITICAL, "kimijax.engine.runner"):
        for i, inbox in enumerate(inboxes):
            runner.submit(make(engine, f"r{i}"), inbox)
        gate.release(100)
        outputs = [inbox.until_done() for inbox in inboxes]
        later = Inbox()
        runner.submit(make(engine, "later"), later).result(WAIT)
        assert later.until_done()[-1].finish_reason == "stop"
        wait_until_idle(runner)
        assert runner.stats().free_pages == engine.config.total_pages
        assert runner.failure is None
    # Whether the third was already queued when the step began depends on timing; that it is not lost does not.
    assert outputs[0][-1].error == "the engine step failed"
    assert outputs[2][-1].finish_reason == "stop"


def test_engine_that_cannot_be_restored_ends_everything_and_says_so() -> None:
    gate = threading.Semaphore(0)
    engine, inbox = make_engine(gate), Inbox()
    engine.failures.append(RuntimeError("step"))
    engine.recover_fails = True
    runner = EngineRunner(engine).start()
    runner.submit(make(engine, "a"), inbox).result(WAIT)
    queued = runner.submit(make(engine, "b"), inbox)
    gate.release(100)
    ends = [inbox.until_done()[-1]]
    if queued.exception(WAIT) is None:
        ends.append(inbox.until_done()[-1])
    assert {e.error for e in ends} == {"the engine failed: the device is gone"}
    assert str(runner.failure) == "the device is gone"
    with pytest.raises(RunnerStoppedError, match="the device is gone"):
        runner.submit(make(engine, "c"), inbox).result(WAIT)
    assert runner.drain(WAIT)
    runner.stop()


def test_receiver_that_raises_loses_its_own_request_only() -> None:
    engine, inbox = make_engine(), Inbox()

    def broken(output: StepOutput) -> None:
        raise RuntimeError("event loop is closed")

    with EngineRunner(engine) as runner:
        runner.submit(make(engine, "broken"), broken).result(WAIT)
        runner.submit(make(engine, "good"), inbox).result(WAIT)
        assert inbox.until_done()[-1].finish_reason == "stop"
        assert runner.drain(WAIT)
    assert "broken" in engine.cancelled


def test_drain_waits_and_stop_cuts() -> None:
    gate = threading.Semaphore(0)
    engine, inbox = make_engine(gate), Inbox()
    runner = EngineRunner(engine).start()
    runner.submit(make(engine, "a"), inbox).result(WAIT)
    assert not runner.drain(0.01)
    with pytest.raises(RunnerStoppedError, match="shutting down"):
        runner.submit(make(engine, "b"), inbox).result(WAIT)
    gate.release(2)
    assert not runner.drain(0.05)
    stopper = threading.Thread(target=runner.stop)
    stopper.start()
    gate.release()
    stopper.join(WAIT)
    assert not stopper.is_alive()
    assert inbox.until_done()[-1].finish_reason == "abort"
    assert runner.stats().free_pages == engine.config.total_pages
    assert runner.drain(0)
    assert "engine" not in {t.name for t in threading.enumerate()}
