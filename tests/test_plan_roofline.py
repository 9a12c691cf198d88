"""Floors of decoding steps of Kimi-K2.5 on eight GPUs, against figures that were worked out apart from this code."""

import functools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kimijax.checkpoint import with_int4
from kimijax.config import load_config
from kimijax.draft_loading import declare_stand_in
from kimijax.loader import Placement
from kimijax.plan import main
from kimijax.plan_gpus import GPUS, Gpu, find_gpu
from kimijax.plan_roofline import Step, busiest_share, distinct_experts, roofline
from kimijax.plan_weights import Plan, make_plan
from kimijax.sharding import Preset

from .test_plan import k25_config

# Milliseconds of reading at 4,096 cached tokens: batch, preset, RTX PRO 6000, H200. They count the routers in float32,
# where they are kept in bfloat16: 60 x 384 x 7168 values of 2 bytes more.
FLOORS: list[tuple[int, Preset, float, float]] = [
    (1, "tp", 3.71, 1.38),
    (1, "dcp", 3.57, 1.33),
    (1, "ep", 4.99, 1.86),
    (8, "tp", 10.2, 3.80),
    (8, "dcp", 9.05, 3.38),
    (8, "ep", 13.3, 4.96),
    (64, "tp", 42.5, 15.9),
    (64, "dcp", 33.5, 12.5),
    (64, "ep", 46.0, 17.2),
]
ROUTERS = 60 * 384 * 7168 * 2


@pytest.fixture(scope="module")
def k25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("k25") / "config.json"
    path.write_text(json.dumps(k25_config()))
    return path


@functools.cache
def weights(path: Path, preset: Preset) -> Plan:
    return make_plan(path, preset=preset)


@functools.cache
def steps(
    path: Path, preset: Preset, batches: tuple[int, ...], counts: tuple[int, ...] = (0,), cached: int = 4096
) -> dict[tuple[int, int], Step]:
    """(batch, k) -> step."""
    target = with_int4(load_config(path))
    where = Placement(None, jnp.dtype(jnp.bfloat16), unpack_int4=False)
    drafter, plan = declare_stand_in(target, where.dtype), weights(path, preset)
    found = roofline(target, plan, drafter, None, where, cached=cached, batches=batches, draft_counts=counts)
    return {(s.batch, s.draft_tokens): s for s in found.steps}


@pytest.mark.parametrize(("batch", "preset", "pro", "h200"), FLOORS)
def test_reading(batch: int, preset: Preset, pro: float, h200: float, k25: Path) -> None:
    step = steps(k25, preset, (1, 8, 64))[batch, 0]
    for name, milliseconds in (("RTX-PRO-6000", pro), ("H200", h200)):
        bandwidth = GPUS[name].bandwidth
        assert (step.read + ROUTERS) / bandwidth * 1e3 == pytest.approx(milliseconds, rel=0.01)
        assert step.flops / GPUS[name].bf16 < step.read / bandwidth  # reading bounds all of these


def test_attention_by_request(k25: Path) -> None:
    """Whole attention weights cost 12.3 GB where split ones cost 3.2; each device reads its own requests' cache."""
    by = {preset: steps(k25, preset, (8, 64), cached=32768) for preset in ("ep", "dp-attention")}
    attention, shared, dense = 12.34e9 - 3.16e9, 7 / 8 * 5.28e9, 7 / 8 * 0.79e9
    for batch in (8, 64):
        cache = (batch - batch // 8) * 32768 * 70_272
        more = by["dp-attention"][batch, 0].read - by["ep"][batch, 0].read
        assert more == pytest.approx(attention + shared + dense - cache, rel=0.01)
    assert by["dp-attention"][64, 0].read < by["ep"][64, 0].read < 10 * by["dp-attention"][64, 0].read


@pytest.mark.parametrize(("tokens", "most"), [(1, 2.5), (8, 11.2), (64, 39.7)])
def test_the_busiest_device(tokens: int, most: float) -> None:
    """Of eight devices with 48 whole experts each."""
    assert busiest_share(384, 8, tokens, 8) * 48 == pytest.approx(most, rel=0.03)
    assert busiest_share(384, 8, tokens, 1) == distinct_experts(384, 8, tokens) / 384
    assert busiest_share(384, 8, 512, 8) == 1


def test_drafts(k25: Path) -> None:
    by = steps(k25, "tp", (1, 64), (0, 1, 3))
    gpu = GPUS["H200"]
    for batch in (1, 64):
        plain, one, three = (by[batch, k] for k in (0, 1, 3))
        assert plain.tokens * 4 == three.tokens
        # 2 a layer of 61; embedding, layer and head of a pass of the drafter; and what the rest of a step sends.
        assert (plain.collectives, one.collectives, three.collectives) == (126, 135, 141)
        for step in (one, three):
            passes = step.draft_tokens
            waiting = step.collectives * 8e-6
            assert step.seconds(gpu) == pytest.approx(step.read / 4.8e12 + waiting)
            assert 1 < step.seconds(gpu) / plain.seconds(gpu) < passes + 1.2
    # Drafting pays sooner where all experts are read anyway.
    pays = {batch: by[batch, 3].seconds(gpu) / by[batch, 0].seconds(gpu) for batch in (1, 64)}
    assert pays[64] < pays[1]
    # 63.4 GFLOP a token, and latent attention: two products of 64 heads with 576 and 512 values in 61 layers.
    context = 2 * 61 * 64 * (576 + 512) * 4096
    assert by[1, 0].flops * 8 == pytest.approx(63.4e9 + context, rel=0.01)


def test_a_step_is_the_longer_of_reading_and_computing() -> None:
    gpu: Gpu = find_gpu("h200")
    assert gpu.seconds(4.8e9, 0, 0) == pytest.approx(1e-3)
    assert gpu.seconds(4.8e9, 1978e9, 0) == pytest.approx(2e-3)
    assert gpu.seconds(4.8e9, 0, 100) == pytest.approx(1e-3 + 8e-4)
    assert {g.memory for g in GPUS.values()} == {141 * 10**9, 96 * 10**9, 180 * 10**9}


def test_command_line(k25: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--model", str(k25), "--gpu", "rtx-pro-6000", "--batch", "8", "--draft-tokens", "3"]
    assert main([*line, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed["device"]["memory_bytes"] == 96 * 10**9  # the GPU's
    rows = printed["roofline"]["steps"]
    assert [(row["batch"], row["draft_tokens"]) for row in rows] == [(8, 0), (8, 3)]
    assert np.isclose(rows[0]["seconds"], (10.2e-3 - ROUTERS / 1.792e12) + rows[0]["collectives"] * 25e-6, rtol=0.01)
    assert main(line) == 0
    table = capsys.readouterr().out
    assert "8 x RTX-PRO-6000, tp" in table
    assert "25 µs a collective over PCIe (assumed)" in table
