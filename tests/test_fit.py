"""The trainer of drafters: what an update changes, and that a mesh, micro-batches or stored states do not matter."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from kimijax.drafter import declare_drafter
from kimijax.errors import ConfigError
from kimijax.layers import rms_norm
from kimijax.names import parameters
from kimijax.sharding import Preset
from kimijax.train import dataset, draft_recipe, fit_optimizer, fit_progress, placement
from kimijax.train import fit as fit_stage
from kimijax.train import fitter as trainer

from . import fit_cases as cases

EQUAL = 1e-5  # float32 sums in another order, relative to the largest value
T = cases.FIT["row_tokens"]


@functools.cache
def states() -> cases.States:
    return cases.States(cases.documents())


@functools.cache
def batch() -> dataset.RowBatch[np.ndarray]:
    return rows_of()[0]


def rows_of(source: Any = None, **arguments: Any) -> dataset.Rows:
    settings: dict[str, Any] = {"rows": 8, "row_tokens": T, "seed": 0} | arguments
    return dataset.Rows(states() if source is None else source, **settings)


def fitter_of(recipe: draft_recipe.DraftRecipe, **arguments: Any) -> trainer.Fitter:
    return cases.fitter(recipe, 100, **arguments)


@pytest.fixture(scope="module")
def fitter() -> trainer.Fitter:
    return fitter_of(cases.recipe())


def leaves(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def assert_close(found: Any, expected: Any, limit: float = EQUAL) -> None:
    a, b = leaves(found), leaves(expected)
    assert a.keys() == b.keys()
    for name in a:
        scale = np.abs(b[name]).max() + 1e-12
        assert np.abs(a[name] - b[name]).max() <= limit * scale, name


def first_update(fitter: trainer.Fitter, batch: dataset.RowBatch[np.ndarray]) -> dict[str, Any]:
    """Loss, counts and gradient of a fresh state's first update; the gradient as AdamW's first moment has it."""
    state, metrics = fitter.step(fitter.create(), batch)
    adam = cast(Any, state.optimizer)[1][0]
    moment = jax.tree.map(lambda x: x / (1 - fitter.fit.beta1), adam.mu)
    # The change of the parameters is left out: where a gradient is nearly 0, its sign is all that AdamW sees.
    return {"gradient": moment, **metrics._replace(update_norm=metrics.loss)._asdict()}


def test_an_update_changes_every_parameter_and_nothing_else(fitter: trainer.Fitter) -> None:
    state = fitter.create()
    before = leaves(state.params)
    lent = leaves(fitter.drafter(state.params).embed.get_value())
    drafter = fitter.drafter(state.params)
    assert {"embed", "target_ids"} & {str(path[0]) for path in parameters(drafter)} == set()
    assert len(before) == len(parameters(drafter))
    after, metrics = fitter.step(state, batch())
    assert int(after.step) == 1
    assert all((leaves(after.params)[name] != before[name]).any() for name in before)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(after.params))
    assert leaves(fitter.drafter(after.params).embed.get_value())[""].tobytes() == lent[""].tobytes()
    # All that is saved: parameters, two moments of each, the counts of AdamW and its schedule, the step.
    assert len(jax.tree.leaves(after)) == 3 * len(before) + 3
    assert float(metrics.gradient_norm) > 0
    assert int(metrics.masked_rows) == 0


@pytest.mark.parametrize(
    "head", [pytest.param(cases.LLAMA, id="llama"), pytest.param(cases.MLA, id="mla", marks=pytest.mark.slow)]
)
def test_it_learns(head: dict[str, Any], fitter: trainer.Fitter) -> None:
    """The documents go on as they began, which is all that there is to learn; held-out ones are others."""
    updates, heldout = rows_of(epochs=20), cases.heldout_rows()
    if head is not cases.LLAMA:
        fitter = fitter_of(cases.recipe(head))
    state = fitter.create()
    first = fit_stage.evaluate(fitter, state, heldout)
    for i in range(len(updates)):
        state, _ = fitter.step(state, updates[i])
    last = fit_stage.evaluate(fitter, state, heldout)
    assert last["loss/0"] < 0.4 * first["loss/0"]
    assert last["length/sampled_k2"] > 1.2 * first["length/sampled_k2"]
    assert last["length/greedy_k2"] > 0.2 > first["length/greedy_k2"]
    assert last["valid_rows"] == first["valid_rows"] > 100


def test_rows_without_loss_are_counted_and_change_nothing(fitter: trainer.Fitter) -> None:
    """One masked row: the others' gradient. All of them: loss 0, gradient 0, finite parameters."""
    one = np.zeros((1, 8, T), bool)
    one[:, 3] = True
    masked = batch()._replace(mask=batch().mask & ~one)
    gone = masked._replace(segments=np.where(one, -1, batch().segments))
    found, expected = first_update(fitter, masked), first_update(fitter, gone)
    # Rows of padding alone are not rows without loss: there is nothing in them to be learned.
    assert (int(found.pop("masked_rows")), int(expected.pop("masked_rows"))) == (1, 0)
    assert_close(found, expected)
    nothing = first_update(fitter, batch()._replace(mask=batch().mask & False))
    assert all((x == 0).all() for x in leaves(nothing["gradient"]).values())
    assert (float(nothing["loss"]), float(nothing["gradient_norm"]), int(nothing["masked_rows"])) == (0.0, 0.0, 8)
    after, _ = fitter.step(fitter.create(), batch()._replace(mask=batch().mask & False))
    assert all(np.isfinite(x).all() for x in leaves(after).values())


