"""The choice of k, on machines and drafters that are made up: seconds and accepted drafts go in, k comes out."""

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimijax.acceptance import simulated_length
from kimijax.engine.adaptive import (
    UNKNOWN_CHANCE,
    AcceptanceTracker,
    Adaptive,
    AdaptiveConfig,
    Allowance,
    Choice,
    expected_lengths,
)
from kimijax.engine.step_costs import StepCosts
from kimijax.errors import ConfigError
from kimijax.simulated import simulated_accepts, simulated_chances

COSTS = {0: 1.0, 1: 1.3, 2: 1.5, 3: 1.7, 5: 2.2}  # in plain steps: fixed latency dominates, as on the real machine
DEAR = {0: 1.0, 1: 1.9, 2: 2.8, 3: 3.7, 5: 5.5}  # arithmetic dominates: as a large batch
PLAIN = 0.01  # seconds
RECORDED = (0.7, 0.5, 0.35)
GOOD, MIDDLING, BAD = (0.8, 0.75, 0.7, 0.65, 0.6), (0.35, 0.3, 0.3, 0.3, 0.3), (0.05,) * 5


def step_costs(costs: dict[int, float], bucket: int = 1) -> StepCosts[int]:
    return StepCosts({(bucket, k): [cost * PLAIN] for k, cost in costs.items()})


@dataclass
class Run:
    """What a simulated run did, step by step, in plain steps."""

    choices: list[Choice] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)

    def speed_up(self, start: int = 0, stop: int | None = None) -> float:
        return sum(self.lengths[start:stop]) / sum(self.costs[start:stop])


def simulate(
    adaptive: Adaptive[int, str],
    costs: dict[int, float],
    chances: Callable[[int], Sequence[float]],
    n_steps: int,
    *,
    rows: int = 1,
    seed: int = 0,
    pace: Callable[[int, random.Random], float] = lambda step, rng: rng.gauss(1, 0.05),
) -> Run:
    """Serve one bucket for n_steps. `pace` is how long a step takes in its usual time; the run does not count it."""
    rng, run = random.Random(seed), Run()
    for step in range(n_steps):
        choice = adaptive.choose(1, {"all": rows})
        accepted = [_passed(chances(step), choice.k, rng) for _ in range(rows)]
        adaptive.observe(1, choice.k, costs[choice.k] * PLAIN * max(pace(step, rng), 0.3), {"all": accepted})
        run.choices.append(choice)
        run.costs.append(costs[choice.k])
        run.lengths.append(1 + sum(accepted) / rows)
    return run


def _passed(chances: Sequence[float], k: int, rng: random.Random) -> int:
    n = 0
    while n < k and rng.random() < chances[n]:
        n += 1
    return n


def best_fixed(costs: dict[int, float], chances: Sequence[float]) -> float:
    return max(simulated_length(chances[:k], bonus=True) / cost for k, cost in costs.items())


def largest_loss(run: Run, share: float) -> float:
    """Over all stretches of steps the largest loss against plain decoding beyond `share` of their time."""
    worst = lowest = total = 0.0
    for cost, length in zip(run.costs, run.lengths, strict=True):
        total += (1 - share) * cost - length
        lowest = min(lowest, total)
        worst = max(worst, total - lowest)
    return worst


# ---- drafters


@pytest.mark.parametrize("rows", [1, 16])
def test_a_good_drafter_is_used_at_its_best_k(rows: int) -> None:
    run = simulate(Adaptive(step_costs(COSTS), RECORDED), COSTS, lambda _: GOOD, 3000, rows=rows)
    assert run.speed_up() > 0.97 * best_fixed(COSTS, GOOD)
    assert run.choices[0] == Choice(3, "best")


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("costs", [COSTS, DEAR])
@pytest.mark.parametrize("chances", [BAD, MIDDLING])
def test_a_bad_drafter_costs_nearly_nothing(rows: int, costs: dict[int, float], chances: Sequence[float]) -> None:
    """The recorded acceptance promises what the drafter does not keep."""
    run = simulate(Adaptive(step_costs(costs), RECORDED), costs, lambda _: chances, 3000, rows=rows)
    assert run.speed_up() > 0.985
    assert run.speed_up(0, 256) > 0.97


