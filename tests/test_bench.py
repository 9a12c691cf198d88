"""The benchmark's figures are what their definition says, its tokens are the model's own, its flags are checked."""

import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kimijax.acceptance import Acceptance
from kimijax.bench import engine_config, main, parser
from kimijax.bench_engines import ADAPTIVE, PLAIN, PLAIN_WITH_DRAFTER, Drafting, Models, Variant, make_engine
from kimijax.bench_prompts import Prompts, Workload, probe_prompts, random_prompts, read_prompts
from kimijax.bench_report import render, report
from kimijax.bench_runs import MAX_WARM_UP, BatchResult, Speculation, Spread, Work, measure, run_once
from kimijax.config import load_config
from kimijax.draft_loading import LoadedDraft
from kimijax.draft_tree import TreeShape
from kimijax.engine.config import EngineConfig
from kimijax.engine.request import Request, Sampling, StepOutput
from kimijax.engine.stats import EngineStats
from kimijax.errors import ConfigError
from kimijax.loader import NANO_DRAFTER
from kimijax.probe import Probe
from kimijax.speculative_options import SpeculativeOptions

from .golden import FAMILIES, hf_weights, write_checkpoint
from .reference import forward
from .tiny_speculation import tiny_drafter, tiny_target

PROMPT_S, STEP_S = 0.5, 0.25  # what the fake engines' prompts and steps take


class Clock:
    """Of all fake engines of a test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeEngine:
    """Steps of `width` tokens a request, all but one of them drafts, on a clock of its own; the first `compiles` runs
    also compile. Tokens are read one step late, as the engine's are."""

    def __init__(self, clock: Clock, compiles: int = 0, width: int = 2, stuck: bool = False) -> None:
        self.clock, self.compiles, self.width, self.stuck = clock, compiles, width, stuck
        self.runs = self.n_made = 0
        self.waiting: list[Request] = []
        self.decoding: list[Request] = []
        self.begun: list[Request] = []  # without a token yet
        self.late = 0  # programs that steps compile from now on
        self.seeds: list[int] = []

    def make_request(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        assert sampling.max_tokens is not None
        self.n_made += 1
        return Request(f"r{self.n_made}", tuple(prompt), sampling, 99, frozenset(), sampling.max_tokens)

    def add(self, request: Request) -> None:
        self.seeds.append(request.seed)
        self.waiting.append(request)

    def compute_prompts(self) -> None:
        self.runs += 1
        self.clock.now += PROMPT_S * len(self.waiting) + (100.0 if self.runs <= self.compiles else 0.0)
        self._begin()

    def step(self) -> list[StepOutput]:
        self.clock.now += STEP_S + PROMPT_S * len(self.waiting)
        if self.stuck:
            return []
        outputs = [self._draw(r) for r in self.decoding]
        self.decoding = [r for r in self.decoding if r.finish_reason is None]
        self.decoding += self.begun
        self.begun = []
        self._begin()
        return outputs

    def _begin(self) -> None:
        self.begun += self.waiting
        self.waiting.clear()

    def _draw(self, request: Request) -> StepOutput:
        before = len(request.output)
        for _ in range(self.width):
            request.append(request.prompt[0] + len(request.output))
        if self.width > 1:
            own = request.accepted.setdefault(self.width - 1, [0] * self.width)
            own[-1] += 1
        return StepOutput(request.id, tuple(request.output[before:]), request.finish_reason)

    def n_compiled(self) -> int:
        return min(self.runs, self.compiles) + self.late

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0)


PROMPTS = [[20, 1, 1, 1, 1, 1], [30, 1, 1, 1, 1, 1], [40, 1, 1, 1, 1, 1]]


def work(gen_len: int = 4, batch: int = 3, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any) -> Work:
    return Work(prompts, batch, gen_len, **options)


def test_prompts_and_decoding_are_timed_apart() -> None:
    clock = Clock()
    run = run_once(FakeEngine(clock), work(), clock)
    assert run.prefill_s == pytest.approx(3 * PROMPT_S)
    assert run.decode_s == pytest.approx(3 * STEP_S)  # one that begins, two of 2 tokens each
    assert run.total_s == pytest.approx(run.prefill_s + run.decode_s)
    assert run.n_decoded == run.n_tokens == 12
    assert run.rows == tuple((n, n + 1, n + 2, n + 3) for n in (20, 30, 40))
    assert run.acceptance == Acceptance(6, (6,), (6,))
    assert run.rounds == {1: 6}


