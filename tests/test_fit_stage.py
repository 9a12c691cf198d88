"""The stage `fit` on a run's folder: what it reads, its report, and the drafter that comes out."""

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]  # made at import

from kimijax.errors import ConfigError
from kimijax.names import parameters
from kimijax.sharding import make_mesh
from kimijax.train import draft_recipe, fit_checkpoints, fit_report, metrics, vocab
from kimijax.train import features as features_stage
from kimijax.train import fit as fit_stage
from kimijax.wiring import WiringError

from . import feature_cases

FIT = {
    "epochs": 2,
    "rows": 1,
    "row_tokens": 64,
    "accumulate": 1,
    "ttt_steps": 2,
    "learning_rate": 1e-3,
    "compute_dtype": "float32",
    "data_parallel": 1,
    "fsdp": False,
    "log_every": 1,
    "eval_every": 2,
    "save_every": 2,
}
DRAFT = {"kind": "llama", "n_heads": 2, "n_kv_heads": 2, "head_dim": 16, "mlp_width": 32}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return feature_cases.write_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def run(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[draft_recipe.DraftRecipe, Path]:
    """A run that is ready to be fitted, stopped after its first update, and finished."""
    out = tmp_path_factory.mktemp("run")
    recipe = feature_cases.make_run(out, target, fit=FIT, draft=DRAFT)
    features_stage.extract(recipe, out)
    vocab.build_vocab(recipe, out)
    fit_stage.fit(recipe, out, lambda: True)
    assert fit_checkpoints.last_step(out / "fit") == 1
    assert not (out / "fit" / fit_report.REPORT).exists()
    fit_stage.fit(recipe, out, lambda: False)
    return recipe, out


def changed(recipe: draft_recipe.DraftRecipe, table: str, **fields: object) -> draft_recipe.DraftRecipe:
    values = vars(recipe)[table]
    return dataclasses.replace(recipe, **{table: dataclasses.replace(values, **fields)})


def test_the_report(run: tuple[draft_recipe.DraftRecipe, Path]) -> None:
    recipe, out = run
    updates = fit_checkpoints.last_step(out / "fit")
    text = (out / "fit" / fit_report.REPORT).read_text()
    assert f"| updates | {updates} in 2 epochs, of 1 x 1 rows |" in text
    assert "vocabulary 300 of 600, taps 1, 2 |" in text
    rows = [json.loads(line) for line in (out / "fit" / metrics.METRICS).read_text().splitlines()]
    final = [row for row in rows if "heldout/acc/0" in row][-1]
    assert final["step"] == updates
    assert f"| 2 | {final['heldout/loss/1']:.3f} | {final['heldout/acc/1']:.3f} |" in text
    length = final["heldout/length/sampled_k2_with_bonus"]
    assert f"| sampled, chain of 2 | {length - 1:.3f} | {length:.3f} |" in text
    loss = [row for row in rows if "loss" in row]
    assert [row["step"] for row in loss] == list(range(1, (updates or 0) + 1))
    assert list((out / "fit" / "tensorboard").glob("events.*"))
    assert recipe.name in text
    for name, titles in ((fit_report.LOSS_PLOT, {"Loss", "training"}), (fit_report.ACCEPTANCE_PLOT, {"draft token"})):
        svg = ElementTree.fromstring((out / "fit" / name).read_text())
        assert titles <= {element.text for element in svg.iter() if element.tag.endswith("}text")}
        assert name in text


def test_a_plot_is_to_scale() -> None:
    line = [(1.0, 2.0), (3.0, 6.0), (5.0, 4.0)]
    svg = ElementTree.fromstring(fit_report.line_plot("a < b", "x", {"one & all": line}))
    [points] = [e.attrib["points"] for e in svg.iter() if e.tag.endswith("}polyline")]
    at = np.array([[float(v) for v in point.split(",")] for point in points.split()])
    assert at[1, 0] == pytest.approx((at[0, 0] + at[2, 0]) / 2, abs=0.1)
    assert at[2, 1] == pytest.approx((at[0, 1] + at[1, 1]) / 2, abs=0.1)
    assert at[1, 1] < at[0, 1]  # upwards is less
    fit_report.line_plot("flat", "x", {"one point": [(1.0, 1.0)]})


def test_reports_of_steps_that_were_done_twice(tmp_path: Path) -> None:
    """A later session's report counts, and a line that was cut off is no line."""
    with metrics.MetricsLog(tmp_path, 0, 0) as log:
        for step in (1, 2, 3):
            log.write(step, {"loss": float(step)})
    with (tmp_path / metrics.METRICS).open("a") as file:
        file.write('{"step": 4, "lo')
    with metrics.MetricsLog(tmp_path, 1, 0) as log:
        log.write(2, {"loss": 7.0})
    assert metrics.series(tmp_path, "loss") == [(1, 1.0), (2, 7.0), (3, 3.0)]
    # TensorBoard leaves out what earlier sessions reported of this step and later ones: not of step 1, which is kept.
    assert max(e.step for e in events(tmp_path) if e.HasField("session_log")) == 2


def events(folder: Path) -> Iterator[Any]:
    """Records of a length, two checksums and the data."""
    for path in (folder / "tensorboard").iterdir():
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            yield Event.FromString(data[at + 12 : at + 12 + size])
            at += size + 16


def test_the_fitted_drafter(run: tuple[draft_recipe.DraftRecipe, Path]) -> None:
    recipe, out = run
    drafter = fit_stage.load_fitted(recipe, out)
    assert {x.get_value().dtype for x in parameters(drafter).values()} == {np.dtype(np.float32)}
    assert drafter.embed.get_value().shape == (600, 32)
    logits = jax.jit(lambda d, ids, x: d.forward(ids, d.fuse({1: x, 2: x})).logits)(
        drafter, jnp.ones((1, 4), jnp.int32), jnp.ones((1, 4, 32))
    )
    assert logits.shape == (1, 4, 300)
    assert np.isfinite(logits).all()
    # Trained on one device, read onto two.
    split = nnx.state(fit_stage.load_fitted(recipe, out, mesh=make_mesh(jax.devices()[:2])), nnx.Param)
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(split)} == {2}
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), split, nnx.state(drafter, nnx.Param))
    )
    half = fit_stage.load_fitted(recipe, out, dtype=jnp.bfloat16)
    whole = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(drafter, nnx.Param))
    found = nnx.state(half, nnx.Param)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, whole))


