"""Compiling for a GPU that is not there: the text that it is told by, and the real thing where the compiler is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kimijax import plan
from kimijax.plan_compile import CompiledProgram
from kimijax.plan_cuda import CudaProgram, count_thunks, is_available, target_description
from kimijax.plan_gpus import GPUS

from .test_plan import k25_config

THUNKS = """\
000: kCommandBuffer [source       | next=009 (1)]
    001: kCustomKernel [source       | next=002 (1)] loop_fusion grid: [1, 1, 1] threads: [8, 1, 1]
    002: kCopy         [prev=001 (1) | sink        ] kCopy
    014: kAsyncStart   [prev=013 (1)  | next=017 (2)] stream=computation_stream[0], async_id=14
        015: kCollectiveKernel [source | sink] kCollectiveKernel
009: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    010: kCustomKernel [source       | next=011 (1)] reduce grid: [1, 1, 1] threads: [8, 1, 1]  shared_memory: 0 bytes
  body:
        041: kAllReduce     [prev=132 (1) | next=000 (1)] kAllReduce
"""


def test_launches_are_counted() -> None:
    counts = count_thunks(THUNKS)
    program = CompiledProgram("decode", 0.0, 0.0, 0, 0, 0, (), ())
    assert CudaProgram(program, 3, counts, {}).launches(counts) == {
        "kernels": 2,
        "copies": 1,
        "one-shot collectives": 1,
        "NCCL collectives": 1,
        "loops": 1,
        "CUDA graphs": 1,
    }


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_a_target_says_whether_it_has_nvlink(gpu: object) -> None:
    assert isinstance(gpu, plan.Gpu)
    text = target_description(gpu)
    assert ("active_links" in text) == gpu.has_nvlink
    major, minor = gpu.compute_capability
    assert f"major: {major} minor: {minor}" in text
    assert text.count("{") == text.count("}")


def test_without_the_compiler_the_rest_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "is_available", lambda: False)
    (tmp_path / "config.json").write_text(json.dumps(k25_config()))
    assert plan.main(["--model", str(tmp_path), "--cuda", "h200"]) == 0
    told = capsys.readouterr().out
    assert "skipped: compiling for a GPU needs" in told
    assert "76.18 GB on each of 8 device(s)" in told
    assert plan.main(["--model", str(tmp_path), "--cuda", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cuda"]["skipped"].endswith("pip install 'kimijax[aot]'")


@pytest.mark.skipif(not is_available(), reason="XLA's CUDA compiler is not installed: pip install 'kimijax[aot]'")
@pytest.mark.parametrize(("gpu", "kind"), [("H200", "one-shot collectives"), ("RTX-PRO-6000", "NCCL collectives")])
def test_a_decoding_step(gpu: str, kind: str, tmp_path: Path) -> None:
    """In a process of its own, whose devices are not those of the tests."""
    (tmp_path / "config.json").write_text(json.dumps(k25_config()))
    command = [sys.executable, "-m", "kimijax.plan", "--model", str(tmp_path), "--cuda", gpu, "--layers", "5", "--json"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
        cwd=Path(__file__).parents[1],
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)["cuda"]
    layer, program = found["launches"]["layer"], found["program"]
    assert layer[kind] == 2
    assert layer["kernels"] < 60
    assert program["temporaries"] < 100e6
    assert not [t for t in program["largest"] if t["weight"] is not None]  # no weight is copied
