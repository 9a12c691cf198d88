"""The plan on paper: its document is what it prints, and its constants are what the code and XLA count."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from benchmarks import scale, scale_constants, scale_model
from kimijax.config import load_config, parse_config
from kimijax.drafter import declare_drafter
from kimijax.errors import ConfigError
from kimijax.fingerprint import MATTERS
from kimijax.model import Tables
from kimijax.train import dataset, draft_recipe, draft_stages, ttt

DOCUMENT = Path(__file__).parents[1] / "docs" / "scale.md"
PUBLISHED = Path(__file__).parents[2] / "shared" / "data" / "kimi_k25"
JOB = scale_model.Job(8, 600_000, 6e9, "dcp")


@pytest.fixture(scope="module")
def h200() -> scale_constants.Constants:
    return scale_constants.constants("H200")


@pytest.fixture(scope="module")
def found() -> dict[str, scale.Table]:
    return scale.tables(scale.DEFAULT)


def test_document_has_the_tables_that_are_printed(found: dict[str, scale.Table]) -> None:
    text = DOCUMENT.read_text()
    assert sorted(re.findall(r"<!-- table: (\S+) -->", text)) == sorted(found)
    assert scale.updated(text, found) == text, "python -m benchmarks.scale --update docs/scale.md"
    stale = text.replace("| `generate` |", "| `generate` | 1", 1)
    assert stale != text
    assert scale.updated(stale, found) == text


def test_what_the_document_says_in_short(h200: scale_constants.Constants) -> None:
    text = " ".join(DOCUMENT.read_text().split())
    one, eight = (scale_model.hours(h200, dataclasses.replace(JOB, gpus=n), "online") for n in (8, 64))
    assert "It takes about two thirds of all hours" in text
    assert one.generate / one.total == pytest.approx(2 / 3, abs=0.05)
    assert "Two weeks of one H200 node; two days of eight" in text
    assert (one.total / 24, eight.total / 24) == pytest.approx((14, 2), rel=0.15)
    assert "hundreds of terabytes" in text
    assert 2e14 < JOB.tokens * h200.feature_bytes < 9e14
    assert scale_model.break_even(h200, JOB, beside=False) == scale_model.break_even(h200, JOB, beside=True) == 2
    assert "all-reduces of long passes take as long as" in text
    pcie = scale_constants.constants("RTX-PRO-6000")
    links = 2 * pcie.layers * scale_model.traffic(pcie, 1)
    assert links / (scale_model.forward(pcie, JOB.context(pcie)) - links) == pytest.approx(1, abs=0.25)


def test_an_unknown_table_is_refused(found: dict[str, scale.Table]) -> None:
    with pytest.raises(ConfigError, match="table: found 'speed'"):
        scale.updated("<!-- table: speed -->\n", found)


def test_document_runs_what_there_is() -> None:
    """Stages exist in their order, and the settings are those that the plan was computed with."""
    text = DOCUMENT.read_text()
    asked = re.findall(r"^python -m kimijax\.train (\S+)", text, re.M)
    assert asked == [name for name in draft_stages.STAGES if name != "features"]  # online
    settings = re.findall(r"--set '?([a-z_.]+=[^\s')]+)", text)
    paths = [item for item in settings if "/" in item]
    assert tuple(item for item in settings if item not in paths) == scale_constants.OVERRIDES


def test_one_node_and_eight_train_with_equal_updates(h200: scale_constants.Constants) -> None:
    text = DOCUMENT.read_text()
    [nodes] = re.findall(r"\((`target\.devices=64`.*?)\)", text, re.S)
    sets = re.findall(r"`([a-z_.]+=\d+)`", nodes)
    assert len(sets) == 4
    fit = draft_recipe.load_draft_recipe(scale_constants.RECIPE, (*scale_constants.OVERRIDES, *sets)).fit
    assert fit.rows * fit.row_tokens * fit.accumulate == h200.update_tokens
    assert f"{int(h200.update_tokens):,} tokens" in text


def test_constants_are_the_known_sizes(h200: scale_constants.Constants) -> None:
    assert h200.target_flops + h200.head_flops == pytest.approx(63.4e9, rel=1e-3)  # 31.69 G active parameters
    assert h200.weight_bytes == pytest.approx(76.2e9, rel=1e-3)
    assert h200.cache_bytes == 576 * 61 * 2
    assert h200.feature_bytes == 4 * 7168 * 2 + 4 + 1
    assert h200.draft_params == pytest.approx(1.841e9, rel=1e-3)
    assert h200.fusion_params == 3 * 7168 * 7168
    assert h200.check_threads == vars(dataset)["_THREADS"]


def test_declared_sizes_are_the_published_ones() -> None:
    if not PUBLISHED.is_dir():
        pytest.skip("the published config.json is not beside the repository")
    published, declared = load_config(PUBLISHED), parse_config(scale_constants.KIMI_K25)
    sizes = MATTERS - {"yarn"}  # no size
    assert {n: vars(declared)[n] for n in sizes} == {n: vars(published)[n] for n in sizes}


def test_flops_of_an_update_are_those_that_xla_counts(h200: scale_constants.Constants) -> None:
    """Of the program that trains, at the real sizes: lowered, never compiled."""
    config, bf16, n = parse_config(scale_constants.KIMI_K25), jnp.dtype(jnp.bfloat16), 64
    recipe = draft_recipe.load_draft_recipe(scale_constants.RECIPE, scale_constants.OVERRIDES)
    wiring = recipe.target.wiring(config)
    drafter = declare_drafter(recipe.draft.config(config, wiring, 0), wiring, dtype=bf16)
    graph, params, lent = nnx.split(drafter, nnx.Param, ...)
    tables_graph, tables = nnx.split(Tables(config, bf16))
    ids, states = jax.ShapeDtypeStruct((1, n), jnp.int32), jax.ShapeDtypeStruct((1, n, 7168), bf16)
    mask = jax.ShapeDtypeStruct((1, n), jnp.bool_)
    batch = ttt.Batch(ids, mask, ids, ids, dict.fromkeys(wiring.taps, states), states)  # type: ignore[arg-type]

    def loss(params: nnx.State, lent: nnx.State, tables: nnx.State, batch: ttt.Batch) -> jax.Array:
        return ttt.ttt_loss(nnx.merge(graph, params, lent), nnx.merge(tables_graph, tables), batch, recipe.fit)[0]

    counted = jax.jit(jax.grad(loss)).lower(params, lent, tables, batch).cost_analysis()
    assert isinstance(counted, dict)
    assert counted["flops"] / n == pytest.approx(scale_model.fit_flops(h200, n / 2), rel=0.01)


def test_published_speeds_are_met_within_a_quarter() -> None:
    for p in scale_constants.PUBLISHED:
        ratio = scale_model.predicted(scale_constants.constants(p.gpu), p) / p.speed
        assert 0.75 < ratio < 1.25, (p, ratio)
    gpu, _, spent, _ = scale_constants.PUBLISHED_TRAINING
    assert 0.75 < scale_model.predicted_training(scale_constants.constants(gpu), 600_000) / spent < 1.25


def test_decoding_cannot_be_faster_than_reading(h200: scale_constants.Constants) -> None:
    """One request chooses 8 experts of 384 a layer; the bound is written out in bytes."""
    whole = dataclasses.replace(h200, decode_efficiency=1.0)
    read = h200.dense_read_bytes + h200.expert_read_bytes * 8 / 384 + 4096 * 70272
    latency = 2 * 61 * (8e-6 + 1.75 * 7168 * 2 / 337.5e9)
    assert scale_model.decode_step(whole, 1, 4096, "tp") == pytest.approx(read / 4.8e12 + latency)


def test_a_cache_split_by_position_holds_eight_times_the_requests(h200: scale_constants.Constants) -> None:
    free = 141e9 * 0.92 - h200.weight_bytes - 4e9
    assert scale_model.requests_that_fit(h200, "tp") == int(free // (70272 * 20480))
    assert scale_model.requests_that_fit(h200, "dcp") == int(8 * free // (70272 * 20480))


def test_hours_follow_nodes_and_epochs(h200: scale_constants.Constants) -> None:
    one = scale_model.hours(h200, JOB, "online")
    eight = scale_model.hours(h200, dataclasses.replace(JOB, gpus=64), "online")
    assert eight.generate == pytest.approx(one.generate / 8)
    exchanged = 6e9 / h200.update_tokens * 2 * 7 / 8 * 4 * h200.draft_params / h200.nic_bandwidth / 3600
    assert eight.fit == pytest.approx(one.fit / 8 + exchanged)
    assert eight.evaluate == one.evaluate
    twice = scale_model.hours(h200, dataclasses.replace(JOB, epochs=2), "online")
    assert twice.fit == pytest.approx(2 * one.fit)
    assert twice.generate == one.generate


def test_slow_disks_bound_the_stages_on_files(h200: scale_constants.Constants) -> None:
    fast, slow = (dataclasses.replace(h200, disk_write=x, disk_read=x, check_rate=1e15) for x in (1e15, 1e9))
    size = 6e9 * h200.feature_bytes
    a, b = (scale_model.hours(c, JOB, "files") for c in (fast, slow))
    assert b.features - a.features == pytest.approx(size / 1e9 / 3600, rel=1e-4)
    assert b.fit == pytest.approx(size / 1e9 / 3600)
    assert a.features + a.fit == pytest.approx(scale_model.hours(fast, JOB, "online").fit, rel=1e-4)


def test_break_even_follows_the_disks(h200: scale_constants.Constants) -> None:
    free = dataclasses.replace(h200, disk_write=1e15, disk_read=1e15, check_rate=1e15)
    assert scale_model.break_even(free, JOB, beside=True) == 2  # the second epoch is the first to save a pass
    # Reading takes as long as the pass that it saves, and more.
    assert scale_model.break_even(dataclasses.replace(free, disk_read=1e8), JOB, beside=True) is None
    ahead = scale_model.forward(free, JOB.context(free))
    thrice = dataclasses.replace(free, disk_write=h200.feature_bytes / (2.5 * ahead))
    assert scale_model.break_even(thrice, JOB, beside=False) == 4


def test_sensitivity_names_what_moves_the_total(h200: scale_constants.Constants) -> None:
    def total(c: scale_constants.Constants, job: scale_model.Job) -> float:
        return job.gpus + 10 * c.answer_share + c.disk_read / 1e11

    rows = scale_model.sensitivity(h200, JOB, total)
    assert [row[0] for row in rows[:2]] == ["answer_share", "disk_read"]
    assert rows[0][2:] == pytest.approx((total(h200, JOB) - 10 * 2 / 3 * 0.2, total(h200, JOB) + 10 * 2 / 3 * 0.25))
    assert not {"peak_flops", "target_flops"} & {row[0] for row in rows}


def test_command_line(capsys: pytest.CaptureFixture[str], found: dict[str, scale.Table]) -> None:
    assert scale.main(["--json", "--gpus", "8"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["tables"]) == list(found)
    total = next(row for row in printed["tables"]["hours"] if row["stage, hours"] == "all")
    assert total["8 GPUs, online"] == scale_model.hours(scale_constants.constants("H200"), JOB, "online").total
    assert scale.main(["--json", "--gpus", "8", "--compute-efficiency", "0.6"]) == 0
    faster = json.loads(capsys.readouterr().out)["tables"]["token"][1]
    assert faster["tokens/s of a node"] > 1.5 * printed["tables"]["token"][1]["tokens/s of a node"]


def test_every_number_that_the_code_does_not_decide_has_a_flag() -> None:
    fields = dataclasses.fields(scale_constants.Constants)
    free = [f.name for f in fields if f.metadata["kind"] != "code"]
    args = scale.parser().parse_args([part for name in free for part in (f"--{name.replace('_', '-')}", "0.5")])
    assert scale.question(args).given == dict.fromkeys(free, 0.5)
    assert all(f.metadata["source"] for f in fields)
    assert {f.metadata["kind"] for f in fields} == {"code", "data sheet", "published", "measured", "assumed"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "12"], "gpus: found 12, expected a multiple of 8"),
        (["--gpus", "8,x"], "--gpus: found '8,x'"),
        (["--samples", "0"], "samples, tokens, epochs"),
        (["--decode-efficiency", "1.2"], "decode_efficiency: found 1.2, expected a number above 0 and at most 1"),
        (["--check-rate", "0"], "check_rate: found 0.0"),
        (
            ["--gpu", "RTX-PRO-6000", "--preset", "tp", "--memory-share", "0.8"],
            "memory: found '76.8 GB usable on a GPU', expected 81.6 GB",
        ),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_constants_of_the_code_cannot_be_given() -> None:
    with pytest.raises(ConfigError, match="constant: found 'cache_bytes'"):
        scale_constants.constants("H200", {"cache_bytes": 1.0})
    with pytest.raises(ConfigError, match="gpu: found 'H100'"):
        scale_constants.constants("H100")