def test_steps_with_a_prompt_or_a_place_that_is_free_are_no_decoding() -> None:
    """Two at a time: a third prompt begins in the place of the first answer that ends, and then a place stays free."""
    clock = Clock()
    prompts = [[20, 1], [30, 1], [40, 1], [50, 1]]
    engine = FakeEngine(clock)
    run = run_once(engine, work(batch=2, prompts=prompts), clock)
    assert run.prefill_s == pytest.approx(2 * PROMPT_S)
    # Steps 1 to 3 answer the first two. Step 4 computes two prompts, step 5 reads nothing, 6 and 7 answer them: 4, 5
    # and 6 begin while requests have no token yet.
    assert run.decode_s == pytest.approx(4 * STEP_S)
    assert run.n_decoded == 12
    assert run.n_tokens == 16
    assert run.total_s == pytest.approx(4 * PROMPT_S + 7 * STEP_S)
    assert engine.seeds == [0, 1, 2, 3]  # a run draws the same as any other


def test_rates_follow_their_definition_and_leave_compilation_out() -> None:
    clock = Clock()
    (result,) = measure({PLAIN: FakeEngine(clock, compiles=1)}, work(), 3, clock)
    assert result.prefill_tok_s == Spread(12.0, 12.0, 12.0, 3)  # 3 prompts of 6 tokens in 1.5 s
    assert result.decode_tok_s == Spread(16.0, 16.0, 16.0, 3)  # 3 answers of 4 tokens in 0.75 s
    assert result.output_tok_s == Spread(5.333, 5.333, 5.333, 3)  # the same in 2.25 s
    assert result.compile_s == pytest.approx(100.0)
    assert (result.batch, result.k, result.n_compiled, result.warm_up_runs) == (3, "0", 1, 1)
    assert result.ids == (20, 21, 22, 23)
    assert result.ratio is None
    assert result.repeatable
    assert result.peak_rss_mb > 10


def test_engines_take_turns_and_are_compared_round_by_round() -> None:
    """Each run is slower than the one before: the rates fall, and their ratios do not."""
    clock = Clock()
    order: list[str] = []

    class Named(FakeEngine):
        def compute_prompts(self) -> None:
            order.append(f"{self.width}")
            super().compute_prompts()

        def step(self) -> list[StepOutput]:
            self.clock.now += STEP_S * (self.runs - 1)
            return super().step()

    # One run each before those that count. 12 tokens are 12 steps of plain decoding, and 3 of the other; one begins.
    engines = {PLAIN: Named(clock, width=1), "3": Named(clock, width=4)}
    plain, drafted = measure(engines, work(gen_len=12), 3, clock)
    assert order == ["1", "4", "1", "4", "4", "1", "1", "4"]
    assert plain.ratio is None
    assert plain.decode_tok_s.max == pytest.approx(2 * plain.decode_tok_s.min, rel=1e-3)  # 2, 3 and 4 times STEP_S
    assert drafted.ratio == Spread(3.25, 3.25, 3.25, 3)
    speculation = drafted.speculation
    assert speculation is not None
    assert speculation.acceptance["by_position"] == [1.0, 1.0, 1.0]
    assert speculation.rounds_by_k == {3: 27}  # 3 runs of 3 requests and 3 rounds
    assert speculation.n_different == 0
    assert plain.speculation is None


def test_answers_that_are_not_the_plain_engines_are_counted() -> None:
    class Wrong(FakeEngine):
        def _draw(self, request: Request) -> StepOutput:
            out = super()._draw(request)
            wrong = tuple(0 if request.prompt[0] == 30 else t for t in out.tokens)
            return (
                dataclasses.replace(out, tokens=wrong) if dataclasses.is_dataclass(out) else out._replace(tokens=wrong)
            )

    clock = Clock()
    engines = {PLAIN: FakeEngine(clock, width=1), "1": Wrong(clock)}
    assert _different(measure(engines, work(), 1, clock)) == 1
    engines = {PLAIN: FakeEngine(clock, width=1), "1": Wrong(clock)}
    assert _different(measure(engines, work(temperature=1.0), 1, clock)) is None  # there is chance in them


def _different(results: list[BatchResult]) -> int | None:
    speculation = results[1].speculation
    assert speculation is not None
    return speculation.n_different


def test_an_engine_that_never_stops_compiling_is_refused() -> None:
    clock = Clock()
    with pytest.raises(RuntimeError, match=f"still compiles after {MAX_WARM_UP + 1} equal runs"):
        measure({PLAIN: FakeEngine(clock, compiles=10_000)}, work(), 1, clock)