def test_micro_batches_add_up_to_the_big_batch(fitter: trainer.Fitter) -> None:
    halves = fitter_of(cases.recipe(rows=4, accumulate=2))
    assert_close(first_update(halves, rows_of(rows=4, accumulate=2)[0]), first_update(fitter, batch()))


def test_an_empty_micro_batch_is_not_counted_among_valid_ones() -> None:
    """The end of an epoch may leave one; only a divisor of all positions knows of it."""
    two, one = (fitter_of(cases.recipe(rows=4, accumulate=a, normaliser="valid")) for a in (2, 1))
    whole = rows_of(rows=4, accumulate=2)[0]
    empty = np.arange(2)[:, None, None] == 1
    gone = whole._replace(mask=whole.mask & ~empty, segments=np.where(empty, -1, whole.segments))
    found = first_update(two, gone)
    assert_close(found, first_update(one, jax.tree.map(lambda x: x[:1], whole)))
    assert float(found["loss"]) > 0


@pytest.mark.parametrize(("data", "fsdp"), [pytest.param(8, False, marks=pytest.mark.slow), (8, True), (4, True)])
def test_a_mesh_changes_nothing(fitter: trainer.Fitter, data: int, fsdp: bool) -> None:
    recipe = cases.recipe(data_parallel=data, fsdp=fsdp)
    spread = fitter_of(recipe, mesh=placement.fit_mesh(recipe.fit, 8))
    found = first_update(spread, batch())
    assert_close(found, first_update(fitter, batch()))
    state = spread.create()
    placed = {name: cast(NamedSharding, x.sharding).spec for name, x in arrays(state.params).items()}
    split = "data" if fsdp else None
    assert placed["['fc'].value"] == PartitionSpec(None, split)
    if data < 8:
        assert placed["['lm_head'].value"] == PartitionSpec("tensor", split)
    for name, x in arrays(found["gradient"]).items():
        assert x.sharding.is_equivalent_to(arrays(state.params)[name].sharding, x.ndim), name
    if fsdp:
        whole = sum(x.nbytes for x in jax.tree.leaves(state))
        here = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
        assert here < 1.3 * whole / 8


def arrays(tree: Any) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def test_the_dimension_that_fsdp_splits() -> None:
    split = placement.split_over_data
    assert split(PartitionSpec(None, None), (32, 96), 4) == PartitionSpec(None, "data")
    assert split(PartitionSpec("tensor", None), (96, 32), 4) == PartitionSpec("tensor", "data")
    assert split(PartitionSpec(None, None), (32, 32), 4) == PartitionSpec("data", None)
    assert split(PartitionSpec(None, None), (32, 90), 4) == PartitionSpec("data", None)
    assert split(PartitionSpec(None), (6,), 4) == PartitionSpec(None)
    assert split(PartitionSpec(), (8,), 4) == PartitionSpec("data")


