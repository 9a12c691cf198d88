"""Pre-training: a resumed run is the run, the loss falls, and what is exported is what was trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimijax import checkpoint, quant
from kimijax.config import load_config
from kimijax.errors import ConfigError
from kimijax.train import metrics, optimizer, packing, pretrain, target_export

from .micro_run import micro_recipe, write_corpus

STEPS, HALF = 30, 13
RECIPE = micro_recipe(steps=STEPS)
CORPUS_BYTES = np.ones(RECIPE.target.vocab_size, np.int64)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("micro") / "corpus")


@pytest.fixture(scope="module")
def trainer() -> pretrain.Pretrainer:
    return pretrain.Pretrainer(RECIPE.target, RECIPE.pretrain)


@pytest.fixture(scope="module")
def batch(corpus: Path) -> pretrain.Batch:
    return next(pretrain.batches(packing.Documents.load(corpus), RECIPE.pretrain, 0))


@pytest.fixture(scope="module")
def straight(
    corpus: Path, trainer: pretrain.Pretrainer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[pretrain.TrainState, Path]:
    """The state after an uninterrupted run, and the run's folder."""
    out = tmp_path_factory.mktemp("straight")
    return train(trainer, corpus, out), out


def train(
    trainer: pretrain.Pretrainer, corpus: Path, out: Path, stop: Callable[[], bool] = lambda: False
) -> pretrain.TrainState:
    """`run` on the micro corpus."""
    documents, heldout = packing.Documents.load(corpus), packing.Documents.load(corpus, "heldout_")
    return pretrain.run(trainer, documents, heldout, CORPUS_BYTES, out, stop)


def after(n: int) -> Callable[[], bool]:
    """A stop that is asked for in the n-th step."""
    asked = iter(range(1, n + 1))
    return lambda: next(asked) == n


def bits(tree: Any) -> list[tuple[str, bytes]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path), np.asarray(x).tobytes()) for path, x in leaves]


def reported(out: Path, name: str) -> dict[int, float]:
    rows = map(json.loads, (out / metrics.METRICS).read_text().splitlines())
    return {row["step"]: row[name] for row in rows if name in row}


def test_a_resumed_run_is_the_straight_run(
    trainer: pretrain.Pretrainer, corpus: Path, straight: tuple[pretrain.TrainState, Path], tmp_path: Path
) -> None:
    """Parameters, optimiser state, step and every reported loss are the same bits; the stop comes between two saves."""
    half = train(trainer, corpus, tmp_path, after(HALF))
    assert int(half.step) == HALF
    assert pretrain.last_step(tmp_path) == HALF
    whole = train(trainer, corpus, tmp_path)
    assert int(whole.step) == STEPS
    assert bits(whole) == bits(straight[0])
    resumed, expected = reported(tmp_path, "loss"), reported(straight[1], "loss")
    assert expected.items() <= resumed.items()
    assert resumed.keys() - expected.keys() == {HALF}  # the step that it stopped at is reported too
    assert reported(tmp_path, "heldout_int4/nats_per_byte") == reported(straight[1], "heldout_int4/nats_per_byte")


def test_a_save_that_was_killed_leaves_the_older_checkpoint(
    trainer: pretrain.Pretrainer, corpus: Path, straight: tuple[pretrain.TrainState, Path], tmp_path: Path
) -> None:
    train(trainer, corpus, tmp_path, after(HALF))
    folder = tmp_path / pretrain.CHECKPOINTS
    torn = folder / "20.orbax-checkpoint-tmp"  # the name under which step 20, which comes next, is written
    (torn / "default").mkdir(parents=True)
    (torn / "default" / "_METADATA").write_text("{")
    assert pretrain.last_step(tmp_path) == HALF
    assert torn.exists()  # a reader changes nothing
    assert bits(train(trainer, corpus, tmp_path)) == bits(straight[0])
    assert not torn.exists()


