"""Trees of guesses: which nodes, what they see, which are accepted, what stays cached, and the text that comes out."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from kimijax.cache import PagedCache, PagedView, Window
from kimijax.draft_tree import DraftTree, Tree, TreeShape, best_nodes, depths, tree_round, tree_visible, walk
from kimijax.drafter import Drafter
from kimijax.errors import ConfigError
from kimijax.sampling import SamplingRows
from kimijax.speculation import ChainState
from kimijax.verification import NO_TOKEN

from .test_rounds import check_state, stepper
from .test_speculation import exact_distribution
from .tiny_speculation import GREEDY, PROMPTS, VOCAB, settings, speculator, tiny_drafter

# ---- shapes ---------------------------------------------------------------------------------------------------------


def test_shapes_that_are_no_tree_are_refused() -> None:
    for field, shape in {"depth": (0, 2, 3), "top_k": (2, 0, 3), "budget": (3, 2, 2)}.items():
        with pytest.raises(ConfigError, match=rf"tree\.{field}"):
            TreeShape(*shape)
    with pytest.raises(ConfigError, match="to 10, all that are drafted"):
        TreeShape(3, 2, 11)
    assert TreeShape(3, 2, 10).n_candidates == 2 + 4 + 4
    assert TreeShape(4, 1, 4).n_candidates == 4  # a chain
    with pytest.raises(ConfigError, match="at most 28"):
        DraftTree(tiny_drafter(), VOCAB, TreeShape(2, 29, 29))


def test_the_best_nodes_bring_their_parents() -> None:
    """Scores by hand; of equal scores the earlier node stays, so that a child never comes without its parent."""
    levels = [
        ([-1.0, -2.0], [10, 11], [-1, -1]),
        ([-1.5, -3.0, -2.0, -2.5], [20, 21, 22, 23], [0, 0, 1, 1]),  # numbered 2 ... 5
        ([-1.5, -1.6, -2.0, -9.0], [30, 31, 32, 33], [2, 2, 4, 4]),  # numbered 6 ... 9
    ]
    arrays = [tuple(jnp.asarray([x]) for x in level) for level in levels]
    expected = {
        3: ([10, 20, 30], [0, 1, 2]),
        5: ([10, 11, 20, 30, 31], [0, 0, 1, 3, 3]),
        6: ([10, 11, 20, 22, 30, 31], [0, 0, 1, 2, 3, 3]),
        7: ([10, 11, 20, 22, 30, 31, 32], [0, 0, 1, 2, 3, 3, 4]),
    }
    for budget, (tokens, parents) in expected.items():
        tree = best_nodes(cast(Any, arrays), budget)
        assert (tree.tokens[0].tolist(), tree.parents[0].tolist()) == (tokens, parents)


def test_nodes_see_the_prefix_their_ancestors_and_themselves() -> None:
    """Two children of the root, two of the second, one of the first: five cached tokens before them."""
    tree = Tree(jnp.asarray([[1, 2, 3, 4, 5]]), jnp.asarray([[0, 0, 2, 2, 1]]))
    ancestors = tree.ancestors(2)
    assert depths(ancestors)[0].tolist() == [0, 1, 1, 2, 2, 2]
    visible = np.asarray(tree_visible(ancestors, jnp.asarray([5]), 16))[0]
    ways = [{0}, {0, 1}, {0, 2}, {0, 2, 3}, {0, 2, 4}, {0, 1, 5}]
    for node, way in enumerate(ways):
        assert set(np.flatnonzero(visible[node])) == set(range(5)) | {5 + i for i in way}


# ---- drafting -------------------------------------------------------------------------------------------------------


class Naive:
    """The nodes found one path after another, each path a chain of forced tokens over a cache of its own."""

    def __init__(self, drafter: Drafter, n_tokens: int) -> None:
        self.drafter = drafter
        graph, leaves = nnx.split(drafter)

        def decode(leaves: Any, ids: Any, features: Any, start: Any, view: Any) -> Any:
            d = nnx.merge(graph, leaves)
            hidden, view = d.decode(ids, features, start, view)
            return hidden.feedback, log_p(d, hidden.normed), view

        def log_p(d: Any, normed: Any) -> Any:
            logits = d.logits(normed)
            real = d.to_target(jnp.arange(logits.shape[-1], dtype=jnp.int32)) < n_tokens
            return jax.nn.log_softmax(jnp.where(real[None, None], logits, -jnp.inf))

        self._decode = functools.partial(jax.jit(decode), leaves)
        self._first = functools.partial(jax.jit(lambda leaves, normed: log_p(nnx.merge(graph, leaves), normed)), leaves)

    def log_p(self, state: ChainState[Any], length: int, path: Sequence[int]) -> np.ndarray:
        """float32 [Vd], after the tokens of a path, of the one row of a state."""
        feedback, view = state.feedback[:, None], state.view
        log_p = self._first(state.normed[:, None])[0, 0]
        for i, token in enumerate(path):
            at = jnp.asarray([length + i], jnp.int32)
            feedback, log_p, view = self._decode(jnp.asarray([[token]], jnp.int32), feedback, at, view)
            log_p = log_p[0, 0]
        return np.asarray(log_p)

    def tree(self, state: ChainState[Any], length: int, shape: TreeShape) -> dict[tuple[int, ...], float]:
        """The kept paths and their scores."""
        found: dict[tuple[int, ...], float] = {}
        beams: dict[tuple[int, ...], float] = {(): 0.0}
        for _ in range(shape.depth):
            grown: dict[tuple[int, ...], float] = {}
            for path, score in beams.items():
                log_p = self.log_p(state, length, path)
                for draft_id in np.argsort(-log_p)[: shape.top_k]:
                    token = int(self.drafter.to_target(jnp.asarray(draft_id, jnp.int32)))
                    grown[(*path, token)] = score + float(log_p[draft_id])
            found |= grown
            beams = dict(sorted(grown.items(), key=lambda item: -item[1])[: shape.top_k])
        return dict(sorted(found.items(), key=lambda item: -item[1])[: shape.budget])


def grown(drafter: Drafter, state: ChainState[Window], length: jax.Array, shape: TreeShape, n_tokens: int) -> Tree:
    graph, leaves = nnx.split(drafter)

    def grow(leaves: Any, state: ChainState[Window]) -> Tree:
        return DraftTree[Window](nnx.merge(graph, leaves), n_tokens, shape).grow(state, length)[0]

    return jax.jit(grow)(leaves, state)


@pytest.mark.parametrize(
    ("kind", "window"), [("llama", 3), *(pytest.param(k, None, marks=pytest.mark.slow) for k in ("llama", "mla"))]
)
def test_trees_are_those_of_chains_along_every_path(kind: str, window: int | None) -> None:
    drafter = tiny_drafter(kind, window=window)
    shape, n, n_tokens = TreeShape(4, 3, 14), 7, VOCAB - 3
    rng = np.random.default_rng(3)
    d = drafter.config
    view = Window((jnp.asarray(rng.standard_normal((1, 24, d.cache_width)), jnp.float32),))
    feedback, normed = (jnp.asarray(rng.standard_normal((1, d.hidden)), jnp.float32) for _ in range(2))
    state = ChainState(feedback, normed, jnp.asarray([True]), view)
    tree = grown(drafter, state, jnp.asarray([n], jnp.int32), shape, n_tokens)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True):
        paths.append((*paths[parent], token))
    assert len(set(paths)) == shape.budget + 1
    right = Naive(drafter, n_tokens).tree(state, n, shape)
    assert set(paths[1:]) == set(right)
    assert max(map(len, paths)) > 2  # otherwise this shows little
    assert max(map(max, paths[1:])) < n_tokens


def test_a_broken_drafter_has_no_guesses() -> None:
    """Logits that are not a number: no node is a token, and the target's own comes out."""
    drafter = tiny_drafter()
    view = Window((jnp.zeros((2, 16, drafter.config.cache_width)),))
    state = ChainState.empty(view, 2, drafter.config, jnp.float32)
    state = replace(state, normed=state.normed * jnp.float32(np.nan), ready=jnp.asarray([True, True]))
    tree = grown(drafter, state, jnp.asarray([4, 5], jnp.int32), TreeShape(2, 2, 5), VOCAB)
    assert (np.asarray(tree.tokens) == NO_TOKEN).all()
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, VOCAB)), jnp.float32)
    found, nodes = walk(logits, tree, settings([GREEDY, {}]), jnp.asarray([5, 6], jnp.int32), VOCAB, 2)
    assert found.accepted.tolist() == [0, 0]
    assert int(found.tokens[0, 0]) == int(logits[0, 0].argmax())
    assert nodes.tolist() == [[0, 0, 0]] * 2


