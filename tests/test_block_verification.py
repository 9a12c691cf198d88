"""Accepting blocks of guesses as a whole: by enumeration, against fixed distributions, and round after round."""

import functools
import itertools
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from kimijax.block_verification import BLOCK, BlockRule, block_chances
from kimijax.model import Hidden
from kimijax.sampling import Purpose, SamplingRows, draw_from
from kimijax.speculation import RowState, speculative_round
from kimijax.verification import NO_TOKEN, TOKEN_BY_TOKEN, Proposal, Rule, verify

from .tiny_speculation import GREEDY, settings

V, K = 3, 3


class Pair:
    """A target and a drafter over V tokens: p and q, float64 [V], after every prefix of up to K tokens."""

    def __init__(self, seed: int, sharpness: float = 1.5) -> None:
        rng = np.random.default_rng(seed)
        prefixes = [x for n in range(K + 1) for x in itertools.product(range(V), repeat=n)]
        self.p, self.q = ({x: _random(rng, sharpness) for x in prefixes} for _ in range(2))
        self.blocks = list(itertools.product(range(V), repeat=K))

    def of_blocks(self, table: dict[tuple[int, ...], np.ndarray], n: int) -> np.ndarray:
        """float64 [V ** K, n, V] along every block."""
        return np.asarray([[table[x[:i]] for i in range(n)] for x in self.blocks])

    def chance_of_block(self, x: tuple[int, ...]) -> float:
        return float(np.prod([self.q[x[:i]][x[i]] for i in range(K)]))


def _random(rng: np.random.Generator, sharpness: float) -> np.ndarray:
    x = np.exp(sharpness * rng.standard_normal(V))
    return x / x.sum()


def ends(chances: np.ndarray) -> np.ndarray:
    """The chance of ending with 0 ... K guesses, [..., K + 1], of h [..., K]: the largest number that passes."""
    fail_behind = np.flip(np.cumprod(np.flip(1 - chances, -1), -1), -1)  # [..., i]: guesses i + 1 and up fail
    behind = np.concatenate([fail_behind, np.ones((*chances.shape[:-1], 1))], -1)
    return behind * np.concatenate([np.ones((*chances.shape[:-1], 1)), chances], -1)


def accepted_one_by_one(pair: Pair) -> float:
    """Mean number of guesses that token by token accepts."""
    total = 0.0
    for x in pair.blocks:
        ratios = [min(1.0, pair.p[x[:i]][x[i]] / pair.q[x[:i]][x[i]]) for i in range(K)]
        total += pair.chance_of_block(x) * np.cumprod(ratios).sum()
    return total


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("certain", [False, True])
def test_enumerated_blocks_leave_the_targets_distribution(seed: int, certain: bool) -> None:
    """Every block of guesses and every number of them: all texts of K + 1 tokens have p's chance, to rounding.

    Certain guesses are the same block always, and so the only one.
    """
    pair = Pair(seed)
    p = jnp.asarray(pair.of_blocks(pair.p, K), jnp.float32)
    q = None if certain else jnp.asarray(pair.of_blocks(pair.q, K), jnp.float32)
    proposal = Proposal(jnp.asarray(pair.blocks, jnp.int32), q)
    weights, chances = (np.asarray(x, np.float64) for x in block_chances(p, proposal, jnp.ones((len(p), K), jnp.bool)))
    end, mean = ends(chances), 0.0
    found = np.zeros((V,) * (K + 1))
    only = pair.blocks[(7 * seed) % len(pair.blocks)]
    for row, x in enumerate(pair.blocks):
        if certain and x != only:
            continue
        chance = 1.0 if certain else pair.chance_of_block(x)
        mean += chance * float(end[row] @ np.arange(K + 1))
        for n in range(K + 1):
            after = pair.p[x]
            if n < K:
                q_here = np.eye(V)[x[n]] if certain else pair.q[x[:n]]
                after = np.maximum(weights[row, n] * pair.p[x[:n]] - q_here, 0)
            if end[row, n] * after.sum() > 0:
                for y in range(V):
                    share = chance * end[row, n] * after[y] / after.sum()
                    add(found, (*x[:n], y), share, pair)
    right = np.zeros_like(found)
    add(right, (), 1.0, pair)
    np.testing.assert_allclose(found, right, atol=1e-6)
    if not certain:
        assert mean >= accepted_one_by_one(pair) - 1e-6


def add(to: np.ndarray, prefix: tuple[int, ...], share: float, pair: Pair) -> None:
    """A share of texts that begin so and go on as the target does."""
    if len(prefix) == K + 1:
        to[prefix] += share
        return
    for y, p in enumerate(pair.p[prefix]):
        add(to, (*prefix, y), share * p, pair)