def test_the_torn_name_is_the_one_that_is_written(trainer: pretrain.Pretrainer, tmp_path: Path) -> None:
    """Fails when the library begins to write under another name, which the test above would not notice."""
    seen: list[str] = []
    state = trainer.create()
    with pretrain.checkpoints(tmp_path) as manager:
        manager.save(1, args=pretrain.ocp.args.StandardSave(tuple(state)))
        seen += [p.name for p in (tmp_path / pretrain.CHECKPOINTS).iterdir()]
        manager.wait_until_finished()
    assert all(name == "1" or name.startswith("1.orbax-checkpoint-tmp") for name in seen)
    assert [p.name for p in (tmp_path / pretrain.CHECKPOINTS).iterdir()] == ["1"]


def test_more_steps_done_than_asked(straight: tuple[pretrain.TrainState, Path], corpus: Path) -> None:
    fewer = pretrain.Pretrainer(RECIPE.target, micro_recipe(steps=STEPS - 10).pretrain)
    with pytest.raises(ConfigError, match=rf"pretrain.steps: found {STEPS - 10}, expected at least {STEPS}"):
        train(fewer, corpus, straight[1])


def test_the_loss_falls_on_what_can_be_learned(straight: tuple[pretrain.TrainState, Path]) -> None:
    loss = reported(straight[1], "loss")
    assert loss[STEPS] < 0.5 * loss[min(loss)]
    held = reported(straight[1], "heldout_float/nats_per_byte")
    assert held[STEPS] < 0.7 * held[min(held)]
    assert metrics.training_seconds(straight[1], RECIPE.pretrain) > 0


def test_the_order_of_the_data_is_a_function_of_seed_and_step(corpus: Path) -> None:
    documents = packing.Documents.load(corpus)
    whole = pretrain.batches(documents, RECIPE.pretrain, 0)
    first = [next(whole) for _ in range(40)]  # several epochs
    late = pretrain.batches(documents, RECIPE.pretrain, 37)
    assert bits(first[37:]) == bits([next(late) for _ in range(3)])
    other = pretrain.batches(documents, micro_recipe(steps=STEPS, seed=1).pretrain, 0)
    assert bits(first[0]) != bits(next(other))


def test_capacity_is_the_reference_when_nothing_is_dropped(
    trainer: pretrain.Pretrainer, batch: pretrain.Batch, straight: tuple[pretrain.TrainState, Path]
) -> None:
    params = straight[0].params
    found, loads = trainer.losses(params, batch, experts="capacity", int4_experts=False)
    expected, _ = trainer.losses(params, batch, experts="reference", int4_experts=False)
    assert RECIPE.target.moe is not None
    rows, n_experts = int(loads[0].sum()), RECIPE.target.moe.n_experts
    assert max(int(load.max()) for load in loads) <= 1.5 * rows / n_experts  # else this test shows nothing
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_the_router_bias_moves_towards_balance(trainer: pretrain.Pretrainer, batch: pretrain.Batch) -> None:
    def crowd(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        return jnp.array([0.4, 0.0, 0.0, 0.0]) if optimizer.parameter_name(path) == optimizer.FROZEN else x

    params = jax.tree_util.tree_map_with_path(crowd, trainer.create().params)
    busiest = []
    for _ in range(25):
        _, loads = trainer.losses(params, batch, experts="reference", int4_experts=False)
        busiest.append(float(loads[0].max()) / float(loads[0].mean()))
        params = pretrain._balance(params, loads, 0.02)
    assert busiest[0] == 2.0  # every token chose it: K = 2 of E = 4
    assert busiest[-1] < 1.5


def test_int4_rounding_passes_the_gradient() -> None:
    w = jax.random.normal(jax.random.key(0), (3, 5, 64), jnp.float32).astype(jnp.bfloat16)
    c = jax.random.normal(jax.random.key(1), (3, 5, 64), jnp.float32)
    value = pretrain._round_to_int4(w)
    assert (value == quant.dequantize(quant.quantize(w), jnp.bfloat16)).all()
    assert (value != w).any()
    gradient = jax.grad(lambda w: (pretrain._round_to_int4(w).astype(jnp.float32) * c).sum())(w)
    assert (gradient == c.astype(jnp.bfloat16)).all()


def test_a_batch_without_loss_gives_zero_and_finite_gradients(
    trainer: pretrain.Pretrainer, batch: pretrain.Batch
) -> None:
    masked = pretrain.Batch(batch.ids, jnp.zeros_like(batch.weight), jnp.full_like(batch.segments, -1), batch.positions)
    state, found = trainer.step(trainer.create(), masked, int4_experts=False)
    assert float(found.loss) == 0.0
    assert float(found.gradient_norm) == 0.0
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state.params))


