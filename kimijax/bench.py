"""`python -m kimijax.bench offline`: how fast a checkpoint prefills and decodes in the engine that also serves it.

What the figures mean. Every batch gets its own engine of exactly that many rows over the one loaded model. A run adds
`batch` requests of `prompt_len` random ids and steps the engine by hand: all prompts first, then decoding alone.

    prefill tok/s = batch * prompt_len / time from adding the requests until each has its first token
    decode  tok/s = batch * (gen_len - 1) / time after that

Decoding is greedy and ignores end tokens, so that every run makes the same tokens. Runs count from the first one on
before which a whole run compiled nothing, and must compile nothing themselves.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from . import __version__, checkpoint
from .config import TargetConfig, load_config
from .engine.config import EngineConfig
from .engine.engine import Engine
from .engine.request import Request, Sampling, StepOutput
from .errors import CheckpointError, ConfigError
from .generate import DEFAULT_CONTEXT
from .loader import model_directory
from .model import Target

FIRST_ID = 16  # the ids below are special in many vocabularies
N_IDS = 8  # tokens of row 0 that are shown, to compare implementations
MAX_WARM_UP = 3  # runs that may compile

Clock = Callable[[], float]


@dataclass(frozen=True)
class Workload:
    """What is run: `runs` counted runs of `prompt_len` prompt and `gen_len` output tokens for each batch size."""

    batches: tuple[int, ...] = (1, 8, 32)
    prompt_len: int = 512
    gen_len: int = 128
    runs: int = 5

    def __post_init__(self) -> None:
        for batch in self.batches:
            if batch < 1:
                raise ConfigError("batch", batch, "positive integers, separated by commas")
        if self.prompt_len < 1:
            raise ConfigError("prompt_len", self.prompt_len, "a positive integer")
        if self.gen_len < 2:
            raise ConfigError("gen_len", self.gen_len, "2 or more: the first token belongs to prefill")
        if self.runs < 1:
            raise ConfigError("runs", self.runs, "a positive integer")


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
    """One run's times in seconds, and its tokens by row."""

    prefill_s: float
    decode_s: float
    rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class BatchResult:
    """The figures of one batch size."""

    batch: int
    compile_s: float  # what the runs that compiled took longer than one that counts
    n_compiled: int  # programs; a server compiles more, for the sizes that this workload has not
    warm_up_runs: int  # runs that compiled something
    prefill_tok_s: Spread
    decode_tok_s: Spread
    peak_rss_mb: int  # of the process so far: it only grows from one batch to the next
    ids: tuple[int, ...]
    repeatable: bool  # every run made the same tokens


class SteppedEngine(Protocol):
    """What a measurement needs of an engine; see `kimijax.engine.engine.Engine`."""

    def add(self, request: Request) -> None: ...
    def make_request(self, prompt: Sequence[int], sampling: Sampling) -> Request: ...
    def prefill_step(self) -> list[StepOutput]: ...
    def decode_step(self) -> list[StepOutput]: ...
    def n_compiled(self) -> int: ...


def random_prompts(vocab_size: int, batch: int, length: int, seed: int = 0) -> list[list[int]]:
    """Ids FIRST_ID ... vocab_size - 1 from NumPy's default generator, [batch, length]: the same for every program that
    draws them so, whatever it is written in. Raises ConfigError for a vocabulary without such ids."""
    if vocab_size <= FIRST_ID:
        raise ConfigError("vocab_size", vocab_size, f"more than {FIRST_ID}: prompts are drawn from the ids above")
    return np.random.default_rng(seed).integers(FIRST_ID, vocab_size, size=(batch, length)).tolist()


def run_once(
    engine: SteppedEngine, prompts: Sequence[Sequence[int]], gen_len: int, clock: Clock = time.perf_counter
) -> Run:
    """All prompts, then all decoding.

    Raises:
      RuntimeError: a row stopped short of gen_len tokens, or the engine stopped making progress.
    """
    sampling = Sampling(temperature=0.0, max_tokens=gen_len, ignore_eos=True)
    requests = [engine.make_request(prompt, sampling) for prompt in prompts]
    rows: dict[str, list[int]] = {r.id: [] for r in requests}
    t0 = clock()
    for request in requests:
        engine.add(request)
    # A chunk holds at least one token, so this many steps compute every prompt.
    for _ in range(sum(len(p) for p in prompts)):
        _collect(rows, engine.prefill_step())
        if all(rows.values()):
            break
    t1 = clock()
    while any(len(tokens) < gen_len for tokens in rows.values()):
        outputs = engine.decode_step()
        if not outputs:
            raise RuntimeError(f"the engine stopped after {[len(t) for t in rows.values()]} of {gen_len} tokens")
        _collect(rows, outputs)
    t2 = clock()
    return Run(t1 - t0, t2 - t1, tuple(tuple(tokens) for tokens in rows.values()))


