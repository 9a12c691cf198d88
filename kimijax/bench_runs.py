"""Timed runs of engines, one after the other in turns, and the figures made of them. See `kimijax.bench` for what the
figures mean."""

import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from .acceptance import Acceptance
from .engine.request import Request, Sampling, StepOutput
from .engine.stats import EngineStats
from .errors import ConfigError

N_IDS = 8  # tokens of the first request that are shown, to compare implementations
MAX_WARM_UP = 3  # runs that may compile
IDLE_STEPS = 8  # without a token, after which an engine is stuck: it may have nothing to tell for one or two

Clock = Callable[[], float]


@dataclass(frozen=True)
class Work:
    """One run: `prompts` are answered, `batch` of them at a time; another begins when one ends."""

    prompts: Sequence[Sequence[int]]
    batch: int
    gen_len: int  # tokens of an answer at most
    temperature: float = 0.0
    ignore_eos: bool = True

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompts that begin together."""
        return sum(map(len, self.prompts[: self.batch]))


@dataclass(frozen=True)
class Spread:
    """Figures of several runs."""

    median: float
    min: float
    max: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(round(statistics.median(values), 3), round(min(values), 3), round(max(values), 3), len(values))


@dataclass(frozen=True)
class Run:
    """One run's times in seconds, and its tokens by request.

    Attributes:
      prefill_s: of the first `batch` prompts.
      total_s: of everything.
      decode_s: of the steps in which `batch` requests decoded, and no prompt was computed.
      n_decoded: tokens of these steps.
      rows: tokens of each request.
      acceptance: of all rounds with drafts.
      rounds: k -> rounds with k drafts.
    """

    prefill_s: float
    total_s: float
    decode_s: float
    n_decoded: int
    rows: tuple[tuple[int, ...], ...]
    acceptance: Acceptance = field(default_factory=Acceptance)
    rounds: Mapping[int, int] = field(default_factory=dict[int, int])

    @property
    def decode_rate(self) -> float:
        return self.n_decoded / self.decode_s

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.rows))


@dataclass(frozen=True)
class Speculation:
    """What drafts did in the runs that count.

    Attributes:
      acceptance: as `Acceptance.to_json`.
      rounds_by_k: request-rounds with k drafts.
      estimate: of the adaptive choice after the last run, see `engine.adaptive.Status`; its speed-up is over plain
        decoding with the drafter kept up.
      first_run_ratio: decode rate of an engine's first run, which had learned nothing, over the plain engine's median;
        None where that run compiled.
      n_different: answers that are not the plain engine's; None where there is chance in them.
    """

    acceptance: Mapping[str, Any]
    rounds_by_k: Mapping[int, int]
    estimate: Mapping[str, Any] | None
    first_run_ratio: float | None
    n_different: int | None


@dataclass(frozen=True)
class BatchResult:
    """The figures of one engine at one batch size."""

    batch: int
    k: str  # see `bench_engines.Variant`
    compile_s: float  # warm-up, and what the runs that compiled took longer than one that counts
    n_compiled: int  # programs; a server compiles more, for the sizes that this workload has not
    warm_up_runs: int  # runs that compiled something
    prefill_tok_s: Spread
    decode_tok_s: Spread
    output_tok_s: Spread
    ratio: Spread | None  # of decode rates to the plain engine's in the same round; None: it is that engine
    peak_rss_mb: int  # of the process so far: it only grows from one batch to the next
    ids: tuple[int, ...]
    repeatable: bool  # every run made the same tokens
    speculation: Speculation | None = None


class SteppedEngine(Protocol):
    """What a measurement needs of an engine; see `bench_engines.MeasuredEngine`."""

    def add(self, request: Request) -> None: ...
    def make_request(self, prompt: Sequence[int], sampling: Sampling) -> Request: ...
    def compute_prompts(self) -> None: ...
    def step(self) -> list[StepOutput]: ...
    def n_compiled(self) -> int: ...
    def stats(self) -> EngineStats: ...


def run_once(engine: SteppedEngine, work: Work, clock: Clock = time.perf_counter) -> Run:
    """The first prompts together, then decoding, and a new prompt in the place of each answer that ends.

    Raises:
      RuntimeError: the engine stopped making progress.
      ConfigError: there was no step in which the whole batch decoded.
    """
    requests = _requests(engine, work)
    rows: dict[str, list[int]] = {r.id: [] for r in requests}
    begun, waiting = {r.id for r in requests[: work.batch]}, deque(requests[work.batch :])
    start = clock()
    for request in requests[: work.batch]:
        engine.add(request)
    engine.compute_prompts()
    last = prefilled = clock()
    decode_s, n_decoded, idle = 0.0, 0, 0
    late: set[str] = set()  # begun in the place of others, and without a token yet: their prompts may be under way
    while begun:
        is_full = len(begun) == work.batch and not late
        outputs = engine.step()
        for output in outputs:
            rows[output.request_id].extend(output.tokens)
            late.discard(output.request_id)
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
        now, n_new = clock(), sum(len(o.tokens) for o in outputs)
        if is_full:
            decode_s, n_decoded = decode_s + now - last, n_decoded + n_new
        last, idle = now, 0 if n_new else idle + 1
        if idle > IDLE_STEPS:
            raise RuntimeError(f"the engine stopped after {[len(t) for t in rows.values()]} of {work.gen_len} tokens")
        for output in outputs:
            if output.finish_reason is not None:
                begun.discard(output.request_id)
                if waiting:
                    engine.add(waiting[0])
                    begun.add(waiting[0].id)
                    late.add(waiting.popleft().id)
    if not n_decoded:
        expected = f"answers so long that {work.batch} of them decode together"
        raise ConfigError("gen_len", work.gen_len, expected, "raise it, or measure a smaller batch")
    acceptance = sum((r.acceptance for r in requests), Acceptance())
    rounds: dict[int, int] = {}
    for r in requests:
        for k, counts in r.accepted.items():
            rounds[k] = rounds.get(k, 0) + sum(counts)
    answers = tuple(tuple(tokens) for tokens in rows.values())
    return Run(prefilled - start, last - start, decode_s, n_decoded, answers, acceptance, rounds)


def _requests(engine: SteppedEngine, work: Work) -> list[Request]:
    """Their seeds are their numbers, so that every run draws the same; they are not asked for, which would tie the
    tokens to those of plain decoding and let fewer drafts pass (see `Sampling.seed`)."""
    sampling = Sampling(temperature=work.temperature, max_tokens=work.gen_len, ignore_eos=work.ignore_eos)
    made = [engine.make_request(prompt, sampling) for prompt in work.prompts]
    return [replace(request, seed=i) for i, request in enumerate(made)]


class _Measured:
    """An engine on its way to its figures."""

    def __init__(self, engine: SteppedEngine, work: Work, clock: Clock) -> None:
        self.engine, self.work, self.clock = engine, work, clock
        self.warm_up: list[Run] = []
        self.done: list[Run] = []
        self.compiled = -1
        self.first_compiled = False

    def settle(self) -> None:
        """Runs until one compiles nothing. RuntimeError: the engine keeps compiling, so no time is its own."""
        while (now := self.engine.n_compiled()) != self.compiled:
            if len(self.warm_up) > MAX_WARM_UP:
                raise RuntimeError(f"the engine still compiles after {len(self.warm_up)} equal runs")
            self.compiled = now
            self.warm_up.append(run_once(self.engine, self.work, self.clock))
            if len(self.warm_up) == 1:
                self.first_compiled = self.engine.n_compiled() != now

    def run(self) -> None:
        """One that counts. RuntimeError: it compiled something."""
        self.done.append(run_once(self.engine, self.work, self.clock))
        late = self.engine.n_compiled() - self.compiled
        if late:
            raise RuntimeError(f"{late} programs were compiled in runs that count")

    def speculation(self, plain: "_Measured | None") -> Speculation | None:
        rounds: dict[int, int] = {}
        for run in self.done:
            for k, n in run.rounds.items():
                rounds[k] = rounds.get(k, 0) + n
        status = self.engine.stats().speculation
        if not rounds and status is None:
            return None
        first = different = None
        if plain is not None:
            if not self.first_compiled:
                rate = statistics.median(r.decode_rate for r in plain.done)
                first = round(self.warm_up[0].decode_rate / rate, 3)
            if self.work.temperature == 0 and not self.engine.stats().simulated:
                pairs = zip(self.done[0].rows, plain.done[0].rows, strict=True)
                different = sum(a != b for a, b in pairs)
        return Speculation(
            sum((r.acceptance for r in self.done), Acceptance()).to_json(),
            dict(sorted(rounds.items())),
            None if status is None else asdict(status),
            first,
            different,
        )

    def result(self, name: str, warm_up_s: float, plain: "_Measured | None") -> BatchResult:
        """plain: the engine to compare with; None: there is none, or this is it."""
        compiling = [r.total_s for r in self.warm_up[:-1]]
        steady = statistics.median(r.total_s for r in self.done)
        ratio = None
        if plain is not None:
            ratio = Spread.of([a.decode_rate / b.decode_rate for a, b in zip(self.done, plain.done, strict=True)])
        return BatchResult(
            batch=self.work.batch,
            k=name,
            compile_s=round(warm_up_s + sum(max(s - steady, 0.0) for s in compiling), 2),
            n_compiled=self.compiled,
            warm_up_runs=len(compiling),
            prefill_tok_s=Spread.of([self.work.n_prompt / r.prefill_s for r in self.done]),
            decode_tok_s=Spread.of([r.decode_rate for r in self.done]),
            output_tok_s=Spread.of([r.n_tokens / r.total_s for r in self.done]),
            ratio=ratio,
            peak_rss_mb=peak_rss_mb(),
            ids=self.done[0].rows[0][:N_IDS],
            repeatable=all(r.rows == self.done[0].rows for r in (*self.warm_up, *self.done)),
            speculation=self.speculation(plain),
        )


def measure(
    engines: Mapping[str, SteppedEngine],
    work: Work,
    runs: int,
    clock: Clock = time.perf_counter,
    *,
    warm_up_s: Mapping[str, float] | None = None,
) -> list[BatchResult]:
    """One batch size: each engine runs until a run compiles nothing; then they take turns, `runs` times, in one order
    and the other, so that what the machine does meanwhile happens to all of them.

    Args:
      engines: by name; the first is the one that the others are compared with.
      work: of a run.
      runs: that count, of each engine.
      clock: seconds.
      warm_up_s: time that engines have spent on compiling before.
    Raises:
      RuntimeError: an engine that keeps compiling, or compiles in a run that counts.
    """
    measured = {name: _Measured(engine, work, clock) for name, engine in engines.items()}
    for m in measured.values():
        m.settle()
    order = list(measured.values())
    for i in range(runs):
        for m in order if i % 2 == 0 else order[::-1]:
            m.run()
    spent = warm_up_s or {}
    plain = order[0]
    pairs = measured.items()
    return [m.result(name, spent.get(name, 0.0), None if m is plain else plain) for name, m in pairs]


def peak_rss_mb() -> int:
    """Peak resident memory of this process so far, in 2^20 bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
    return round(peak / 2**20 if sys.platform == "darwin" else peak / 2**10)
