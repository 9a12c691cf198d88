"""What the host does in each step of the engine beside the devices' work, at 64 running requests. Prints JSON.

    python -m benchmarks.host_time                     # the host alone: programs that return at once
    python -m benchmarks.host_time --real              # kimi-nano decodes; calls of programs and waiting are taken off
    python -m benchmarks.host_time --profile 25        # where the time goes, by function

Run from the root of the repository. `step_us` is the time of `Engine.step`: planning, book-keeping, reading of what was
drawn. Requests end and are replaced all the time; `turnover_us` are the steps in which a request begins, `steady_us`
the others. `intake_us` is the time of `make_request` and `add`, which come between steps.

Without --real, programs are replaced by records that were made before, in which a random number of drafts passes: what
is left is the host, and `cpu_us` the processor time of its thread, which another process that takes the core away does
not change. With --real, the time of each program's call (`dispatch_us`, most of it JAX's own) and the time until its
results are there are measured and taken off. `loadavg_before` and `probe_gflops` tell whether something else had the
processor, as in `kimijax.bench`.
"""

import argparse
import cProfile
import functools
import gc
import io
import json
import os
import pstats
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from kimijax import checkpoint
from kimijax.bench import host_gflops
from kimijax.config import load_config
from kimijax.draft_checkpoint import load_draft
from kimijax.draft_record import read_record
from kimijax.drafter import Drafter
from kimijax.engine import engine as engine_module
from kimijax.engine.config import EngineConfig
from kimijax.engine.engine import Engine
from kimijax.engine.programs import Programs
from kimijax.engine.request import Sampling
from kimijax.loader import NANO, NANO_DRAFTER
from kimijax.model import Target
from kimijax.rounds import Record
from kimijax.speculative_options import SpeculativeOptions
from kimijax.verification import NO_TOKEN

TOKEN = 100  # that every row of a made-up record draws
VARIANTS = 8  # made-up records of one shape
SETTLE = 50  # steps before those that count


class InstantPrograms(Programs):
    """Programs that do nothing and return at once."""

    @functools.cached_property
    def _random(self) -> np.random.Generator:
        return np.random.default_rng(0)

    @functools.cached_property
    def _records(self) -> dict[tuple[int, int, int], list[Record]]:
        return {}

    def call(self, program: Any, *args: Any, **static: Any) -> Any:
        state = args[0]
        if program is not self._rounds:
            if "k" not in static:
                return state
            # The halves of a round with rules, which only the warm-up asks for: propose, and verify.
            return (state, None) if len(args) == 4 else (state, None, None)
        places, n_rounds, k = args[1], int(args[3]), static["k"]
        made = self._records.setdefault((len(places), n_rounds, k), [])
        if len(made) < VARIANTS:
            made.append(self._record(len(places), n_rounds, k))
        return state, made[int(self._random.integers(len(made)))]

    def _record(self, b: int, n_rounds: int, k: int) -> Record:
        most = self.most_rounds(k)
        accepted = np.full((most, b), -1, np.int32)
        accepted[:n_rounds] = self._random.integers(0, k + 1, (n_rounds, b)) if k else -1
        produced = (np.maximum(accepted[:n_rounds], 0) + 1).sum(axis=0, dtype=np.int32)
        room = most * (k + 1)
        tokens = np.where(np.arange(room)[None] < produced[:, None], TOKEN, NO_TOKEN).astype(np.int32)
        guesses = np.full((most, b, k), TOKEN, np.int32)
        arrays = (tokens, produced, np.zeros(b, np.bool_), guesses, accepted, np.int32(n_rounds))
        return Record(*(jnp.asarray(x) for x in arrays))


class TimedPrograms(Programs):
    """Programs whose calls are timed."""

    called = 0.0  # seconds of all calls since it was last set to 0

    def call(self, program: Any, *args: Any, **static: Any) -> Any:
        t0 = time.perf_counter()
        out = super().call(program, *args, **static)
        self.called += time.perf_counter() - t0
        return out


class TimedEngine(Engine):
    """An engine whose waiting for results is timed."""

    waited = 0.0

    def _drain(self) -> bool:
        t0 = time.perf_counter()
        if self._flight is not None:
            jax.block_until_ready(self._flight.record)
        self.waited += time.perf_counter() - t0
        return super()._drain()

    def spent_elsewhere(self) -> tuple[float, float]:
        """Seconds of program calls and of waiting since the last time that this was asked."""
        programs = self._programs
        called = programs.called if isinstance(programs, TimedPrograms) else 0.0
        if isinstance(programs, TimedPrograms):
            programs.called = 0.0
        waited, self.waited = self.waited, 0.0
        return called, waited


@dataclass
class Times:
    """Seconds, one entry a step (or a request)."""

    steps: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])  # of the engine's thread
    steady: list[float] = field(default_factory=list[float])  # of steps in which no request begins
    turnover: list[float] = field(default_factory=list[float])  # of the others
    intake: list[float] = field(default_factory=list[float])
    dispatch: list[float] = field(default_factory=list[float])
    tokens: int = 0


