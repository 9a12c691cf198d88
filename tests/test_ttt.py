"""The loss of the training-time test, its counts and its gradients against the formulas written out."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimijax.drafter import Drafter
from kimijax.layers import rms_norm
from kimijax.model import Tables
from kimijax.train import draft_recipe, ttt
from kimijax.unroll import unroll, valid_rows

from .draft_reference import TARGET_WIDTH, VOCAB
from .test_drafter import LIMIT, WIRING, make, relative_error, tiny_target
from .test_unroll import explicit

N_STEPS = 3
FIT = draft_recipe.FitTable(
    seed=0,
    epochs=1,
    rows=2,
    row_tokens=12,
    accumulate=1,
    ttt_steps=N_STEPS,
    decay=0.8,
    loss="soft_ce",
    lk_rate=3.0,
    normaliser="all",
    schedule="cosine",
    learning_rate=1e-3,
    final_share=0.1,
    warmup_share=0.0,
    decay_share=0.0,
    beta1=0.9,
    beta2=0.95,
    weight_decay=0.0,
    clip_norm=1.0,
    compute_dtype="float32",
    data_parallel=1,
    fsdp=False,
    log_every=1,
    eval_every=1,
    save_every=1,
)

type Loss = Callable[[Drafter, Tables, ttt.Batch, draft_recipe.FitTable], tuple[jax.Array, ttt.StepSums]]


def tables() -> Tables:
    target = tiny_target({})
    target.norm.set_value(jnp.linspace(0.5, 1.5, TARGET_WIDTH))
    return target


def random_batch(mask: Any, segments: Any | None = None, seed: int = 4) -> ttt.Batch:
    """A batch with this mask [B, T]; one document a row if there are no segments."""
    mask = np.asarray(mask, bool)
    segments = np.zeros(mask.shape, np.int32) if segments is None else np.asarray(segments, np.int32)
    starts = np.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
    index = np.arange(mask.shape[1])
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    rng = np.random.default_rng(seed)

    def states(scale: float) -> jax.Array:
        return jnp.asarray(rng.standard_normal((*mask.shape, TARGET_WIDTH)) * scale, jnp.float32)

    ids = jnp.asarray(rng.integers(0, VOCAB, mask.shape), jnp.int32)
    taps = {tap: states(1 + tap) for tap in WIRING.taps}
    return ttt.Batch(
        ids=ids,
        mask=jnp.asarray(mask),
        segments=jnp.asarray(segments),
        positions=jnp.asarray(positions, jnp.int32),
        taps=taps,
        last=states(3.0),
    )


def take(batch: ttt.Batch, rows: slice, tokens: slice) -> ttt.Batch:
    """Some rows of a batch, and of them some tokens, their positions from 0."""
    cut = jax.tree.map(lambda x: x[rows, tokens], batch)
    return dataclasses.replace(cut, positions=cut.positions - cut.positions[:, :1])


class Evaluated(NamedTuple):
    total: float
    sums: ttt.StepSums
    gradient: dict[str, np.ndarray]  # by parameter


def program(drafter: Drafter, fit: draft_recipe.FitTable, loss: Loss = ttt.ttt_loss) -> Any:
    """The jitted (parameters, batch) -> ((loss, sums), gradient), and the parameters."""
    graph, params, rest = nnx.split(drafter, nnx.Param, ...)
    tables_graph, tables_state = nnx.split(tables())

    def scalar(params: Any, batch: ttt.Batch) -> tuple[jax.Array, ttt.StepSums]:
        return loss(nnx.merge(graph, params, rest), nnx.merge(tables_graph, tables_state), batch, fit)

    return jax.jit(jax.value_and_grad(scalar, has_aux=True)), params


def evaluator(
    drafter: Drafter, fit: draft_recipe.FitTable, loss: Loss = ttt.ttt_loss
) -> Callable[[ttt.Batch], Evaluated]:
    compiled, params = program(drafter, fit, loss)

    def evaluate(batch: ttt.Batch) -> Evaluated:
        (total, sums), gradient = compiled(params, batch)
        flat = nnx.to_flat_state(gradient)
        return Evaluated(float(total), sums, {"/".join(map(str, k)): np.asarray(x.get_value()) for k, x in flat})

    return evaluate


def naive(
    drafter: Drafter, tables: Tables, batch: ttt.Batch, fit: draft_recipe.FitTable
) -> tuple[jax.Array, ttt.StepSums]:
    """All of it at once: every step's logits, log-softmax over both vocabularies, gradients by autodiff."""
    hidden = unroll(drafter, drafter.fuse(batch.taps), batch.ids, batch.positions, batch.segments, fit.ttt_steps)
    normed = batch.last if batch.last_is_normed else rms_norm(batch.last, tables.norm[...], tables.config.norm_eps)
    full = tables.head(normed)
    ids = np.asarray(drafter.target_ids[...])
    valid = valid_rows(batch.mask, batch.segments, fit.ttt_steps)
    t = batch.ids.shape[1]
    total, sums = jnp.float32(0), []
    for j, h in enumerate(hidden):
        logits = drafter.logits(h)[:, : t - 1 - j]
        target = full[:, 1 + j :]
        log_q, log_p = jax.nn.log_softmax(logits), jax.nn.log_softmax(target[..., ids])
        p, best = jax.nn.softmax(target), target.argmax(axis=-1)
        q = jnp.zeros_like(p).at[..., ids].set(jnp.exp(log_q))
        cross = -(jnp.exp(log_p) * log_q).sum(axis=-1)
        kl = (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)
        accepted = 1 - jnp.abs(p - q).sum(axis=-1) / 2
        w = jnp.exp(-fit.lk_rate * jax.lax.stop_gradient(accepted))
        row = {"soft_ce": cross, "kl": kl, "lk": w * kl + (1 - w) * (1 - accepted)}[fit.loss]
        counts = valid[j, :, : t - 1 - j]
        learns = counts & jnp.isin(best, ids)
        n = learns.sum() if fit.normaliser == "valid" else batch.ids.size
        loss = jnp.where(learns, row, 0.0).sum()
        total = total + fit.decay**j * loss / jnp.maximum(n, 1).astype(jnp.float32)
        correct = counts & (jnp.asarray(ids)[logits.argmax(axis=-1)] == best)
        sums.append((loss, counts.sum(), correct.sum(), jnp.where(counts, accepted, 0.0).sum()))
    return total, ttt.StepSums(*(jnp.stack(x).astype(jnp.float32) for x in zip(*sums, strict=True)))


