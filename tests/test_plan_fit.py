"""An update of the drafter at the shapes of the recipe for Kimi-K2.5, compiled from shapes alone."""

import json
from pathlib import Path

import pytest

from kimijax.config import load_config
from kimijax.train import draft_recipe, plan_fit

from .test_plan import k25_config

# A shorter row, one micro-batch and one unrolled step: the widths are the recipe's.
SHORT = "fit.row_tokens=256 target.max_tokens=256 fit.accumulate=1 fit.ttt_steps=1".split()


@pytest.fixture(scope="module")
def k25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("k25") / "config.json"
    path.write_text(json.dumps(k25_config()))
    return path


def test_an_update_over_eight_devices(k25: Path) -> None:
    recipe = draft_recipe.load_draft_recipe("kimi-k2.5", [*SHORT, "target.taps=[0,1,2]"])
    plan = plan_fit.plan_fit(recipe, load_config(k25), n_layers=2)
    update = plan.update
    # Of the head, 1.84 G float32 parameters: fusion and the low-rank projections of 2 x 7168 inputs lie whole on each.
    whole = 3 * 7168**2 + 2 * 7168 * (1536 + 576) + 7 * 7168 + 3 * 7168 + 1536 + 512
    assert plan.drafter / 4 == pytest.approx(whole + (1_840_000_000 - whole) / 8, rel=0.01)
    assert plan.optimizer == pytest.approx(2 * plan.drafter, rel=1e-6)  # two moments
    embedding = 163_840 * 7168 * 2 // 8  # the target's, which the drafter names too
    assert update.arguments == pytest.approx(plan.target + plan.drafter + plan.optimizer + embedding, rel=1e-3)
    assert update.layer_collectives() == {"all-reduce": 2}
    assert update.collectives_of("drafter").total() > 0
    expert_slice = 384 * 24_772_608 / 8
    assert max(t.nbytes for t in update.largest) < expert_slice
    assert not [t for t in update.largest if t.weight is not None and ".experts." in t.weight]


def test_names_of_what_is_frozen() -> None:
    assert plan_fit.frozen_name("frozen.target['layers'][3]['mlp']['router'].value") == "target.layers.*.mlp.router"
    assert plan_fit.frozen_name("state.params['fc'].value") is None


def test_a_target_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_fit.main(["--recipe", "kimi-k2.5"]) == 2
    assert "model: found '/models/Kimi-K2.5'" in capsys.readouterr().err
