"""Before the first request: compile every program, and measure what rounds cost."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..startup_progress import Report
from .device import DeviceState, Start
from .programs import Batch, Programs
from .request import Request, Sampling
from .rule_programs import RulePrograms, RuleRows
from .step_costs import StepCosts

_TIMED = 3  # programs timed for each entry of the cost table


def warm_up_programs(programs: Programs, rules: RulePrograms, state: DeviceState, report: Report) -> DeviceState:
    """Run every program once, on padding alone, which leaves pages and places as they are."""
    jobs: list[tuple[str, Callable[[DeviceState], DeviceState]]] = []

    def add(name: str, job: Callable[..., DeviceState], *args: Any) -> None:
        jobs.append((name, lambda state: job(state, *args)))

    n = programs.config.max_batch  # the place of padding
    for length, window in programs.prefill_shapes():
        add(f"prefill {length} x {window}", programs.run_prefill, [], length, window)
    add("start", programs.start_blank, n, Start.blank())
    add("copy", programs.copy, 0, 0)
    add("rules", rules.begin, Request("warm-up", (0,), Sampling(), 0, frozenset(), 1, place=n))
    for size in programs.batch_sizes:
        for window in programs.windows:
            batch = programs.batch([], size, window)
            for k in programs.draft_counts:
                add(f"{size} x {window}, {k} drafts", lambda s, b, k: programs.rounds(s, b, 0, k)[0], batch, k)
            for k in rules.draft_counts:
                add(f"{size} x {window}, {k} drafts, rules", lambda s, b, k: _rule_round(rules, s, b, k), batch, k)
    for i, (name, job) in enumerate(jobs):
        report(name, i + 1, len(jobs))
        state = job(state)
    jax.block_until_ready(state)
    return state


def _rule_round(rules: RulePrograms, state: DeviceState, batch: Batch, k: int) -> DeviceState:
    size = len(batch.places)
    rows = RuleRows.of([], np.zeros(0, np.int64), size)
    proposal = None
    if k:
        state, proposal = rules.propose(state, batch, rows, rules.all_allowed(size, 1), k)
    return rules.verify(state, batch, rows, proposal, rules.all_allowed(size, k + 1), k)[0]


def measure_costs(programs: Programs, state: DeviceState) -> tuple[DeviceState, StepCosts[tuple[int, int]]]:
    """Seconds of a round for each (batch size, window) and number of drafts, on rows without pages.

    Such rows read what lies in some page and write nowhere; what they compute means nothing, and costs what it costs.
    """
    seconds: dict[tuple[tuple[int, int], int], list[float]] = {}
    for size in programs.batch_sizes:
        for window in programs.windows:
            batch = programs.batch([], size, window)._replace(places=np.arange(size, dtype=np.int32))
            for k in programs.draft_counts:
                n = programs.most_rounds(k)
                times: list[float] = []
                for _ in range(_TIMED):
                    begin = Start.blank(max(window - max(programs.touched(k, n), programs.reach(k, n)) - 1, 0), 1 << 20)
                    for place in range(size):
                        state = programs.start_blank(state, place, begin)
                    jax.block_until_ready(state)
                    t0 = time.perf_counter()
                    state, record = programs.rounds(state, batch, n, k)
                    n_rounds = int(record.n_rounds)
                    jax.block_until_ready(state)
                    times.append((time.perf_counter() - t0) / max(n_rounds, 1))
                seconds[(size, window), k] = times
    for place in range(programs.config.max_batch):
        state = programs.start_blank(state, place, Start.blank())
    return state, StepCosts(seconds)
