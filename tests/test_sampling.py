"""Drawing tokens against a sort-based NumPy oracle, known distributions, and what a draw may depend on."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kimijax.sampling import (
    Purpose,
    SamplingRows,
    argmax,
    distribution,
    draw_from,
    draw_guess,
    filtered,
    is_greedy,
    sample,
)

N_DRAWS = 20_000
TARGET = (0.5, 0.3, 0.2)

draw = jax.jit(sample, static_argnames="n_tokens")
guess = jax.jit(draw_guess, static_argnames="vocab_size")
keep = jax.jit(filtered)


@dataclass(frozen=True)
class Row:
    """One row's settings, all off by default."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    coupled: bool = False


def rows_of(rows: Sequence[Row]) -> SamplingRows:
    return SamplingRows.of(
        [r.temperature for r in rows],
        [r.top_k for r in rows],
        [r.top_p for r in rows],
        [r.min_p for r in rows],
        [r.seed for r in rows],
        [r.coupled for r in rows],
    )


def kept_by_sorting(logits: np.ndarray, row: Row) -> np.ndarray:
    """Probabilities float64 [V] after the filters, by sorting. Rejects examples that rounding decides."""
    p = np.exp((logits - logits.max()) / row.temperature)
    p /= p.sum()
    order = np.sort(p)[::-1]
    if 0 < row.top_k < len(p):
        p = np.where(p >= order[row.top_k - 1] * (1 - 1e-6), p, 0.0)
        p /= p.sum()
    if row.top_p < 1:
        order = np.sort(p)[::-1]
        total = np.cumsum(order)
        assume(np.abs(total - row.top_p).min() > 1e-5)
        p = np.where(p >= order[np.argmax(total >= row.top_p)] * (1 - 1e-6), p, 0.0)
        p /= p.sum()
    assume(np.abs(p - row.min_p * p.max()).min() > 1e-6 or row.min_p in (0.0, 1.0))
    p = np.where(p >= row.min_p * p.max() * (1 - 1e-6), p, 0.0)
    return p / p.sum()


settings_of_a_row = st.builds(
    Row,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 14),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)
# Quarters: ties are frequent, and logits that differ do so by far more than rounding.
logits_of_a_row = st.lists(st.integers(-12, 12), min_size=12, max_size=12)


@given(st.lists(st.tuples(logits_of_a_row, settings_of_a_row), min_size=4, max_size=4))
def test_filters_equal_sorting(batch: list[tuple[list[int], Row]]) -> None:
    logits = np.asarray([quarters for quarters, _ in batch], np.float32) / 4
    rows = [row for _, row in batch]
    right = np.stack([kept_by_sorting(x.astype(np.float64), row) for x, row in zip(logits, rows, strict=True)])
    found = np.asarray(keep(logits, rows_of(rows)))
    np.testing.assert_array_equal(found > 0, right > 0)
    np.testing.assert_allclose(found, right, atol=1e-5)


@pytest.mark.parametrize(
    ("row", "right"),
    [
        (Row(), TARGET),
        (Row(top_k=2), (0.625, 0.375, 0)),
        (Row(top_p=0.7), (0.625, 0.375, 0)),
        (Row(min_p=0.5), (0.625, 0.375, 0)),
        (Row(top_k=3, top_p=0.999, min_p=0.01), TARGET),
        (Row(top_p=1e-6), (1, 0, 0)),
        (Row(min_p=1.0), (1, 0, 0)),
        (Row(temperature=0.5), (0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38)),
        (Row(temperature=0.5, top_k=2), (0.25 / 0.34, 0.09 / 0.34, 0)),
    ],
)
def test_frequencies(row: Row, right: tuple[float, ...]) -> None:
    """20,000 positions of one seed, and one position of 20,000 seeds."""
    logits = np.tile(np.log(np.asarray(TARGET, np.float32)), (N_DRAWS, 1))
    settings = rows_of([row])
    one_seed = jax.tree.map(lambda x: np.repeat(x, N_DRAWS, axis=0), settings)
    seeds = np.stack([np.zeros(N_DRAWS), np.arange(N_DRAWS)], axis=1).astype(np.uint32)
    many_seeds = dataclasses.replace(one_seed, seed=jnp.asarray(seeds))
    everywhere, here = np.arange(N_DRAWS, dtype=np.int32), np.full(N_DRAWS, 7, np.int32)
    for rows, positions in ((one_seed, everywhere), (many_seeds, here)):
        drawn = np.asarray(draw(logits, rows, positions, n_tokens=3))
        frequency = np.bincount(drawn, minlength=3) / N_DRAWS
        np.testing.assert_allclose(frequency, right, atol=0.015)
        assert set(np.flatnonzero(frequency)) == set(np.flatnonzero(right))  # a filtered token never, not seldom
        pairs = np.zeros((3, 3))
        np.add.at(pairs, (drawn[:-1], drawn[1:]), 1 / (N_DRAWS - 1))
        np.testing.assert_allclose(pairs, np.outer(frequency, frequency), atol=0.015)  # neighbours are independent