def _collect(rows: dict[str, list[int]], outputs: Sequence[StepOutput]) -> None:
    for output in outputs:
        rows[output.request_id].extend(output.tokens)


def measure(
    engine: SteppedEngine, prompts: Sequence[Sequence[int]], gen_len: int, runs: int, clock: Clock = time.perf_counter
) -> BatchResult:
    """One batch size: runs until one compiles nothing, then `runs` that count.

    Raises:
      RuntimeError: the engine keeps compiling, so no time is its own.
    """
    warm_up: list[Run] = []
    compiled = -1
    while (now := engine.n_compiled()) != compiled:
        if len(warm_up) > MAX_WARM_UP:
            raise RuntimeError(f"the engine still compiles after {len(warm_up)} equal runs")
        compiled = now
        warm_up.append(run_once(engine, prompts, gen_len, clock))
    done = [run_once(engine, prompts, gen_len, clock) for _ in range(runs)]
    if engine.n_compiled() != compiled:
        raise RuntimeError(f"{engine.n_compiled() - compiled} programs were compiled in runs that count")
    batch, length = len(prompts), len(prompts[0])
    compiling = [r.prefill_s + r.decode_s for r in warm_up[:-1]]
    steady = statistics.median(r.prefill_s + r.decode_s for r in done)
    return BatchResult(
        batch=batch,
        compile_s=round(sum(max(s - steady, 0.0) for s in compiling), 2),
        n_compiled=compiled,
        warm_up_runs=len(compiling),
        prefill_tok_s=Spread.of([batch * length / r.prefill_s for r in done]),
        decode_tok_s=Spread.of([batch * (gen_len - 1) / r.decode_s for r in done]),
        peak_rss_mb=peak_rss_mb(),
        ids=done[0].rows[0][:N_IDS],
        repeatable=all(r.rows == done[0].rows for r in (*warm_up, *done)),
    )


def peak_rss_mb() -> int:
    """Peak resident memory of this process so far, in 2^20 bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
    return round(peak / 2**20 if sys.platform == "darwin" else peak / 2**10)


def host_gflops(seconds: float = 0.4) -> float:
    """GFLOP/s of NumPy's float32 matrix product on the host: low when something else has the processor."""
    a = np.ones((512, 512), np.float32)
    out, n, t0 = np.empty_like(a), 0, time.perf_counter()
    while time.perf_counter() - t0 < seconds:
        np.matmul(a, a, out=out)
        n += 1
    return round(2 * 512**3 * n / (time.perf_counter() - t0) / 1e9, 1)


def engine_config(
    config: TargetConfig, work: Workload, batch: int, context_length: int | None, burst: int
) -> EngineConfig:
    """An engine of exactly `batch` rows.

    Args:
      config: the model.
      work: what has to fit.
      batch: rows.
      context_length: tokens of a request; None: what the server takes unless told otherwise.
      burst: tokens a decoding program makes.
    Raises:
      ConfigError: the prompt and the output do not fit into the context, or the context not into the model.
    """
    length = min(DEFAULT_CONTEXT, config.max_positions) if context_length is None else context_length
    if length > config.max_positions:
        raise ConfigError("context_length", length, f"at most the model's {config.max_positions} positions")
    if work.prompt_len + work.gen_len > length:
        needed = f"at least prompt_len + gen_len ({work.prompt_len + work.gen_len})"
        raise ConfigError("context_length", length, needed, "raise it or shorten the prompt")
    return EngineConfig(max_batch=batch, context_length=length, burst=burst)


def load_model(directory: Path, config: TargetConfig, dtype: str) -> tuple[Target, float]:
    """The model on the first device, INT4 experts unpacked on a CPU, and the seconds that took."""
    t0 = time.perf_counter()
    on_cpu = jax.default_backend() == "cpu"
    model = checkpoint.load(directory, config, dtype=jnp.dtype(dtype), unpack_int4=on_cpu)
    return model, time.perf_counter() - t0