def test_compiling_in_a_run_that_counts_is_refused() -> None:
    class Late(FakeEngine):
        def compute_prompts(self) -> None:
            super().compute_prompts()
            self.late = int(self.runs == 3)

    clock = Clock()
    with pytest.raises(RuntimeError, match="1 programs were compiled in runs that count"):
        measure({PLAIN: Late(clock)}, work(), 2, clock)


def test_an_engine_that_is_stuck_is_refused() -> None:
    clock = Clock()
    with pytest.raises(RuntimeError, match=r"\[0, 0, 0\] of 4 tokens"):
        run_once(FakeEngine(clock, stuck=True), work(), clock)


def test_prompts_are_those_of_numpys_default_generator() -> None:
    """Known values: other programs draw the same ones, so they may not change."""
    assert random_prompts(4096, 1, 4) == [[3486, 2614, 2101, 1116]]
    assert random_prompts(4096, 2, 2) == [[3486, 2614], [2101, 1116]]
    with pytest.raises(ConfigError, match="vocab_size"):
        random_prompts(16, 1, 4)


def test_prompts_from_files(tmp_path: Path) -> None:
    ids, lines = tmp_path / "ids.json", tmp_path / "lines.jsonl"
    ids.write_text("[[1, 2], [3]]")
    lines.write_text('[5, 6]\n\n{"ids": [7]}\n')
    assert read_prompts(ids, None, 10) == Prompts(str(ids), ((1, 2), (3,)), is_text=True)
    assert read_prompts(lines, None, 10).ids == ((5, 6), (7,))
    assert read_prompts(ids, None, 10).first(3) == [(1, 2), (3,), (1, 2)]


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("p.json", "[[1, 10]]", "prompt 1"),
        ("p.json", "[[1], []]", "prompt 2"),
        ("p.json", '{"ids": [1]}', "a list of lists"),
        ("p.json", "[1", "JSON"),
        ("p.json", "[]", "at least one prompt"),
        ("p.jsonl", '[1]\n{"text": "x"}', "prompt 2"),
        ("p.jsonl", '{"messages": [{"role": "user", "content": "x"}]}', "chat template"),
        ("none.json", None, "none.json"),
    ],
)
def test_files_that_are_no_prompts_are_refused(tmp_path: Path, name: str, text: str | None, named: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_prompts(tmp_path / name, None, 10)


def test_held_out_prompts_are_the_first_halves_of_the_probe() -> None:
    probe = Probe.from_json(json.loads((NANO_DRAFTER / "probe.json").read_text()))
    found = probe_prompts(probe)
    assert [s.ids[: len(p)] == p and len(p) == len(s.ids) // 2 for s, p in zip(probe.sequences, found.ids, strict=True)]
    assert found.is_text
    with pytest.raises(ConfigError, match="--prompts"):
        probe_prompts(None)


def test_text_ends_where_the_model_ends_it_and_random_ids_do_not() -> None:
    text, random = Prompts("file", ((1,), (2,), (3,)), is_text=True), Prompts("random", ((1,), (2,)), is_text=False)
    w = Workload(batches=(2,), gen_len=9)
    assert w.of_batch(2, text) == Work([(1,), (2,), (3,)], 2, 9, 0.0, ignore_eos=False)
    assert w.of_batch(4, text).prompts == [(1,), (2,), (3,), (1,)]
    assert w.of_batch(1, random) == Work([(1,)], 1, 9, 0.0, ignore_eos=True)
    assert Workload(batches=(2,), requests=5, ignore_eos=True).of_batch(2, text) == Work(
        [(1,), (2,), (3,), (1,), (2,)], 2, 128, 0.0, ignore_eos=True
    )


def test_variants_of_a_comparison() -> None:
    simulated = Drafting(("0", "1", "5", "adaptive"), (TreeShape(2, 2, 4),), simulate_acc_len=1.5)
    made = simulated.variants(None)
    assert [v.name for v in made] == [PLAIN, "1", "5", "tree 2,2,5", PLAIN_WITH_DRAFTER, ADAPTIVE]
    one, five = (SpeculativeOptions("EAGLE3", k, 1, k + 1, adaptive=False, simulate_acc_len=1.5) for k in (1, 5))
    tree = SpeculativeOptions("EAGLE3", 2, 2, 5, adaptive=False)
    adaptive = dataclasses.replace(five, adaptive=True)
    assert [v.options for v in made] == [None, one, five, tree, five, adaptive]
    assert Drafting(("0",)).variants(None) == Drafting().variants(None) == [Variant(PLAIN)]
    for drafting in (Drafting(("3",)), Drafting(trees=(TreeShape(2, 2, 4),)), Drafting(block_verification=True)):
        with pytest.raises(ConfigError, match="without a draft"):
            drafting.variants(None)


def test_all_variants_give_the_tokens_of_plain_decoding() -> None:
    """Real engines; also the one that keeps a drafter up and never asks it."""
    vocab = 16  # of the smaller of the tiny models
    draft = LoadedDraft(
        "tiny", tiny_drafter(vocab=vocab), SpeculativeOptions("EAGLE3", 2, 1, 3, False), None, is_stand_in=False
    )
    models = Models(tiny_target(vocab), draft, None, ())
    sizes = EngineConfig(max_batch=1, context_length=64, page_size=16, chunk_size=32, prefix_cache=False)
    options = draft.options
    variants = (Variant(PLAIN), Variant("2", options), Variant(PLAIN_WITH_DRAFTER, options))
    engines = {v.name: make_engine(models, sizes, v) for v in variants}
    plain, drafted, undrafted = measure(engines, work(12, 1, [[3, 1, 4], [1, 5, 9, 2]]), 1)
    assert plain.repeatable
    assert drafted.repeatable
    assert plain.ids == drafted.ids == undrafted.ids
    assert drafted.speculation is not None
    assert drafted.speculation.n_different == 0
    assert drafted.speculation.rounds_by_k.keys() == {2}
    assert drafted.speculation.acceptance["accepted"][0] > 0
    assert undrafted.speculation is None  # it has not drafted
    assert drafted.ratio is not None
    assert undrafted.ratio is not None


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


FACTS = {"model": "m", "dtype": "float32", "load_s": 0.1, "loadavg_before": 0.2, "probe_gflops": 100.0}
RANDOM_PROMPTS = Prompts("random", ((1, 2),), is_text=False)


def result(n: int, k: str, repeatable: bool = True, **more: Any) -> BatchResult:
    rates = Spread(n, n, n, 3), Spread(7, 6, 8, 3), Spread(5, 5, 5, 3)
    more = {"ratio": None, **more}
    return BatchResult(n, k, 1.5, 2, 1, *rates, peak_rss_mb=99, ids=(5, 6), repeatable=repeatable, **more)


def test_table_of_a_comparison() -> None:
    acceptance = Acceptance(10, (10, 10), (8, 4))
    estimate = {"k": 2, "speed_up": 1.91, "drafts": 2, "length": 2.2, "break_even": 1.15}
    spec = Speculation(acceptance.to_json(), {2: 10}, estimate, 1.5, 3)
    results = [result(4, PLAIN), result(4, ADAPTIVE, ratio=Spread(1.8, 1.7, 1.9, 3), speculation=spec)]
    row = report(results, Workload(), RANDOM_PROMPTS, EngineConfig(), FACTS | {"simulated_acceptance_length": 2.2})
    json.dumps(row)
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(render(row))
    lines = console.export_text().splitlines()
    (line,) = (line for line in lines if "adaptive" in line and "│" in line)
    assert line.replace("│", "").split() == ["4", "adaptive", "7", "1.80", "(1.70-1.90)", "2.20", "0.80", "0.40"]
    text = " ".join("\n".join(lines).split())
    assert "3 ANSWERS DIFFER" in text
    assert "SIMULATED acceptance length 2.2: no real output" in text
    assert "estimated 1.91 times plain decoding with 2 drafts" in text


def test_table_has_a_row_for_each_batch() -> None:
    results = [result(n, PLAIN, repeatable=n == 8) for n in (8, 32)]
    row = report(results, Workload(), RANDOM_PROMPTS, EngineConfig(), FACTS)
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
        (["--requests", "1", "--batch", "2"], "requests"),
        (["--temperature", "-1"], "temperature"),
        (["--k", "3"], "--draft"),
        (["--k", "3,often"], "--k"),
        (["--tree", "3,2"], "--tree"),
        (["--tree", "3,2,20"], "--tree"),
        (["--draft", "no/such/draft"], "no/such/draft"),
        (["--data", "held-out"], "--prompts"),
        (["--prompts", "no/such/file.json"], "no/such/file.json"),
        (["--simulate-acc-len", "9"], "simulate_acc_len"),
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
    w = Workload(gen_len=10)
    assert engine_config(config, w, 4, 10, None, 8).context_length == min(2048, config.max_positions)
    expected = EngineConfig(max_batch=4, context_length=128, burst=8, prefix_cache=False)
    assert engine_config(config, w, 4, 10, 128, 8) == expected


def test_spec_tokens_is_another_name_of_k() -> None:
    assert parser().parse_args(["offline", "--spec-tokens", "0,3,adaptive"]).k == ("0", "3", "adaptive")
