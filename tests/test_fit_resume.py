"""A resumed training of a drafter is the run: after a stop, after a kill, on other devices; another run is refused."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from kimijax.errors import ConfigError
from kimijax.train import fit_checkpoints, metrics, placement
from kimijax.train import fitter as trainer
from kimijax.wiring import Wiring, WiringError

from . import fit_cases as cases

RECIPE = cases.recipe(**cases.RESUMED)
UPDATES = 12
TIMES = {"time", "tokens_per_second", "minutes_left"}


@pytest.fixture(scope="module")
def fitter() -> trainer.Fitter:
    return cases.fitter(RECIPE, UPDATES)


@pytest.fixture(scope="module")
def straight(fitter: trainer.Fitter, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[str, bytes]], Path]:
    """The bits of the state after an uninterrupted run, and the run's folder."""
    folder = tmp_path_factory.mktemp("straight")
    return bits(cases.train(fitter, RECIPE, folder, lambda: False)), folder


def bits(tree: Any) -> list[tuple[str, bytes]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path), np.asarray(x).tobytes()) for path, x in leaves]


def after(n: int) -> Callable[[], bool]:
    """A stop that is asked for in the n-th update."""
    asked = iter(range(1, n + 1))
    return lambda: next(asked) == n


def reported(folder: Path) -> dict[int, dict[str, float]]:
    """Everything that was reported, by update, but for times; of an update that was done twice, the later."""
    found: dict[int, dict[str, float]] = {}
    for line in (folder / metrics.METRICS).read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row.pop("step"), {}).update({k: v for k, v in row.items() if k not in TIMES})
    return found


def identity() -> fit_checkpoints.Identity:
    return cases.identity(RECIPE, cases.documents())