def test_the_schedule_is_warm_up_stable_decay() -> None:
    rate = optimizer.schedule(micro_recipe(steps=100, warmup_steps=10, decay_steps=20).pretrain, 2.0)
    values = [np.asarray(rate(step)) for step in (0, 5, 10, 50, 80, 90, 99, 100)]
    np.testing.assert_allclose(values, [0.0, 1.0, 2.0, 2.0, 2.0, 1.0, 0.1, 0.0], atol=1e-6)
    flat = optimizer.schedule(micro_recipe(steps=100, warmup_steps=0, decay_steps=0).pretrain, 2.0)
    assert [np.asarray(flat(step)) for step in (0, 99)] == [2.0, 2.0]


def test_an_export_is_the_rounded_model(
    trainer: pretrain.Pretrainer, corpus: Path, straight: tuple[pretrain.TrainState, Path], tmp_path: Path
) -> None:
    """Loaded again, in bf16, it gives the very logits of the trained weights rounded in memory."""
    directory = tmp_path / "export"
    bf16 = pretrain.Pretrainer(RECIPE.target, micro_recipe(steps=STEPS, compute_dtype="bfloat16").pretrain)
    ids = jnp.asarray([[5, 80, 81, 82, 300, 7]], jnp.int32)

    @jax.jit
    def logits(state: nnx.State) -> jax.Array:
        return nnx.merge(bf16.graph, state)(ids).logits

    def load() -> nnx.State:
        return nnx.state(checkpoint.load(directory, load_config(directory), dtype=jnp.bfloat16, unpack_int4=True))

    target_export.export_target(straight[0].params, RECIPE, corpus, directory)
    config = load_config(directory)
    assert (config.model_type, config.has_vision, config.eos_token_ids) == ("kimi_k25", False, (258, 257))
    expected = nnx.state(jax.jit(bf16.model, static_argnums=1)(straight[0].params, True))
    assert bits(load()) == bits(expected)
    found = logits(load())
    assert (found == logits(expected)).all()
    assert (found != logits(nnx.state(bf16.model(straight[0].params, False)))).any()
    # A second export takes the place of the first; a folder of something else is refused.
    target_export.export_target(trainer.create().params, RECIPE, corpus, directory)
    assert (found != logits(load())).any()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match="mine"):
        target_export.export_target(straight[0].params, RECIPE, corpus, tmp_path / "mine")
    assert not list(tmp_path.glob(".*"))


def test_installing_replaces_the_model_and_keeps_the_rest(
    straight: tuple[pretrain.TrainState, Path], corpus: Path, tmp_path: Path
) -> None:
    export, nano = tmp_path / "export", tmp_path / "nano"
    (nano / "drafter").mkdir(parents=True)
    (nano / "drafter" / "config.json").write_text("{}")
    (nano / "config.json").write_text("{}")
    (nano / "model-00001-of-00002.safetensors").write_bytes(b"an earlier model")
    with pytest.raises(ConfigError, match="complete export"):
        target_export.install(export, nano)
    target_export.export_target(straight[0].params, RECIPE, corpus, export)
    target_export.install(export, nano)
    names = {f.name for f in export.iterdir()}
    assert {f.name for f in nano.iterdir()} == names | {"drafter"}
    assert all((nano / name).read_bytes() == (export / name).read_bytes() for name in names)
    assert (nano / "drafter" / "config.json").read_text() == "{}"


def test_a_loss_that_is_not_finite_is_never_saved(
    trainer: pretrain.Pretrainer, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> pretrain.TrainState:
        state = pretrain.Pretrainer.create(trainer)
        params = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.params)
        return pretrain.TrainState(params, state.optimizer, state.step)

    monkeypatch.setattr(trainer, "create", broken)
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        train(trainer, corpus, tmp_path, after(1))
    assert pretrain.last_step(tmp_path) is None