BATCH = 8
VOCABULARY = 64


def mixed_batch(seed: int) -> tuple[np.ndarray, list[Row], np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((BATCH, VOCABULARY)) * 4).astype(np.float32)
    rows = [
        Row(seed=11),
        Row(seed=2**63 - 1, temperature=0.7),
        Row(seed=2**32, top_k=5),
        Row(seed=0, top_p=0.8),
        Row(seed=5, min_p=0.1, temperature=1.5),
        Row(temperature=0.0, seed=3),
        Row(seed=11, top_k=9, top_p=0.9, min_p=0.02),
        Row(seed=7, temperature=0.0, top_k=3),
    ]
    return logits, rows, rng.integers(0, 2000, BATCH).astype(np.int32)


def test_a_draw_depends_on_its_own_row_only() -> None:
    """Not on its place in the batch, the batch's size, or whether a neighbour is greedy, filtered or plain."""
    for seed in range(20):
        logits, rows, positions = mixed_batch(seed)
        together = np.asarray(draw(logits, rows_of(rows), positions, n_tokens=VOCABULARY))
        order = np.random.default_rng(seed).permutation(BATCH)
        moved = draw(logits[order], rows_of([rows[i] for i in order]), positions[order], n_tokens=VOCABULARY)
        np.testing.assert_array_equal(moved, together[order])
        for i in range(BATCH):
            alone = draw(logits[i : i + 1], rows_of([rows[i]]), positions[i : i + 1], n_tokens=VOCABULARY)
            assert int(alone[0]) == together[i], rows[i]


def test_a_neighbour_s_filter_changes_no_bit_of_a_plain_row() -> None:
    """Large logits, where rounding is coarse: the programs with and without filters must compute the same sums."""
    n = 2048
    logits = np.tile(np.linspace(30_000.0, 30_001.0, VOCABULARY, dtype=np.float32), (n, 1))
    positions = np.arange(n, dtype=np.int32)
    plain = [Row(seed=i) for i in range(n)]
    one = draw(logits, rows_of(plain), positions, n_tokens=VOCABULARY)
    two = draw(logits, rows_of([*plain[:-1], Row(seed=n - 1, top_k=4)]), positions, n_tokens=VOCABULARY)
    np.testing.assert_array_equal(one[:-1], two[:-1])