def test_meshes_that_cannot_be() -> None:
    def refused(devices: int, names: str, **fit: Any) -> None:
        recipe = cases.recipe(**fit)
        with pytest.raises(ConfigError, match=names):
            fitter_of(recipe, mesh=placement.fit_mesh(recipe.fit, devices))

    refused(16, r"target.devices: found 16, expected at most 8")
    refused(8, r"fit.data_parallel: found 3, expected a divisor of target.devices \(8\)", data_parallel=3, rows=9)
    refused(8, r"mesh axis tensor: found 8, expected a divisor of heads")  # 4 heads
    assert placement.fit_mesh(cases.recipe().fit, 1) is None
    with pytest.raises(ConfigError, match=r"fit.rows: found 6, expected a multiple of the 8 parts of the mesh"):
        placement.fit_mesh(cases.recipe(data_parallel=2, rows=6).fit, 8, "dp-attention")


def test_a_mesh_that_cannot_hold_the_drafter_is_refused_with_those_that_can() -> None:
    head = cases.LLAMA | {"n_kv_heads": 4}

    def refused(names: str, preset: Preset = "tp", devices: int = 8, **fit: Any) -> None:
        recipe = cases.recipe(head, **fit)
        config = recipe.draft.config(cases.config(), cases.WIRING, len(cases.TARGET_IDS))
        drafter = declare_drafter(config, cases.WIRING, dtype=jnp.dtype(jnp.float32))
        placement.check_mesh(drafter, placement.fit_mesh(recipe.fit, 4, preset), recipe.fit)
        with pytest.raises(ConfigError, match=names):
            placement.check_mesh(drafter, placement.fit_mesh(recipe.fit, devices, preset), recipe.fit)

    two_four_eight = r"fit.data_parallel: found 1, expected 2 or 4 or 8 for 8 devices and 8 rows; "
    refused(two_four_eight + r"the drafter's heads \(4\) cannot be split over tensor \(8\)")
    refused(two_four_eight + r".*over expert \(8\)", "ep")
    refused(r"found 1, expected 2 or 4 for 8 devices and 4 rows", rows=4)
    refused(r"target.devices: found 8, expected a number that divides the drafter.*with 1 rows", rows=1)


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param("tp", marks=pytest.mark.slow),
        "ep",
        pytest.param("dcp", marks=pytest.mark.slow),
        pytest.param("dp-attention", marks=pytest.mark.slow),
    ],
)
def test_online_is_files(preset: Preset, fitter: trainer.Fitter) -> None:
    """The target inside the program, on a mesh, gives what its stored states give: loss, counts, gradient."""
    tokens = rows_of(dataset.TokenDocuments(cases.documents()))[0]
    assert tokens.taps == {}
    recipe = cases.recipe(source="online", data_parallel=4)
    online = fitter_of(recipe, mesh=placement.fit_mesh(recipe.fit, 8, preset), online=cases.target())
    assert_close(first_update(online, tokens), first_update(fitter, batch()))
    with pytest.raises(ValueError, match="no hidden states"):
        fitter.step(fitter.create(), tokens)


