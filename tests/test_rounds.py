"""Draft and verify, round by round: what is cached after each, what a step sees, and where a request ends."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimijax.cache import PagedCache, PagedView, Window
from kimijax.draft_attention import LlamaAttention
from kimijax.drafter import draft_cache
from kimijax.sampling import SamplingRows
from kimijax.speculation import (
    NO_TOKEN,
    ChainState,
    DraftChain,
    Proposal,
    Round,
    RowState,
    prefill_chunk,
    speculative_round,
)
from kimijax.speculator import run_rounds

from .tiny_speculation import (
    GREEDY,
    PROMPTS,
    VOCAB,
    plain_logits,
    settings,
    speculator,
    tiny_drafter,
    tiny_target,
)

S = 48  # rows of a cache


class Stepper:
    """Rounds of B rows one at a time, with every state kept."""

    def __init__(self, vocab: int) -> None:
        self.target, self.drafter = tiny_target(vocab), tiny_drafter(vocab=vocab)
        graphs, self.states = zip(*(nnx.split(m) for m in (self.target, self.drafter)), strict=True)

        def models(states: Any) -> tuple[Any, DraftChain[Any]]:
            target, drafter = (nnx.merge(g, s) for g, s in zip(graphs, states, strict=True))
            return target, DraftChain(drafter, vocab)

        def prefill(states: Any, *args: Any, first: bool) -> Any:
            return prefill_chunk(*models(states), *args, n_tokens=vocab, first=first)

        def step(states: Any, *args: Any, k: int) -> Any:
            return speculative_round(*models(states), *args, k=k, n_tokens=vocab)

        def true_rows(states: Any, ids: Any) -> Any:
            target, chain = models(states)
            at = jnp.zeros(1, jnp.int32)
            hidden, latents = target.prefill(ids, at, None, taps=chain.taps)
            cache = draft_cache(chain.drafter.config, 1, S, jnp.dtype(jnp.float32))
            out, cache = chain.drafter.decode(ids[:, 1:], chain.drafter.fuse(hidden.taps)[:, :-1], at, cache)
            return latents, cache.rows(0), chain.drafter.logits(out.normed)[0]

        self._true_rows = jax.jit(true_rows)
        self._prefill = jax.jit(prefill, static_argnames="first")
        self._round = jax.jit(step, static_argnames="k")

    def empty(self, b: int) -> RowState[ChainState[Any], Any]:
        c, d = self.target.config, self.drafter.config
        view = Window(tuple(jnp.zeros((b, S, c.latent_dim)) for _ in range(c.n_layers)))
        chain = ChainState.empty(draft_cache(d, b, S, jnp.dtype(jnp.float32)), b, d, jnp.float32)
        return RowState(jnp.zeros(b, jnp.int32), jnp.zeros(b, jnp.int32), view, chain)

    def prefill(self, prompts: Sequence[Sequence[int]], rows: SamplingRows, chunk: int, state: Any = None) -> Any:
        n = np.asarray([len(p) for p in prompts], np.int32)
        ids = np.full((len(prompts), -(-int(n.max()) // chunk) * chunk + 1), 5, np.int32)  # padding is no id of its own
        for i, p in enumerate(prompts):
            ids[i, : len(p)] = p
        state = self.empty(len(prompts)) if state is None else state
        for start in range(0, int(n.max()), chunk):
            part, at = ids[:, start : start + chunk + 1], np.full(len(prompts), start, np.int32)
            state = self._prefill(self.states, state, part, at, n, rows, first=start == 0)
        return state

    def round(self, state: Any, rows: SamplingRows, k: int, budget: int = 100) -> tuple[Round, Any]:
        b = state.token.shape[0]
        none = np.full((b, 1), NO_TOKEN, np.int32)
        return self._round(self.states, state, rows, np.full(b, budget, np.int32), none, k=k)

    def true_rows(self, ids: Sequence[int]) -> tuple[Any, Any, Any]:
        """Of a whole sequence: the target's cache rows, the draft's [1, T - 1, C], and its logits [T - 1, Vd]."""
        t = len(ids)
        latents, rows, logits = self._true_rows(self.states, np.asarray([[*ids, *(0,) * (S - t)]], np.int32))
        return latents, rows[:, : t - 1], logits[: t - 1]


@functools.cache
def stepper(vocab: int = VOCAB) -> Stepper:
    return Stepper(vocab)


def check_state(run: Stepper, state: Any, texts: Sequence[Sequence[int]]) -> None:
    """Both caches hold what a pass over the committed tokens computes, whatever was rejected on the way."""
    for b, text in enumerate(texts):
        n = int(state.length[b])
        assert len(text) == n + 1
        assert text[-1] == int(state.token[b])
        latents, rows, _ = run.true_rows(text)
        for layer, own in enumerate(latents):
            np.testing.assert_allclose(state.view.rows(layer)[b, :n], own[0, :n], atol=2e-5)
        np.testing.assert_allclose(state.proposer.view.rows(0)[b, :n], rows[0, :n], atol=2e-5)


def test_rejected_drafts_leave_nothing_behind() -> None:
    """After every round, with blocks of 3 guesses of which 0 to 3 pass."""
    run, rows = stepper(), settings([GREEDY, {"seed": 4}])
    prompts = [PROMPTS[0], PROMPTS[5]]
    state = run.prefill(prompts, rows, chunk=16)
    texts = [[*p, int(t)] for p, t in zip(prompts, state.token, strict=True)]
    seen: set[int] = set()
    for _ in range(8):
        made, state = run.round(state, rows, 3)
        for b, text in enumerate(texts):
            text += made.tokens[b, : int(made.committed[b])].tolist()
        seen |= set(made.accepted.tolist())
        check_state(run, state, texts)
    assert {0, 3} <= seen


def test_a_block_may_be_cut_anywhere() -> None:
    """A budget below what was accepted: the state is that of the tokens that were committed, and the text goes on."""
    run, rows = stepper(), settings([GREEDY, GREEDY])
    prompts = [PROMPTS[0], PROMPTS[5]]
    state = run.prefill(prompts, rows, chunk=16)
    texts = [[*p, int(t)] for p, t in zip(prompts, state.token, strict=True)]
    for budget in (1, 2, 0, 3, 1, 0, 0, 4):
        made, after = run.round(state, rows, 3, budget)
        assert (np.asarray(made.committed) == np.minimum(np.asarray(made.accepted) + 1, budget)).all()
        for b, text in enumerate(texts):
            text += made.tokens[b, : int(made.committed[b])].tolist()
        check_state(run, after, texts)
        state = after
    for prompt, text in zip(prompts, texts, strict=True):
        assert text[len(prompt) :] == plain_logits(tuple(text))[len(prompt) - 1 : -1].argmax(axis=1).tolist()


@pytest.mark.slow
def test_k_may_change_from_round_to_round() -> None:
    run, rows = stepper(), settings([GREEDY, {"seed": 4}])
    prompts = [PROMPTS[0], PROMPTS[5]]
    state = run.prefill(prompts, rows, chunk=16)
    texts = [[*p, int(t)] for p, t in zip(prompts, state.token, strict=True)]
    for k in (3, 0, 0, 3, 1, 3, 0, 1):
        made, state = run.round(state, rows, k)
        for b, text in enumerate(texts):
            text += made.tokens[b, : int(made.committed[b])].tolist()
        check_state(run, state, texts)
        if k:  # the first guess is the drafter's, computed from the whole text before the round
            before = texts[0][: len(texts[0]) - int(made.committed[0])]
            logits = run.true_rows(before)[2][-1]
            assert int(made.guesses[0, 0]) == int(run.drafter.to_target(logits.argmax().astype(jnp.int32)))


def test_chunks_of_a_prompt_feed_the_true_next_token() -> None:
    """8 tokens in chunks of 3, 4 and 8: the draft's rows are those of one pass, and so are its guesses."""
    run, prompt = stepper(8), [t % 8 for t in PROMPTS[1][:8]]
    rows = settings([GREEDY])
    first = None
    for chunk in (8, 4, 3):
        state = run.prefill([prompt], rows, chunk)
        text = [*prompt, int(state.token[0])]
        _, right, logits = run.true_rows(text)
        np.testing.assert_allclose(state.proposer.view.rows(0)[0, :8], right[0], atol=2e-5)
        check_state(run, state, [text])
        made, _ = run.round(state, rows, 3)
        assert int(made.guesses[0, 0]) == int(run.drafter.to_target(logits[-1].argmax().astype(jnp.int32)))
        first = made.guesses.tolist() if first is None else first
        assert made.guesses.tolist() == first


