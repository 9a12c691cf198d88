"""A server's day in minutes: requests of all kinds come and go, and nothing may be compiled once the engine is warm.

    python -m benchmarks.mixed_load --seconds 600
    python -m benchmarks.mixed_load --seconds 600 --fixed      # drafts in every round, although random ids seldom pay

Run from the root of the repository. kimi-nano with its drafter answers requests that arrive at random: prompts of all
lengths, some with a beginning that others have too, greedy and sampled, with seeds, penalties, biases, bad words, stop
ids, log-probabilities and constraints; some are cancelled. The pages of the pool are too few for all of them, so that
requests are preempted. It fails if a program is compiled, a page leaks, or an answer ends with an error; otherwise it
prints one JSON line: throughput, and how often things happened. Every --report seconds a line goes to stderr.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import kimijax
from kimijax.bench import host_gflops
from kimijax.engine.config import EngineConfig
from kimijax.engine.engine import Engine
from kimijax.engine.request import Request, Sampling
from kimijax.engine.scheduler import QueueFullError
from kimijax.speculative_options import SpeculativeOptions

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
N_BEGINNINGS = 5  # of prompts, that several share


class Compilations:
    """Counts what JAX compiles, whoever asks for it."""

    def __init__(self) -> None:
        self.n = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILE_EVENT:
            self.n += 1


class EveryOther:
    """A constraint: tokens at even positions of the output have even ids, and the others odd ones."""

    def __init__(self, vocab_size: int) -> None:
        self.words, self.n = -(-vocab_size // 32), 0

    def masks(self, guesses: Sequence[int]) -> np.ndarray:
        rows = np.arange(self.n, self.n + len(guesses) + 1)[:, None] % 2
        return np.broadcast_to(np.where(rows == 0, 0x55555555, 0xAAAAAAAA).astype(np.uint32), (len(rows), self.words))

    def commit(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token % 2 != self.n % 2:
                raise RuntimeError(f"token {token} came at position {self.n} of an output: its mask was not applied")
            self.n += 1


def make_engine(args: argparse.Namespace) -> Engine:
    """kimi-nano with its drafter, or without (--k 0)."""
    options = SpeculativeOptions("EAGLE3", args.k, 1, args.k + 1, adaptive=not args.fixed) if args.k else None
    page = EngineConfig.page_size
    n_pages = max(args.context_length // page + 1, round(args.batch * args.context_length / page * args.pool))
    sizes = EngineConfig(args.batch, args.context_length, n_pages=n_pages, max_queued=4 * args.batch)
    return kimijax.load("nano", draft="nano" if args.k else None, speculation=options, engine=sizes).engine


class Traffic:
    """Draws requests."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.random = engine, np.random.default_rng(seed)
        self.beginnings = [self._ids(int(n)) for n in self.random.integers(8, 200, N_BEGINNINGS)]

    def _ids(self, n: int) -> list[int]:
        return self.random.integers(16, min(self.engine.n_tokens, 3800), n).tolist()

    def request(self) -> Request:
        context = self.engine.config.context_length
        prompt = self._ids(1 + int(self.random.exponential(context / 8)))
        if self.random.random() < 0.5:
            prompt = [*self.beginnings[self.random.integers(N_BEGINNINGS)], *prompt]
        prompt = prompt[: context - 8]
        n = 1 + int(self.random.exponential(context / 8))
        constraint = EveryOther(self.engine.vocab_size) if self.random.random() < 0.1 else None
        sampling = Sampling(max_tokens=n, **self._sampling())
        return self.engine.make_request(prompt, sampling, constraint=constraint)

    def _sampling(self) -> dict[str, Any]:
        draw = self.random.random
        fields: dict[str, Any] = {"temperature": 0.0 if draw() < 0.5 else float(draw() * 1.5)}
        optional: dict[str, tuple[float, Any]] = {
            "top_p": (0.3, 0.5 + draw() / 2),
            "top_k": (0.2, int(self.random.integers(1, 50))),
            "min_p": (0.1, draw() * 0.2),
            "seed": (0.3, int(self.random.integers(2**31))),
            "stop_token_ids": (0.1, tuple(self._ids(3))),
            "ignore_eos": (0.3, True),
            "priority": (0.1, int(self.random.integers(-1, 2))),
        }
        if draw() < 0.25:  # they take other programs
            optional |= {
                "repetition_penalty": (0.4, 1.0 + draw() * 0.3),
                "frequency_penalty": (0.3, draw() - 0.5),
                "presence_penalty": (0.3, draw() - 0.5),
                "logit_bias": (0.3, {token: float(draw() * 10 - 5) for token in self._ids(4)}),
                "min_tokens": (0.3, int(self.random.integers(1, 20))),
                "bad_words": (0.3, (tuple(self._ids(1)), tuple(self._ids(2)))),
                "logprobs": (0.4, int(self.random.integers(0, 5))),
            }
        return fields | {name: value for name, (share, value) in optional.items() if draw() < share}


