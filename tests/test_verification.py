"""Accepting and replacing drafts, against fixed distributions."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimijax.block_verification import BLOCK
from kimijax.sampling import Purpose, SamplingRows, distribution, draw_from, draw_guess, sample
from kimijax.verification import NO_TOKEN, TOKEN_BY_TOKEN, Proposal, Rule, verify

from .test_sampling import coincidence
from .tiny_speculation import GREEDY, settings

N = 20_000
P = np.asarray([0.5, 0.3, 0.2], np.float32)
Q = np.asarray([0.2, 0.7, 0.1], np.float32)
K = 2
check = jax.jit(verify, static_argnames=("n_tokens", "rule"))


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


# ---- coupled rows ---------------------------------------------------------------------------------------------------

B, V, WIDE = 12, 16, 5  # rows, vocabulary, guesses
RULES: Sequence[Rule] = (TOKEN_BY_TOKEN, BLOCK)
KINDS: Sequence[Mapping[str, float]] = (
    GREEDY,
    {"coupled": 1},
    {},
    {"coupled": 1, "top_k": 5, "temperature": 0.8},
    {"top_p": 0.9},
    {"coupled": 1, "min_p": 0.05, "top_p": 0.95},
    {"top_k": 1, "coupled": 1},
    {"temperature": 1.7, "min_p": 0.1},
)
plain = jax.jit(sample, static_argnames="n_tokens")


class Block:
    """Logits of B blocks, guesses drawn for some kind of row each, and one guess that is none."""

    def __init__(self, seed: int, kinds: Sequence[Mapping[str, float]] = KINDS) -> None:
        rng = np.random.default_rng(seed)
        self.logits = (rng.standard_normal((B, WIDE + 1, V)) * 2).astype(np.float32)
        self.settings = [{"seed": int(rng.integers(2**63)), **kinds[i % len(kinds)]} for i in range(B)]
        self.position = rng.integers(0, 3000, B).astype(np.int32)
        self.q_logits = self.logits[:, :WIDE] + rng.standard_normal((B, WIDE, V)).astype(np.float32) * 0.7
        self.rows = settings(self.settings)
        self.tokens, self.q = (np.array(x) for x in guesses_of(self.q_logits, self.rows, self.position))
        if seed % 2:
            self.tokens[seed % B, seed % WIDE] = NO_TOKEN

    def tokens_without_guesses(self) -> np.ndarray:
        """int32 [B, WIDE + 1], one position after the other."""
        each = [
            plain(self.logits[:, i], self.rows, self.position + np.int32(i), n_tokens=V - 1) for i in range(WIDE + 1)
        ]
        return np.stack(each, axis=1)


@jax.jit
def guesses_of(q_logits: Any, rows: SamplingRows, position: Any) -> tuple[jax.Array, jax.Array]:
    """Tokens and q of a `Proposal`, as a chain draws them; the drafter's ids are the target's."""
    k = q_logits.shape[1]
    q = jnp.stack([distribution(q_logits[:, i], rows) for i in range(k)], axis=1)
    tokens = [draw_guess(q[:, i], rows, position + i, None, q.shape[-1]) for i in range(k)]
    return jnp.stack(tokens, axis=1), q


def checked(
    logits: np.ndarray,
    tokens: np.ndarray,
    q: np.ndarray | None,
    rows: SamplingRows,
    position: np.ndarray,
    **static: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, k + 1] and accepted counts [B]."""
    draft: Any = Proposal(tokens, q)  # pyright: ignore[reportArgumentType]  # NumPy in, moved by the jitted call
    found = check(logits, draft, rows, position, **static)
    return np.asarray(found.tokens), np.asarray(found.accepted)