@pytest.mark.parametrize(
    ("table", "fields", "names", "error"),
    [
        ("target", {"taps": (0, 2)}, "wiring.taps", WiringError),
        ("fit", {"seed": 9}, "fit.seed: found 9", ConfigError),
        ("draft", {"mlp_width": 64}, "draft.mlp_width: found 64", ConfigError),
        ("features", {"dtype": "bfloat16"}, "features.dtype", ConfigError),
        ("fit", {"rows": 3}, "fit.rows: found 3", ConfigError),
        ("target", {"devices": 99}, "target.devices: found 99, expected at most 8", ConfigError),
        ("target", {"devices": 8}, r"target.devices: found 8, expected a number that divides the drafter", ConfigError),
    ],
)
def test_what_does_not_fit_the_run_is_refused(
    table: str,
    fields: dict[str, Any],
    names: str,
    error: type[ConfigError],
    run: tuple[draft_recipe.DraftRecipe, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By name, and before any weight is read."""
    recipe, out = run
    monkeypatch.setattr("kimijax.train.fit._target", None)
    with pytest.raises(error, match=names):
        fit_stage.fit(changed(recipe, table, **fields), out, lambda: False)


def test_a_run_without_a_checkpoint(run: tuple[draft_recipe.DraftRecipe, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run the stage fit"):
        fit_stage.load_fitted(run[0], tmp_path)