def test_a_neighbour_s_filter_changes_no_bit_of_another_one() -> None:
    """A search that no row needs is left out; those that remain find the same probabilities."""
    logits, _, _ = mixed_batch(1)
    kinds = [Row(top_k=6), Row(top_p=0.8), Row(min_p=0.05), Row()]
    weigh = jax.jit(distribution)
    alone = [np.asarray(weigh(logits, rows_of([kind] * BATCH))) for kind in kinds]
    together = np.asarray(weigh(logits, rows_of(kinds * (BATCH // len(kinds)))))
    for i, row in enumerate(together):
        np.testing.assert_array_equal(row.view(np.int32), alone[i % len(kinds)][i].view(np.int32))


@given(st.lists(st.sampled_from([-np.inf, -2.0, 0.0, -0.0, 3.0, 1e38]), min_size=12, max_size=12))
def test_argmax_is_numpy_s(row: list[float]) -> None:
    rows = np.asarray(row, np.float32).reshape(2, 6)
    assert jax.jit(argmax)(rows).tolist() == rows.argmax(axis=1).tolist()


def test_seed_and_position_both_matter() -> None:
    logits = np.zeros((BATCH, VOCABULARY), np.float32)
    at = np.arange(BATCH, dtype=np.int32)

    def drawn(seeds: list[int], positions: np.ndarray) -> list[int]:
        return draw(logits, rows_of([Row(seed=s) for s in seeds]), positions, n_tokens=VOCABULARY).tolist()

    assert len(set(drawn([1] * BATCH, at))) > BATCH // 2
    assert len(set(drawn(list(range(BATCH)), at * 0))) > BATCH // 2
    assert drawn([1] * BATCH, at) != drawn([1 + 2**32] * BATCH, at)  # the high word counts
    assert drawn([1] * BATCH, at) == drawn([1] * BATCH, at)


def test_greedy_takes_the_lowest_of_tied_ids() -> None:
    logits = np.zeros((BATCH, VOCABULARY), np.float32)
    logits[:, [40, 9, 63]] = 2.0
    positions = np.arange(BATCH, dtype=np.int32)
    greedy = [Row(temperature=0.0, seed=i, top_k=i, top_p=0.5) for i in range(BATCH)]
    assert draw(logits, rows_of(greedy), positions, n_tokens=VOCABULARY).tolist() == [9] * BATCH
    only_one = [Row(temperature=1.0, seed=i, top_k=1) for i in range(BATCH)]
    assert draw(logits, rows_of(only_one), positions, n_tokens=VOCABULARY).tolist() == [9] * BATCH


def test_top_k_1_is_greedy() -> None:
    for seed in range(10):
        logits, _, positions = mixed_batch(seed)
        rows = [Row(top_k=1, temperature=0.1 + i, seed=i) for i in range(BATCH)]
        drawn = draw(logits, rows_of(rows), positions, n_tokens=VOCABULARY)
        np.testing.assert_array_equal(drawn, logits.argmax(axis=1))


@pytest.mark.parametrize("row", [Row(temperature=0.0), Row(), Row(temperature=1e4), Row(top_k=10), Row(top_p=0.9)])
def test_ids_beyond_the_tokenizer_are_never_drawn(row: Row) -> None:
    n_tokens = 60
    logits = np.zeros((BATCH, VOCABULARY), np.float32)
    logits[:, n_tokens:] = 50.0
    logits[:, 10:20] = 1.0
    for start in range(0, 200, BATCH):
        positions = np.arange(start, start + BATCH, dtype=np.int32)
        drawn = np.asarray(draw(logits, rows_of([row] * BATCH), positions, n_tokens=n_tokens))
        assert drawn.max() < n_tokens
        if row.top_k or row.temperature == 0:
            assert set(drawn) <= set(range(10, 20))  # the filter counts real tokens only


@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.95, "min_p": 0.01}])
def test_extreme_temperatures(filters: dict[str, float]) -> None:
    """Cold equals greedy down to the smallest float32; hot is finite and spread out."""
    logits, _, positions = mixed_batch(3)
    for temperature in (1e-4, 1e-20, 1e-37, 1e-38, 1e-41, 1e-46):
        rows = [Row(temperature=temperature, seed=i, **filters) for i in range(BATCH)]  # pyright: ignore[reportArgumentType]
        drawn = draw(logits, rows_of(rows), positions, n_tokens=VOCABULARY)
        np.testing.assert_array_equal(drawn, logits.argmax(axis=1), err_msg=f"{temperature}")
    hot = rows_of([Row(temperature=1e4, seed=i) for i in range(BATCH)])
    p = np.asarray(keep(logits, hot))
    assert np.isfinite(p).all()
    np.testing.assert_allclose(p, 1 / VOCABULARY, rtol=0.01)
    drawn = np.concatenate([draw(logits, hot, np.full(BATCH, i, np.int32), n_tokens=VOCABULARY) for i in range(40)])
    assert len(set(drawn.tolist())) > VOCABULARY * 0.9


# ---- guesses --------------------------------------------------------------------------------------------------------


def many(row: Row) -> SamplingRows:
    """The row with N_DRAWS seeds."""
    return rows_of([dataclasses.replace(row, seed=i) for i in range(N_DRAWS)])


def coincidence(p: np.ndarray, q: np.ndarray) -> float:
    """The chance that argmax(log p + g) and argmax(log q + g) are the same, g one Gumbel noise: of each x that both
    can draw, the chance that its exponential clock, as fast for both as the other's allow, rings first."""
    both = np.flatnonzero((p > 0) & (q > 0))
    return float(sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in both))


FAR = (0.1, 0.2, 0.7)


