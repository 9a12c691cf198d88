"""Nothing is lost where tokens are drawn: texts made by rounds of guesses against the chance of every text.

A target and a drafter whose logits depend on the whole text so far, a vocabulary small enough to enumerate all texts of
four tokens, and the functions that rounds are made of: guesses, processors, verification or a walk, the cut at the
budget. Every batch holds all kinds of rows side by side. The chances are computed in NumPy, one text at a time.
"""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from kimijax.block_verification import BLOCK
from kimijax.draft_tree import Tree, TreeShape, best_nodes, depths, walk
from kimijax.penalties import NO_ID, History, ProcessorRows, Rules, Widths, chain_before, process, process_draft
from kimijax.sampling import SamplingRows, distribution, draw_guess, only_tokens
from kimijax.speculation import committed_tokens
from kimijax.verification import NO_TOKEN, TOKEN_BY_TOKEN, Proposal, Rule, TokenByToken, Verified, entry, verify

from .test_penalties import Text, oracle
from .tiny_speculation import settings

V, N_TOKENS, LENGTH = 6, 5, 4  # columns, of which the last is no token; tokens of a text
OWN = np.asarray([0, 1, 2, 4], np.int32)  # the drafter's vocabulary
PROMPT, END = (1, 2, 1), 4
WIDTHS = Widths(bias=2, stops=1, words=2, word_length=3)


def after(prefix: jax.Array, token: jax.Array) -> jax.Array:
    """Number of the prefix that is a token longer; texts are numbered as the nodes of a heap, the empty one is 0."""
    return prefix * N_TOKENS + 1 + jnp.maximum(token, 0)


class Tables(NamedTuple):
    """Logits after each prefix."""

    target: np.ndarray  # float32 [prefixes, V]
    drafter: np.ndarray  # float32 [prefixes, len(OWN)]

    @staticmethod
    def random(seed: int) -> "Tables":
        rng, n = np.random.default_rng(seed), (N_TOKENS**LENGTH - 1) // (N_TOKENS - 1)
        target = (rng.standard_normal((n, V)) * 1.3).astype(np.float32)
        drafter = target[:, OWN] + rng.standard_normal((n, len(OWN))).astype(np.float32) * 0.7
        target[:, N_TOKENS:] = 5.0
        return Tables(target, drafter)

    def at(self, table: np.ndarray, prefix: jax.Array) -> jax.Array:
        """Rows of a table; some row for a prefix past the end of all texts."""
        return jnp.asarray(table)[prefix % len(table)]


TABLES = Tables.random(0)


@dataclass(frozen=True)
class Case:
    """What rows ask for."""

    sampling: Mapping[str, float]
    rules: Rules


CASES = {
    "nothing": Case({}, Rules()),
    "top_k": Case({"top_k": 2, "temperature": 1.4}, Rules()),
    "top_p": Case({"top_p": 0.8}, Rules()),
    "min_p": Case({"min_p": 0.2, "temperature": 1.2}, Rules()),
    "filters": Case({"top_k": 4, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8}, Rules()),
    "repetition": Case({}, Rules(repetition_penalty=1.6)),
    "frequency": Case({}, Rules(frequency_penalty=1.1)),
    "presence": Case({}, Rules(presence_penalty=-0.9)),
    "bias": Case({}, Rules(logit_bias={0: 1.5, 3: -1.0})),
    "everything": Case(
        {"top_k": 4, "top_p": 0.95, "min_p": 0.03, "temperature": 1.3},
        Rules(1.3, 0.9, 0.4, {2: 1.0}, 2, ((0, 1, 3), (3, 0))),
    ),
}


# ---- every text's chance --------------------------------------------------------------------------------------------


def kept(logits: np.ndarray, row: Mapping[str, float]) -> np.ndarray:
    """Probabilities float64 [V] of a row's temperature and filters, by sorting."""
    x = (logits - logits.max()) / row.get("temperature", 1.0)
    order = np.argsort(-x)
    p = np.exp(x[order])
    p /= p.sum()
    if "top_k" in row:
        p[int(row["top_k"]) :] = 0
        p /= p.sum()
    if "top_p" in row:
        total = p.cumsum()
        assert np.abs(total - row["top_p"]).min() > 1e-5, "rounding decides what top_p keeps: take other tables"
        p[np.argmax(total >= row["top_p"]) + 1 :] = 0
        p /= p.sum()
    if "min_p" in row:
        assert np.abs(p / p[0] - row["min_p"]).min() > 1e-5, "rounding decides what min_p keeps: take other tables"
        p[p < row["min_p"] * p[0]] = 0
        p /= p.sum()
    out = np.zeros_like(p)
    out[order] = p
    return out