@pytest.mark.parametrize("window", [None, 4])
def test_a_rounds_steps_see_what_training_shows_them(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step j stands at position t + j and sees the true rows up to t, then its own of steps 1 ... j, window applied."""
    drafter = tiny_drafter(window=window)
    seen: list[tuple[list[int], np.ndarray]] = []  # filled by what runs next
    project, over = LlamaAttention.project, LlamaAttention.over

    def spy_project(self: LlamaAttention, inputs: Any, positions: jax.Array) -> Any:
        seen.append((positions[0].tolist(), np.empty(0)))
        return project(self, inputs, positions)

    def spy_over(self: LlamaAttention, query: jax.Array, rows: jax.Array, visible: jax.Array) -> Any:
        seen[-1] = (seen[-1][0], np.asarray(visible)[0])
        return over(self, query, rows, visible)

    monkeypatch.setattr(LlamaAttention, "project", spy_project)
    monkeypatch.setattr(LlamaAttention, "over", spy_over)
    n, k = 9, 3  # 9 tokens cached
    at = jnp.asarray([n], jnp.int32)
    chain = ChainState.empty(draft_cache(drafter.config, 1, 16, jnp.dtype(jnp.float32)), 1, drafter.config, jnp.float32)
    run = DraftChain[Window](drafter, VOCAB)
    run.propose(replace(chain, ready=jnp.asarray([True])), at, settings([GREEDY]), k)
    steps, seen = seen, []

    def sees(t: int) -> set[int]:
        return {s for s in range(t + 1) if window is None or t - s < window}

    t = n - 1
    for j, (positions, visible) in enumerate(steps, start=1):
        assert positions == [t + j]
        assert set(np.flatnonzero(visible[0])) == sees(t + j)
    assert len(steps) == k - 1
    taps = {tap: jnp.zeros((1, k + 1, drafter.config.target_hidden)) for tap in run.taps}
    run.observe(chain, taps, jnp.zeros((1, k + 1), jnp.int32), at, jnp.asarray([2]))
    ((positions, visible),) = seen
    assert positions == [10]  # the newest of two true rows
    assert set(np.flatnonzero(visible[0])) == sees(10)


@pytest.mark.slow
def test_pages_give_the_same_rounds() -> None:
    """Paged caches in shuffled pages, against dense ones."""
    run, rows = stepper(), settings([GREEDY, {"seed": 4}])
    prompts, page = [PROMPTS[0], PROMPTS[5]], 8
    tables = np.random.default_rng(0).permutation(2 * S // page).reshape(2, -1).astype(np.int32)

    def paged(width: int, layers: int) -> PagedView:
        cache = PagedCache(tuple(jnp.zeros((2 * S // page, page, width)) for _ in range(layers)))
        return PagedView(cache, jnp.asarray(tables))

    dense = run.empty(2)
    c, d = run.target.config, run.drafter.config
    state = replace(
        dense,
        view=paged(c.latent_dim, c.n_layers),
        proposer=replace(dense.proposer, view=paged(d.cache_width, 1)),
    )
    one, two = run.prefill(prompts, rows, 16), run.prefill(prompts, rows, 16, state)
    for _ in range(6):
        (a, one), (b, two) = run.round(one, rows, 3), run.round(two, rows, 3)
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


# ---- ends of a request ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Oracle:
    """A proposer that knows the text [B, 64], and is told after how many right guesses to err, by position [64]."""

    text: jax.Array
    right: jax.Array
    taps: tuple[int, ...] = ()

    def prefill(self, state: Any, taps: Any, following: Any, start: Any, last: Any) -> Any:
        return state

    def propose(self, state: Any, length: jax.Array, rows: Any, k: int, process: Any = None) -> tuple[Proposal, Any]:
        i = jnp.arange(k, dtype=jnp.int32)[None]
        tokens = jnp.take_along_axis(self.text, length[:, None] + 1 + i, axis=1)
        n_right = self.right[length][:, None]
        return Proposal(jnp.where(i < n_right, tokens, (tokens + 1) % VOCAB), None), state

    def observe(self, state: Any, taps: Any, tokens: Any, start: Any, committed: Any, prepare: Any = None) -> Any:
        return state


class Blocks:
    """Greedy answers in blocks whose sizes an Oracle decides; compiled once."""

    def __init__(self) -> None:
        self.prompts = [PROMPTS[0], PROMPTS[5]]
        plain = speculator().generate(self.prompts, settings([GREEDY] * 2), [30, 30], k=0)
        self.answers = [list(g.tokens) for g in plain]
        self.text = np.zeros((2, 64), np.int32)
        for i, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            self.text[i, : len(prompt) + len(answer)] = prompt + answer
        run = stepper()
        state = run.prefill(self.prompts, settings([GREEDY] * 2), chunk=16)
        self.state = replace(state, proposer=())
        graph, self.leaves = nnx.split(run.target)

        def loop(leaves: Any, state: Any, right: Any, limit: Any, ends: Any) -> Any:
            oracle = Oracle(jnp.asarray(self.text), right)
            rows = settings([GREEDY] * 2)
            options: dict[str, Any] = {"k": 3, "room": 16, "n_tokens": VOCAB}
            return run_rounds(nnx.merge(graph, leaves), oracle, state, rows, limit, ends, **options)[0]

        self._loop = jax.jit(loop)

    def __call__(self, right: Sequence[int], limit: Sequence[int], ends: Sequence[Sequence[int]]) -> Any:
        per_position = np.resize(np.asarray(right, np.int32), 64)
        ids = np.full((2, 2), NO_TOKEN, np.int32)
        for row, own in zip(ids, ends, strict=True):
            row[: len(own)] = own
        return self._loop(self.leaves, self.state, per_position, np.asarray(limit, np.int32), ids)


@functools.cache
def blocks() -> Blocks:
    return Blocks()


@pytest.mark.parametrize("right", [[3], [0], [1], [3, 0, 2, 1, 1]])
def test_a_limit_cuts_a_block(right: Sequence[int]) -> None:
    """Every limit from 0 to 16, another one for the other row: exactly so many tokens, and only as many rounds."""
    for limit in range(17):
        limits = (limit, 16 - limit)
        found = blocks()(right, limits, [[], []])
        for i in range(2):
            n = limits[i]
            assert found.produced[i] == n
            assert found.tokens[i, :n].tolist() == blocks().answers[i][:n]
            assert (np.asarray(found.tokens[i, n:]) == NO_TOKEN).all()
            assert not found.ended[i]
            lengths = expected_rounds(right, len(blocks().prompts[i]), n)
            assert [a for a in found.accepted[:, i].tolist() if a >= 0] == lengths


def expected_rounds(right: Sequence[int], length: int, limit: int) -> list[int]:
    """Accepted guesses of each round up to `limit` tokens, of which the first is prefill's."""
    out: list[int] = []
    produced = 1
    while produced < limit:
        out.append(right[length % len(right)])
        produced += out[-1] + 1
        length += out[-1] + 1
    return out


def test_an_end_token_anywhere_in_a_block_is_the_last() -> None:
    """Each token of the answer in turn, as the one id that ends it or the second of two; the other row goes on."""
    answer = blocks().answers[0][:16]
    for right in ([3], [2, 0]):
        for token in dict.fromkeys(answer):
            n = answer.index(token) + 1
            found = blocks()(right, (16, 12), [[VOCAB - 1, token] if token % 2 else [token], []])
            n_first = min(n, answer.index(VOCAB - 1) + 1) if token % 2 and VOCAB - 1 in answer else n
            assert found.produced.tolist() == [n_first, 12]
            assert found.tokens[0, :n_first].tolist() == answer[:n_first]
            assert (np.asarray(found.tokens[0, n_first:]) == NO_TOKEN).all()
            assert found.ended.tolist() == [True, False]
            # The end comes before the limit where both fall into one block, and the limit before a later end.
            assert blocks()(right, (n_first, 0), [[token], []]).ended.tolist() == [True, False]
            if n_first > 1:
                assert blocks()(right, (n_first - 1, 0), [[token], []]).ended.tolist() == [False, False]