# ---- acceptance -----------------------------------------------------------------------------------------------------

P = np.asarray([0.4, 0.3, 0.2, 0.1], np.float32)
SMALL = Tree(jnp.asarray([[1, 2, 3, 0, 2]]), jnp.asarray([[0, 0, 1, 1, 2]]))  # 1 and 2, then 3 and 0 after 1, 2 after 2


@pytest.mark.parametrize("row", [{}, {"top_k": 3}])
def test_siblings_are_accepted_as_by_repeated_rejection(row: dict[str, float]) -> None:
    """Each child in turn with its chance in what is left of p; what none takes is drawn from the rest."""
    n = 20_000
    tree = Tree(*(jnp.tile(x, (n, 1)) for x in SMALL))
    logits = np.tile(np.log(P), (n, 6, 1))
    rows = settings([{**row, "seed": i} for i in range(n)])
    found, nodes = jax.jit(functools.partial(walk, n_tokens=4, depth=2))(logits, tree, rows, np.full(n, 7, np.int32))
    p = (P if not row else np.asarray([4, 3, 2, 0], np.float32) / 9).astype(np.float64)
    expected: dict[tuple[int, ...], float] = {}
    for first in range(4):
        for path, chance in after_siblings(p, [1, 2], first).items():
            if path == ():
                expected[(first,)] = chance
                continue
            children = {1: [3, 0], 2: [2]}[path[0]]
            for second in range(4):
                share = chance * sum(after_siblings(p, children, second).values())
                if second in children:
                    for third in range(4):
                        expected[(first, second, third)] = share * p[third]
                else:
                    expected[(first, second)] = share
    texts = [tuple(t for t in x if t != NO_TOKEN) for x in np.asarray(found.tokens).tolist()]
    assert set(texts) <= {x for x, chance in expected.items() if chance > 0}
    outcomes = [x for x, chance in expected.items() if chance > 0]
    right = n * np.asarray([expected[x] for x in outcomes])
    assert right.sum() == pytest.approx(n)
    assert stats.chisquare([texts.count(x) for x in outcomes], right * n / right.sum()).pvalue > 0.01
    assert [len(x) - 1 for x in texts] == found.accepted.tolist()
    numbers = {(): 0, (1,): 1, (2,): 2, (1, 3): 3, (1, 0): 4, (2, 2): 5}
    for text, way, accepted in zip(texts[:200], nodes[:200].tolist(), found.accepted[:200].tolist(), strict=True):
        assert way[: accepted + 1] == [numbers[text[:i]] for i in range(accepted + 1)]