@pytest.mark.parametrize("rule", RULES)
def test_a_coupled_row_draws_the_tokens_of_plain_decoding(rule: Rule) -> None:
    """Whatever is guessed, with whatever q, and however many: as many of its tokens as guesses and luck allow."""
    passed = 0
    for seed in range(8):
        block = Block(seed)
        right = block.tokens_without_guesses()
        mine = [i for i, row in enumerate(block.settings) if row.get("coupled") or row.get("temperature") == 0]
        noise = np.random.default_rng(seed).integers(0, V, (B, WIDE)).astype(np.int32)
        drafts = {
            "drawn": (block.tokens, block.q),
            "certain": (right[:, :WIDE], None),
            "senseless": (noise, np.full((B, WIDE, V), 1 / V, np.float32)),
        }
        for (name, (guesses, q)), k in itertools.product(drafts.items(), (0, 3, WIDE)):
            guesses, q = guesses[:, :k], None if q is None else q[:, :k]
            tokens, accepted = checked(
                block.logits[:, : k + 1], guesses, q, block.rows, block.position, n_tokens=V - 1, rule=rule
            )
            for i in mine:
                n = int(np.cumprod(guesses[i] == right[i, :k]).sum())
                assert accepted[i] == n
                assert tokens[i].tolist() == [*right[i, : n + 1].tolist(), *[NO_TOKEN] * (k - n)], name
                passed += n if name == "drawn" else 0
    assert passed > 100


@pytest.mark.parametrize("rule", RULES)
def test_a_neighbour_changes_no_token_of_any_row(rule: Rule) -> None:
    """Greedy, coupled and rejecting rows side by side, and each among its equals alone."""
    for seed in range(4):
        block = Block(seed)
        mixed = checked(block.logits, block.tokens, block.q, block.rows, block.position, n_tokens=V, rule=rule)
        drafted = guesses_of(block.q_logits, block.rows, block.position)
        for kind, row in enumerate(KINDS):
            alike = settings([{**row, "seed": own["seed"]} for own in block.settings])
            alone = checked(block.logits, block.tokens, block.q, alike, block.position, n_tokens=V, rule=rule)
            some = np.arange(kind, B, len(KINDS))
            for a, b in zip(mixed, alone, strict=True):
                np.testing.assert_array_equal(a[some], b[some])
            if row.get("temperature", 1) > 0 and row.get("top_k") != 1:
                for a, b in zip(drafted, guesses_of(block.q_logits, alike, block.position), strict=True):
                    np.testing.assert_array_equal(np.asarray(a)[some], np.asarray(b)[some])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"temperature": 0.6}])
def test_coupled_guesses_pass_as_often_as_the_coupling_says(rule: Rule, filters: Mapping[str, float]) -> None:
    """p and q the same at each position: i guesses in a row pass with chance a ** i, and tokens follow p. Rejection
    sampling passes no fewer, which is why rows without a seed use it."""
    row = {**filters, "coupled": 1}
    one = settings([row])
    weigh = jax.jit(distribution)
    p, q = (np.asarray(weigh(np.log(x)[None], one))[0] for x in (P, Q))
    rows, at = settings([{**row, "seed": i} for i in range(N)]), np.full(N, 7, np.int32)
    guesses, q_of_guesses = guesses_of(np.tile(np.log(Q), (N, K, 1)), rule.draws(rows, jnp.asarray(at)), at)
    proposal = Proposal(guesses, q_of_guesses)
    found = check(np.tile(np.log(P), (N, K + 1, 1)), proposal, rows, at, n_tokens=3, rule=rule)
    tokens, accepted, a = np.asarray(found.tokens), np.asarray(found.accepted), coincidence(p, q)
    for i in range(1, K + 1):
        assert np.mean(accepted >= i) == pytest.approx(a**i, abs=0.015)
    assert a <= np.minimum(p, q).sum() + 1e-6
    np.testing.assert_allclose(frequencies(tokens[:, 0]), p, atol=0.015)


@pytest.mark.parametrize("rule", RULES)
def test_logits_of_a_coupled_row_that_are_no_number_give_no_token(rule: Rule) -> None:
    block = Block(2)
    right = block.tokens_without_guesses()
    block.logits[:, 2] = np.nan
    tokens, accepted = checked(
        block.logits, right[:, :WIDE], None, block.rows, block.position, n_tokens=V - 1, rule=rule
    )
    for i, row in enumerate(block.settings):
        if row.get("coupled"):
            assert accepted[i] == 2
            assert tokens[i].tolist() == [*right[i, :2].tolist(), *[NO_TOKEN] * (WIDE - 1)]
