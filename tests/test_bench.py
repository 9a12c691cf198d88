"""The benchmark's figures are what their definition says, its tokens are the model's own, its flags are checked."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kimijax.bench import (
    MAX_WARM_UP,
    BatchResult,
    Spread,
    Workload,
    engine_config,
    main,
    measure,
    random_prompts,
    render,
    report,
    run_once,
)
from kimijax.config import load_config
from kimijax.engine.config import EngineConfig
from kimijax.engine.request import Request, Sampling, StepOutput
from kimijax.errors import ConfigError

from .golden import FAMILIES, hf_weights, write_checkpoint
from .reference import forward

CHUNK_S, BURST_S = 0.5, 0.25  # what the fake engine's steps take


class FakeEngine:
    """Chunks of 4 prompt tokens, bursts of 2 tokens, on a clock of its own; `compiles` steps also compile."""

    def __init__(self, compiles: int = 1, finish_early: bool = False) -> None:
        self.now = 0.0
        self.steps = 0
        self.compiles, self.finish_early = compiles, finish_early
        self.waiting: list[list[Any]] = []  # request, prompt tokens left
        self.decoding: list[Request] = []

    def clock(self) -> float:
        return self.now

    def make_request(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        assert sampling.temperature == 0
        assert sampling.ignore_eos
        assert sampling.max_tokens is not None
        return Request(f"r{self.steps}-{prompt[0]}", tuple(prompt), sampling, 0, frozenset(), sampling.max_tokens)

    def add(self, request: Request) -> None:
        self.waiting.append([request, len(request.prompt)])

    def prefill_step(self) -> list[StepOutput]:
        self.steps += 1
        self.now += CHUNK_S + (100.0 if self.steps <= self.compiles else 0.0)
        head = self.waiting[0]
        head[1] -= 4
        if head[1] > 0:
            return []
        self.decoding.append(self.waiting.pop(0)[0])
        return [self._draw(self.decoding[-1], 1)]

    def decode_step(self) -> list[StepOutput]:
        self.now += BURST_S
        outputs = [] if self.finish_early else [self._draw(r, 2) for r in self.decoding]
        self.decoding = [r for r in self.decoding if r.finish_reason is None]
        return outputs

    def _draw(self, request: Request, n: int) -> StepOutput:
        before = len(request.output)
        for _ in range(n):
            request.append(request.prompt[0] + len(request.output))
        return StepOutput(request.id, tuple(request.output[before:]), request.finish_reason)

    def n_compiled(self) -> int:
        return min(self.steps, self.compiles)


PROMPTS = [[20, 1, 1, 1, 1, 1], [30, 1, 1, 1, 1, 1], [40, 1, 1, 1, 1, 1]]  # two chunks each


def test_times_are_split_at_the_last_first_token() -> None:
    engine = FakeEngine(compiles=0)
    run = run_once(engine, PROMPTS, 4, engine.clock)
    assert run.prefill_s == pytest.approx(6 * CHUNK_S)
    assert run.decode_s == pytest.approx(2 * BURST_S)  # 3 tokens after the first, in bursts of 2
    assert run.rows == tuple((n, n + 1, n + 2, n + 3) for n in (20, 30, 40))


def test_rates_follow_their_definition_and_leave_compilation_out() -> None:
    engine = FakeEngine(compiles=1)
    result = measure(engine, PROMPTS, 4, 3, engine.clock)
    assert result.prefill_tok_s == Spread(6.0, 6.0, 6.0, 3)  # 3 rows of 6 tokens in 3 s
    assert result.decode_tok_s == Spread(18.0, 18.0, 18.0, 3)  # 3 rows of 3 tokens in 0.5 s
    assert result.compile_s == pytest.approx(100.0)
    assert (result.batch, result.n_compiled, result.warm_up_runs, result.ids) == (3, 1, 1, (20, 21, 22, 23))
    assert result.repeatable
    assert result.peak_rss_mb > 10


def test_an_engine_that_never_stops_compiling_is_refused() -> None:
    engine = FakeEngine(compiles=10_000)
    with pytest.raises(RuntimeError, match=f"still compiles after {MAX_WARM_UP + 1} equal runs"):
        measure(engine, PROMPTS, 4, 1, engine.clock)


def test_compiling_in_a_run_that_counts_is_refused() -> None:
    class Late(FakeEngine):
        def n_compiled(self) -> int:
            return 1 if self.steps <= 12 else 2  # 6 steps a run: the third compiles

    engine = Late()
    with pytest.raises(RuntimeError, match="1 programs were compiled in runs that count"):
        measure(engine, PROMPTS, 4, 2, engine.clock)


def test_a_row_that_stops_short_is_refused() -> None:
    engine = FakeEngine(compiles=0, finish_early=True)
    with pytest.raises(RuntimeError, match=r"\[1, 1, 1\] of 4 tokens"):
        run_once(engine, PROMPTS, 4, engine.clock)


def test_prompts_are_those_of_numpys_default_generator() -> None:
    """Known values: other programs draw the same ones, so they may not change."""
    assert random_prompts(4096, 1, 4) == [[3486, 2614, 2101, 1116]]
    assert random_prompts(4096, 2, 2) == [[3486, 2614], [2101, 1116]]
    with pytest.raises(ConfigError, match="vocab_size"):
        random_prompts(16, 1, 4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "tiny"
    write_checkpoint("kimi_k2", directory, dtype="float32")
    return directory


SMALL = ["--prompt-len", "20", "--gen-len", "11", "--runs", "2", "--context-length", "64", "--burst", "4"]


def greedy(prompt: list[int], n: int) -> list[int]:
    """Tokens by the NumPy reference, which recomputes the whole sequence for each."""
    config = FAMILIES["kimi_k2"]
    weights = hf_weights(config)
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(np.argmax(forward(config, weights, np.array(ids)).logits[-1])))
    return ids[len(prompt) :]


def test_offline_prints_one_json_line_with_the_models_own_greedy_ids(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["offline", "--model", str(tiny), "--batch", "2", "--dtype", "float32", "--json", *SMALL]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    row = json.loads(line)
    assert {"peer", "version", "dtype", "ids", "prefill_tok_s", "decode_tok_s"} <= row.keys()
    settings = {"peer": "kimijax", "dtype": "float32", "batch": 2, "prompt_len": 20, "gen_len": 11}
    assert settings.items() <= row.items()
    for key in ("prefill_tok_s", "decode_tok_s"):
        assert row[key].keys() == {"median", "min", "max", "runs"}
        assert row[key]["runs"] == 2
        assert 0 < row[key]["min"] <= row[key]["median"] <= row[key]["max"]
    (only,) = row["by_batch"]
    assert all(row[key] == only[key] for key in only)
    vocab = load_config(tiny).vocab_size
    assert row["ids"] == greedy(random_prompts(vocab, 2, 20)[0], 8)
    assert row["repeatable"]


def test_table_has_a_row_for_each_batch() -> None:
    results = [BatchResult(n, 1.5, 2, 1, Spread(n, n, n, 3), Spread(7, 6, 8, 3), 99, (5, 6), n == 8) for n in (8, 32)]
    facts = {"model": "m", "dtype": "float32", "load_s": 0.1, "loadavg_before": 0.2, "probe_gflops": 100.0}
    row = report(results, Workload(), EngineConfig(), facts)
    assert row.keys().isdisjoint({"ids", "decode_tok_s"})  # of two batches, neither is the row's
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render(row))
    lines = console.export_text().splitlines()
    assert any("8 (8-8)" in line and "7 (6-8)" in line for line in lines)
    assert any("32 (32-32)" in line and "7 (6-8)" in line for line in lines)
    assert [line.split() for line in lines if "NOT REPEATABLE" in line] == [
        ["batch", "32,", "row", "0:", "5", "6", "(NOT", "REPEATABLE)"]
    ]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--batch", "1,x"], "--batch"),
        (["--batch", "0"], "batch"),
        (["--prompt-len", "0"], "prompt_len"),
        (["--gen-len", "1"], "gen_len"),
        (["--runs", "0"], "runs"),
        (["--burst", "0"], "burst"),
        (["--dtype", "float16"], "--dtype"),
        (["--context-length", "100"], "context_length"),  # no whole pages
        (["--context-length", "64", "--prompt-len", "64"], "prompt_len + gen_len"),
        (["--context-length", "1048576"], "positions"),
        (["--model", "no/such/directory"], "no/such/directory"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(
    tiny: Path, capsys: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    try:
        code = main(["offline", "--model", str(tiny), "--gen-len", "2", "--prompt-len", "4", *flags])
    except SystemExit as e:
        code = e.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert named in line


def test_default_context_is_the_servers_or_the_models_if_shorter(tiny: Path) -> None:
    config = load_config(tiny)
    work = Workload(prompt_len=10, gen_len=10)
    assert engine_config(config, work, 4, None, 8).context_length == min(2048, config.max_positions)
    assert engine_config(config, work, 4, 128, 8) == EngineConfig(max_batch=4, context_length=128, burst=8)