def after_siblings(p: np.ndarray, children: list[int], token: int) -> dict[tuple[int, ...], float]:
    """Recursive rejection with certain guesses: the chance that a token comes out, and as which node or as none."""
    left, reached = p.copy(), 1.0
    for child in children:
        passes = left[child] / left.sum() if left.sum() > 0 else 0.0
        if child == token:
            return {(child,): reached * passes}
        reached *= 1 - passes
        left[child] = 0
    return {(): reached * left[token] / left.sum() if left.sum() > 0 else 0.0}


# ---- rounds ---------------------------------------------------------------------------------------------------------


class TreeStepper:
    """`tree_round` on the states that a `Stepper` prefills, one round at a time."""

    def __init__(self, shape: TreeShape, vocab: int = VOCAB) -> None:
        self.run, self.shape = stepper(vocab), shape
        models = (self.run.target, self.run.drafter)
        graphs, _ = zip(*(nnx.split(m) for m in models), strict=True)

        def step(leaves: Any, *args: Any) -> Any:
            target, drafter = (nnx.merge(g, s) for g, s in zip(graphs, leaves, strict=True))
            return tree_round(target, DraftTree(drafter, vocab, shape), *args, n_tokens=vocab)

        self._round = jax.jit(step)

    def prefill(self, prompts: Sequence[Sequence[int]], rows: SamplingRows) -> Any:
        return self.run.prefill(prompts, rows, 16, self.run.empty(len(prompts)))

    def round(self, state: Any, rows: SamplingRows, budget: Sequence[int], ends: int = NO_TOKEN) -> Any:
        b = state.token.shape[0]
        return self._round(self.run.states, state, rows, np.asarray(budget, np.int32), np.full((b, 1), ends, np.int32))

    def texts(self, prompts: Sequence[Sequence[int]], rows: SamplingRows, limit: int) -> tuple[list[list[int]], int]:
        """Answers of `limit` tokens, and how often another child of the root than the first was accepted."""
        state = self.prefill(prompts, rows)
        texts, others = [[int(t)] for t in state.token], 0
        while min(map(len, texts)) < limit:
            made, state = self.round(state, rows, [limit - len(t) for t in texts])
            for b, text in enumerate(texts):
                n = int(made.committed[b])
                text += made.tokens[b, :n].tolist()
                others += int(n > 0 and made.accepted[b] > 0 and made.tokens[b, 0] != made.guesses[b, 0])
        return texts, others