def test_more_is_accepted_than_one_by_one() -> None:
    """p (1/3, 2/3) and q (2/3, 1/3) everywhere, two guesses: 11/9 tokens in the mean, and 10/9 one by one."""
    p, q = np.asarray([1 / 3, 2 / 3], np.float32), np.asarray([2 / 3, 1 / 3], np.float32)
    blocks = np.asarray(list(itertools.product(range(2), repeat=2)), np.int32)
    proposal = Proposal(jnp.asarray(blocks), jnp.asarray(np.tile(q, (4, 2, 1))))
    _, chances = block_chances(jnp.asarray(np.tile(p, (4, 2, 1))), proposal, jnp.ones((4, 2), jnp.bool))
    assert q[blocks].prod(axis=1) @ ends(np.asarray(chances)) @ np.arange(3) == pytest.approx(11 / 9, abs=1e-6)


N = 20_000
check = jax.jit(verify, static_argnames=("n_tokens", "rule"))


@pytest.mark.parametrize("seed", [0, 1])
def test_drawn_blocks_follow_the_target(seed: int) -> None:
    """`verify` with the rule, guesses drawn as a chain draws them: chi-square over texts of K + 1 tokens, and more
    guesses accepted than one by one."""
    pair = Pair(seed)
    p, q = (pair.of_blocks(table, K + 1).astype(np.float32) for table in (pair.p, pair.q))
    q_at = [np.asarray([pair.q[x] for x in itertools.product(range(V), repeat=i)], np.float32) for i in range(K)]
    rows, start = settings([{"seed": i} for i in range(N)]), np.full(N, 5, np.int32)

    @jax.jit
    def guesses(rows: SamplingRows) -> jax.Array:
        code, tokens = jnp.zeros(N, jnp.int32), []
        for i in range(K):
            tokens.append(draw_from(jnp.asarray(q_at[i])[code], rows, jnp.asarray(start) + i, Purpose.DRAFT))
            code = code * V + tokens[-1]
        return jnp.stack(tokens, axis=1)

    accepted: dict[Rule, float] = {}
    for rule in (TOKEN_BY_TOKEN, BLOCK):
        tokens = guesses(rule.draws(rows, jnp.asarray(start)))
        index = np.asarray(tokens) @ (V ** np.arange(K - 1, -1, -1))
        found = check(np.log(p[index]), Proposal(tokens, jnp.asarray(q[index, :K])), rows, start, n_tokens=V, rule=rule)
        accepted[rule] = float(found.accepted.mean())
        counts, right = np.zeros((V,) * (K + 1)), np.zeros((V,) * (K + 1))
        rng = np.random.default_rng(seed)
        for text in np.asarray(found.tokens).tolist():
            x = tuple(t for t in text if t != NO_TOKEN)
            while len(x) <= K:  # what later rounds draw
                x = (*x, int(np.searchsorted(pair.p[x].cumsum(), rng.random() * (1 - 1e-9))))
            counts[x] += 1
        add(right, (), float(N), pair)
        assert stats.chisquare(counts.ravel(), right.ravel()).pvalue > 0.01
    assert accepted[TOKEN_BY_TOKEN] == pytest.approx(accepted_one_by_one(pair), abs=0.03)
    assert accepted[BLOCK] > accepted[TOKEN_BY_TOKEN] + 0.03


def test_greedy_rows_are_as_with_the_other_rule() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((64, K + 1, V)).astype(np.float32)
    guesses, rows = jnp.asarray(rng.integers(0, V, (64, K)), jnp.int32), settings([GREEDY, {"seed": 3}] * 32)
    both = [
        check(logits, Proposal(guesses, None), rows, np.zeros(64, np.int32), n_tokens=V, rule=r)
        for r in (BLOCK, TOKEN_BY_TOKEN)
    ]
    for a, b in zip(*both, strict=True):
        np.testing.assert_array_equal(a[::2], b[::2])


@pytest.mark.parametrize("rule", [BLOCK, TOKEN_BY_TOKEN])
def test_a_block_ends_before_what_is_no_guess(rule: Rule) -> None:
    """Certain guesses, the second none or after logits that are not a number: the first alone is a block of one."""
    p = np.asarray([0.2, 0.5, 0.3], np.float32)
    logits = np.tile(np.log(p), (N, K + 1, 1))
    rows, start = settings([{"seed": i} for i in range(N)]), np.zeros(N, np.int32)
    guesses = jnp.asarray(np.tile([1, NO_TOKEN, 1], (N, 1)), jnp.int32)
    found = check(logits, Proposal(guesses, None), rows, start, n_tokens=V, rule=rule)
    assert set(found.accepted.tolist()) == {0, 1}
    assert float(found.accepted.mean()) == pytest.approx(0.5, abs=0.015)
    for decided in (found.tokens[:, 0], found.tokens[found.accepted == 1, 1]):
        np.testing.assert_allclose(np.bincount(decided, minlength=V) / len(decided), p, atol=0.02)
    logits[:, 1] = np.nan
    found = check(logits, Proposal(jnp.ones((N, K), jnp.int32), None), rows, start, n_tokens=V, rule=rule)
    assert set(found.accepted.tolist()) == {0, 1}
    assert set(found.tokens[found.accepted == 1, 1].tolist()) == {NO_TOKEN}


