"""Admission, chunked prefill, decoding and preemption, with an engine whose programs are a few lines of Python.

The fake programs keep what each page holds and check it: a token computed without its predecessors in its own pages, a
page written by two requests or a donated cache used again fails at once. The next token is a hash of all before it, so
that an output is right only if every token of it was.
"""

import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kimijax.engine import engine as engine_module
from kimijax.engine.config import EngineConfig, bucket
from kimijax.engine.engine import Engine
from kimijax.engine.pages import PagePool
from kimijax.engine.request import Phase, Request, Sampling, StepOutput
from kimijax.engine.scheduler import PrefillPlan, QueueFullError
from kimijax.errors import ConfigError
from kimijax.model import Target

VOCABULARY = 40
EOS = 0


def next_token(tokens: Sequence[int]) -> int:
    return zlib.crc32(bytes(tokens)) % VOCABULARY


def expected_output(request: Request) -> list[int]:
    """What a request must draw, worked out without an engine."""
    output: list[int] = []
    while len(output) < request.limit and not (output and output[-1] in request.stop_ids):
        output.append(next_token([*request.prompt, *output]))
    return output


class FakeCache:
    """(page, offset) -> token; unusable once it was given to a program, as a donated buffer is."""

    def __init__(self, slots: dict[tuple[int, int], int]) -> None:
        self._slots: dict[tuple[int, int], int] | None = slots

    def donate(self) -> dict[tuple[int, int], int]:
        assert self._slots is not None, "buffer has been deleted or donated"
        slots, self._slots = self._slots, None
        return slots


