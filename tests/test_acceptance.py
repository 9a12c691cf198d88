"""The acceptance counters against numbers made by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimijax.acceptance import Acceptance, simulated_length


def test_five_rounds() -> None:
    """k = 2, accepted drafts 2, 2, 0, 1, 0."""
    found = Acceptance.of([2, 2, 0, 1, 0], k=2)
    assert found == Acceptance(rounds=5, drafted=(5, 5), accepted=(3, 2))
    assert found.length == 2.0
    assert found.rate == 0.5
    assert found.by_position == (0.6, 0.4)
    assert found.conditional == pytest.approx((0.6, 2 / 3))
    assert found.to_json() | {"conditional": None} == {
        "rounds": 5, "drafted": [5, 5], "accepted": [3, 2], "length": 2.0, "rate": 0.5, "by_position": [0.6, 0.4],
        "conditional": None,
    }  # fmt: skip


rounds_of_a_run = st.integers(0, 4).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k), max_size=20)))


@given(st.lists(rounds_of_a_run, min_size=1, max_size=4))
def test_sums_count_every_round_once(runs: list[tuple[int, list[int]]]) -> None:
    """Runs with different k, added up, against a count over all rounds."""
    total = sum((Acceptance.of(accepted, k) for k, accepted in runs), Acceptance())
    rounds = [(k, a) for k, accepted in runs for a in accepted]
    assert total.rounds == len(rounds)
    assert sum(total.drafted) == sum(k for k, _ in rounds)
    assert sum(total.accepted) == sum(a for _, a in rounds)
    for i, (drafted, accepted) in enumerate(zip(total.drafted, total.accepted, strict=True)):
        assert drafted == sum(k > i for k, _ in rounds)
        assert accepted == sum(a > i for _, a in rounds)
    if rounds:
        assert total.length == pytest.approx(np.mean([a + 1 for _, a in rounds]))


def test_nothing_counted_is_no_number() -> None:
    empty, plain = Acceptance.of([], k=2), Acceptance.of([0, 0], k=0)
    assert math.isnan(empty.length)
    assert math.isnan(empty.rate)
    assert plain.length == 1.0
    assert math.isnan(plain.rate)
    assert empty.to_json()["by_position"] == [None, None]
    never = Acceptance.of([0, 0], k=2)
    assert never.by_position == (0.0, 0.0)
    assert never.conditional[0] == 0.0
    assert math.isnan(never.conditional[1])


def test_a_conditional_chance_is_none_where_k_differs() -> None:
    """100 rounds of one draft, none accepted, and 100 of two, both accepted: the second share is twice the first."""
    mixed = Acceptance.of([0] * 100, k=1) + Acceptance.of([2] * 100, k=2)
    assert mixed.by_position == (0.5, 1.0)
    assert mixed.conditional[0] == 0.5
    assert math.isnan(mixed.conditional[1])
    assert mixed.to_json()["conditional"] == [0.5, None]
    plain = Acceptance.of([0], k=0) + Acceptance.of([1, 2], k=2)
    assert plain.conditional == (1.0, 0.5)


def test_impossible_counters_are_refused() -> None:
    with pytest.raises(ValueError, match="accepted"):
        Acceptance(rounds=2, drafted=(2,), accepted=(3,))
    with pytest.raises(ValueError, match="drafted"):
        Acceptance(rounds=2, drafted=(3,), accepted=(0,))


def test_simulated_length() -> None:
    """0.8 + 0.8 * 0.5 + 0.8 * 0.5 * 0.25 = 1.3."""
    assert simulated_length([0.8, 0.5, 0.25], bonus=False) == pytest.approx(1.3)
    assert simulated_length([0.8, 0.5, 0.25], bonus=True) == pytest.approx(2.3)
    assert simulated_length([], bonus=True) == 1.0
    # Shares that a run's rounds really had give that run's length back.
    run = Acceptance.of([3, 0, 1, 1, 2, 3, 3], k=3)
    assert simulated_length(run.conditional, bonus=True) == pytest.approx(run.length)


def test_what_came_since() -> None:
    before, after = Acceptance.of([0, 2, 1], 2), Acceptance.of([3, 0], 3)
    assert (before + after) - before == after
    assert (after + before) - after == Acceptance(3, (3, 3, 0), (2, 1, 0))
    assert before - Acceptance() == before