@functools.cache
def chances(name: str) -> np.ndarray:
    """float64 [N_TOKENS ** LENGTH], of the texts in lexical order."""
    case = CASES[name]

    def spread(prefix: tuple[int, ...], number: int, chance: float) -> np.ndarray:
        if len(prefix) == LENGTH:
            return np.asarray([chance])
        logits = np.append(TABLES.target[number, :N_TOKENS].astype(np.float64), -np.inf)
        p = kept(oracle(logits, Text(case.rules, (END,), PROMPT, prefix)), case.sampling)
        below = (spread((*prefix, x), number * N_TOKENS + 1 + x, chance * p[x]) for x in range(N_TOKENS))
        return np.concatenate(list(below))

    return spread((), 0, 1.0)


def p_value(texts: np.ndarray, right: np.ndarray) -> float:
    """Chi-square of texts int32 [N, LENGTH]; texts that are too rare to count alone are counted together, and an
    impossible one makes it 0."""
    number = texts @ (N_TOKENS ** np.arange(LENGTH - 1, -1, -1))
    counts, expected = np.bincount(number, minlength=len(right)), right * len(texts)
    if counts[right == 0].any():
        return 0.0
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    some = expected > 0
    return float(stats.chisquare(counts[some], expected[some]).pvalue)


# ---- rounds ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """How a round guesses and accepts."""

    k: int = 3
    rule: Rule = TOKEN_BY_TOKEN
    tree: TreeShape | None = None
    ragged: bool = False  # as many guesses as row and round say, 0 ... k
    blind: bool = False  # a mistake to be found out: processors do not see the guesses


class State(NamedTuple):
    """B texts between two rounds."""

    tokens: jax.Array  # int32 [B, LENGTH]
    prefix: jax.Array  # int32 [B], its number
    history: History
    rounds: jax.Array  # int32 [B]
    accepted: jax.Array  # int32 [B], guesses of all rounds


class Rows(NamedTuple):
    """What B rows ask for."""

    sampling: SamplingRows
    rules: ProcessorRows


