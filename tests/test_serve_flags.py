"""The server's speculation flags, what they refuse, and what --check prints. Weights are never loaded here."""

import dataclasses
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimijax import serving_plan
from kimijax.errors import CheckpointError, ConfigError
from kimijax.loader import NANO, NANO_DRAFTER
from kimijax.serve import check, config, startup
from kimijax.speculative_options import SpeculativeOptions
from kimijax.wiring import WiringError

from . import golden
from .checkpoint_cases import rewrite
from .test_plan import k25_config

ROOT = Path(__file__).resolve().parents[1]
SPECULATION = "--speculative-algorithm EAGLE3 --speculative-draft-model-path nano"


def parse(line: str) -> config.ServerConfig:
    return config.parse_args(shlex.split(line))


def refusal(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command line is refused with."""
    with pytest.raises(SystemExit) as stopped:
        parse(line)
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


# ---- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path D --speculative-num-draft-tokens 6",
        "--speculative-algorithm EAGLE3 --speculative-draft-model D --spec-tokens 5",
        "--spec-method EAGLE3 --spec-model D --spec-tokens 5",
        """--speculative-config '{"method": "EAGLE3", "model": "D", "num_speculative_tokens": 5}'""",
        """-sc '{"method": "EAGLE3", "model": "D", "num_speculative_tokens": 5}'""",
    ],
)
def test_both_dialects_say_the_same(line: str) -> None:
    flags = parse(line).speculation()
    assert (flags.algorithm, flags.draft, flags.num_draft_tokens, flags.num_steps) == ("EAGLE3", "D", 6, None)
    options = SpeculativeOptions.resolve(draft=flags.draft, **flags.settings)
    assert options == SpeculativeOptions("EAGLE3", 5, 1, 6)


@pytest.mark.parametrize(
    ("line", "adaptive"),
    [
        ("", None),
        ("--speculative-adaptive", True),
        ("--speculative-adaptive true", True),
        ("--speculative-adaptive=false", False),
    ],
)
def test_a_switch_may_have_a_value(line: str, adaptive: bool | None) -> None:
    flags = parse(f"{line} {SPECULATION} --speculative-use-block-verification").speculation()
    assert (flags.adaptive, flags.block_verification) == (adaptive, True)


def test_prefixes_are_cached_unless_told_otherwise() -> None:
    assert parse("").engine_config(2048).prefix_cache
    for flag in ("--disable-radix-cache", "--no-enable-prefix-caching"):
        assert not parse(flag).engine_config(2048).prefix_cache


@pytest.mark.parametrize(
    ("line", "message"),
    [
        # What other servers ignore.
        ("--speculative-draft-model-path D", "without an algorithm; add --speculative-algorithm EAGLE3"),
        (
            "--speculative-num-steps 3",
            "--speculative-num-steps: found 3, expected no such setting without an algorithm",
        ),
        ("--speculative-adaptive false", "--speculative-adaptive: found False"),
        ("--speculative-simulate-acc-len 2.5", "--speculative-simulate-acc-len: found 2.5"),
        ("--spec-tokens 3", "--speculative-num-draft-tokens: found 4"),
        ("""-sc '{"model": "D"}'""", "--speculative-draft-model-path: found 'D', expected no such setting without an"),
        (
            "--speculative-algorithm NONE --spec-model D",
            "speculative_draft_model_path: found 'D', expected no such setting beside --speculative-algorithm NONE",
        ),
        # Two that say the same.
        (
            """-sc '{"method": "eagle3", "model": "D"}' --spec-model D""",
            "expected one of --speculative-config and --speculative-draft-model-path; neither overrides the other",
        ),
        ("""-sc '{"method": "eagle3", "model": "D"}' --spec-tokens 3""", "--speculative-config and --spec-tokens"),
        ("""-sc '{"method": "eagle3", "model": "D"}' --speculative-eagle-topk 2""", "--speculative-eagle-topk"),
        ("--spec-tokens 3 --speculative-num-draft-tokens 4", "one of --spec-tokens and --speculative-num-draft-tokens"),
        ("--spec-method eagle3 --speculative-algorithm EAGLE3", "--speculative-algorithm is given twice"),
        # Wrong values.
        ("--spec-tokens 0", "--spec-tokens: found 0, expected 1 or more"),
        (
            """-sc '{"method": "eagle3", "k": 3}'""",
            "--speculative-config.k: found 3, expected no such key, only method",
        ),
        ("""-sc '{"method": "eagle3", "num_speculative_tokens": 0}'""", "num_speculative_tokens: found 0, expected an"),
        ("""-sc '{"method": "eagle3", "num_speculative_tokens": true}'""", "num_speculative_tokens: found True"),
        ("""-sc '{"method": 3}'""", "--speculative-config.method: found 3, expected a text"),
        ("-sc eagle3", "expected a JSON object"),
        ("--speculative-adaptive maybe", "found 'maybe', expected true or false"),
        ("--speculative-algorithm EAGLE3 --spec-model ''", "--speculative-draft-model-path: found ''"),
        ("--gpu-memory-utilization 0.9", "--max-total-tokens sizes the cache"),
    ],
)
def test_wrong_flags_name_the_fix(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(line, capsys)


# ---- flags and files ------------------------------------------------------------------------------------------------


def test_the_draft_of_nano_fits_nano() -> None:
    found = startup.check_files(parse(SPECULATION))
    assert found.draft is not None
    assert found.draft.directory == NANO_DRAFTER
    assert found.speculation == SpeculativeOptions("EAGLE3", 3, 1, 4)  # what its probe was measured with
    assert found.speculation is not None
    assert found.speculation.sources["num_steps"] == "the draft's files"
    tree = startup.check_files(parse(f"{SPECULATION} --speculative-eagle-topk 4 --speculative-num-steps 2"))
    assert tree.speculation == SpeculativeOptions("EAGLE3", 2, 4, 8)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--speculative-algorithm EAGLE --spec-model nano",
            "speculative_algorithm: found 'EAGLE', expected EAGLE3; .* its fc takes 768",
        ),
        ("--speculative-algorithm NEXTN --spec-model nano", "speculative_algorithm: found 'NEXTN', expected EAGLE3"),
        (
            "--speculative-algorithm EAGLE3",
            "no such setting without a draft; name the draft .*--speculative-draft-model-path",
        ),
        ("--speculative-algorithm EAGLE3 --spec-model nowhere", "draft: found 'nowhere', expected"),
        (
            f"{SPECULATION} --speculative-num-draft-tokens 4 --speculative-num-steps 5",
            "set --speculative-num-draft-tokens 6",
        ),
        (
            f"{SPECULATION} --speculative-eagle-topk 4 --spec-tokens 63",
            "a tree of 3 steps with 4 branches has 36 drafts",
        ),
        (f"{SPECULATION} --speculative-eagle-topk 4000", "speculative_eagle_topk: found 4000, expected at most 3072"),
        (
            f"{SPECULATION} --speculative-simulate-acc-len 4.5",
            "speculative_simulate_acc_len: found 4.5, expected 1 ... 4",
        ),
        ("--context-length 4096", "--context-length: found 4096"),
        (
            f"{SPECULATION} --max-total-tokens 2048",
            "n_pages: found 32, expected at least 33: .* raise --max-total-tokens",
        ),
    ],
)
def test_flags_that_the_files_contradict(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        startup.check_files(parse(line))


def draft_with(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Nano's draft with another config.json."""
    shutil.copytree(NANO_DRAFTER, folder)
    data = json.loads((folder / "config.json").read_text())
    change(data)
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def without(data: dict[str, Any], *keys: str, **values: Any) -> None:
    for key in keys:
        del data[key]
    data.update(values)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda d: d["kimijax"].update(tokenizer="a" * 64),
            WiringError,
            "1 difference.*\n.*\n  tokenizer .*aaaaaaaaaaaa",
        ),
        (lambda d: d["kimijax"]["target"]["config"].update(rope_theta=1.0), WiringError, "target.config.rope_theta"),
        (lambda d: d.update(vocab_size=4000), ConfigError, "found .4096, 256, 6., expected the draft's .4000"),
        (
            lambda d: without(d, "kimijax", hidden_size=128, target_hidden_size=128),
            ConfigError,
            "target_hidden_size|width",
        ),
        (
            lambda d: d.update(draft_vocab_size=3000),
            CheckpointError,
            r"lm_head.weight: found \[3072, 256\], expected \[3000",
        ),
        (
            lambda d: d.update(max_position_embeddings=512),
            ConfigError,
            "--context-length: found 1024, expected at most 512, .* 2048",
        ),
    ],
)
def test_a_draft_of_something_else(change: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    folder = draft_with(tmp_path / "draft", change)
    line = f"--speculative-algorithm EAGLE3 --spec-model {folder} --context-length 1024"
    with pytest.raises(error, match=message):
        startup.check_files(parse(line))


@pytest.mark.parametrize("tp", [2, 8])
def test_a_draft_is_split_like_the_model(tp: int) -> None:
    assert startup.check_files(parse(f"{SPECULATION} --tp {tp}")).draft is not None


def test_a_draft_that_the_devices_do_not_divide(tmp_path: Path) -> None:
    folder = draft_with(tmp_path / "draft", lambda d: d.update(intermediate_size=764))
    names = ("gate_proj", "up_proj", "down_proj")

    def cut(tensors: dict[str, Any]) -> dict[str, Any]:
        return {
            n: (v[..., :764] if names[2] in n else v[:764]) if any(p in n for p in names) else v
            for n, v in tensors.items()
        }

    rewrite(folder, cut, shards=1)
    line = f"--speculative-algorithm EAGLE3 --spec-model {folder}"
    assert startup.check_files(parse(f"{line} --tp 4")).draft is not None
    with pytest.raises(ConfigError, match=r"^--tp: found 8, expected a number that divides the model and its draft"):
        startup.check_files(parse(f"{line} --tp 8"))


def test_layer_ids_of_several_meanings_need_a_name(tmp_path: Path) -> None:
    folder = draft_with(tmp_path / "draft", lambda d: without(d, "kimijax"))
    line = f"--speculative-algorithm EAGLE3 --spec-model {folder}"
    with pytest.raises(WiringError, match="--layer-id-convention"):
        startup.check_files(parse(line))
    for name, taps in (("vllm", (2, 4, 5)), ("specforge", (3, 5, 6))):
        found = startup.check_files(parse(f"{line} --layer-id-convention {name}"))
        assert found.draft is not None
        assert found.draft.resolved.wiring.taps == taps
    with pytest.raises(ConfigError, match=r"config\.kimijax\.wiring says it"):
        startup.check_files(parse(f"{SPECULATION} --layer-id-convention specforge"))


def test_a_context_that_nobody_set_is_what_both_can(tmp_path: Path) -> None:
    folder = draft_with(tmp_path / "draft", lambda d: d.update(max_position_embeddings=500))
    found = startup.check_files(parse(f"--speculative-algorithm EAGLE3 --spec-model {folder}"))
    assert found.engine.context_length == 448


def test_a_vocabulary_out_of_range_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    folder = draft_with(tmp_path / "draft", lambda d: None)
    rewrite(folder, lambda t: {**t, "d2t": t["d2t"] + 5000}, shards=1)
    with pytest.raises(CheckpointError, match="d2t: offsets"):
        startup.check_files(parse(f"--speculative-algorithm EAGLE3 --spec-model {folder}"))


# ---- --check --------------------------------------------------------------------------------------------------------


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


def test_the_roofline_counts_what_is_read(k25: Path) -> None:
    """By hand, for Kimi-K2.5 on eight devices in bf16 with INT4 experts."""
    line = f"--model {k25} --tp 8 --dtype bfloat16 --speculative-algorithm EAGLE3 --speculative-simulate-acc-len 2"
    flags = parse(line)
    where = serving_plan.Placement(None, startup.DTYPES["bfloat16"], unpack_int4=False)
    found = startup.resolve(flags, where)
    _, weights = serving_plan.plan_memory(k25, found.engine, found.drafter, found.speculation, where, 8, here=False)
    lines = serving_plan.roofline(found.target, weights, found.drafter, found.speculation, where, cached=1000)
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


# ---- compiled programs ----------------------------------------------------------------------------------------------

COMPILE = """
import sys
import jax, jax.monitoring
from kimijax.serve import config, startup
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
print(startup.use_compilation_cache(config.parse_args(sys.argv[1:])))
jax.jit(lambda x: x * 3 + 1)(2.0)
print(sum("cache_hits" in name for name in hits), sum("cache_misses" in name for name in hits))
"""


def test_a_second_start_finds_the_programs_of_the_first(tmp_path: Path) -> None:
    def start(*arguments: str) -> list[str]:
        command = [sys.executable, "-c", COMPILE, *arguments]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return run.stdout.split("\n")

    folder = tmp_path / "made" / "for it"
    first, second = (start("--compilation-cache-dir", str(folder)) for _ in range(2))
    assert first[0] == second[0] == str(folder)
    hits, misses = map(int, first[1].split())
    assert hits == 0 < misses
    assert list(map(int, second[1].split())) == [misses, 0]
    assert start("--compilation-cache-dir", "none")[:2] == ["None", "0 0"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--compilation-cache-dir"):
        startup.use_compilation_cache(config.ServerConfig(compilation_cache_dir=str(tmp_path / "file" / "sub")))


def test_nano_is_not_changed() -> None:
    """What the tests above copy and change is a copy."""
    assert json.loads((NANO_DRAFTER / "config.json").read_text())["max_position_embeddings"] == 2048
    assert (NANO / "config.json").is_file()