SHAPES = {1: TreeShape(3, 1, 3), 2: TreeShape(3, 2, 6), 4: TreeShape(3, 4, 12)}


@pytest.mark.parametrize("top_k", [2, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 4))])
@pytest.mark.parametrize("batch", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_text_is_that_of_a_chain_and_of_plain_decoding(top_k: int, batch: int) -> None:
    """Greedy rows as a chain, and rows that sample as plain decoding with the same seed."""
    prompts = [PROMPTS[0], PROMPTS[5], PROMPTS[2]][:batch]
    others = 0
    for settings_of in ([GREEDY] * batch, [{"seed": 4}, GREEDY, {"seed": 9, "top_p": 0.9}][:batch]):
        rows = settings(settings_of)
        texts, n = TreeStepper(SHAPES[top_k]).texts(prompts, rows, 20)
        others += n
        for k in (0, 3):
            plain = speculator().generate(prompts, rows, [20] * batch, k=k)
            for text, row, answer in zip(texts, settings_of, plain, strict=True):
                if k == 0 or row == GREEDY:
                    assert text == list(answer.tokens)
    assert top_k == 1 or batch == 1 or others > 0  # otherwise no row of a branch was moved


@pytest.mark.slow
def test_caches_hold_what_was_accepted() -> None:
    """After every round, cut by a budget or idle too: both caches as after a pass over the committed tokens."""
    steps, prompts = TreeStepper(SHAPES[2]), [PROMPTS[0], PROMPTS[5], PROMPTS[2]]
    rows = settings([GREEDY, {"seed": 4}, GREEDY])
    state = steps.prefill(prompts, rows)
    texts = [[*p, int(t)] for p, t in zip(prompts, state.token, strict=True)]
    seen: set[int] = set()
    for budget in (9, 9, 2, 0, 9, 1, 9):
        made, state = steps.round(state, rows, (budget, 9, 9))
        assert int(made.committed[0]) == min(int(made.accepted[0]) + 1, budget)
        for b, text in enumerate(texts):
            text += made.tokens[b, : int(made.committed[b])].tolist()
        seen |= set(made.accepted.tolist())
        check_state(steps.run, state, texts)
    assert {0, 3} <= seen


@dataclass(frozen=True)
class Fixed:
    """A proposer of one tree."""

    tree: Tree
    shape: TreeShape
    taps: tuple[int, ...] = ()

    def grow(self, state: Any, length: jax.Array) -> tuple[Tree, Any]:
        return self.tree, state

    def observe(self, state: Any, taps: Any, tokens: Any, start: Any, committed: Any, prepare: Any = None) -> Any:
        return state


@pytest.mark.parametrize("page", [None, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16))])
def test_an_accepted_branch_lies_packed(page: int | None) -> None:
    """Two children with one child each: in row 0 the second branch is right, in row 1 the first, in row 2 none; the
    wrong branch goes on with the right token. One cache of pages in any order, or dense rows."""
    run, prompts = stepper(VOCAB), [PROMPTS[0], PROMPTS[5], PROMPTS[2]]
    rows = settings([GREEDY] * 3)
    answers = [list(g.tokens) for g in speculator().generate(prompts, rows, [6] * 3, k=0)]
    nodes = [
        [wrong(a[1]), a[1], a[2], a[2]] if b == 0 else [a[1], wrong(a[1]), a[2], a[2]] for b, a in enumerate(answers)
    ]
    nodes[2][0] = wrong(answers[2][1], 2)
    tree = Tree(jnp.asarray(nodes), jnp.asarray([[0, 0, 1, 2]] * 3))
    state = run.prefill(prompts, rows, 16)
    if page is not None:
        state = replace(state, view=in_pages(state.view, page))
    graph, leaves = nnx.split(run.target)

    def step(leaves: Any, state: Any) -> Any:
        proposer = cast(Any, Fixed(tree, TreeShape(2, 2, 4)))
        budget, none = jnp.full(3, 9, jnp.int32), jnp.full((3, 1), NO_TOKEN, jnp.int32)
        return tree_round(nnx.merge(graph, leaves), proposer, state, rows, budget, none, n_tokens=VOCAB)

    made, after = jax.jit(step)(leaves, replace(state, proposer=()))
    assert made.accepted.tolist() == [2, 2, 0]
    for b, answer in enumerate(answers):
        n = int(made.committed[b])
        assert made.tokens[b, :n].tolist() == answer[1 : 1 + n]
        text = [*prompts[b], *answer[: 1 + n]]
        latents = run.true_rows(text)[0]
        length = int(after.length[b])
        assert length == len(text) - 1
        for layer, own in enumerate(latents):
            np.testing.assert_allclose(after.view.rows(layer)[b, :length], own[0, :length], atol=2e-5)