def drafted_chain(rows: Rows, state: State, position: jax.Array, method: Method) -> Proposal:
    draws, own = method.rule.draws(rows.sampling, position), jnp.asarray(OWN)
    b = len(position)
    tokens, q, prefix = jnp.zeros((b, 0), jnp.int32), [], state.prefix
    for i in range(method.k):
        logits = process_draft(TABLES.at(TABLES.drafter, prefix), rows.rules, state.history, tokens, own)
        p = distribution(logits, draws)
        guess = own[draw_guess(p, draws, position + i, own, V)]
        guess = jnp.where(jnp.isnan(logits).any(axis=-1), NO_TOKEN, guess)
        if method.ragged:
            guess = jnp.where(i < (jnp.arange(b) // 32 + state.rounds) % (method.k + 1), guess, NO_TOKEN)
        tokens, prefix = jnp.concatenate([tokens, guess[:, None]], axis=1), after(prefix, guess)
        q.append(p)
    return Proposal(tokens, jnp.stack(q, axis=1), own) if q else Proposal(tokens, None)


def chain_round(rows: Rows, state: State, position: jax.Array, method: Method) -> Verified:
    proposal = drafted_chain(rows, state, position, method)
    return verify(
        target_logits(rows, state, chain_before(proposal.tokens), method.blind),
        proposal,
        rows.sampling,
        position,
        N_TOKENS,
        method.rule,
    )


def target_logits(rows: Rows, state: State, before: jax.Array, blind: bool) -> jax.Array:
    """float32 [B, N, V] of positions that come after guesses int32 [B, N, A], padded with NO_ID on the right."""
    prefix = jnp.broadcast_to(state.prefix[:, None], before.shape[:2])
    for i in range(before.shape[-1]):
        prefix = jnp.where(before[..., i] >= 0, after(prefix, before[..., i]), prefix)
    logits = only_tokens(TABLES.at(TABLES.target, prefix), N_TOKENS)
    return process(logits, rows.rules, state.history, jnp.full_like(before, NO_ID) if blind else before)


def drafted_tree(state: State, shape: TreeShape) -> Tree:
    """The best nodes, level by level as `DraftTree.grow` finds them."""

    def children(prefix: jax.Array, scores: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        best, ids = jax.lax.top_k(jax.nn.log_softmax(TABLES.at(TABLES.drafter, prefix)), shape.top_k)
        tokens = jnp.asarray(OWN)[ids]
        b, n = len(prefix), prefix.shape[1] * shape.top_k
        return (scores[..., None] + best).reshape(b, n), tokens.reshape(b, n), after(prefix[..., None], tokens)

    b = len(state.prefix)
    scores, tokens, below = children(state.prefix[:, None], jnp.zeros((b, 1)))
    levels = [(scores, tokens, jnp.full((b, shape.top_k), -1, jnp.int32))]
    beams, below = jnp.broadcast_to(jnp.arange(shape.top_k, dtype=jnp.int32), tokens.shape), below.reshape(b, -1)
    for i in range(shape.depth - 1):
        grown, tokens, below = children(below, scores)
        levels.append((grown, tokens, jnp.repeat(beams, shape.top_k, axis=1)))
        scores, chosen = jax.lax.top_k(grown, shape.top_k)
        below = jnp.take_along_axis(below.reshape(b, -1), chosen, axis=1)
        beams = chosen + shape.top_k + i * shape.top_k**2
    return best_nodes(levels, shape.budget)


def tree_round(rows: Rows, state: State, position: jax.Array, method: Method) -> Verified:
    assert method.tree is not None
    depth = method.tree.depth
    tree = drafted_tree(state, method.tree)
    ancestors = tree.ancestors(depth)
    tokens = jnp.pad(tree.tokens, ((0, 0), (1, 0)), constant_values=NO_ID)
    levels = [ancestors & (depths(ancestors) == d)[:, None] for d in range(1, depth + 1)]
    before = jnp.stack([jnp.where(level, tokens[:, None], NO_ID).max(axis=-1) for level in levels], axis=-1)
    logits = target_logits(rows, state, before, method.blind)
    return walk(logits, tree, rows.sampling, position, N_TOKENS, depth).found


@functools.partial(jax.jit, static_argnames="method")
def generate(rows: Rows, *, method: Method) -> State:
    """LENGTH tokens of each row."""
    b = rows.sampling.temperature.shape[0]
    every, none = jnp.arange(b), jnp.full((b, 1), NO_TOKEN, jnp.int32)
    do = chain_round if method.tree is None else tree_round

    def step(state: State) -> State:
        n = state.history.n_output
        found = do(rows, state, len(PROMPT) + n, method)
        committed = committed_tokens(found, LENGTH - n, none)
        offset = jnp.arange(found.tokens.shape[1], dtype=jnp.int32)[None]
        counts, prefix = offset < committed[:, None], state.prefix
        for i in range(found.tokens.shape[1]):
            prefix = jnp.where(counts[:, i], after(prefix, found.tokens[:, i]), prefix)
        places, busy = jnp.where(counts, n[:, None] + offset, LENGTH), committed > 0
        return State(
            state.tokens.at[every[:, None], places].set(found.tokens, mode="drop"),
            prefix,
            state.history.with_output(found.tokens, committed),
            state.rounds + busy.astype(jnp.int32),
            state.accepted + jnp.where(busy, found.accepted, 0),
        )

    prompt = jnp.broadcast_to(jnp.asarray(PROMPT, jnp.int32), (b, len(PROMPT)))
    history, zeros = History.empty(b, V, WIDTHS.word_length).with_prompt(prompt), jnp.zeros(b, jnp.int32)
    state = State(jnp.full((b, LENGTH), NO_TOKEN, jnp.int32), zeros, history, zeros, zeros)
    return jax.lax.while_loop(lambda s: (s.history.n_output < LENGTH).any(), step, state)


BATCH = 48_000


class Drawn(NamedTuple):
    """Texts of one kind of rows."""

    texts: np.ndarray  # int32 [N, LENGTH]
    rounds: float  # of a text, in the mean
    accepted: float  # guesses of a round, in the mean


@functools.cache
def draw_texts(kinds: tuple[tuple[str, bool], ...], n: int, method: Method) -> list[Drawn]:
    """n texts of each kind, a case's name and whether rows are coupled, row by row beside one another."""
    rng, size = np.random.default_rng(0), min(BATCH // len(kinds), n)
    rules = [CASES[name].rules for name, _ in kinds]
    one = Rows(
        settings([{**CASES[name].sampling, "coupled": coupled} for name, coupled in kinds]),
        ProcessorRows.of(rules, [(END,)] * len(kinds), WIDTHS, len(kinds)),
    )
    many: Rows = jax.tree.map(lambda x: np.tile(x, (size, *(1,) * (x.ndim - 1))), one)
    states: list[State] = []
    for _ in range(-(-n // size)):
        words = rng.integers(0, 2**32, (size * len(kinds), 2), dtype=np.uint32)
        sampling = SamplingRows(**{**vars(many.sampling), "seed": words})
        states.append(generate(Rows(sampling, many.rules), method=method))
    tokens, rounds, accepted = (
        np.concatenate([np.asarray(x) for x in part]).reshape(-1, len(kinds), *part[0].shape[1:])
        for part in zip(*((s.tokens, s.rounds, s.accepted) for s in states), strict=True)
    )
    return [
        Drawn(tokens[:n, i], float(rounds[:n, i].mean()), float(accepted[:n, i].sum() / rounds[:n, i].sum()))
        for i in range(len(kinds))
    ]


METHODS = {
    "chain": Method(),
    "block": Method(rule=BLOCK),
    "tree": Method(tree=TreeShape(3, 2, 6)),
    "wide tree": Method(tree=TreeShape(2, 4, 12)),
    "ragged chain": Method(ragged=True),
    "ragged block": Method(rule=BLOCK, ragged=True),
}


def check(names: list[str], n: int, method: str) -> None:
    """Prints a line for each kind, so that `pytest -s` shows the figures."""
    kinds = tuple(itertools.product(names, (False, True)))
    low: list[str] = []
    for (name, coupled), drawn in zip(kinds, draw_texts(kinds, n, METHODS[method]), strict=True):
        p = p_value(drawn.texts, chances(name))
        line = f"{method:12} {name:10} {'coupled' if coupled else 'free':7} p {p:.3f}, {drawn.accepted:.2f} accepted"
        print(line)
        if p <= 0.01:
            low.append(line)
        assert drawn.accepted > 0.3, line  # else nothing was put to the test
        assert drawn.rounds > 1.2, line
    assert not low


FEW, N_FEW = ["nothing", "filters", "everything"], 40_000


@pytest.mark.parametrize("method", ["chain", "block", "tree"])
def test_texts_follow_the_target(method: str) -> None:
    check(FEW, N_FEW, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_texts_of_every_kind_follow_the_target(method: str) -> None:
    check(list(CASES), 200_000, method)


def test_coupled_rows_have_the_text_of_plain_decoding() -> None:
    """Token for token, whatever guesses; rows that are not coupled do not."""
    kinds = tuple(itertools.product(FEW, (False, True)))
    plain = draw_texts(kinds, N_FEW, Method(k=0))
    for name in ("chain", "block", "tree"):
        drawn = draw_texts(kinds, N_FEW, METHODS[name])
        for (case, coupled), mine, right in zip(kinds, drawn, plain, strict=True):
            equal = bool((mine.texts == right.texts).all())
            assert equal == (coupled or name == "tree"), (name, case, coupled)


class FromTarget(TokenByToken):
    """Draws what replaces a rejected guess from p, not from what is left of it."""

    def accept(
        self, p: jax.Array, proposal: Proposal, usable: jax.Array, draws: SamplingRows, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        n, _ = super().accept(p, proposal, usable, draws, position)
        return n, entry(p, jnp.minimum(n, p.shape[1] - 1))


MISTAKES = {
    "replaced from p": ("nothing", Method(k=1, rule=FromTarget())),
    "a chain's penalties": ("everything", Method(k=2, blind=True)),
    "a tree's penalties": ("everything", Method(tree=TreeShape(3, 2, 6), blind=True)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found_out(mistake: str) -> None:
    name, method = MISTAKES[mistake]
    (drawn,) = draw_texts(((name, False),), N_FEW, method)
    assert p_value(drawn.texts, chances(name)) < 1e-6
