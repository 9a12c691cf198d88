"""Accepting and replacing drafts, against fixed distributions."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimijax.sampling import Purpose, draw_from
from kimijax.speculation import (
    NO_TOKEN,
    Proposal,
    verify,
)

from .tiny_speculation import GREEDY, settings

N = 20_000
P = np.asarray([0.5, 0.3, 0.2], np.float32)
Q = np.asarray([0.2, 0.7, 0.1], np.float32)
K = 2
check = jax.jit(verify, static_argnames="n_tokens")


def fixed(p: np.ndarray, row: Mapping[str, float], proposal: Proposal, position: int = 7) -> tuple[Any, Any]:
    """Tokens [N, K + 1] and accepted counts [N] of N seeds, the target's distribution p at every position."""
    logits = np.tile(np.log(p), (N, K + 1, 1)).astype(np.float32)
    found = check(logits, proposal, settings([row] * N), np.full(N, position, np.int32), n_tokens=len(p))
    return np.asarray(found.tokens), np.asarray(found.accepted)


def drawn_from_q(position: int = 7) -> Proposal:
    """Guesses of N seeds, drawn as the chain draws them."""
    rows, q = settings([{}] * N), jnp.asarray(np.tile(Q, (N, 1)))
    draw = jax.jit(draw_from, static_argnames="purpose")
    at = [np.full(N, position + i, np.int32) for i in range(K)]
    tokens = jnp.stack([draw(q, rows, i, purpose=Purpose.DRAFT) for i in at], axis=1)
    return Proposal(tokens, jnp.stack([q] * K, axis=1))


def certain(token: int) -> Proposal:
    return Proposal(jnp.full((N, K), token, jnp.int32), None)


def frequencies(tokens: np.ndarray) -> np.ndarray:
    return np.bincount(tokens, minlength=3) / len(tokens)


def positions_of(tokens: np.ndarray, accepted: np.ndarray) -> list[np.ndarray]:
    """The tokens of each position of the block, of those rows in which it is decided: the last is the bonus token."""
    return [tokens[accepted >= i, i] for i in range(K + 1)]


def test_drafts_from_another_distribution_leave_the_targets() -> None:
    """60 % of guesses from q pass; what replaces the others is (0.75, 0, 0.25); everywhere the outcome is p."""
    tokens, accepted = fixed(P, {}, drawn_from_q())
    assert np.mean(accepted > 0) == pytest.approx(0.6, abs=0.015)
    np.testing.assert_allclose(frequencies(tokens[accepted == 0, 0]), (0.75, 0, 0.25), atol=0.015)
    for decided in positions_of(tokens, accepted):
        np.testing.assert_allclose(frequencies(decided), P, atol=0.015)
    assert (tokens[np.arange(K + 1)[None] > accepted[:, None]] == NO_TOKEN).all()
    pairs = np.zeros((3, 3))
    both = tokens[accepted >= 1]
    np.add.at(pairs, (both[:, 0], both[:, 1]), 1 / len(both))
    first = frequencies(both[:, 0])
    np.testing.assert_allclose(pairs, np.outer(first, P), atol=0.015)  # a token does not depend on the one before


def test_a_certain_draft_leaves_the_targets_distribution() -> None:
    """Token 1 always: it passes with chance 0.3, else (0.714, 0, 0.286)."""
    tokens, accepted = fixed(P, {}, certain(1))
    assert np.mean(accepted > 0) == pytest.approx(0.3, abs=0.015)
    np.testing.assert_allclose(frequencies(tokens[accepted == 0, 0]), (5 / 7, 0, 2 / 7), atol=0.015)
    for decided in positions_of(tokens, accepted)[:2]:
        np.testing.assert_allclose(frequencies(decided), P, atol=0.015)
    assert len(positions_of(tokens, accepted)[2]) == pytest.approx(0.09 * N, rel=0.1)


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.5}])
def test_filters_bind_drafts_and_bonus_alike(filters: Mapping[str, float]) -> None:
    right = (0.625, 0.375, 0)
    tokens, accepted = fixed(P, filters, certain(2))
    assert not accepted.any()
    np.testing.assert_allclose(frequencies(tokens[:, 0]), right, atol=0.015)
    tokens, accepted = fixed(P, filters, drawn_from_q())
    for decided in positions_of(tokens, accepted):
        np.testing.assert_allclose(frequencies(decided), right, atol=0.015)
        assert 2 not in decided


def test_a_reduced_vocabulary_is_q_over_target_ids() -> None:
    """q over ids (1, 3) of 4: the same as q with zeros elsewhere, to the bit."""
    p = np.asarray([0.1, 0.4, 0.3, 0.2], np.float32)
    q, ids = np.asarray([0.7, 0.3], np.float32), jnp.asarray([1, 3], jnp.int32)
    guesses = jnp.asarray(np.random.default_rng(0).choice([1, 3], (N, K), p=q), jnp.int32)
    reduced = Proposal(guesses, jnp.asarray(np.tile(q, (N, K, 1))), ids)
    full = Proposal(guesses, jnp.asarray(np.tile([0, 0.7, 0, 0.3], (N, K, 1)), jnp.float32))
    for a, b in zip(fixed(p, {}, reduced), fixed(p, {}, full), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(np.bincount(fixed(p, {}, reduced)[0][:, 0]) / N, p, atol=0.015)


@pytest.mark.parametrize("row", [GREEDY, {"top_k": 1}, {"temperature": 1e-41}])
def test_greedy_rows_take_the_lowest_of_tied_ids(row: Mapping[str, float]) -> None:
    """Beside a row that samples, and alone: logits tie at 1 and 2, guesses are 1 (right), then 2 (wrong)."""
    logits = np.log(np.asarray([0.2, 0.4, 0.4], np.float32))
    proposal = Proposal(jnp.asarray([[1, 2]] * 2, jnp.int32), jnp.asarray(np.tile(Q, (2, K, 1))))
    for other in (GREEDY, {}):
        block = np.tile(logits, (2, K + 1, 1))
        found = check(block, proposal, settings([row, other]), np.zeros(2, np.int32), n_tokens=3)
        assert found.tokens[0].tolist() == [1, 1, NO_TOKEN]
        assert int(found.accepted[0]) == 1


@pytest.mark.parametrize("other", [GREEDY, {}])
def test_what_is_no_number_passes_nothing(other: Mapping[str, float]) -> None:
    """No guess: the target's token. Logits that are not a number, at the second position: no token there."""
    logits = np.tile(np.log(P), (4, K + 1, 1))
    logits[2, 1] = np.nan
    guesses = jnp.asarray([[NO_TOKEN, 0], [0, NO_TOKEN], [0, 0], [0, 0]], jnp.int32)
    rows = settings([GREEDY, GREEDY, GREEDY, other])
    found = check(logits, Proposal(guesses, None), rows, np.zeros(4, np.int32), n_tokens=3)
    assert found.tokens[:3].tolist() == [[0, NO_TOKEN, NO_TOKEN], [0, 0, NO_TOKEN], [0, NO_TOKEN, NO_TOKEN]]
    assert found.accepted[:3].tolist() == [0, 1, 1]


def test_ids_of_no_token_are_neither_accepted_nor_drawn() -> None:
    logits = np.tile(np.asarray([0.0, 1.0, 9.0], np.float32), (N, K + 1, 1))
    for row in ({}, GREEDY):
        found = check(logits, certain(2), settings([row] * N), np.zeros(N, np.int32), n_tokens=2)
        assert set(np.asarray(found.tokens)[:, 0].tolist()) <= {0, 1}
        assert not np.asarray(found.accepted).any()
