"""The command line of training: a run from corpus to report, stopped and resumed on the way; and what it refuses."""

import functools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kimijax.errors import ConfigError
from kimijax.train import cli, config, nano_corpus, report, run_record, stages, stopping

from .micro_run import micro_recipe, recipe_text, write_corpus


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Path of the micro recipe; the corpus builder writes the micro corpus."""

    def build(out_dir: Path, *, seed: int, n_ranks: int) -> None:
        write_corpus(out_dir, seed=seed, n_ranks=n_ranks)

    monkeypatch.setattr(nano_corpus, "build", build)
    path = tmp_path / "micro.toml"
    path.write_text(recipe_text(steps=6, warmup_steps=1, decay_steps=0), encoding="utf-8")
    return str(path)


def stop_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGTERM that comes before the first step."""
    sizes = stages.token_bytes

    def signalled(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return sizes(*arguments)

    monkeypatch.setattr(stages, "token_bytes", signalled)


def test_a_run_that_is_stopped_and_resumed(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ["pretrain", "--recipe", recipe, "--out", str(out)]
    monkeypatch.setattr(stages, "Pretrainer", functools.cache(stages.Pretrainer))  # compiles once
    with monkeypatch.context() as patch:
        stop_at_once(patch)
        assert cli.main(command) == 0
    assert "saved at step 1 of 6; run the same command again to resume" in capsys.readouterr().err
    assert not (out / "export").exists()

    monkeypatch.setattr(nano_corpus, "build", None)  # the corpus that the run began with is kept
    assert cli.main(command) == 0
    assert "resumed at step 1 of 6" in capsys.readouterr().err
    first, second = run_record.sessions(out)
    assert (first["outcome"], first["step"], second["outcome"], second["step"]) == ("interrupted", 1, "exported", 6)
    assert second["recipe"]["pretrain"]["steps"] == 6
    assert second["inputs"].keys() == first["inputs"].keys() != set()
    assert second["versions"].keys() >= {"jax", "flax", "optax", "kimijax", "python"}
    config = json.loads((out / "export" / "config.json").read_text())
    assert config["text_config"]["quantization_config"]["format"] == "pack-quantized"
    text = (out / "report.md").read_text()
    assert "| steps | 6 of 6, 4 rows of 32 tokens each |" in text
    assert "### What is b?" in text
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert f"{evaluation['int4_weights']['nats_per_byte']:.4f}" in text

    # What does not fit the run is refused before anything is computed.
    def refusal(*changes: str) -> str:
        flags = [flag for change in changes for flag in ("--set", change)]
        assert cli.main([*command, *flags]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        return lines[0]

    assert "pretrain.steps: found 5, expected at least 6" in refusal("pretrain.steps=5")
    assert "pretrain.seed: found 3, expected 0" in refusal("pretrain.seed=3")
    assert "model.n_routed_experts: found 8, expected 4" in refusal("model.n_routed_experts=8")
    assert "corpus.seed: found 1, expected 0" in refusal("corpus.seed=1")
    write_corpus(out / "corpus", seed=5)
    (out / "corpus" / "report.json").write_text(
        (out / "corpus" / "report.json").read_text().replace('"seed": 5', '"seed": 0')
    )
    assert "inputs.corpus/" in refusal()


def test_export_needs_a_checkpoint(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export-pretrained", "--recipe", recipe, "--out", str(tmp_path / "none")]) == 2
    assert "expected a run with a checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("name", "folder"), [("nano-target", "nano-target"), ("micro.toml", "micro")])
def test_the_folder_is_named_after_the_recipe(
    recipe: str, name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Path] = []

    def stage(recipe: config.Recipe, out: Path, *_: Any, **__: Any) -> None:
        given.append(out)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(cli.STAGES, "pretrain", (stage, ""))
    assert cli.main(["pretrain", "--recipe", name]) == 0
    assert cli.main(["pretrain", "--recipe", name, "--out", "elsewhere"]) == 0
    assert given == [Path("runs") / folder, Path("elsewhere")]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--recipe", "nanno"], "recipe: found 'nanno'"),
        (["--recipe", "nano-target", "--set", "pretrain.stepz=1"], "--set: found 'pretrain.stepz=1'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    arguments: list[str], names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pretrain", *arguments, "--out", str(tmp_path / "run")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert names in lines[0]
    assert not (tmp_path / "run").exists()


def test_a_file_in_the_place_of_the_folder(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").write_text("mine")
    assert cli.main(["pretrain", "--recipe", recipe, "--out", str(tmp_path / "run")]) == 2
    assert "expected a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["pretrain"], ["fly"], [], ["pretrain", "--recipe", "nano-target", "--out", "x", "--y"]]
)
def test_unknown_flags_and_stages_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_is_the_usual_one(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stopping.StopRequest() as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        assert signal.getsignal(number) is before
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("error", "code"), [(FloatingPointError("nan"), 1), (KeyboardInterrupt(), 130)])
def test_exit_status_of_failures(
    error: BaseException, code: int, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(stages, "run", fail)
    assert cli.main(["pretrain", "--recipe", recipe, "--out", str(tmp_path / "run")]) == code
    [session] = run_record.sessions(tmp_path / "run")
    assert session.get("outcome") == ("failed: nan" if code == 1 else None)


def test_a_record_that_is_not_one_is_refused(tmp_path: Path) -> None:
    for text, names in (("{", "valid JSON"), ('{"format": 9, "sessions": []}', "found 9"), ("[]", "found")):
        (tmp_path / run_record.FILE).write_text(text)
        with pytest.raises(ConfigError, match=names):
            run_record.sessions(tmp_path)


def test_a_fence_that_the_answer_cannot_close() -> None:
    sample = report.Sample("q", "```python\nx\n```", cut=True)
    held = report.HeldOut(1.0, 2.0)
    assert report.answer_lines(sample) == [
        "",
        "### q",
        "",
        "````text",
        sample.answer,
        "````",
        "",
        "(Cut at the limit of tokens.)",
    ]
    assert report.Evaluation(3, held, report.HeldOut(1.01, 2.0)).int4_cost == pytest.approx(0.01)


def test_the_micro_recipe_and_its_file_are_the_same(recipe: str) -> None:
    assert config.load_recipe(recipe) == micro_recipe(steps=6, warmup_steps=1, decay_steps=0)
