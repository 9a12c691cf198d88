"""The server's speculation flags, and what they refuse. Weights are never loaded here."""

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

from kimijax.errors import CheckpointError, ConfigError
from kimijax.loader import NANO, NANO_DRAFTER
from kimijax.serve import config, startup
from kimijax.speculative_options import SpeculativeOptions
from kimijax.wiring import WiringError

from .checkpoint_cases import rewrite
from .serving import servers

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


# ---- what a server says of it ---------------------------------------------------------------------------------------


def test_the_model_card_tells_of_speculation(tmp_path: Path) -> None:
    for server in servers(tmp_path):
        [plain] = server().get("/v1/models").json["data"]
        assert not {"speculation", "simulated"} & plain.keys()
        for simulated, told in ((None, False), (2.5, True)):
            options = SpeculativeOptions("EAGLE3", 3, 1, 4, simulate_acc_len=simulated)
            made = server()
            made.state.ready(dataclasses.replace(made.service, speculation=options))
            [card] = made.get("/v1/models").json["data"]
            assert card["speculation"]["num_draft_tokens"] == 4
            assert ("simulated" in card) == told


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