def run(engine: Engine, args: argparse.Namespace, compilations: Compilations) -> dict[str, Any]:
    """The load, and what became of it. RuntimeError: an answer that ended with an error, or a leak."""
    traffic, random = Traffic(engine, args.seed), np.random.default_rng(args.seed + 1)
    live: set[str] = set()
    counts: Counter[str] = Counter()
    begun = time.perf_counter()
    arrival, told = begun, begun
    before = compilations.n, engine.n_compiled()
    while (now := time.perf_counter()) < begun + args.seconds or engine.has_work:
        while arrival < min(now, begun + args.seconds):
            arrival += random.exponential(1 / args.rate)
            _arrive(engine, traffic.request(), live, counts)
        if live and random.random() < args.cancels:
            gone = sorted(live)[random.integers(len(live))]
            engine.cancel(gone)
            live.discard(gone)
            counts["cancelled"] += 1
        if not engine.has_work:
            time.sleep(max(0.0, min(arrival - now, 0.1)))
            continue
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
            counts["tokens"] += len(output.tokens)
            if output.finish_reason is not None:
                live.discard(output.request_id)
                counts[output.finish_reason] += 1
        counts["steps"] += 1
        if now > told + args.report:
            told = now
            engine.check_integrity()
            s = engine.stats()
            print(f"{now - begun:.0f} s: {dict(counts)}, running {s.n_running}, {s.speculation}", file=sys.stderr)
    seconds = time.perf_counter() - begun
    engine.check_integrity()
    stats = engine.stats()
    if stats.free_pages != stats.total_pages or live:
        raise RuntimeError(f"{stats.total_pages - stats.free_pages} pages leaked, {len(live)} requests never ended")
    compiled = compilations.n - before[0], engine.n_compiled() - before[1]
    if any(compiled):
        raise RuntimeError(f"after warm-up JAX compiled {compiled[0]} programs, {compiled[1]} of them the engine's")
    return {
        "seconds": round(seconds, 1),
        "output_tok_s": round(counts["tokens"] / seconds, 1),
        "requests_s": round((counts["stop"] + counts["length"]) / seconds, 2),
        **dict(counts),
        "compiled": 0,
        "preempted": stats.n_preempted,
        "prompt_tokens": stats.n_prompt_tokens,
        "cached_tokens": stats.n_cached_tokens,
        "acceptance": stats.acceptance.to_json(),
    }


def _arrive(engine: Engine, request: Request, live: set[str], counts: Counter[str]) -> None:
    try:
        engine.add(request)
    except QueueFullError:
        counts["refused"] += 1
        return
    live.add(request.id)
    counts["requests"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="in which requests arrive")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--cancels", type=float, default=0.02, help="chance of one in each step")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context-length", type=int, default=1024)
    parser.add_argument("--pool", type=float, default=0.4, help="share of the pages that a full batch could fill")
    parser.add_argument("--k", type=int, default=3, help="drafts at most; 0: no drafter")
    parser.add_argument("--fixed", action="store_true", help="always --k drafts, whether they pay or not")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=float, default=30.0, metavar="SECONDS")
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    compilations = Compilations()
    engine = make_engine(args)
    t0 = time.perf_counter()
    engine.warm_up()
    warm_up_s = time.perf_counter() - t0
    if not compilations.n:
        raise RuntimeError("JAX told of no compilation while the engine warmed up: the event has another name")
    row = run(engine, args, compilations)
    row |= {"warm_up_s": round(warm_up_s, 1), "programs": engine.n_compiled()}
    row |= {
        "k": args.k,
        "adaptive": not args.fixed,
        "batch": args.batch,
        "rate": args.rate,
        "context_length": args.context_length,
    }
    row |= {"loadavg_before": round(load_before, 2), "probe_gflops": host_gflops()}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
