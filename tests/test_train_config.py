"""Recipes: what they hold, and that every mistake in one is named."""

from pathlib import Path

import pytest

from kimijax.errors import ConfigError
from kimijax.train import config

NANO = (config.RECIPES / "nano-target.toml").read_text(encoding="utf-8")


def test_the_nano_recipe_is_a_kimi_k25() -> None:
    recipe = config.load_recipe("nano-target")
    target = recipe.target
    assert target.moe is not None
    assert (target.text_type, target.moe.scoring, target.n_dense_layers) == ("kimi_k2", "sigmoid", 1)
    assert target.q_lora_rank is not None
    assert target.yarn is not None
    assert len(recipe.samples.questions) == 10


def test_overrides() -> None:
    recipe = config.load_recipe(
        "nano-target",
        ["pretrain.steps=7000", "pretrain.learning_rate=1", "model.rope_scaling.factor=8.0", "samples.max_tokens=5"],
    )
    assert recipe.pretrain.steps == 7000
    assert recipe.pretrain.learning_rate == 1.0
    assert recipe.target.yarn is not None
    assert recipe.target.yarn.factor == 8.0
    assert recipe.samples.max_tokens == 5


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("pretrain.stepz=3", "pretrain.stepz=3"),
        ("steps=3", "steps=3"),
        ("pretrain.steps", "pretrain.steps"),
        ("pretrain=3", "pretrain=3"),
        ("model.rope_scaling.factor.x=1", "model.rope_scaling.factor.x=1"),
        ("pretrain.steps=many", "pretrain.steps=many"),
        ("pretrain.steps=1\ny=2", "one value"),
        ("pretrain.steps=0", "pretrain.steps"),
        ("pretrain.steps=1.5", "pretrain.steps: found 1.5, expected an integer"),
        ("pretrain.steps=true", "pretrain.steps"),
        ("pretrain.rows=-1", "pretrain.rows"),
        ("pretrain.warmup_steps=-1", "pretrain.warmup_steps"),
        ("pretrain.decay_steps=99999", "pretrain.warmup_steps and decay_steps"),
        ("pretrain.learning_rate=nan", "pretrain.learning_rate"),
        ("pretrain.learning_rate=0", "pretrain.learning_rate"),
        ("pretrain.prompt_weight=1.1", "pretrain.prompt_weight"),
        ("pretrain.balance_rate=-0.1", "pretrain.balance_rate"),
        ('pretrain.compute_dtype="float16"', "pretrain.compute_dtype: found 'float16', expected 'bfloat16' or"),
        ("pretrain.row_tokens=4096", "model.max_position_embeddings"),
        ('corpus.builder="books"', "corpus.builder"),
        ("corpus.n_ranks=4000", "model.vocab_size"),
        ('model.scoring_func="softmax"', "scoring_func"),
        ('model.rope_scaling.type="linear"', "rope_scaling.type"),
        ("model.moe_intermediate_size=0", "moe_intermediate_size"),
        ("samples.questions=[]", "samples.questions"),
        ("samples.questions=[1]", "samples.questions: found [1], expected a list of strings"),
        ("samples.max_tokens=0", "samples.max_tokens"),
    ],
)
def test_a_bad_override_is_named(override: str, names: str) -> None:
    with pytest.raises(ConfigError) as error:
        config.load_recipe("nano-target", [override])
    assert names in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("seed = 0\nsteps", "steps", "pretrain.seed: found 'missing'"),
        ("[pretrain]", "[pretrain]\nspeed = 1", "pretrain.speed: found 'no such field'"),
        ("[samples]", "[examples]", "exactly corpus, model, pretrain, samples"),
        ('hidden_act = "silu"', 'hidden_act = "gelu"', "hidden_act"),
        ("[model.rope_scaling]", "attention_sinks = 4\n[model.rope_scaling]", "attention_sinks"),
        ("[corpus]", "[corpus", "valid TOML"),
        ("[model.rope_scaling]", "[model.quantization_config]\n[model.rope_scaling]", "model.quantization_config"),
    ],
)
def test_a_bad_file_is_named(old: str, new: str, names: str, tmp_path: Path) -> None:
    assert old in NANO
    path = tmp_path / "bad.toml"
    path.write_text(NANO.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        config.load_recipe(str(path))
    assert names in str(error.value)


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="nano"):
        config.load_recipe("nanno")