def make_engine(args: argparse.Namespace) -> TimedEngine:
    """With as many rows as requests run."""
    config = load_config(NANO)
    model = checkpoint.load(NANO, config, dtype=jnp.dtype("float32"), unpack_int4=True)
    drafter = None if args.k == 0 else nano_drafter(model)
    options = None
    if args.k:
        options = SpeculativeOptions("EAGLE3", args.k, 1, args.k + 1, adaptive=args.adaptive)
    sizes = EngineConfig(max_batch=args.requests, context_length=args.context_length, burst=args.burst, batch_factor=64)
    kind = TimedPrograms if args.real else InstantPrograms
    with mock.patch.object(engine_module, "Programs", kind):
        engine = TimedEngine(model, sizes, drafter=drafter, speculation=options)
    if args.adaptive and args.k:
        engine.warm_up()
    return engine


def nano_drafter(model: Target) -> Drafter:
    record = read_record(NANO_DRAFTER)
    assert record is not None, "nano's drafter carries a record"
    return load_draft(NANO_DRAFTER, record.contract.wiring, model, dtype=jnp.float32)


class Load:
    """Requests that end all the time, and others in their place."""

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        self.engine, self.args = engine, args
        self.random = np.random.default_rng(1)

    def refill(self, times: Times) -> bool:
        """Add requests until all places are taken; whether there were any."""
        stats = self.engine.stats()
        missing = self.args.requests - stats.n_running - stats.n_waiting
        for _ in range(missing):
            prompt = self.random.integers(16, 4096, self.args.prompt_len).tolist()
            n = int(self.random.integers(self.args.gen_len // 2, self.args.gen_len * 3 // 2))
            sampling = Sampling(temperature=float(self.random.integers(2)), max_tokens=n, ignore_eos=True)
            t0 = time.perf_counter()
            self.engine.add(self.engine.make_request(prompt, sampling))
            times.intake.append(time.perf_counter() - t0)
        return missing > 0

    def run(self, n_steps: int, times: Times, profile: cProfile.Profile | None = None) -> None:
        for _ in range(n_steps):
            turned = self.refill(times)
            if profile is not None:
                profile.enable()
            t0, cpu0 = time.perf_counter(), time.thread_time()
            outputs = self.engine.step()
            seconds, cpu = time.perf_counter() - t0, time.thread_time() - cpu0
            if profile is not None:
                profile.disable()
            if isinstance(self.engine, TimedEngine):
                called, waited = self.engine.spent_elsewhere()
                seconds -= called + waited
                times.dispatch.append(called)
            times.steps.append(seconds)
            times.cpu.append(cpu)
            (times.turnover if turned else times.steady).append(seconds)
            times.tokens += sum(len(o.tokens) for o in outputs)


def microseconds(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median, 99th percentile and most; None of nothing."""
    if not seconds:
        return None
    us = np.asarray(seconds) * 1e6
    of = {"median": np.median(us), "p90": np.percentile(us, 90), "p99": np.percentile(us, 99), "max": us.max()}
    return {name: round(float(x), 1) for name, x in of.items()}


def top_functions(profile: cProfile.Profile, n: int) -> str:
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(n)
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="that run at a time")
    parser.add_argument("--k", type=int, default=3, help="drafts; 0: no drafter")
    parser.add_argument("--adaptive", action="store_true", help="choose k step by step")
    parser.add_argument("--burst", type=int, default=EngineConfig.burst)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--gen-len", type=int, default=1024, help="mean output tokens of a request")
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--real", action="store_true", help="run the programs, too")
    parser.add_argument("--profile", type=int, metavar="N", help="print the N most expensive functions on stderr")
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    engine = make_engine(args)
    load = Load(engine, args)
    load.run(min(SETTLE, args.steps), Times())
    gc.collect()
    gc.freeze()  # as the server does when it has started
    times = Times()
    load.run(args.steps, times)
    if args.profile:
        profile = cProfile.Profile()
        load.run(args.steps, Times(), profile)
        import sys

        print(top_functions(profile, args.profile), file=sys.stderr)
    engine.check_integrity()
    row = {
        "requests": args.requests,
        "k": args.k,
        "adaptive": args.adaptive,
        "burst": args.burst,
        "real": args.real,
        "steps": len(times.steps),
        "tokens_a_step": round(times.tokens / len(times.steps), 1),
        "step_us": microseconds(times.steps),
        "cpu_us": None if args.real else microseconds(times.cpu),
        "steady_us": microseconds(times.steady),
        "turnover_us": microseconds(times.turnover),
        "intake_us": microseconds(times.intake),
        "dispatch_us": microseconds(times.dispatch) if args.real else None,
        "turnover_share": round(len(times.turnover) / len(times.steps), 3),
        "mean_step_us": round(statistics.fmean(times.steps) * 1e6, 1),
        "loadavg_before": round(load_before, 2),
        "probe_gflops": host_gflops(),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
