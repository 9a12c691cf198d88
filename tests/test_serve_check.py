"""--check: what it prints, the memory plan and the roofline behind it. Weights are never loaded here."""

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kimijax import plan_roofline, serving_plan
from kimijax.errors import CheckpointError, ConfigError
from kimijax.serve import check, config, startup
from kimijax.sharding import Preset

from . import golden
from .test_plan import k25_config
from .test_serve_flags import ROOT, SPECULATION, parse


def cells(report: str, first: str) -> list[str]:
    """The words of the line that begins so."""
    return next(line.split() for line in report.splitlines() if line.split()[:1] == [first])


def test_check_prints_what_a_command_line_comes_to() -> None:
    report = check.check(parse(f"{SPECULATION} --port 5 --max-running-requests 4 --check"))
    assert cells(report, "--port") == ["--port", "5", "set"]
    assert cells(report, "--page-size") == ["--page-size", "64", "default"]
    assert cells(report, "--context-length")[:3] == ["--context-length", "2048", "default,"]
    assert cells(report, "--max-total-tokens")[1] == str(4 * (2048 + 64))  # the page behind is for drafts
    assert cells(report, "--speculative-num-steps") == ["--speculative-num-steps", "3", "the", "draft's", "files"]
    assert cells(report, "--speculative-num-draft-tokens")[1:] == ["4", "num_steps", "+", "1"]
    assert cells(report, "--dtype") == ["--dtype", "float32", "auto"]
    flags = {line.split()[0] for line in report.splitlines() if line.startswith("  --")}
    fields = {f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(config.ServerConfig) if f.metadata}
    assert flags == fields - {"--check"}
    assert "EAGLE3, chain of 3 drafts, as many as pay" in report
    for item in ("target", "drafter", "cache of the target", "cache of the drafter"):
        assert f"\n  {item} " in report
    assert "notes" not in report


def test_what_another_dialect_set_is_said_to_be_set() -> None:
    report = check.check(parse("""-sc '{"method": "eagle3", "model": "nano", "num_speculative_tokens": 5}'"""))
    assert cells(report, "--speculative-num-draft-tokens")[1:] == ["6", "set", "by", "another", "flag"]
    assert cells(report, "--speculative-num-steps")[1:] == ["5", "num_draft_tokens", "-", "1"]
    assert cells(report, "--speculative-draft-model-path")[2:] == ["set", "by", "another", "flag"]


