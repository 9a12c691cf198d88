"""The probe: what replays and what does not, the strictness of its JSON, and the warning about served acceptance."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimijax.draft_parts import DraftParts
from kimijax.drafter import Drafter, set_vocabulary
from kimijax.errors import ConfigError
from kimijax.model import Target
from kimijax.probe import (
    MARGIN,
    POSITIONS,
    STEPS,
    Probe,
    ProbeAcceptance,
    ProbeResult,
    check,
    make_probe,
    replay,
    served_acceptance_warning,
)
from kimijax.sharding import make_mesh, parameter_sharding
from kimijax.wiring import Wiring, WiringError

from .draft_faults import LAYERS, TAPS, random_ids, random_target, ridge_draft

BF16 = jnp.dtype(jnp.bfloat16)
Pair = tuple[Target, Drafter]


@pytest.fixture(scope="module")
def pair() -> Pair:
    target = random_target()
    return target, ridge_draft(target)


@pytest.fixture(scope="module")
def probe(pair: Pair) -> Probe:
    """Four sequences of two lengths."""
    rows = random_ids(4, 7).tolist()
    acceptance = ProbeAcceptance(draft_tokens=3, temperature=0.0, by_position=(0.6, 0.4, 0.2))
    return make_probe(*pair, [rows[0], rows[1][:24], *rows[2:]], acceptance)


def changed[M: nnx.Module](module: M, change: Callable[[Any, nnx.Variable], jax.Array]) -> M:
    """A copy with other values, given each variable's path and the variable."""
    graph, state = nnx.split(module)
    flat = [(path, v.replace(change(path, v))) for path, v in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def retapped(drafter: Drafter, target: Target, taps: tuple[int, ...]) -> Drafter:
    """The same head, fed other taps."""
    parts = DraftParts.of(drafter, target)
    out = parts.drafter(parts.base)
    set_vocabulary(out, np.asarray(drafter.target_ids[...]))
    out.wiring = Wiring(taps, LAYERS, 64)
    return out


def refused(result: ProbeResult) -> str:
    with pytest.raises(WiringError) as error:
        check(result, "draft D")
    return str(error.value)


# ---- what replays ---------------------------------------------------------------------------------------------------


def test_replays_exactly(pair: Pair, probe: Probe) -> None:
    result = replay(probe, *pair)
    check(result)
    assert max(result.distances.values()) < 1e-5
    assert result.agreement == (1.0, 1.0)
    assert min(result.confident) >= 10


def test_json_round_trip(pair: Pair, probe: Probe) -> None:
    again = Probe.from_json(json.loads(json.dumps(probe.to_json())))
    assert again == probe
    check(replay(again, *pair))


def test_replays_in_bfloat16(pair: Pair, probe: Probe) -> None:
    """Far from exactly, and far from the limits."""

    def rounded(_: Any, v: nnx.Variable) -> jax.Array:
        value = v.get_value()
        return value.astype(BF16) if value.dtype == jnp.float32 else value

    result = replay(probe, changed(pair[0], rounded), changed(pair[1], rounded))
    check(result)
    for tap, distance in result.distances.items():
        assert 1e-4 < distance < result.limits[tap] / 2


def test_replays_on_eight_devices(pair: Pair, probe: Probe) -> None:
    mesh = make_mesh()

    def spread(_: Any, v: nnx.Variable) -> jax.Array:
        value = v.get_value()
        return jax.device_put(value, parameter_sharding(mesh, v.get_metadata()["axes"], value.shape))

    result = replay(probe, changed(pair[0], spread), changed(pair[1], spread), mesh=mesh)
    check(result)
    assert max(result.distances.values()) < 1e-4


# ---- what does not --------------------------------------------------------------------------------------------------


def test_other_taps(pair: Pair, probe: Probe) -> None:
    """By the wiring, before anything runs; and where the target itself keeps the wrong stream, by its features."""
    target, drafter = pair
    with pytest.raises(WiringError, match=r"recorded with taps \(2, 4, 5\), the drafter is fed \(3, 5, 6\)"):
        replay(probe, target, retapped(drafter, target, (3, 5, 6)))
    with pytest.raises(WiringError, match=r"recorded with taps \(2, 4, 5\), the drafter is fed \(0, 2, 4\)"):
        replay(probe, target, retapped(drafter, target, (0, 2, 4)))

    # The probe of a target that counts its layers from another one: the same numbers, under other names.
    step = 1
    other = make_probe(target, retapped(drafter, target, tuple(t + step for t in TAPS)), random_ids(4, 7).tolist())
    sequences = tuple(
        dataclasses.replace(s, features={t - step: rows for t, rows in s.features.items()}) for s in other.sequences
    )
    separation = {t - step: value for t, value in other.separation.items()}
    result = replay(dataclasses.replace(other, separation=separation, sequences=sequences), target, drafter)
    assert min(result.distances[tap] / result.limits[tap] for tap in TAPS) > 2
    message = refused(result)
    assert "draft D does not replay its probe: its target's features are not those that it was trained on" in message
    assert "recorded (" in message
    assert "found (" in message


def test_another_target(pair: Pair, probe: Probe) -> None:
    result = replay(probe, random_target(seed=1), pair[1])
    assert min(result.distances[tap] / result.limits[tap] for tap in TAPS) > 2
    assert "tap 2" in refused(result)


def test_permuted_slots(pair: Pair, probe: Probe) -> None:
    """The streams are right, and their columns in fc are not: only the tokens tell."""

    def permute(path: Any, v: nnx.Variable) -> jax.Array:
        return jnp.roll(v.get_value(), 64, axis=1) if path == ("fc",) else v.get_value()

    result = replay(probe, pair[0], changed(pair[1], permute))
    assert result.features_match
    message = refused(result)
    assert "with the right features it proposes other tokens" in message
    assert "recorded tokens (" in message
    assert "), found (" in message


def test_another_vocabulary(pair: Pair, probe: Probe) -> None:
    other = changed(pair[1], lambda _, v: v.get_value())
    ids = np.asarray(other.target_ids[...])
    unused = np.setdiff1d(np.arange(128), ids)
    set_vocabulary(other, np.sort(np.concatenate([ids[len(unused) :], unused])))
    assert "other weights, vocabulary" in refused(replay(probe, pair[0], other))


def test_a_target_that_is_too_small(pair: Pair, probe: Probe) -> None:
    beyond = dataclasses.replace(probe.sequences[0], ids=(*probe.sequences[0].ids[:-1], 128))
    with pytest.raises(WiringError, match="recorded with tap 5 and token 128, the target has 8 layers and 128 tokens"):
        replay(dataclasses.replace(probe, sequences=(beyond,)), *pair)


def test_features_that_are_no_numbers(pair: Pair, probe: Probe) -> None:
    """A target that overflows is refused as well: not a number is not near."""

    def overflow(path: Any, v: nnx.Variable) -> jax.Array:
        return v.get_value() * jnp.float32("nan") if path[:2] == ("layers", 3) else v.get_value()

    result = replay(probe, changed(pair[0], overflow), pair[1])
    assert not result.features_match
    refused(result)


# ---- the record -----------------------------------------------------------------------------------------------------


def test_what_is_recorded(probe: Probe) -> None:
    assert probe.taps == TAPS
    assert all(0.1 < value < 3 for value in probe.separation.values())
    for s in probe.sequences:
        assert len(s.positions) == POSITIONS
        assert s.positions == tuple(sorted(set(s.positions)))
        assert s.positions[0] > 4
        assert s.positions[-1] == len(s.ids) - STEPS - 1
    assert any(m >= MARGIN for s in probe.sequences for step in s.margins for m in step)
    assert len(json.dumps(probe.to_json())) < 20_000


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: d.update(format=2), "probe.format"),
        (lambda d: d.pop("seed"), "probe.seed"),
        (lambda d: d.update(note="x"), "probe.note"),
        (lambda d: d.update(sequences=[]), "probe.sequences"),
        (lambda d: d["separation"].update({"2": 0.0}), "probe.separation.2"),
        (lambda d: d["separation"].pop("4"), "probe.sequences[0].features"),
        (lambda d: d["separation"].update({"x": 1.0}), "probe.separation"),
        (lambda d: d["sequences"][0].update(extra=1), "probe.sequences[0].extra"),
        (lambda d: d["sequences"][0]["ids"].__setitem__(0, -1), "probe.sequences[0].ids"),
        (lambda d: d["sequences"][1]["positions"].__setitem__(7, 23), "probe.sequences[1].positions"),
        (lambda d: d["sequences"][0]["features"]["2"].pop(), "probe.sequences[0].features.2"),
        (lambda d: d["sequences"][0]["features"]["2"][0].__setitem__(0, float("nan")), "probe.sequences[0].features.2"),
        (lambda d: d["sequences"][0]["tokens"][0][0].__setitem__(0, 1.5), "probe.sequences[0].tokens"),
        (lambda d: d["sequences"][0]["margins"].pop(), "probe.sequences[0].margins"),
        (lambda d: d["acceptance"].update(by_position=[0.5]), "probe.acceptance.by_position"),
        (lambda d: d["acceptance"].update(by_position=[1.5, 0.5, 0.2]), "probe.acceptance.by_position"),
        (lambda d: d["acceptance"].update(p=1), "probe.acceptance.p"),
    ],
)
def test_record_is_read_strictly(change: Callable[[dict[str, Any]], Any], field: str, probe: Probe) -> None:
    data = json.loads(json.dumps(probe.to_json()))
    change(data)
    with pytest.raises(ConfigError) as error:
        Probe.from_json(data)
    assert error.value.field == field


def test_sequences_that_are_too_short(pair: Pair) -> None:
    for sequences in ([], [list(range(11))]):
        with pytest.raises(ConfigError, match=r"probe sequences: found '[01]+ tokens', expected 12 or more in each"):
            make_probe(*pair, sequences)


def test_served_acceptance(probe: Probe) -> None:
    """0.85 of what was recorded is the limit."""
    assert served_acceptance_warning(probe, 0.511) == ""
    warning = served_acceptance_warning(probe, 0.509)
    assert "accepted in 50.9% of the rounds, below 0.85 of the 60.0% that were recorded" in warning
    assert served_acceptance_warning(dataclasses.replace(probe, acceptance=None), 0.0) == ""
