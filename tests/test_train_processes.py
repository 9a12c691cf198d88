"""Training and extraction by two processes, for real: the same run as one process's, stopped, moved and killed."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kimijax.multihost import HEARTBEAT_TIMEOUT
from kimijax.sharding import PRESETS, Preset
from kimijax.train import (
    cli,
    draft_recipe,
    draft_target,
    feature_files,
    feature_manifest,
    features,
    fit_checkpoints,
    metrics,
    vocab,
)
from kimijax.train import run_record as records

from . import feature_cases, test_fit_stage
from .train_jobs import PROGRAM, Job, arguments
from .two_processes import Group, processes

EQUAL = 1e-5
FIT: dict[str, Any] = test_fit_stage.FIT | {
    "epochs": 2,
    "rows": 8,
    "learning_rate": 1e-2,
    "warmup_share": 0.1,
    "eval_every": 3,
    "save_every": 100,
}
HEAD: dict[str, Any] = test_fit_stage.DRAFT | {"n_heads": 8, "n_kv_heads": 8, "head_dim": 4}
LENGTHS = tuple(int(n) for n in np.random.default_rng(0).integers(3, 60, 45))
COMMAND = "import sys; from kimijax.train.cli import main; sys.exit(main(sys.argv[1:]))"
# How a run's eight devices lie: four groups of two, everything split.
EIGHT = ("target.devices=8", "fit.data_parallel=4", "fit.fsdp=true")


class Run(NamedTuple):
    """A run that is ready to be fitted."""

    recipe: str  # path
    out: Path

    def copy(self, to: Path, *, without: str = "") -> str:
        shutil.copytree(self.out, to, ignore=shutil.ignore_patterns(without) if without else None)
        return str(to)

    def fit(self, out: Path | str, *overrides: str, stop: int = 0, host: int = 0) -> Job:
        return Job("fit", self.recipe, str(out), overrides, stop, host)

    def features(self, out: Path | str, *overrides: str, stop: int = 0, host: int = 0) -> Job:
        return Job("features", self.recipe, str(out), overrides, stop, host)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("processes")
    target = feature_cases.write_target(folder / "model", config=feature_cases.WIDE)
    recipe = feature_cases.make_run(
        folder / "run",
        target,
        target={"taps": (0, 1)},
        features={"batch_tokens": 64},
        fit=FIT,
        draft=HEAD,
        vocab={"size": 304},
        export={"forms": ("sglang",)},
    )
    train, heldout = (feature_cases.make_documents(lengths, seed) for seed, lengths in ((2, LENGTHS), (3, LENGTHS[:9])))
    feature_cases.save_documents(folder / "run" / "corpus", train, heldout)
    with feature_cases.small_files():
        assert features.extract(recipe, folder / "run")
    vocab.build_vocab(recipe, folder / "run")
    tables = {name: table for name, table in records.plain(recipe).items() if name != "name"}
    text = [f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in t.items()) for name, t in tables.items()]
    (folder / "tiny.toml").write_text("".join(text))
    return Run(str(folder / "tiny.toml"), folder / "run")


def together(jobs: Sequence[Job], expected: Sequence[bool], timeout: float = 240) -> None:
    """Run jobs in two processes of four devices, which must say what is expected."""
    with processes(PROGRAM, 2, 4, arguments(jobs)) as group:
        assert group.wait(timeout) == [0, 0], group.told()
        for i in range(2):
            assert f"FINISHED {list(expected)}" in group.stdout(i), group.told()
        if any(job.stage == "fit" for job in jobs):
            assert ["  loss " in group.stderr(i) for i in range(2)] == [True, False]  # one reports


REPORTED = ("loss", "loss/1", "accept/0", "gradient_norm", "tokens", "heldout/loss/0", "heldout/accept/1")


def reported(out: Path | str) -> dict[str, list[tuple[int, float]]]:
    return {name: metrics.series(Path(out) / "fit", name) for name in REPORTED}


def assert_same_run(found: Path | str, expected: Path | str, least: int = 6) -> None:
    a, b = reported(found), reported(expected)
    for name in REPORTED:
        assert [step for step, _ in a[name]] == [step for step, _ in b[name]], name
        assert [value for _, value in a[name]] == pytest.approx([value for _, value in b[name]], rel=EQUAL), name
    assert len(a["loss"]) >= least


def files(out: Path | str) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((Path(out) / "features").iterdir())}


def test_two_processes_are_one(run: Run, tmp_path: Path) -> None:
    """A run that goes from two processes of four devices to one of eight and back reports what one device does; so do
    features that two processes begin and one finishes, or the other way round."""
    moved, begun, mended = (run.copy(tmp_path / name) for name in ("moved", "begun", "mended"))
    shutil.rmtree(Path(begun) / "features")
    for name in ("features-00002.safetensors", "features-00005.safetensors"):
        (Path(mended) / "features" / name).unlink()
    # Host 1 is asked to stop in the second update: both stop after the third.
    first = [
        run.fit(moved, *EIGHT, stop=2, host=1),
        run.features(begun, stop=12, host=1),
        run.features(mended),
    ]
    together(first, [False, False, True])
    assert fit_checkpoints.last_step(Path(moved) / "fit") == 3
    assert files(mended) == files(run.out)
    contract = draft_target.DraftTarget.of(draft_recipe.load_draft_recipe(run.recipe)).contract
    with pytest.raises(feature_manifest.FeatureError, match="expected all; run the stage features again"):
        feature_files.FeatureSet.open(Path(begun) / "features", contract)
    assert "features-00001.safetensors" in files(begun)  # host 1's first
    assert len(files(begun)) < len(files(run.out))

    assert run.features(begun).run(0)
    assert files(begun) == files(run.out)
    assert not run.fit(moved, *EIGHT, stop=2).run(0)
    assert fit_checkpoints.last_step(Path(moved) / "fit") == 5
    alone = run.copy(tmp_path / "alone")
    assert run.fit(alone).run(0)
    together([run.fit(moved, *EIGHT)], [True])
    assert_same_run(moved, alone)


def test_processes_that_were_started_differently_are_refused(run: Run, tmp_path: Path) -> None:
    out = run.copy(tmp_path / "run")
    own = [["--set", "fit.seed=0"], ["--set", "fit.seed=1"]]
    with processes(COMMAND, 2, 1, ["fit", "--recipe", run.recipe, "--out", out], own=own) as group:
        assert group.wait(60) == [2, 2], group.told()
        for i in range(2):
            assert "kimijax.train: fit: found 'a difference between hosts 0 and 1', expected the same" in group.stderr(
                i
            )


@pytest.mark.slow
def test_folders_that_are_not_shared_are_refused(run: Run, tmp_path: Path) -> None:
    own = [["--out", run.copy(tmp_path / name)] for name in ("one", "other")]
    with processes(COMMAND, 2, 1, ["fit", "--recipe", run.recipe], own=own) as group:
        assert group.wait(60) == [2, 2], group.told()
        for i in range(2):
            assert "--out: found " in group.stderr(i)
            assert "expected one folder of all hosts; host 1 has another" in group.stderr(i)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_on_two_processes(preset: Preset, run: Run, tmp_path: Path) -> None:
    """Online, with the target in the middle of each process and over both; and extraction over both: all are those of
    one device."""
    within, across, stored = (run.copy(tmp_path / name) for name in ("within", "across", "stored"))
    shutil.rmtree(Path(stored) / "features")
    online = ("target.devices=8", f'target.preset="{preset}"', 'features.source="online"')
    jobs = [
        run.fit(within, *online, "fit.data_parallel=2", "fit.epochs=1"),
        run.fit(across, *online, "fit.data_parallel=1", "fit.epochs=1"),
        run.features(stored, *online[:2]),
    ]
    together(jobs, [True] * 3, timeout=600)
    alone = run.copy(tmp_path / "alone")
    assert run.fit(alone, "fit.epochs=1").run(0)
    for out in (within, across):
        assert_same_run(out, alone, least=3)
    contract = draft_target.DraftTarget.of(draft_recipe.load_draft_recipe(run.recipe)).contract
    found, expected = (feature_files.FeatureSet.open(Path(out) / "features", contract) for out in (stored, run.out))
    for a, b in zip(found, expected, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        for x, y in ((a.last, b.last), (a.taps[1], b.taps[1])):
            assert np.abs(x - y).max() <= EQUAL * np.abs(y).max()


@contextmanager
def training(run: Run, out: str) -> Iterator[Group]:
    """Two processes by the command line, once ten updates are done and the last is saved."""
    sets = [f"--set={item}" for item in (*EIGHT, "fit.epochs=100000", "fit.save_every=5")]
    with processes(COMMAND, 2, 4, ["fit", "--recipe", run.recipe, "--out", out, *sets]) as group:
        end = time.monotonic() + 200
        while fit_checkpoints.last_step(Path(out) / "fit") is None or "step 10 " not in group.stderr(0):
            assert all(p.poll() is None for p in group.processes), group.told()
            assert time.monotonic() < end, group.told()
            time.sleep(0.2)
        yield group


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_the_other(lost: int, run: Run, tmp_path: Path) -> None:
    """In the stated time, with an error that says so; one process goes on from what was saved."""
    out = run.copy(tmp_path / "run")
    with training(run, out) as group:
        os.kill(group.processes[lost].pid, signal.SIGKILL)
        began = time.monotonic()
        codes = group.wait(HEARTBEAT_TIMEOUT + 20)
        assert time.monotonic() - began < HEARTBEAT_TIMEOUT + 10
        assert codes[lost] == -signal.SIGKILL
        assert codes[1 - lost] not in (0, None)
        assert "another" in group.stderr(1 - lost), group.told()
    saved = fit_checkpoints.last_step(Path(out) / "fit")
    assert saved is not None
    assert saved >= 5
    assert not run.fit(out, "fit.epochs=100000", stop=2).run(0)
    assert fit_checkpoints.last_step(Path(out) / "fit") == saved + 2


@pytest.mark.slow
def test_a_stop_of_one_process_stops_both(run: Run, tmp_path: Path) -> None:
    out = run.copy(tmp_path / "run")
    with training(run, out) as group:
        group.processes[1].terminate()
        assert group.wait(60) == [0, 0], group.told()
        for i in range(2):
            assert "stopped; run the same command again to resume" in group.stderr(i)
        step = fit_checkpoints.last_step(Path(out) / "fit")
        assert f"saved at step {step} of " in group.stderr(0)
    assert records.sessions(Path(out))[-1]["outcome"] == "interrupted in fit"


@pytest.mark.parametrize("stage", ["corpus", "generate", "vocab", "evaluate", "export", "all"])
def test_stages_for_one_process(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = ["--num-hosts", "2", "--host-id", "0", "--coordinator", "localhost:1"]
    assert cli.main([stage, "--recipe", "nano", *hosts]) == 2
    said = f"--num-hosts: found 2, expected 1 for {stage}; only features and fit run on several hosts"
    assert said in capsys.readouterr().err


def test_incomplete_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", "--recipe", "nano", "--num-hosts", "2", "--host-id", "1"]) == 2
    assert "--coordinator: found None" in capsys.readouterr().err