class FakePrograms:
    """Stands in for `kimijax.engine.programs.Programs`."""

    def __init__(self, model: Target, config: EngineConfig, n_tokens: int, mesh: object, experts: str) -> None:
        self.config = config
        self.failing = ""  # name of the program that raises next, after it took the cache

    def new_cache(self) -> FakeCache:
        return FakeCache({})

    def prefill(self, cache: FakeCache, plan: PrefillPlan) -> tuple[FakeCache, np.ndarray]:
        slots, request = self._take(cache, "prefill"), plan.request
        assert request.cached == plan.start
        assert 0 < plan.stop - plan.start <= self.config.chunk_size
        self._check(slots, request, plan.start)
        for at in range(plan.start, plan.stop):
            slots[self._place(request, at)] = request.token(at)
        drawn = next_token(request.tokens(0, plan.stop)) if plan.last else -1
        return FakeCache(slots), np.asarray([drawn])

    def decode(self, cache: FakeCache, requests: Sequence[Request], n_steps: int) -> tuple[FakeCache, np.ndarray]:
        slots = self._take(cache, "decode")
        assert 0 < len(requests) <= self.config.max_batch
        assert 0 < n_steps <= self.config.burst
        drawn = np.full((bucket(len(requests), self.config.batch_sizes), self.config.burst), -1)
        for row, request in zip(drawn, requests, strict=False):
            assert request.cached == request.n_tokens - 1
            self._check(slots, request, request.cached)
            tokens = request.tokens(0, request.n_tokens)
            for i in range(n_steps):
                if len(tokens) <= self.config.context_length:  # what follows is drawn, but belongs to nobody
                    slots[self._place(request, len(tokens) - 1)] = tokens[-1]
                row[i] = next_token(tokens)
                tokens.append(int(row[i]))
        return FakeCache(slots), drawn

    def _take(self, cache: FakeCache, name: str) -> dict[tuple[int, int], int]:
        slots = cache.donate()
        if self.failing == name:
            self.failing = ""
            raise RuntimeError("injected")
        return slots

    def _place(self, request: Request, at: int) -> tuple[int, int]:
        return request.pages[at // self.config.page_size], at % self.config.page_size

    def _check(self, slots: dict[tuple[int, int], int], request: Request, n: int) -> None:
        found = [slots[self._place(request, at)] for at in range(n)]
        assert found == request.tokens(0, n), f"request {request.id} reads tokens that are not its own"


def make_engine(**sizes: Any) -> tuple[Engine, FakePrograms]:
    config = EngineConfig(**sizes)
    model = SimpleNamespace(config=SimpleNamespace(max_positions=config.context_length, vocab_size=VOCABULARY))
    with mock.patch.object(engine_module, "Programs", FakePrograms):
        engine = Engine(cast(Target, model), config, stop_ids=[EOS])
    return engine, cast(FakePrograms, engine._programs)


def everyone(engine: Engine) -> list[Request]:
    return [*engine._scheduler.running, *engine._scheduler.waiting]


class EngineMachine(RuleBasedStateMachine):
    """Random traffic through tiny pools: nothing is lost, mixed up, leaked or stuck."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, Request] = {}
        self.found: dict[str, list[int]] = {}
        self.n_added = 0

    @initialize(
        page_size=st.integers(1, 4),
        context_pages=st.integers(2, 5),
        spare_pages=st.integers(0, 6),
        max_batch=st.integers(1, 4),
        chunk_size=st.integers(1, 9),
        burst=st.integers(1, 5),
        max_queued=st.integers(0, 4),
    )
    def start(self, page_size: int, context_pages: int, spare_pages: int, **sizes: int) -> None:
        self.engine, self.programs = make_engine(
            page_size=page_size,
            context_length=page_size * context_pages,
            n_pages=context_pages + spare_pages,
            batch_factor=2,
            **sizes,
        )

    @rule(share=st.floats(0, 1), max_tokens=st.none() | st.integers(1, 12), ignore_eos=st.booleans())
    def add(self, share: float, max_tokens: int | None, ignore_eos: bool) -> None:
        config = self.engine.config
        self.n_added += 1
        n = 1 + int(share * (config.context_length - 2))
        prompt = [(self.n_added * 7 + i * i) % VOCABULARY for i in range(n)]
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos)
        request = self.engine.make_request(prompt, sampling, id=f"{self.n_added:04}")
        full = len(self.live) >= config.max_batch + config.max_queued
        if full:
            with pytest.raises(QueueFullError):
                self.engine.add(request)
            return
        self.engine.add(request)
        self.live[request.id], self.found[request.id] = request, []

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        request = list(self.live.values())[which % len(self.live)]
        pages, free = len(request.pages), self.engine.stats().free_pages
        self.engine.cancel(request.id)
        assert self.engine.stats().free_pages == free + pages
        self.engine.cancel(request.id)  # and again: an id that is not known any more
        assert request.phase is Phase.FINISHED
        del self.live[request.id]

    @rule(n=st.integers(1, 4))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.step_once()

    def step_once(self) -> None:
        oldest = min(self.live.values(), key=lambda r: r.id, default=None)
        before = (len(oldest.output), oldest.cached) if oldest else (0, 0)
        self.deliver(self.engine.step())
        if oldest is not None and oldest.phase is not Phase.FINISHED:
            assert (len(oldest.output), oldest.cached) > before, "the oldest request stands still"

    @precondition(lambda self: self.live)
    @rule(name=st.sampled_from(["prefill", "decode"]))
    def failing_step(self, name: str) -> None:
        self.programs.failing = name
        try:
            self.deliver(self.engine.step())
            self.programs.failing = ""  # that program was not needed
        except RuntimeError:
            hurt = {r.id for r in self.engine._scheduler.running}
            outputs = self.engine.recover()
            assert {o.request_id for o in outputs if o.error} == hurt
            assert self.engine.stats().free_pages == self.engine.stats().total_pages
            self.deliver(outputs)

    def deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            request = self.live[output.request_id]
            self.found[request.id] += output.tokens
            assert output.tokens or output.error
            right = expected_output(request)
            assert self.found[request.id] == right[: len(self.found[request.id])]
            assert (output.finish_reason == "abort") == bool(output.error)
            if output.finish_reason in ("stop", "length"):
                assert self.found[request.id] == right
                assert request.phase is Phase.FINISHED
                assert output.finish_reason == ("stop" if right[-1] in request.stop_ids else "length")
            if output.finish_reason is not None:
                del self.live[request.id]

    @invariant()
    def holds_together(self) -> None:
        if "engine" not in vars(self):
            return
        self.engine.check_integrity()
        held = everyone(self.engine)
        assert [r.id for r in held] == sorted(self.live), "a request was lost, or overtook another"
        assert len(self.engine._scheduler.running) <= self.engine.config.max_batch
        assert self.engine.has_work == bool(self.live)
        for request in held:
            assert self.found[request.id] == request.output
            assert request.cached <= len(request.pages) * self.engine.config.page_size

    def teardown(self) -> None:
        if "engine" not in vars(self):
            return
        # Each step moves the oldest request by a chunk or a token: a bound on the steps that are left.
        bound = sum(2 * (len(r.prompt) + r.limit) + 2 for r in self.live.values())
        for _ in range(bound):
            if not self.live:
                break
            self.step_once()
            self.holds_together()
        assert not self.live
        assert self.engine.stats().free_pages == self.engine.stats().total_pages
        assert self.engine.step() == []


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(settings.get_profile("kimijax"), max_examples=200, stateful_step_count=40)


def run_to_end(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for _ in range(1000):
        if not engine.has_work:
            return found
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.tokens)
        engine.check_integrity()
    raise AssertionError("the engine does not come to an end")


def test_the_youngest_gives_way_and_keeps_its_output() -> None:
    engine, _ = make_engine(max_batch=2, context_length=16, page_size=2, n_pages=8, chunk_size=16, burst=2)
    first, second = (engine.make_request([i] * 6, Sampling(max_tokens=10, ignore_eos=True), id=str(i)) for i in (1, 2))
    engine.add(first)
    engine.add(second)
    preempted_at = None
    for _ in range(100):
        engine.step()
        assert first.phase is not Phase.WAITING
        if second.phase is Phase.WAITING and second.output:
            preempted_at = len(second.output)
            assert second.pages == []
            break
    assert preempted_at
    assert engine._scheduler.waiting[0] is second
    run_to_end(engine)
    assert first.output == expected_output(first)
    assert second.output == expected_output(second)
    assert len(second.output) == 10


def test_a_step_that_fails_late_delivers_what_it_had_finished() -> None:
    """A request of one token ends in the prefill of the very step whose decoding fails: its answer must not be lost."""
    engine, programs = make_engine(max_batch=2, context_length=16, page_size=2)
    old = engine.make_request([1, 2], Sampling(ignore_eos=True), id="old")
    engine.add(old)
    engine.step()
    short = engine.make_request([3, 4], Sampling(max_tokens=1), id="short")
    engine.add(short)
    programs.failing = "decode"
    with pytest.raises(RuntimeError, match="injected"):
        engine.step()
    first, second = engine.recover()
    assert first == StepOutput("short", (next_token([3, 4]),), "stop" if short.output[0] == EOS else "length")
    assert second.request_id == "old"
    assert second.finish_reason == "abort"
    assert second.error
    assert engine.recover() == []
    assert not engine.has_work
    again = engine.make_request([1, 2], Sampling(max_tokens=3))
    engine.add(again)
    assert run_to_end(engine) == {again.id: expected_output(again)}


def test_waiting_requests_outlive_a_failed_step() -> None:
    engine, programs = make_engine(max_batch=1, context_length=16, page_size=2)
    requests = [engine.make_request([i], Sampling(max_tokens=4), id=str(i)) for i in range(3)]
    for request in requests:
        engine.add(request)
    programs.failing = "prefill"
    with pytest.raises(RuntimeError, match="injected"):
        engine.step()
    assert [o.request_id for o in engine.recover()] == ["0"]
    assert run_to_end(engine) == {r.id: expected_output(r) for r in requests[1:]}


def test_the_queue_has_a_limit_before_the_first_step_too() -> None:
    engine, _ = make_engine(max_batch=1, max_queued=2, context_length=16, page_size=2)
    requests = [engine.make_request([i], Sampling(max_tokens=2), id=str(i)) for i in range(5)]
    for request in requests[:3]:
        engine.add(request)
    for request in requests[3:]:
        with pytest.raises(QueueFullError, match="queue: 3 requests are running or waiting, the limit"):
            engine.add(request)
    assert set(run_to_end(engine)) == {"0", "1", "2"}
    engine.add(requests[3])


@pytest.mark.parametrize(
    ("max_tokens", "output", "reason"),
    [(5, [3, 4, 7, 8, 9], "stop"), (4, [3, 4, 7, 8], "length"), (1000, [3, 4, 7, 8, 9], "stop"), (1, [3], "length")],
)
def test_end_inside_a_burst(max_tokens: int, output: list[int], reason: str) -> None:
    """Two tokens are out; 7, 8, the end token 9 and one more come in one burst: the end token's place decides first."""
    engine, programs = make_engine(max_batch=1, context_length=64, page_size=8, burst=4)
    script = [3, 4, 7, 8, 9, 11]
    request = engine.make_request([1, 2], Sampling(max_tokens=max_tokens, stop_token_ids=(9,)))
    engine.add(request)
    found: list[StepOutput] = []

    def scripted(tokens: Sequence[int]) -> int:
        made = len(tokens) - 2
        return script[made] if made < len(script) else 5

    with mock.patch(f"{__name__}.next_token", scripted):
        found += engine.step()  # draws 3, then a burst of 4
        while engine.has_work:
            found += engine.step()
    assert [t for o in found for t in o.tokens] == output
    assert [o.finish_reason for o in found if o.finish_reason] == [reason]
    assert request.output == output
    assert programs.config.burst == 4


def test_pages_are_counted() -> None:
    pool = PagePool(4)
    first, second = pool.take(3), pool.take(1)
    assert (first, second) == ([0, 1, 2], [3])
    assert first is not None
    assert second is not None
    assert pool.take(1) is None
    assert pool.take(0) == []
    pool.check_integrity([first, second])
    with pytest.raises(RuntimeError, match="two holders"):
        pool.check_integrity([first, second, [3]])
    with pytest.raises(RuntimeError, match=r"leaked pages \[3\]"):
        pool.check_integrity([first])
    pool.give_back(second)
    with pytest.raises(RuntimeError, match="page 3 is given back but was not taken"):
        pool.give_back(second)
    with pytest.raises(RuntimeError, match=r"foreign \[3\]"):
        pool.check_integrity([first, [3]])
    assert pool.n_free == 1


def test_sizes_that_programs_are_compiled_for() -> None:
    config = EngineConfig(max_batch=20, context_length=2048, page_size=64, chunk_size=512, context_factor=4)
    assert config.batch_sizes == (1, 4, 16, 20)
    assert config.window_lengths == (256, 1024, 2048)
    assert config.chunk_lengths == (32, 128, 512)
    assert config.total_pages == 640
    small = EngineConfig(max_batch=1, context_length=48, page_size=16, chunk_size=7, n_pages=3)
    assert (small.batch_sizes, small.window_lengths, small.chunk_lengths) == ((1,), (48,), (7,))
    odd = EngineConfig(context_length=480, page_size=48, chunk_size=4096)
    assert odd.window_lengths == (288, 480)
    assert odd.chunk_lengths == (32, 128, 480)
    assert [bucket(n, config.batch_sizes) for n in (1, 2, 4, 5, 20)] == [1, 4, 4, 16, 20]
    with pytest.raises(ValueError, match="21 exceeds the largest compiled size 20"):
        bucket(21, config.batch_sizes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_batch", 0),
        ("chunk_size", -1),
        ("burst", 0),
        ("page_size", 0),
        ("max_queued", -1),
        ("batch_factor", 1),
        ("context_factor", 1),
        ("context_length", 100),
        ("n_pages", 31),
    ],
)
def test_impossible_sizes_are_refused(field: str, value: int) -> None:
    sizes: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError, match=f"^{field}: found {value}"):
        EngineConfig(**sizes)


def test_a_context_longer_than_the_model_s_is_refused() -> None:
    model = SimpleNamespace(config=SimpleNamespace(max_positions=1024, vocab_size=VOCABULARY))
    with pytest.raises(ConfigError, match="context_length: found 2048, expected at most the model's 1024 positions"):
        Engine(cast(Target, model), EngineConfig(context_length=2048))