@pytest.mark.parametrize("rows", [1, 16])
def test_a_drafter_that_changes_is_followed_both_ways(rows: int) -> None:
    """Good, bad and good again, as the text changes; each for 1,500 steps."""
    adaptive = Adaptive[int, str](step_costs(COSTS), RECORDED)
    run = simulate(adaptive, COSTS, lambda step: BAD if 1500 <= step < 3000 else GOOD, 4500, rows=rows)
    assert run.speed_up(0, 1500) > 0.97 * best_fixed(COSTS, GOOD)
    assert run.speed_up(1500, 3000) > 0.97
    assert run.speed_up(3400, 4500) > 0.95 * best_fixed(COSTS, GOOD)


def test_trials_find_a_drafter_that_is_better_than_recorded() -> None:
    adaptive = Adaptive[int, str](step_costs(COSTS), (0.1, 0.01, 0.0))
    run = simulate(adaptive, COSTS, lambda _: GOOD, 2000)
    assert run.choices[0] == Choice(0, "best")
    assert "trial" in {c.reason for c in run.choices[:200]}
    assert run.speed_up(1000) > 0.95 * best_fixed(COSTS, GOOD)


def test_trials_that_change_nothing_become_rare() -> None:
    c = AdaptiveConfig()
    run = simulate(Adaptive(step_costs(DEAR), (0.3, 0.1), c), DEAR, lambda _: BAD, 4000)
    starts = [
        i
        for i, choice in enumerate(run.choices)
        if choice.reason == "trial" and run.choices[i - 1].reason not in ("trial", "allowance")
    ]
    gaps = np.diff([0, *starts])
    assert all(gaps[:3] > [100, 200, 400])
    assert len(starts) <= 7
    assert Counter(c.k for c in run.choices)[0] > 3950


def test_a_trial_is_of_what_would_be_best_if_the_record_came_true() -> None:
    """The drafter was bad for long; a trial of one draft would not show what three of them could gain."""
    run = simulate(Adaptive(step_costs(COSTS), RECORDED), COSTS, lambda _: BAD, 300, rows=16)
    assert [c.k for c in run.choices if c.reason == "trial"][:1] == [3]


def test_no_trial_of_what_could_not_pay() -> None:
    """Rounds of one draft that take twice as long give two tokens at most."""
    costs = {0: 1.0, 1: 2.0, 2: 3.0}
    run = simulate(Adaptive(step_costs(costs), (0.9, 0.8)), costs, lambda _: GOOD, 600, pace=lambda *_: 1.0)
    assert {c.k for c in run.choices} == {0}


# ---- the bound


CHANGING = st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(0, 5), min_size=1, max_size=4)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(CHANGING, st.sampled_from([COSTS, DEAR]), st.sampled_from([(), RECORDED, (0.99, 0.98)]), st.integers(0, 1))
def test_no_drafter_loses_more_than_the_allowance(
    phases: list[tuple[int, list[int]]], costs: dict[int, float], recorded: Sequence[float], late: int
) -> None:
    """Phases of some length in which the rows' rounds would accept these drafts; read `late` rounds late."""
    config = AdaptiveConfig(trial_interval=8, longest_trial_interval=32, probe_interval=16)
    adaptive, run = Adaptive[int, str](step_costs(costs), recorded, config), Run()
    unread: deque[tuple[int, list[int]]] = deque()
    worst = late * (max(costs.values()) - 1)
    for length, willing in phases:
        for _ in range(length):
            k = adaptive.choose(1, {"all": len(willing)}).k
            accepted = [min(k, a) for a in willing]
            unread.append((k, accepted))
            run.costs.append(costs[k])
            run.lengths.append(1 + sum(accepted) / len(accepted))
            if len(unread) > late:
                k, accepted = unread.popleft()
                adaptive.observe(1, k, costs[k] * PLAIN, {"all": accepted})
            assert adaptive.allowance.balance >= -worst - 1e-9
    assert largest_loss(run, config.share) <= config.reserve + worst + 1e-6