def assert_same(found: Evaluated, right: Evaluated, scale: float = 1.0) -> None:
    """Equal losses, sums and gradients, where loss and gradient are `scale` times the right ones; counts exactly."""
    assert found.total == pytest.approx(scale * right.total, rel=LIMIT)
    for name in ("valid", "correct"):
        np.testing.assert_array_equal(getattr(found.sums, name), getattr(right.sums, name))
    for name in ("loss", "accepted"):
        np.testing.assert_allclose(getattr(found.sums, name), getattr(right.sums, name), rtol=2 * LIMIT)
    assert found.gradient.keys() == right.gradient.keys()
    for name, gradient in right.gradient.items():
        assert relative_error(found.gradient[name], scale * gradient) < 2 * LIMIT, name


ANSWERS = [[0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0]]
PACKED = [[0] * 12, [0] * 6 + [1] * 4 + [-1] * 2]


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("llama eagle-3.1", {}),
        ("llama eagle-3.1", {"loss": "kl", "normaliser": "valid"}),
        ("llama window", {"loss": "lk", "normaliser": "valid"}),
        ("mla", {"loss": "lk"}),
    ],
)
def test_loss_and_gradients_equal_the_formulas(
    variant: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formulas see all scores with an explicit mask, and all logits; the loss sees blocks, and chunks of 5 of 12
    positions."""
    drafter, _ = make(tmp_path, variant)
    fit = dataclasses.replace(FIT, **changes)
    batch = random_batch(ANSWERS, PACKED)
    with monkeypatch.context() as patch:
        patch.setattr("kimijax.unroll.chained", explicit)
        right = evaluator(drafter, fit, naive)(batch)
    monkeypatch.setattr("kimijax.chained_attention.QUERY_BLOCK", 5)
    monkeypatch.setattr("kimijax.train.losses.CHUNK_ROWS", 36)  # 3 chunks
    found = evaluator(drafter, fit)(batch)
    assert_same(found, right)
    assert found.sums.valid.tolist() == [8, 5, 2]


def test_correct_counts_the_targets_choice(tmp_path: Path) -> None:
    """A target that prefers what the draft does makes every row of step 0 correct; one whose choice the draft
    vocabulary has not, none: such rows count, and nothing is learnt from them."""
    drafter, _ = make(tmp_path, "llama")
    batch = random_batch(np.ones((2, 12)))
    evaluate = evaluator(drafter, FIT)
    first = unroll(drafter, drafter.fuse(batch.taps), batch.ids, batch.positions, batch.segments, 1)[0]
    chosen = drafter.to_target(drafter.logits(first).argmax(axis=-1).astype(jnp.int32))
    target = tables()

    def preferring(ids: jax.Array) -> ttt.Batch:
        last = 20 * target.lm_head[...][ids] / target.norm[...][None, None]
        return dataclasses.replace(batch, last=jnp.roll(last, 1, axis=1))  # row t speaks about position t + 1

    agreed = evaluate(preferring(chosen))
    assert agreed.sums.valid.tolist() == [20, 18, 16]
    assert agreed.sums.correct[0] == 20
    outside = np.setdiff1d(np.arange(VOCAB), np.asarray(drafter.target_ids[...]))[0]
    apart = evaluate(preferring(jnp.full((2, 12), outside)))
    assert apart.sums.valid.tolist() == [20, 18, 16]
    assert not apart.sums.correct.any()
    assert not apart.sums.loss.any()
    assert apart.total == 0
    assert all(not g.any() for g in apart.gradient.values())


def test_packed_documents_learn_as_alone(tmp_path: Path) -> None:
    """Loss and gradients of a row of two documents are the sums of theirs; the second's do not feel the first."""
    drafter, _ = make(tmp_path, "llama full vocabulary")  # every row learns
    evaluate = evaluator(drafter, FIT)
    row = random_batch([[0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]], [[0] * 6 + [1] * 6])
    both = evaluate(row)
    parts = [evaluate(take(row, slice(None), slice(*cut))) for cut in ((0, 6), (6, 12))]
    together = Evaluated(
        sum(p.total for p in parts) / 2,  # each is divided by its own 6 positions, the row by 12
        ttt.StepSums(*(a + b for a, b in zip(*(p.sums for p in parts), strict=True))),
        {name: (g + parts[1].gradient[name]) / 2 for name, g in parts[0].gradient.items()},
    )
    assert_same(both, together)
    second = dataclasses.replace(row, mask=row.mask.at[:, :6].set(False))
    changed = dataclasses.replace(
        second,
        ids=second.ids.at[:, :6].set(3),
        taps={k: v.at[:, :6].multiply(-2.0) for k, v in second.taps.items()},
        last=second.last.at[:, :6].multiply(3.0),
    )
    assert_same(evaluate(changed), evaluate(second))
    assert_same(evaluate(second), parts[1], scale=0.5)


def test_masked_rows_learn_nothing(tmp_path: Path) -> None:
    """With one of two rows masked the other is as alone; with both masked, or an answer that was cut to its first
    token, loss and gradients are zero and finite. The masked row is padding, whose queries see no key in step 0."""
    drafter, _ = make(tmp_path, "llama")
    evaluate = evaluator(drafter, dataclasses.replace(FIT, normaliser="valid", loss="lk"))
    full = random_batch([ANSWERS[0], [0] * 12], [[0] * 12, [-1] * 12])
    assert_same(evaluate(full), evaluate(take(full, slice(0, 1), slice(None))))
    for mask in ([0] * 12, [0] * 11 + [1]):
        nothing = evaluate(dataclasses.replace(full, mask=jnp.asarray([mask, [0] * 12], bool)))
        assert nothing.total == 0
        assert not nothing.sums.valid.any()
        assert all(not g.any() for g in nothing.gradient.values())


def test_last_states_that_are_normed_already(tmp_path: Path) -> None:
    drafter, _ = make(tmp_path, "llama")
    batch, target = random_batch(ANSWERS), tables()
    normed = rms_norm(batch.last, target.norm[...], target.config.norm_eps)
    stored = dataclasses.replace(batch, last=normed, last_is_normed=True)
    graph, state = nnx.split(drafter)
    loss = jax.jit(lambda state, batch: ttt.ttt_loss(nnx.merge(graph, state), target, batch, FIT)[0])
    assert float(loss(state, stored)) == pytest.approx(float(loss(state, batch)), rel=LIMIT)


def test_scores_are_never_all_there(tmp_path: Path) -> None:
    """Temporary memory of loss and gradient at 2,048 tokens and two steps, against the float32 scores alone, which
    autodiff of plain attention would keep."""
    drafter, _ = make(tmp_path, "llama")
    length, steps, n_heads = 2048, 2, 6
    compiled, params = program(drafter, dataclasses.replace(FIT, ttt_steps=steps))
    memory = compiled.lower(params, random_batch(np.ones((1, length)))).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.5 * 4 * n_heads * length * (length * steps + 1)