def report(
    results: Sequence[BatchResult], work: Workload, engine: EngineConfig, facts: dict[str, Any]
) -> dict[str, Any]:
    """The JSON object. With one batch size, that one's figures also stand at the top level, so that the line can be a
    row beside other programs' lines."""
    row = {
        "peer": "kimijax",
        "version": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "prompt_len": work.prompt_len,
        "gen_len": work.gen_len,
        "context_length": engine.context_length,
        "burst": engine.burst,
        **facts,
        "by_batch": [asdict(r) for r in results],
    }
    return row | asdict(results[0]) if len(results) == 1 else row


def render(row: dict[str, Any]) -> Table:
    """The report as a table; figures are the median and, in brackets, the least and the most of all runs."""
    shape = (
        f"prompt {row['prompt_len']}, output {row['gen_len']}, context {row['context_length']}, burst {row['burst']}"
    )
    machine = f"load before {row['loadavg_before']}, host matmul after {row['probe_gflops']} GFLOP/s"
    notes = [f"loaded in {row['load_s']} s; {machine}"]
    table = Table(title=f"{row['model']}: {row['dtype']} on {row['device']}\n{shape}")
    for header in ("batch", "compile s", "prefill tok/s", "decode tok/s", "peak RSS MB"):
        table.add_column(header, justify="right", no_wrap=True)
    for r in row["by_batch"]:
        spreads = (r["prefill_tok_s"], r["decode_tok_s"])
        speeds = [f"{s['median']:,.0f} ({s['min']:,.0f}-{s['max']:,.0f})" for s in spreads]
        table.add_row(str(r["batch"]), str(r["compile_s"]), *speeds, f"{r['peak_rss_mb']:,}")
        ids = " ".join(map(str, r["ids"]))
        notes.append(f"batch {r['batch']}, row 0: {ids}" + ("" if r["repeatable"] else " (NOT REPEATABLE)"))
    table.caption = "\n".join(notes)
    return table


class _Parser(argparse.ArgumentParser):
    """Errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n")


def _batches(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected integers and commas, such as 1,8,32") from e


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = _Parser("python -m kimijax.bench", description="Measure the engine.")
    commands = top.add_subparsers(dest="command", required=True, parser_class=_Parser)
    p = commands.add_parser("offline", help="prefill and decode throughput, without a server")
    p.add_argument("--model", default="nano", help="checkpoint directory, or nano, the model that comes with kimijax")
    p.add_argument("--batch", type=_batches, default=Workload.batches, help="batch sizes, such as 1,8,32")
    p.add_argument("--prompt-len", type=int, default=Workload.prompt_len, help="random ids in each prompt")
    p.add_argument("--gen-len", type=int, default=Workload.gen_len, help="tokens to generate for each prompt")
    p.add_argument("--runs", type=int, default=Workload.runs, help="runs that count")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32 on CPUs, else bfloat16")
    p.add_argument("--context-length", type=int, help=f"default: {DEFAULT_CONTEXT}, or what the model holds if less")
    p.add_argument("--burst", type=int, default=EngineConfig.burst, help="tokens a decoding program makes at a time")
    p.add_argument("--latent-norm-eps", type=float, help="eps of the q_a and kv_a norms; default: rms_norm_eps")
    p.add_argument("--json", action="store_true", help="one JSON line on stdout instead of the table")
    return top


def offline(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Carry out the command. Raises ConfigError or CheckpointError, settings before any weight is read."""
    load_before = os.getloadavg()[0]
    work = Workload(args.batch, args.prompt_len, args.gen_len, args.runs)
    directory = model_directory(args.model)
    config = load_config(directory, latent_norm_eps=args.latent_norm_eps)
    engines = [engine_config(config, work, batch, args.context_length, args.burst) for batch in work.batches]
    prompts = [random_prompts(config.vocab_size, batch, work.prompt_len) for batch in work.batches]
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    model, load_s = load_model(directory, config, dtype)
    results = []
    for engine, rows in zip(engines, prompts, strict=True):
        console.print(f"batch {len(rows)}: compiling, then {work.runs} runs", highlight=False)
        results.append(measure(Engine(model, engine), rows, work.gen_len, work.runs))
    facts = {
        "model": str(args.model),
        "dtype": dtype,
        "load_s": round(load_s, 2),
        "loadavg_before": round(load_before, 2),
        "probe_gflops": host_gflops(),
    }
    return report(results, work, engines[0], facts)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code (2: the model or the settings cannot be measured)."""
    args = parser().parse_args(argv)
    try:
        row = offline(args, Console(stderr=True))
    except (ConfigError, CheckpointError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(row))
    else:
        Console().print(render(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