def test_a_drafter_made_to_deceive_loses_no_more() -> None:
    """It accepts everything until speculation is on, and then nothing until it is off again."""
    config = AdaptiveConfig()
    adaptive, run = Adaptive[int, str](step_costs(DEAR), (), config), Run()
    lure = True
    for _ in range(4000):
        choice = adaptive.choose(1, {"all": 1})
        lure = choice.reason in ("trial", "probe") or (choice.k == 0 and choice.reason == "best")
        accepted = choice.k if lure else 0
        adaptive.observe(1, choice.k, DEAR[choice.k] * PLAIN, {"all": [accepted]})
        run.costs.append(DEAR[choice.k])
        run.lengths.append(1.0 + accepted)
    assert largest_loss(run, config.share) <= config.reserve + 1e-6
    assert largest_loss(run, config.share) > 1  # the bound was put to the test
    assert run.speed_up() > 0.975


def test_gains_are_no_licence_to_lose() -> None:
    allowance = Allowance(share=0.02, reserve=8.0)
    for _ in range(100):
        allowance.settle(cost=1.7, length=4.0)
    assert allowance.balance == 8.0
    assert allowance.covers(9.0)
    assert not allowance.covers(9.1)
    allowance.settle(cost=2.0, length=1.0)
    assert allowance.balance == pytest.approx(7.04)


# ---- costs