def test_a_resumed_run_is_the_straight_run(
    fitter: trainer.Fitter,
    straight: tuple[list[tuple[str, bytes]], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Parameters, moments, step, order of the rows, rates and every report are the same bits, over three epochs whose
    last batches are not full; some stops come between two reports."""
    done = 0
    for n in (1, 4):
        state = cases.train(fitter, RECIPE, tmp_path, after(n))
        done += n
        assert int(state.step) == fit_checkpoints.last_step(tmp_path) == done
    capsys.readouterr()
    assert bits(cases.train(fitter, RECIPE, tmp_path, lambda: False)) == straight[0]
    assert f"resumed at step {done} of {UPDATES}" in capsys.readouterr().err
    assert reported(tmp_path) == reported(straight[1])
    assert reported(tmp_path).keys() == {2, 4, 6, 8, 10, 12}
    assert sorted(int(p.name) for p in (tmp_path / fit_checkpoints.CHECKPOINTS).iterdir()) == [10, 11, 12]
    # A run that is done does nothing more.
    assert bits(cases.train(fitter, RECIPE, tmp_path, lambda: False)) == straight[0]


@pytest.mark.parametrize("update", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5, 11))])
def test_a_run_that_is_killed_goes_on(
    update: int, fitter: trainer.Fitter, straight: tuple[list[tuple[str, bytes]], Path], tmp_path: Path
) -> None:
    """Killed when an update begins to be written, whatever is on disk by then."""
    code = f"from tests.fit_cases import train_alone; train_alone({str(tmp_path)!r})"
    root = Path(__file__).parents[1]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stderr=subprocess.PIPE) as process:
        folder, end = tmp_path / fit_checkpoints.CHECKPOINTS, time.monotonic() + 300
        while not (folder.is_dir() and any(p.name.startswith(str(update)) for p in folder.iterdir())):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    killed = fit_checkpoints.last_step(tmp_path)
    assert (killed or 0) <= update + 2
    assert bits(cases.train(fitter, RECIPE, tmp_path, lambda: False)) == straight[0]
    assert reported(tmp_path) == reported(straight[1])


def test_a_half_written_checkpoint_is_passed_over(
    fitter: trainer.Fitter,
    straight: tuple[list[tuple[str, bytes]], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cases.train(fitter, RECIPE, tmp_path, after(5))
    torn = tmp_path / fit_checkpoints.CHECKPOINTS / "6.orbax-checkpoint-tmp"
    (torn / "state").mkdir(parents=True)
    (torn / "state" / "_METADATA").write_text("{")
    capsys.readouterr()
    assert fit_checkpoints.last_step(tmp_path) == 5
    assert torn.exists()  # a reader changes nothing
    said = "not completely written, ignored: 6.orbax-checkpoint-tmp; step 5 is the newest complete one"
    assert said in capsys.readouterr().err
    assert bits(cases.train(fitter, RECIPE, tmp_path, lambda: False)) == straight[0]
    assert not torn.exists()


def test_the_half_written_name_is_the_one_that_is_used(fitter: trainer.Fitter, tmp_path: Path) -> None:
    """Fails when the library begins to write under another name, which the test above would not notice."""
    with fit_checkpoints.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(fitter.create(), identity(), {"next_index": 0}, {})
        seen = [p.name for p in (tmp_path / fit_checkpoints.CHECKPOINTS).iterdir()]
        # A second writer would take what the first one is writing for the rest of a killed save.
        with pytest.raises(ConfigError, match="in use by another process"):
            fit_checkpoints.Checkpoints(tmp_path)
        assert fit_checkpoints.last_step(tmp_path) in (None, 0)
        checkpoints.wait()
    assert all(name == "0" or name.startswith("0.orbax-checkpoint-tmp") for name in seen)
    assert [p.name for p in (tmp_path / fit_checkpoints.CHECKPOINTS).iterdir()] == ["0"]
    fit_checkpoints.Checkpoints(tmp_path).__exit__()


def test_another_run_is_refused_by_name(straight: tuple[list[tuple[str, bytes]], Path]) -> None:
    mine, replace = identity(), dataclasses.replace

    def refused(other: fit_checkpoints.Identity, names: str, error: type[ConfigError] = ConfigError) -> None:
        with fit_checkpoints.Checkpoints(straight[1], read_only=True) as checkpoints, pytest.raises(error, match=names):
            checkpoints.check(other)

    with fit_checkpoints.Checkpoints(straight[1], read_only=True) as checkpoints:
        checkpoints.check(mine)
        faster = replace(mine.fit, learning_rate=9.0, epochs=7, fsdp=True, data_parallel=2, save_every=9)
        checkpoints.check(replace(mine, fit=faster))  # what may change
    contract, target = mine.contract, mine.contract.target
    wiring = replace(contract, wiring=Wiring((0, 1), 2, 32))
    refused(replace(mine, contract=wiring), r"wiring.taps +\(0, 1, 2\) +\(0, 1\)", WiringError)
    tuned = replace(contract, target=replace(target, tensors={"norm": "1" * 64}))
    refused(replace(mine, contract=tuned), "target.tensors.norm", WiringError)
    refused(replace(mine, draft=replace(mine.draft, mlp_width=64)), "draft.mlp_width: found 64, expected 32")
    refused(replace(mine, vocabulary="0" * 64), "vocab/target_ids.npy")
    refused(replace(mine, data="0" * 64), "documents")
    refused(replace(mine, fit=replace(mine.fit, seed=4)), "fit.seed: found 4, expected 0, with which the run began")
    refused(replace(mine, fit=replace(mine.fit, accumulate=2)), "fit.accumulate")
    refused(replace(mine, fit=replace(mine.fit, loss="lk")), "fit.loss: found 'lk', expected 'kl'")


def test_more_updates_done_than_asked(fitter: trainer.Fitter, straight: tuple[list[tuple[str, bytes]], Path]) -> None:
    settings: dict[str, Any] = cases.RESUMED | {"epochs": 2}
    expected = "fit.epochs: found 3, expected enough for the 12 updates that are done, not 8"
    with pytest.raises(ConfigError, match=expected):
        cases.train(fitter, cases.recipe(**settings), straight[1], lambda: False)


def test_restored_on_other_devices(
    fitter: trainer.Fitter, straight: tuple[list[tuple[str, bytes]], Path], tmp_path: Path
) -> None:
    """Written by eight devices, split over them; read and written by two, one and four: same state, same loss."""
    with fit_checkpoints.Checkpoints(straight[1], read_only=True) as trained:
        state = trained.restore(fitter.abstract()).state
    expected = np.asarray(fitter.sums(state.params, cases.train_rows(3)[0]).loss)
    placed: Any = state
    before = 0
    for devices, data in ((8, 8), (2, 1), (1, 1), (4, 4)):
        settings = cases.recipe(data_parallel=data, fsdp=data > 1)
        there = cases.fitter(settings, UPDATES, mesh=placement.fit_mesh(settings.fit, devices))
        if devices == 8:
            placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, there.abstract())
        else:
            with fit_checkpoints.Checkpoints(tmp_path / str(before), read_only=True) as found:
                placed, data_state, _ = found.restore(there.abstract())
            assert data_state == {"next_index": 12}
            loss = there.sums(placed.params, cases.train_rows(3)[0]).loss
            np.testing.assert_allclose(loss, expected, rtol=1e-6)
        assert bits(placed) == straight[0]
        assert {len(x.sharding.device_set) for x in jax.tree.leaves(placed)} == {devices}
        before = devices
        with fit_checkpoints.Checkpoints(tmp_path / str(devices)) as written:
            written.save(fit_checkpoints.FitState(*placed), identity(), {"next_index": 12}, {})
            written.wait()


@pytest.mark.slow
def test_a_run_that_moves_between_devices_is_the_run(
    fitter: trainer.Fitter, straight: tuple[list[tuple[str, bytes]], Path], tmp_path: Path
) -> None:
    """Three updates each on eight devices, two, one, and eight again: every report is that of the run on one."""
    spread = cases.recipe(**cases.RESUMED, data_parallel=4, fsdp=True)
    eight = cases.fitter(spread, UPDATES, mesh=placement.fit_mesh(spread.fit, 8))
    two = cases.fitter(RECIPE, UPDATES, mesh=placement.fit_mesh(RECIPE.fit, 2))
    for there, settings in ((eight, spread), (two, RECIPE), (fitter, RECIPE)):
        cases.train(there, settings, tmp_path, after(3))
    cases.train(eight, spread, tmp_path, lambda: False)
    found, expected = reported(tmp_path), reported(straight[1])
    assert found.keys() == expected.keys()
    for step, values in expected.items():
        assert found[step].keys() == values.keys()
        for name, value in values.items():
            assert found[step][name] == pytest.approx(value, rel=1e-5, abs=1e-7), (step, name)


def test_what_is_not_finite_is_never_saved(
    fitter: trainer.Fitter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update that went wrong is named, though it is looked at while the next one runs."""
    plain = cases.States.document

    def broken(self: cases.States, index: int) -> Any:
        document = plain(self, index)
        return document._replace(taps={t: x * np.nan for t, x in document.taps.items()}) if index == wrong else document

    rows = cases.train_rows(3)
    at = 2  # the third update
    row = int(rows.chosen(at)[0, 5])
    wrong = rows.plan[row][0]
    monkeypatch.setattr(cases.States, "document", broken)
    with pytest.raises(FloatingPointError, match=rf"step {at + 1}: loss nan.* on rows .*\b{row}\b"):
        cases.train(fitter, RECIPE, tmp_path, lambda: False)
    assert fit_checkpoints.last_step(tmp_path) == at