def wrong(token: int, by: int = 1) -> int:
    return (token + by) % VOCAB


def in_pages(view: Window, page: int) -> PagedView:
    """The same rows in pages that are out of order."""
    b, n = view.layers[0].shape[0], view.length // page
    table = jnp.asarray(np.random.default_rng(0).permutation(b * n).reshape(b, n), jnp.int32)
    cache = PagedCache(tuple(jnp.zeros((b * n, page, rows.shape[-1])) for rows in view.layers))
    places = jnp.broadcast_to(jnp.arange(n * page, dtype=jnp.int32)[None], (b, n * page))
    return PagedView(cache.write(view.layers, table, places), table)


@pytest.mark.slow
@pytest.mark.parametrize("row", [{}, {"temperature": 1.3, "top_p": 0.9}])
def test_sampled_answers_follow_the_targets_distribution(row: dict[str, float]) -> None:
    """All answers of three tokens over 8 ids, chi-square against enumeration."""
    vocab, n, batch, prompt = 8, 8192, 2048, [3, 1, 4]
    steps = TreeStepper(TreeShape(2, 2, 5), vocab)
    counts = np.zeros((vocab,) * 3)
    for start in range(0, n, batch):
        texts, others = steps.texts([prompt] * batch, settings([{**row, "seed": start + i} for i in range(batch)]), 3)
        assert others > 0
        np.add.at(counts, tuple(np.asarray(texts).T), 1)
    expected = n * exact_distribution(prompt, row, vocab, vocab)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    right = np.append(expected[common], expected[~common].sum())
    assert stats.chisquare(observed[right > 0], right[right > 0]).pvalue > 0.01