def test_costs_are_medians_by_bucket_and_k() -> None:
    costs = StepCosts({(4, 2): [0.9, 0.3, 0.31], (4, 0): [0.2], (1, 0): [0.1], (1, 2): [0.15]})
    assert costs.ks == (0, 2)
    assert costs.seconds(4, 2) == 0.31
    assert costs.relative(1) == pytest.approx({0: 1.0, 2: 1.5})


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ({}, "0 among them"),
        ({(1, 1): [0.1]}, "0 among them"),
        ({(1, 0): [0.1], (1, 1): [0.1], (2, 0): [0.1]}, "same for every bucket"),
        ({(1, 0): [0.1, 0.0]}, "k = 0: found .*expected positive"),
        ({(1, 0): []}, "expected positive"),
    ],
)
def test_costs_that_cannot_be_are_refused(measured: dict[tuple[int, int], list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepCosts(measured)


def test_a_pause_of_the_machine_is_no_cost_and_a_lasting_change_is_everyones() -> None:
    costs = step_costs(COSTS)
    for _ in range(20):
        costs.observe(1, 3, 0.017)
    before = costs.relative(1)
    costs.observe(1, 3, 60.0)
    assert costs.relative(1) == before
    for _ in range(60):  # twice as slow from now on; nobody has seen another k
        costs.observe(1, 3, 0.034)
    assert costs.seconds(1, 3) == pytest.approx(0.034, rel=0.01)
    assert costs.relative(1) == pytest.approx(before)
    with pytest.raises(ValueError, match="positive"):
        costs.observe(1, 3, float("nan"))


def test_a_cost_seen_anew_is_corrected_alone() -> None:
    """Warm-up took k = 1 for twice as dear as it is: a few rounds mend that, and only that."""
    costs = StepCosts({(1, 0): [0.01], (1, 1): [0.026]})
    for _ in range(10):
        costs.observe(1, 1, 0.013)
    assert costs.seconds(1, 0) == 0.01
    assert costs.seconds(1, 1) == pytest.approx(0.013, rel=0.25)


@pytest.mark.parametrize(
    "pace",
    [
        lambda step, rng: rng.gauss(1, 0.1) * (6 if rng.random() < 0.05 else 1),
        lambda step, rng: rng.gauss(1, 0.1) * (2 if step // 300 % 2 else 1),
    ],
    ids=["pauses", "half the speed now and then"],
)
def test_an_unsteady_machine_misleads_little(pace: Callable[[int, random.Random], float]) -> None:
    good = simulate(Adaptive(step_costs(COSTS), RECORDED), COSTS, lambda _: GOOD, 3000, pace=pace)
    bad = simulate(Adaptive(step_costs(COSTS), RECORDED), COSTS, lambda _: BAD, 3000, pace=pace)
    assert good.speed_up() > 0.93 * best_fixed(COSTS, GOOD)
    assert bad.speed_up() > 0.975


def test_a_wrong_warm_up_is_found_out() -> None:
    dear = {k: cost if k == 0 else 2 * cost for k, cost in COSTS.items()}
    run = simulate(Adaptive(step_costs(dear), RECORDED), COSTS, lambda _: GOOD, 2000)
    assert run.choices[0].k == 0
    assert run.speed_up(1000) > 0.95 * best_fixed(COSTS, GOOD)


def test_plain_decoding_is_measured_again_while_drafting() -> None:
    """It became half as dear, which nothing but a round without drafts can tell."""
    c = AdaptiveConfig()
    adaptive = Adaptive[int, str](step_costs(COSTS), RECORDED, c)
    now = COSTS | {0: 0.4}
    run = simulate(adaptive, now, lambda _: GOOD, 1500, pace=lambda *_: 1.0)
    probes = [i for i, choice in enumerate(run.choices) if choice.reason == "probe"]
    assert probes[: c.probe_steps] == [c.probe_interval + i for i in range(c.probe_steps)]
    assert {choice.k for choice in run.choices[-100:]} == {0}


# ---- hysteresis


def test_what_is_hardly_better_is_not_worth_a_change() -> None:
    """k = 1 and k = 2 are the same but for 2 %, and every estimate moves by more than that."""
    chances = (0.6, 0.5)
    costs = {0: 1.0, 1: 1.25, 2: 1.9 / 1.6 * 1.25 / 1.02}
    changing, steady = (
        simulate(Adaptive(step_costs(costs), chances, c), costs, lambda _: chances, 3000, rows=4)
        for c in (AdaptiveConfig(margin=0.0, patience=1), AdaptiveConfig())
    )

    def changes(run: Run) -> int:
        ks = [c.k for c in run.choices if c.reason == "best"]
        return sum(a != b for a, b in itertools.pairwise(ks))

    assert changes(steady) < changes(changing) / 4
    assert steady.speed_up() > 0.97 * best_fixed(costs, chances)


def test_plain_decoding_needs_no_margin() -> None:
    """One draft is 1.5 % slower than none, which is less than the margin."""
    adaptive, ks = Adaptive[int, str](step_costs({0: 1.0, 1: 1.3}), (0.6,)), list[int]()
    for _ in range(100):
        ks.append(adaptive.choose(1, {"all": 100}).k)
        adaptive.observe(1, ks[-1], (1.0, 1.3)[ks[-1]] * PLAIN, {"all": [ks[-1]] * 28 + [0] * 72})
    assert ks[0] == 1
    assert set(ks[20:]) == {0}


def test_another_k_must_be_better_for_some_steps_on_end() -> None:
    adaptive = Adaptive[int, str](step_costs(COSTS), RECORDED)
    ks: list[int] = []
    for _ in range(12):
        ks.append(adaptive.choose(1, {"all": 64}).k)
        adaptive.observe(1, ks[-1], COSTS[ks[-1]] * PLAIN, {"all": [0] * 64})
    patience = adaptive.config.patience
    assert ks[: 1 + patience - 1] == [3] * patience  # the first bad round leaves no doubt, and still
    assert ks[patience] == 0


# ---- acceptance


def test_rounds_of_one_program_are_learned_together() -> None:
    """As those of as many steps, but for what fades between them."""
    config = AdaptiveConfig(half_life=1e6, memory=1e6)
    one, many = AcceptanceTracker[str](2, RECORDED, config), AcceptanceTracker[str](2, RECORDED, config)
    one.record(2, {"a": [2, 0, 1, 0], "b": [1, 1]}, n_steps=2)
    many.record(2, {"a": [2, 0], "b": [1]})
    many.record(2, {"a": [1, 0], "b": [1]})
    for group in ("a", "b", "c"):
        assert one.chances(group) == pytest.approx(many.chances(group), abs=1e-4)


@pytest.mark.parametrize(("k", "accepted"), [(4, [0]), (-1, [0]), (2, [3]), (2, [-1])])
def test_rounds_that_cannot_be_are_refused(k: int, accepted: list[int]) -> None:
    tracker = AcceptanceTracker[str](3, (), AdaptiveConfig())
    with pytest.raises(ValueError, match="expected 0"):
        tracker.record(k, {"a": accepted})


def test_what_is_recorded_becomes_chances() -> None:
    config = AdaptiveConfig()
    assert AcceptanceTracker[str](4, (0.8, 0.4), config).chances("any") == pytest.approx([0.8, 0.5, 0.5, 0.5])
    assert AcceptanceTracker[str](1, (0.8, 0.4), config).chances("any") == [0.8]
    assert AcceptanceTracker[str](2, (), config).chances("any") == [UNKNOWN_CHANCE] * 2
    assert AcceptanceTracker[str](3, (0.5, 0.0), config).chances("any") == [0.5, 0.0, 0.0]
    for recorded in ((0.4, 0.8), (1.2,), (-0.1,)):
        with pytest.raises(ValueError, match="falling"):
            AcceptanceTracker[str](2, recorded, config)


def test_chances_are_conditional_whatever_k_was() -> None:
    """Half the rounds have one draft, half two; the second passes in 3 of 4 rounds that come to it."""
    tracker = AcceptanceTracker[str](2, RECORDED, AdaptiveConfig(half_life=1e6, memory=1e6))
    for _ in range(500):
        tracker.record(1, {"a": [1, 1, 1, 0, 0, 0]})
        tracker.record(2, {"a": [2, 2, 2, 1, 0, 0, 0, 0]})
    assert tracker.chances("a") == pytest.approx([0.5, 0.75], abs=0.005)


def test_a_group_is_like_all_until_it_shows_and_the_record_returns() -> None:
    config = AdaptiveConfig()
    tracker = AcceptanceTracker[str](1, (0.7,), config)
    for _ in range(300):
        tracker.record(1, {"prose": [0], "code": [1]})
    assert tracker.chances("prose")[0] < 0.1
    assert tracker.chances("code")[0] > 0.9
    assert tracker.chances("new")[0] == pytest.approx(0.5, abs=0.01)
    tracker.record(1, {"new": [0] * 8})
    assert 0.1 < tracker.chances("new")[0] < 0.2
    for _ in range(int(20 * config.memory)):
        tracker.record(0, {"prose": [0]})
    for group in ("prose", "code", "new"):
        assert tracker.chances(group)[0] == pytest.approx(0.7, abs=0.01)


def test_the_batch_decides_by_the_rows_of_each_group() -> None:
    adaptive = Adaptive[int, str](step_costs(COSTS), RECORDED, AdaptiveConfig(patience=1, trial_interval=10**6,
        longest_trial_interval=10**6, probe_interval=10**6))  # fmt: skip
    for _ in range(40):
        adaptive.tracker.record(5, {"code": [5] * 4, "noise": [0] * 4})
    assert adaptive.choose(1, {"code": 8, "noise": 1}).k == 5
    assert adaptive.choose(1, {"code": 0, "noise": 8}).k == 0
    assert adaptive.choose(1, {"code": 7, "noise": 1}).k == 5
    with pytest.raises(ValueError, match="at least one"):
        adaptive.choose(1, {"code": 0})
    with pytest.raises(ValueError, match="at least one"):
        adaptive.observe(1, 0, PLAIN, {"code": []})


@given(st.lists(st.floats(0, 1), max_size=6))
def test_lengths_are_those_of_the_definition(chances: list[float]) -> None:
    expected = [simulated_length(chances[:k], bonus=True) for k in range(len(chances) + 1)]
    assert expected_lengths(chances) == pytest.approx(expected)


# ---- the rest


def test_buckets_have_a_k_each() -> None:
    measured = {(b, k): [c * PLAIN * b] for b, costs in ((1, COSTS), (16, DEAR)) for k, c in costs.items()}
    adaptive = Adaptive[int, str](StepCosts(measured), RECORDED)
    for step in range(50):
        for bucket, costs, want in ((1, COSTS, 3), (16, DEAR, 0)):
            k = adaptive.choose(bucket, {"all": bucket}).k
            assert k == want
            adaptive.observe(
                bucket, k, costs[k] * PLAIN * bucket, {"all": [min(k, (step + i) % 4) for i in range(bucket)]}
            )


def test_status_says_what_pays() -> None:
    adaptive = Adaptive[int, str](step_costs(COSTS), (0.75, 0.45, 0.35))
    found = adaptive.status(1, {"all": 1})
    assert (found.k, found.drafts) == (3, 3)
    assert (found.speed_up, found.length, found.break_even) == pytest.approx((1.5, 2.55, 1.7))
    assert str(found) == "3 drafts: 1.50 times plain decoding; acceptance length 2.55, which pays from 1.70 on"
    none = Adaptive[int, str](step_costs(DEAR), (0.75, 0.45, 0.35)).status(1, {"all": 1})
    assert (none.k, none.speed_up, none.drafts) == (0, 1.0, 1)
    assert (none.length, none.break_even) == pytest.approx((1.75, 1.9))
    assert str(none) == "no drafts: 1 drafts pay from an acceptance length of 1.90 on, expected are 1.75"


def test_the_same_observations_lead_to_the_same_choices() -> None:
    first, second = (
        simulate(Adaptive(step_costs(COSTS), RECORDED), COSTS, lambda s: (GOOD, BAD)[s // 200 % 2], 800, rows=3)
        for _ in range(2)
    )
    assert first == second
    assert len({c.reason for c in first.choices}) == 4


@pytest.mark.parametrize(
    "wrong",
    [{"share": 0.0}, {"share": 1.0}, {"reserve": 0.0}, {"half_life": -1.0}, {"margin": -0.1}, {"patience": 0},
     {"probe_interval": 0}, {"longest_trial_interval": 1}],
)  # fmt: skip
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"adaptive.{name}: found"):
        AdaptiveConfig(**wrong)  # type: ignore[arg-type]


def test_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(ValueError, match="beside 0"):
        Adaptive(step_costs({0: 1.0}))


# ---- pretended acceptance


@pytest.mark.parametrize(("length", "most"), [(1.0, 3), (2.6, 3), (4.0, 3), (1.3, 1), (5.9, 7)])
def test_pretended_acceptance_has_the_wanted_mean(length: float, most: int) -> None:
    chances = simulated_chances(length, most)
    assert 1 + chances.sum() == pytest.approx(length, abs=1e-5)
    n = 20_000
    seed = jnp.tile(jnp.asarray([[1, 2]], jnp.uint32), (n, 1))
    found = np.asarray(simulated_accepts(jnp.asarray(chances), seed, jnp.arange(n, dtype=jnp.int32)))
    assert found.dtype == np.int32
    assert 1 + found.mean() == pytest.approx(length, abs=0.05)
    np.testing.assert_allclose([(found > i).mean() for i in range(most)], chances, atol=0.015)


def test_pretended_rounds_depend_on_seed_and_round_alone() -> None:
    chances = jnp.asarray(simulated_chances(3.0, 5))
    seed = jnp.asarray([[0, 1], [0, 2], [7, 1]], jnp.uint32)
    all_rounds = [np.asarray(simulated_accepts(chances, seed, jnp.full(3, r, jnp.int32))) for r in range(12)]
    alone = [int(simulated_accepts(chances, seed[1:2], jnp.full(1, r, jnp.int32))[0]) for r in range(12)]
    assert alone == [int(r[1]) for r in all_rounds]
    assert len({tuple(int(r[i]) for r in all_rounds) for i in range(3)}) == 3
    fewer = [np.asarray(simulated_accepts(chances[:2], seed, jnp.full(3, r, jnp.int32))) for r in range(12)]
    np.testing.assert_array_equal(fewer, np.minimum(all_rounds, 2))


@pytest.mark.parametrize(("length", "most"), [(0.9, 3), (4.1, 3), (1.0, 0)])
def test_a_length_that_cannot_be_is_refused(length: float, most: int) -> None:
    with pytest.raises(ConfigError, match="speculative_simulate_acc_len"):
        simulated_chances(length, most)