def drill(folder: Path) -> Path:
    """The headers of a small checkpoint; the data are holes."""
    sizes = {"vocab_size": 528, "num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 512}
    model = golden.with_quantization(golden.FAMILIES["kimi_k2"] | sizes, "int4")
    golden.write_tensors(golden.stored_tensors(model, dtype="bfloat16", quantization="int4", extras=False), folder, 3)
    (folder / "config.json").write_text(json.dumps(model))
    for file in folder.glob("*.safetensors"):
        data, size = file.read_bytes(), file.stat().st_size
        with file.open("wb") as f:
            f.write(data[: 8 + int.from_bytes(data[:8], "little")])
            f.truncate(size)
    return folder


@pytest.mark.parametrize("headers", [True, False])
def test_check_needs_no_weights(headers: bool, tmp_path: Path) -> None:
    folder = drill(tmp_path)
    if not headers:
        for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
            file.unlink()
    with pytest.raises(ConfigError, match=r"^--tp: found 9, expected a number that divides the model; .*vocab \(528\)"):
        check.check(parse(f"--model {folder} --tp 9"))
    line = f"--model {folder} --tp 16 --context-length 512"
    report = check.check(parse(f"{line} --speculative-algorithm EAGLE3 --speculative-simulate-acc-len 3"))
    assert "16 devices are planned for, and this machine has 8" in report
    assert ("no safetensors files yet" in report) == (not headers)
    assert "no tokenizer files yet" in report
    assert "acceptance is simulated" in report
    assert "each of 16 device(s)" in report
    assert cells(report, "free")[1] == "unknown"
    assert cells(report, "--dtype") == ["--dtype", "bfloat16", "auto"]


def test_missing_tensors_are_no_sound_settings(tmp_path: Path) -> None:
    folder = drill(tmp_path)
    next(folder.glob("*.safetensors")).unlink()
    for tp in (1, 16):
        with pytest.raises(CheckpointError, match="missing file"):
            check.check(parse(f"--model {folder} --tp {tp}"))


@pytest.fixture
def k25(tmp_path: Path) -> Path:
    """Kimi-K2.5's config alone."""
    (tmp_path / "config.json").write_text(json.dumps(k25_config()))
    return tmp_path


def test_a_plan_that_does_not_fit_names_what_would(k25: Path) -> None:
    where = serving_plan.Placement(None, startup.DTYPES["bfloat16"], unpack_int4=False)
    found = startup.resolve(parse(f"--model {k25} --context-length 131072"), where)
    fits, weights = serving_plan.plan_memory(k25, found.engine, None, None, where, 1, free=lambda _: 2 * 10**12)
    fits.check()
    per_token = 61 * 576 * 2
    assert fits.cache_bytes_per_token == per_token
    assert dict(fits.items) == {
        "target": weights.device.weight_bytes,
        "cache of the target": 16 * 131072 * per_token,
        "copy of it for decoding": 16 * 131072 * per_token,  # on a CPU
    }

    def refused(room: float, **changes: Any) -> str:
        plan = dataclasses.replace(fits, available=int(weights.device.weight_bytes + room), **changes)
        with pytest.raises(
            ConfigError, match=r"^memory: found .* free on each of 1 device', expected .*: target "
        ) as error:
            plan.check()
        return str(error.value)

    full = 131072 * per_token
    text = refused(3.5 * full)  # of 16 pages and copies
    assert "--max-running-requests 1 fits" in text
    assert "--context-length 14336 fits" in text  # 3.5 / 32 of the context
    assert "--max-total-tokens" not in text  # the copies alone are too large
    # On accelerators nothing is copied: fewer pages than all full contexts are the cheapest way out.
    paged = {"copies": 0, "items": fits.items[:2]}
    text = refused(5 * full, **paged)
    assert text.index(f"--max-total-tokens {5 * 131072} fits") < text.index("--max-running-requests 5 fits")
    assert "use more devices (--tp), or larger ones" in refused(-(10**9))
    assert "without the draft less is needed" in refused(-(10**9), has_draft=True)
    dataclasses.replace(fits, available=None).check()


@pytest.mark.parametrize(("preset", "share"), [("tp", 1), ("ep", 1), ("dp-attention", 8), ("dcp", 8)])
def test_the_cache_of_a_device(preset: Preset, share: int, k25: Path) -> None:
    """All of it, its own requests', or a part of every page."""
    where = serving_plan.Placement(None, startup.DTYPES["bfloat16"], unpack_int4=False)
    line = f"--model {k25} --context-length 4096 --speculative-algorithm EAGLE3 --speculative-simulate-acc-len 2"
    found = startup.resolve(parse(line), where)
    options, drafter = found.speculation, found.drafter
    memory, weights = serving_plan.plan_memory(k25, found.engine, drafter, options, where, 8, preset=preset, here=False)
    items = dict(memory.items)
    per_token = 61 * 576 * 2
    assert memory.cached_tokens == 16 * (4096 + 64)
    assert items["cache of the target"] == memory.cached_tokens * per_token / share
    assert items["cache of the drafter"] == memory.cached_tokens * 576 * 2 / share  # an MLA head's, as the target's
    assert items["target"] == weights.device.weight_bytes
    # Half of what the cache takes holds half of the tokens, whatever a device has of each.
    cache = items["cache of the target"] + items["cache of the drafter"]
    tight = dataclasses.replace(memory, available=memory.fixed + cache // 2)
    with pytest.raises(ConfigError, match=rf"--max-total-tokens {8 * 4160} fits"):
        tight.check()


def test_the_roofline_counts_what_is_read(k25: Path) -> None:
    """By hand, for Kimi-K2.5 on eight devices in bf16 with INT4 experts."""
    line = f"--model {k25} --tp 8 --dtype bfloat16 --speculative-algorithm EAGLE3 --speculative-simulate-acc-len 2"
    flags = parse(line)
    where = serving_plan.Placement(None, startup.DTYPES["bfloat16"], unpack_int4=False)
    found = startup.resolve(flags, where)
    _, weights = serving_plan.plan_memory(k25, found.engine, found.drafter, found.speculation, where, 8, here=False)
    lines = plan_roofline.roofline(found.target, weights, found.drafter, found.speculation, where, cached=1000)
    by = {(s.batch, s.draft_tokens): s for s in lines.steps}
    assert set(by) == {(b, k) for b in (1, 4, 16) for k in (0, 3)}
    expert = 3 * 7168 * 2048 * (0.5 + 2 / 32)  # four bits a weight, a scale of two bytes for 32 of them
    layers, devices = 60, 8
    for batch in (1, 4):
        plain = by[batch, 0]
        more = by[4 * batch, 0].read - plain.read
        cache = 3 * batch * 1000 * 61 * 576 * 2
        experts = (by[4 * batch, 0].experts - plain.experts) * layers * expert / devices
        assert more == pytest.approx(cache + experts, rel=1e-4)
        assert lines.break_even(plain) == 1
        assert 1 < lines.break_even(by[batch, 3]) < 4
    # Of the drafter: fusion once, then three times its layer (MLA and a dense MLP), its head and its cache.
    drafts = by[1, 3].read - by[4, 0].read + 3 * 1000 * 61 * 576 * 2  # one request's cache in place of four
    head, mlp, fc = 163840 * 7168 * 2 / devices, 3 * 7168 * 18432 * 2 / devices, 3 * 7168 * 7168 * 2
    assert fc + 3 * (head + mlp) < drafts < fc + 3 * (head + mlp + 0.2e9)


def test_check_ends_with_0_or_2() -> None:
    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "kimijax.serve", "--check", "--log-level", "warning", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    sound = run(*shlex.split(SPECULATION))
    assert (sound.returncode, sound.stderr) == (0, "")
    assert "the settings are sound" in sound.stdout
    faulty = run(*shlex.split(SPECULATION), "--spec-tokens", "5", "--speculative-num-steps", "3")
    assert (faulty.returncode, faulty.stdout) == (2, "")
    assert faulty.stderr.startswith(
        "kimijax.serve: error: speculative_num_draft_tokens: found 6, expected num_steps + 1"
    )
    assert faulty.stderr.count("\n") == 1
