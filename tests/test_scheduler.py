"""Admission, chunked prefill, decoding and preemption, with an engine around the programs of `fake_programs`."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kimijax.acceptance import Acceptance
from kimijax.draft_tree import TreeShape
from kimijax.engine.config import EngineConfig, bucket
from kimijax.engine.device import MAX_ENDS
from kimijax.engine.engine import Engine
from kimijax.engine.pages import PagePool
from kimijax.engine.request import Phase, Request, Sampling, StepOutput
from kimijax.engine.scheduler import QueueFullError
from kimijax.errors import ConfigError
from kimijax.model import Target

from . import fake_programs
from .engine_cases import check
from .fake_programs import BROKEN, EOS, VOCABULARY, InjectedError, expected_output, make_engine, next_token


def everyone(engine: Engine) -> list[Request]:
    return [*engine._scheduler.running, *engine._scheduler.waiting]


def in_order(requests: Sequence[Request]) -> list[Request]:
    return sorted(requests, key=lambda r: (r.sampling.priority, r.arrival))


class EngineMachine(RuleBasedStateMachine):
    """Random traffic through tiny pools: nothing is lost, mixed up, leaked or stuck."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, Request] = {}
        self.found: dict[str, list[int]] = {}
        self.all: list[Request] = []
        self.stands: tuple[str, int, int] = "", 0, 0  # the first request, its progress, and for how many steps

    @initialize(
        page_size=st.integers(1, 4),
        context_pages=st.integers(2, 5),
        spare_pages=st.integers(0, 6),
        rows=st.integers(1, 4),
        n_groups=st.sampled_from([1, 1, 2, 3]),
        chunk_size=st.integers(1, 9),
        burst=st.integers(1, 5),
        max_queued=st.integers(0, 4),
        prefix_cache=st.booleans(),
        k=st.integers(0, 3),
        width=st.integers(1, 2),
    )
    def start(
        self,
        page_size: int,
        context_pages: int,
        spare_pages: int,
        rows: int,
        n_groups: int,
        k: int,
        width: int,
        **sizes: Any,
    ) -> None:
        width = width if k > 1 else 1
        room = 0 if k == 0 else k + 1 if width == 1 else TreeShape(k, width, k * width).room
        context = page_size * context_pages
        self.engine, self.programs = make_engine(
            k,
            width,
            page_size=page_size,
            context_length=context,
            n_groups=n_groups,
            max_batch=rows * n_groups,
            n_pages=(-(-(context + room) // page_size) + spare_pages) * n_groups,
            batch_factor=2,
            **sizes,
        )

    @rule(
        share=st.floats(0, 1),
        family=st.sampled_from([1, 1, 2, 3, BROKEN]),
        fork=st.integers(0, 20),
        max_tokens=st.none() | st.integers(1, 12),
        ignore_eos=st.booleans(),
        many_stops=st.booleans(),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
    )
    def add(
        self,
        share: float,
        family: int,
        fork: int,
        max_tokens: int | None,
        ignore_eos: bool,
        many_stops: bool,
        priority: int,
    ) -> None:
        """Prompts of a family are the same up to `fork`."""
        config = self.engine.config
        n = 1 + int(share * (config.context_length - 2))
        prompt = [(family + i * i + (0 if i < fork else len(self.all))) % VOCABULARY for i in range(n)]
        prompt[0] = family
        # More than the device knows: the host has to cut.
        stops = tuple(range(40 - MAX_ENDS - 4, 40)) if many_stops else ()
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stops, priority=priority)
        request = self.engine.make_request(prompt, sampling, id=f"{len(self.all):04}")
        if len(self.live) >= config.max_batch + config.max_queued:
            with pytest.raises(QueueFullError):
                self.engine.add(request)
            return
        self.engine.add(request)
        self.live[request.id], self.found[request.id] = request, []
        self.all.append(request)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        request = list(self.live.values())[which % len(self.live)]
        scheduler = self.engine._scheduler
        prefix = scheduler.prefixes[scheduler.group_of(request) if request.place >= 0 else 0]
        own = sum(prefix.pool.n_holders(page) == 1 for page in request.pages)
        free = self.engine.stats().free_pages
        self.engine.cancel(request.id)
        assert self.engine.stats().free_pages == free + own
        self.engine.cancel(request.id)  # and again: an id that is not known any more
        assert request.phase is Phase.FINISHED
        del self.live[request.id]

    @rule(n=st.integers(1, 4))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.step_once()

    def step_once(self) -> None:
        n_prefilling = sum(r.phase is Phase.PREFILL for r in self.live.values())
        self.deliver(self.engine.step())
        if not self.live:
            return
        # A step's tokens are read in the next one: so the first request gets on in every second step at the least. It
        # may have to wait for prompts that were begun before it came.
        first = in_order(list(self.live.values()))[0]
        progress = len(first.output) + first.cached
        same = self.stands[:2] == (first.id, progress)
        self.stands = first.id, progress, self.stands[2] + 1 if same else 0
        assert n_prefilling or self.stands[2] < 2, "the first request stands still"

    @precondition(lambda self: self.live)
    @rule(name=st.sampled_from(["prefill", "start", "copy", "rounds"]))
    def failing_step(self, name: str) -> None:
        self.programs.failing = name
        self.stands = "", 0, 0
        try:
            self.deliver(self.engine.step())
            self.programs.failing = ""  # that program was not needed
        except InjectedError:
            hurt = {r.id for r in self.engine._scheduler.running}
            outputs = self.engine.recover()
            assert {o.request_id for o in outputs if o.error == "the engine step failed"} == hurt
            assert self.engine.stats().free_pages == self.engine.stats().total_pages
            self.deliver(outputs, recovered=True)

    def deliver(self, outputs: list[StepOutput], *, recovered: bool = False) -> None:
        for output in outputs:
            request = self.live[output.request_id]
            self.found[request.id] += output.tokens
            assert output.tokens or output.error
            right, reason = expected_output(request)
            assert self.found[request.id] == right[: len(self.found[request.id])]
            assert (output.finish_reason == "abort") == bool(output.error)
            if output.finish_reason is not None:
                assert request.phase is Phase.FINISHED
                if not (recovered and output.error):
                    assert self.found[request.id] == right
                    assert output.finish_reason == reason
                del self.live[request.id]

    @invariant()
    def holds_together(self) -> None:
        if "engine" not in vars(self):
            return
        check(self.engine)
        held = everyone(self.engine)
        assert {r.id for r in held} == set(self.live), "a request was lost"
        s = self.engine._scheduler
        assert s.running == in_order(s.running)
        assert s.waiting == in_order(s.waiting)
        assert len(s.running) <= s.config.max_batch
        assert self.engine.has_work == bool(self.live)
        for request in held:
            assert self.found[request.id] == request.output
            assert request.cached <= len(request.pages) * self.engine.config.page_size
        assert self.engine.stats().n_without_guesses == 0
        assert self.engine.stats().acceptance == sum((r.acceptance for r in self.all), Acceptance())

    def teardown(self) -> None:
        if "engine" not in vars(self):
            return
        # Two steps move the first request by a chunk or a token: a bound on the steps that are left.
        bound = sum(4 * (len(r.prompt) + r.limit) + 4 for r in self.live.values())
        for _ in range(bound):
            if not self.live:
                break
            self.step_once()
            self.holds_together()
        assert not self.live
        assert self.engine.stats().free_pages == self.engine.stats().total_pages
        assert self.engine.step() == []
        for request in self.all:
            self.counts_are_exact(request)

    def counts_are_exact(self, request: Request) -> None:
        """Rounds with guesses that gave the request a token, each counted once, with the guesses that passed."""
        if self.engine.stats().n_preempted:  # a request may be computed again from any of its tokens
            return
        n, a = len(request.prompt), request.acceptance
        begun = [self.programs.rounds_run.get((request.id, n + i), -1) for i in range(1, len(request.output))]
        right = [passed for passed in begun if passed >= 0]
        assert (a.rounds, sum(a.accepted)) == (len(right), sum(right))


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


def test_the_last_gives_way_and_keeps_its_output() -> None:
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
    for request in (first, second):
        assert (request.output, request.finish_reason) == expected_output(request)
        assert len(request.output) == 10
    assert engine.stats().n_preempted >= 1


@pytest.mark.parametrize("sizes", [{"max_batch": 1}, {"max_batch": 2, "n_pages": 8}], ids=["places", "pages"])
def test_a_better_priority_takes_the_place_of_a_worse_one(sizes: dict[str, Any]) -> None:
    """At once, with a step under way too; the one that gave way goes on where it was, after those that come before."""
    engine, _ = make_engine(context_length=16, page_size=2, chunk_size=16, burst=2, **sizes)
    requests = {
        name: engine.make_request([priority] * 10, Sampling(ignore_eos=True, priority=priority), id=name)
        for name, priority in (("low", 5), ("middle", 3), ("high", 1))
    }
    low, middle, high = requests.values()
    ended: list[str] = []
    engine.add(low)
    engine.step()
    assert low.in_flight
    engine.add(middle)
    engine.add(high)
    engine.step()
    assert (high.phase, low.phase, middle.phase) == (Phase.DECODE, Phase.WAITING, Phase.WAITING)
    assert len(low.output) == 2
    while engine.has_work:
        ended += [o.request_id for o in engine.step() if o.finish_reason]
        check(engine)
    assert ended == ["high", "middle", "low"]
    assert engine.stats().n_preempted == 1
    assert all((r.output, r.finish_reason) == expected_output(r) for r in requests.values())


def test_a_step_that_fails_late_delivers_what_it_had_made() -> None:
    """A request ends in the step before: it is read in the step whose next program fails, and must not be lost."""
    engine, programs = make_engine(max_batch=2, context_length=16, page_size=2, n_pages=8, burst=1)
    old = engine.make_request([1, 2], Sampling(ignore_eos=True), id="old")
    short = engine.make_request([3, 4], Sampling(max_tokens=1), id="short")
    engine.add(old)
    engine.add(short)
    engine.step()
    assert old.in_flight == short.in_flight == 1
    drain = engine._drain

    def drained_and_then_raises() -> bool:
        drain()
        raise RuntimeError("injected")

    with mock.patch.object(engine, "_drain", drained_and_then_raises), pytest.raises(RuntimeError, match="injected"):
        engine.step()
    assert short.finish_reason is not None
    first, second, third = engine.recover()
    assert first == StepOutput("old", (next_token([1, 2]),))
    assert second == StepOutput("short", (next_token([3, 4]),), "stop" if short.output[0] == EOS else "length")
    assert (third.request_id, third.finish_reason) == ("old", "abort")
    assert third.error
    assert engine.recover() == []
    assert not engine.has_work
    assert programs.failing == ""
    again = engine.make_request([1, 2], Sampling(max_tokens=3))
    engine.add(again)
    assert run_to_end(engine) == {again.id: expected_output(again)[0]}


def test_waiting_requests_outlive_a_failed_step() -> None:
    engine, programs = make_engine(max_batch=1, context_length=16, page_size=2)
    requests = [engine.make_request([i, i], Sampling(max_tokens=4), id=str(i)) for i in range(3)]
    for request in requests:
        engine.add(request)
    programs.failing = "prefill"
    with pytest.raises(RuntimeError, match="injected"):
        engine.step()
    assert [o.request_id for o in engine.recover()] == ["0"]
    assert run_to_end(engine) == {r.id: expected_output(r)[0] for r in requests[1:]}


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
    """7, 8, the end token 9 and one more come in one burst: the end token's place decides first."""
    engine, programs = make_engine(max_batch=1, context_length=64, page_size=8, burst=6)
    script = [3, 4, 7, 8, 9, 11]
    request = engine.make_request([1, 2], Sampling(max_tokens=max_tokens, stop_token_ids=(9,)))
    engine.add(request)
    found: list[StepOutput] = []

    def scripted(tokens: Sequence[int]) -> int:
        made = len(tokens) - 2
        return script[made] if made < len(script) else 5

    with mock.patch.object(fake_programs, "next_token", scripted):
        while engine.has_work:
            found += engine.step()
    assert [t for o in found for t in o.tokens] == output
    assert [o.finish_reason for o in found if o.finish_reason] == [reason]
    assert request.output == output
    assert programs.config.burst == 6


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
    assert config.batch_sizes() == (1, 4, 16, 20)
    assert config.window_lengths == (256, 1024, 2048)
    assert config.chunk_lengths == (32, 128, 512)
    assert config.total_pages == 640
    small = EngineConfig(max_batch=1, context_length=48, page_size=16, chunk_size=7, n_pages=3)
    assert (small.batch_sizes(), small.window_lengths, small.chunk_lengths) == ((1,), (48,), (7,))
    odd = EngineConfig(context_length=480, page_size=48, chunk_size=4096)
    assert odd.window_lengths == (288, 480)
    assert odd.chunk_lengths == (32, 128, 480)
    assert [bucket(n, config.batch_sizes()) for n in (1, 2, 4, 5, 20)] == [1, 4, 4, 16, 20]
    with pytest.raises(ValueError, match="21 exceeds the largest compiled size 20"):
        bucket(21, config.batch_sizes())


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