class Processes:
    """A mesh of devices that belong to several processes."""

    def __init__(self, groups: int, processes: int, n: int = 8) -> None:
        devices = np.empty(n, object)
        devices[:] = [SimpleNamespace(process_index=i * processes // n) for i in range(n)]
        self.shape = {"data": groups, "attention": 1, "context": 1, "expert": 1, "tensor": n // groups}
        self.devices = devices.reshape(tuple(self.shape.values()))


@pytest.mark.parametrize(
    ("groups", "processes", "shares"),
    [
        (8, 2, [(0, 2), (1, 2)]),  # four groups in each process
        (2, 2, [(0, 2), (1, 2)]),
        (1, 2, [(0, 1), (0, 1)]),  # one group over both: each brings all rows
        (2, 4, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (8, 1, [(0, 1)]),
    ],
)
def test_the_rows_that_a_process_brings(
    groups: int, processes: int, shares: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh: Any = Processes(groups, processes)
    for process, share in enumerate(shares):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert placement.row_share(mesh) == share


def test_groups_that_lie_across_processes_are_refused() -> None:
    mesh: Any = Processes(3, 2, 12)
    with pytest.raises(ConfigError, match=r"fit.data_parallel: found 3, expected a divisor or a multiple of the"):
        placement.row_share(mesh)


def test_last_states_that_are_normed_already(fitter: trainer.Fitter) -> None:
    config, norm = cases.target().config, cases.target().norm.get_value()
    assert batch().last is not None
    normed = np.asarray(rms_norm(jnp.asarray(batch().last), norm, config.norm_eps))
    again, params = fitter_of(cases.recipe(), last_is_normed=True), fitter.create().params
    expected = fitter.sums(params, batch())
    assert_close(again.sums(params, batch()._replace(last=normed)), expected)
    assert abs(float(again.sums(params, batch()).loss[0]) - float(expected.loss[0])) > 1e-3


def test_bfloat16_computes_and_float32_is_kept(fitter: trainer.Fitter) -> None:
    half = fitter_of(cases.recipe(compute_dtype="bfloat16"))
    found, expected = first_update(half, batch()), first_update(fitter, batch())
    assert 0 < abs(float(found["loss"]) - float(expected["loss"])) < 2e-2 * float(expected["loss"])
    assert {x.dtype for x in jax.tree.leaves(found["gradient"])} == {np.dtype(np.float32)}
    params = half.create().params
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert half.drafter(params, jnp.bfloat16).fc.get_value().dtype == jnp.bfloat16


def test_what_is_not_finite_stops_the_run(fitter: trainer.Fitter) -> None:
    taps = {tap: x.copy() for tap, x in batch().taps.items()}
    taps[1][0, 2, 9] = np.inf
    _, metrics = fitter.step(fitter.create(), batch()._replace(taps=taps))
    with pytest.raises(FloatingPointError, match=r"step 7: loss nan.*on rows \[4, 1\] of the plan.*learning_rate"):
        fit_progress.Progress(2).add(7, metrics, 100, [4, 1])


def test_schedules() -> None:
    recipe = cases.recipe(learning_rate=2.0, warmup_share=0.1, final_share=0.25).fit
    cosine = fit_optimizer.schedule(recipe, 100)
    values = [float(cosine(done)) for done in (0, 4, 9, 54, 99)]
    np.testing.assert_allclose(values, [0.2, 1.0, 2.0, 1.25, 0.5], rtol=1e-6)
    wsd = fit_optimizer.schedule(dataclasses.replace(recipe, schedule="wsd", decay_share=0.2), 100)
    values = [float(wsd(done)) for done in (0, 9, 50, 79, 89, 99)]
    np.testing.assert_allclose(values, [0.2, 2.0, 2.0, 2.0, 1.25, 0.5], rtol=1e-6)
    flat = fit_optimizer.schedule(dataclasses.replace(recipe, schedule="wsd", warmup_share=0.0, decay_share=0.0), 10)
    assert [float(flat(done)) for done in (0, 9)] == [2.0, 2.0]


def test_decay_is_for_matrices(fitter: trainer.Fitter) -> None:
    """Also the norms before fc, which are stacked into a matrix, are not drawn to 0."""
    params = fitter.create().params
    zero = jax.tree.map(jnp.zeros_like, params)
    optimizer = fit_optimizer.make_optimizer(cases.recipe(weight_decay=0.5, learning_rate=1.0, warmup_share=0.0).fit, 9)
    with jax.numpy_dtype_promotion("standard"):
        changes, _ = optimizer.update(zero, optimizer.init(params), params)
    for name, change in leaves(changes).items():
        assert (change != 0).any() == ("norm" not in name), name
    assert leaves(params)["['fc_norm'].value"].ndim == 2


def test_a_summary_is_rates_and_lengths() -> None:
    sums = {"loss": [8.0, 4.0], "valid": [4.0, 2.0], "correct": [2.0, 1.0], "accepted": [3.0, 0.5]}
    found = fit_progress.summary({name: np.array(values) for name, values in sums.items()})
    assert (found["loss/1"], found["acc/0"], found["accept/1"], found["valid_rows"]) == (2.0, 0.5, 0.25, 4.0)
    assert (found["length/greedy_k2"], found["length/greedy_k2_with_bonus"]) == (0.75, 1.75)
    assert found["length/sampled_k2"] == pytest.approx(0.75 + 0.75 * 0.25)
    empty = fit_progress.summary({name: np.zeros(4) for name in sums})
    assert (empty["acc/0"], empty["length/sampled_k3_with_bonus"], empty["valid_rows"]) == (0.0, 1.0, 0.0)


def test_a_fresh_state_is_a_function_of_the_seed(fitter: trainer.Fitter) -> None:
    def bits(fitter: trainer.Fitter) -> list[bytes]:
        return [x.tobytes() for x in leaves(fitter.create().params).values()]

    assert bits(fitter) == bits(fitter_of(cases.recipe()))
    assert bits(fitter) != bits(fitter_of(cases.recipe(seed=1)))
    assert nnx.state(fitter.drafter(fitter.create().params), nnx.Param).keys() == fitter.create().params.keys()
