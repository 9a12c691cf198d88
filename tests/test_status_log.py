"""The server's line of load and acceptance, and what it warns of."""

import dataclasses
import logging
import time

import pytest

from kimijax.config import load_config
from kimijax.draft_loading import WATCHED_ROUNDS, LoadedDraft, read_draft
from kimijax.engine.adaptive import Status
from kimijax.engine.request import Sampling
from kimijax.engine.runner import EngineRunner
from kimijax.engine.stats import EngineStats
from kimijax.loader import NANO, load_tokenizer
from kimijax.serve import status_log
from kimijax.speculative_options import SpeculativeOptions

from .fake_engine import FakeEngine

IDLE = EngineStats(n_running=0, n_waiting=0, free_pages=10, total_pages=10)
FIRST = dataclasses.replace(
    IDLE, n_running=2, n_waiting=1, free_pages=7, n_prompt_tokens=100, n_cached_tokens=25, n_output_tokens=60
)


def test_a_line_tells_of_what_came_since_the_last() -> None:
    assert status_log.line(None, IDLE, 1.0) == "0 running, 0 waiting, 0 of 10 pages in use, 0.0 tokens/s"
    first = status_log.line(None, FIRST, 2.0)
    assert first == "2 running, 1 waiting, 3 of 10 pages in use, 30.0 tokens/s, 25% of prompt tokens from the cache"
    two_drafts = {2: [2, 4, 4]}  # of ten rounds
    status = Status(k=2, speed_up=1.5, drafts=2, length=2.2, break_even=1.46)
    second = dataclasses.replace(FIRST, n_output_tokens=80, n_preempted=1, accepted=two_drafts, speculation=status)
    assert status_log.line(FIRST, second, 2.0) == (
        "2 running, 1 waiting, 3 of 10 pages in use, 10.0 tokens/s, 1 preempted, acceptance length 2.20 (0.80 0.40), "
        "2 drafts: 1.50 times plain decoding; acceptance length 2.20, which pays from 1.46 on"
    )
    more = {**two_drafts, 3: [0, 0, 0, 10]}
    third = dataclasses.replace(second, accepted=more, simulated=True, speculation=None)
    assert status_log.line(second, third, 2.0).endswith(
        "3 of 10 pages in use, 0.0 tokens/s, SIMULATED acceptance length 4.00 (1.00 1.00 1.00)"
    )


@pytest.mark.parametrize(("interval", "lines"), [(0, 0), (1, 7), (3, 2)])
def test_lines_come_every_so_many_steps(interval: int, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    clock = iter(range(100))
    status = status_log.StatusLog(interval, clock=lambda: float(next(clock)))
    with caplog.at_level(logging.INFO, "kimijax.serve.status_log"):
        for step in range(7):
            status(dataclasses.replace(IDLE, n_output_tokens=6 * (step + 1)))
    assert len(caplog.messages) == lines
    if lines:
        assert [m.split(", ")[3] for m in caplog.messages] == [f"{6.0 * interval:.1f} tokens/s"] * lines


def test_low_acceptance_is_logged_though_no_lines_are(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(NANO)
    files = read_draft("nano", NANO, config, load_tokenizer(NANO, config)[0])
    draft = LoadedDraft("d", files.declared, SpeculativeOptions("EAGLE3", 3, 1, 4), files.probe, is_stand_in=False)
    status = status_log.StatusLog(0, draft)
    for step in range(2 * status_log.LOOK_INTERVAL):
        n = WATCHED_ROUNDS * step // status_log.LOOK_INTERVAL
        status(dataclasses.replace(IDLE, accepted={1: [n - n // 2, n // 2]}))
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "the first draft is accepted in 50.0% of the rounds" in caplog.text


def test_the_runner_shows_the_counters_of_each_step() -> None:
    seen: list[EngineStats] = []
    engine = FakeEngine(lambda request: [1, 2, 3], end=0, vocab_size=10)
    ended: list[bool] = []
    with EngineRunner(engine, seen.append) as runner:
        request = engine.make_request([1], Sampling(max_tokens=3))
        runner.submit(request, lambda output: ended.append(output.finish_reason is not None)).result(5)
        deadline = time.monotonic() + 5
        while not any(ended):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    assert seen
    assert all(s.total_pages == engine.config.total_pages for s in seen)