# ---- round after round ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Markov:
    """A target, and a proposer whose state is the token drawn last: the next token depends on the last one alone."""

    table: jax.Array  # float32 [V, V], rows sum to 1
    taps: tuple[int, ...] = ()

    def decode(self, ids: jax.Array, start: jax.Array, cached: Any, **options: Any) -> tuple[Hidden, Any]:
        return Hidden(ids, {}, ()), cached

    def logits(self, ids: jax.Array) -> jax.Array:
        return jnp.log(self.table[ids])

    def propose(
        self, state: jax.Array, length: jax.Array, rows: SamplingRows, k: int, process: Any = None
    ) -> tuple[Proposal, jax.Array]:
        tokens, q, last = [], [], state
        for i in range(k):
            q.append(self.table[last])
            last = draw_from(q[-1], rows, length + (i + 1), Purpose.DRAFT)
            tokens.append(last)
        return Proposal(jnp.stack(tokens, axis=1), jnp.stack(q, axis=1)), state

    def observe(
        self, state: jax.Array, taps: Any, tokens: jax.Array, start: Any, committed: Any, prepare: Any = None
    ) -> jax.Array:
        newest = jnp.take_along_axis(tokens, jnp.maximum(committed - 1, 0)[:, None], axis=1)[:, 0]
        return jnp.where(committed > 0, newest, state)


class Reusing(BlockRule):
    """Draws with the request's own seeds, as token by token may."""

    def draws(self, rows: SamplingRows, position: jax.Array) -> SamplingRows:
        return rows


@functools.partial(jax.jit, static_argnames="rule")
def markov_texts(rows: SamplingRows, rule: Rule) -> jax.Array:
    """The 4 tokens after token 0 that rounds of 2 guesses make, int32 [N, 4]."""
    n, length = rows.temperature.shape[0], 4
    target, proposer = cast(Any, Markov(jnp.asarray(P))), cast(Any, Markov(jnp.asarray(Q)))
    none = jnp.full((n, 1), NO_TOKEN, jnp.int32)
    zeros = jnp.zeros(n, jnp.int32)
    no_cache: Any = ()

    def step(carry: tuple[Any, jax.Array], _: None) -> tuple[tuple[Any, jax.Array], None]:
        state, texts = carry
        made, after = speculative_round(
            target, proposer, state, rows, length - state.length, none, k=2, n_tokens=V, rule=rule
        )
        offset = jnp.arange(3, dtype=jnp.int32)[None]
        places = jnp.where(offset < made.committed[:, None], state.length[:, None] + offset, length)
        return (after, texts.at[jnp.arange(n)[:, None], places].set(made.tokens, mode="drop")), None

    begin = RowState(zeros, zeros, no_cache, zeros), jnp.full((n, length), NO_TOKEN, jnp.int32)
    return jax.lax.scan(step, begin, None, length)[0][1]  # at least one token a round


P = np.asarray([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.3, 0.3, 0.4]], np.float32)
Q = np.asarray([[0.6, 0.2, 0.2], [0.2, 0.4, 0.4], [0.5, 0.4, 0.1]], np.float32)


def test_rounds_follow_the_targets_distribution() -> None:
    """Texts of four tokens, chi-square. What one round rejected must not bias the next: a rule that draws again with
    the same numbers is found out."""
    n, x = 50_000, np.asarray(list(itertools.product(range(V), repeat=4)))
    before = np.concatenate([np.zeros((len(x), 1), int), x[:, :-1]], axis=1)
    right = P.astype(np.float64)[before, x].prod(axis=1)
    right *= n / right.sum()
    chance: list[float] = []
    for rule in (BLOCK, Reusing()):
        texts = markov_texts(settings([{"seed": i} for i in range(n)]), rule)
        counts = np.bincount(np.asarray(texts) @ (V ** np.arange(3, -1, -1)), minlength=len(x))
        chance.append(float(stats.chisquare(counts, right).pvalue))
    assert chance[0] > 0.01
    assert chance[1] < 1e-6