@pytest.mark.parametrize(
    ("p", "q", "filters"),
    [
        (TARGET, TARGET, {}),
        (TARGET, FAR, {}),
        (TARGET, FAR, {"top_k": 2}),
        (TARGET, (0.0, 1.0, 0.0), {}),
        ((0.1, 0.4, 0.3, 0.2), (0.0, 0.55, 0.05, 0.4), {}),
        ((0.1, 0.4, 0.3, 0.2), (0.0, 0.55, 0.05, 0.4), {"temperature": 2.0, "min_p": 0.6}),
    ],
)
def test_coupled_guesses_follow_q_and_meet_the_token(
    p: tuple[float, ...], q: tuple[float, ...], filters: dict[str, float]
) -> None:
    """Guesses are distributed as q, tokens as p, and they coincide as often as the coupling says; with noise of their
    own as often as independent draws do. Columns of q stand for target ids."""
    target, ids = np.asarray(p, np.float32), np.flatnonzero(q).astype(np.int32)
    row = Row(coupled=True, **filters)  # pyright: ignore[reportArgumentType]
    at = np.full(N_DRAWS, 11, np.int32)
    weigh = jax.jit(distribution)
    kept_p = np.asarray(weigh(np.log(target)[None], rows_of([row])))[0]
    kept_q = np.zeros(len(p))
    kept_q[ids] = np.asarray(weigh(np.log(np.asarray(q, np.float32)[ids])[None], rows_of([row])))[0]
    tokens = np.asarray(draw(np.tile(np.log(target), (N_DRAWS, 1)), many(row), at, n_tokens=len(p)))
    columns = np.tile(kept_q[ids].astype(np.float32), (N_DRAWS, 1))
    for coupled, right in ((True, coincidence(kept_p, kept_q)), (False, float(kept_p @ kept_q))):
        rows = many(dataclasses.replace(row, coupled=coupled))
        guesses = ids[np.asarray(guess(columns, rows, at, jnp.asarray(ids), vocab_size=len(p)))]
        np.testing.assert_allclose(np.bincount(guesses, minlength=len(p)) / N_DRAWS, kept_q, atol=0.015)
        assert (guesses == tokens).mean() == pytest.approx(right, abs=0.015)
    distance = np.abs(kept_p - kept_q).sum() / 2
    assert coincidence(kept_p, kept_q) >= (1 - distance) / (1 + distance) - 1e-6


def test_a_guess_from_the_target_s_own_distribution_is_the_token() -> None:
    """Always, with filters and without; of columns that are a permutation of ids alike."""
    logits, kinds, _ = mixed_batch(5)
    rows = rows_of([dataclasses.replace(kind, coupled=True) for kind in kinds])
    sampled = np.flatnonzero(~np.asarray(is_greedy(rows)))
    order = np.random.default_rng(0).permutation(VOCABULARY).astype(np.int32)
    p = jax.jit(distribution)(logits, rows)
    for at in range(200):
        positions = np.full(BATCH, at, np.int32)
        tokens = np.asarray(draw(logits, rows, positions, n_tokens=VOCABULARY))
        plain = np.asarray(guess(p, rows, positions, None, vocab_size=VOCABULARY))
        moved = order[np.asarray(guess(p[:, order], rows, positions, jnp.asarray(order), vocab_size=VOCABULARY))]
        np.testing.assert_array_equal(plain[sampled], tokens[sampled])
        np.testing.assert_array_equal(moved[sampled], tokens[sampled])


def test_a_guess_depends_on_its_own_row_only() -> None:
    """Whatever neighbours are: coupled, not coupled, greedy. Rows that are not coupled draw as `draw_from` does."""
    logits, kinds, positions = mixed_batch(6)
    p = jax.jit(distribution)(logits, rows_of(kinds))
    free = jax.jit(draw_from, static_argnames="purpose")(p, rows_of(kinds), positions, purpose=Purpose.DRAFT)
    sampled = np.flatnonzero(~np.asarray(is_greedy(rows_of(kinds))))
    for mask in (0, 0b10110101, 0b01001010, 0xFF):
        rows = [dataclasses.replace(kind, coupled=bool(mask >> i & 1)) for i, kind in enumerate(kinds)]
        together = np.asarray(guess(p, rows_of(rows), positions, None, vocab_size=VOCABULARY))
        for i in sampled:
            one = slice(i, i + 1)
            alone = guess(p[one], rows_of(rows[one]), positions[one], None, vocab_size=VOCABULARY)
            assert int(alone[0]) == together[i], rows[i]
            if not rows[i].coupled:
                assert together[i] == free[i]


def test_columns_must_have_ids() -> None:
    with pytest.raises(ValueError, match="2 columns, and the target's logits 3"):
        draw_guess(jnp.ones((1, 2)), rows_of([Row()]), jnp.zeros(1, jnp.int32), None, 3)
