"""Trees of guesses in place of a chain (EAGLE-2, arXiv:2406.16858): several tokens for one position, one target pass.

The drafter's first step gives the root's `top_k` most probable children. Each further step runs the `top_k` best nodes
of the level above at once, and gives each of them `top_k` children. A node's score is the sum of the log-probabilities
on the way to it; of all nodes of all levels the `budget` best are kept. No child scores above its parent, and of equals
the earlier is kept, so that a kept node's parent is kept too, and comes before it.

The target runs over the root, which is the token drawn last, and the kept nodes at once. A node stands at the position
of its depth and sees the cached tokens, its ancestors and itself, never a sibling. Its cache row first lies where its
number puts it; the rows of the accepted path are then moved next to each other, and what lies behind them counts no
more, as after a chain (`speculation`).

Acceptance needs no rule of its own. The nodes are certain: nothing was drawn to find them. Trying the children x of a
node one after the other, each with chance p(x) over what is left of p, and drawing from the rest where all fail, is to
draw one token from p and see whether it is among the children. So the token is drawn as without guesses, from the same
random numbers, and a row's text is that of plain decoding whatever the tree is, for a seed as for greedy rows.

The drafter's own rows of the nodes are never moved: the next round begins by computing the rows of accepted tokens from
the target's features, as that of a chain does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .cache import CacheView
from .draft_attention import DraftAttention
from .draft_config import DraftConfig
from .drafter import Drafter, DraftHidden
from .errors import ConfigError
from .model import Target
from .sampling import SamplingRows, sample
from .speculation import ChainState, DraftChain, Round, RowState, after_round, committed_tokens
from .verification import NO_TOKEN, Verified


@dataclass(frozen=True)
class TreeShape:
    """The static shape of a tree. SGLang: num_steps, eagle_topk, and num_draft_tokens, which is budget + 1."""

    depth: int  # levels of guesses below the root
    top_k: int  # children of a node, and nodes of a level that get children
    budget: int  # nodes that the target runs over, without the root

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ConfigError("tree.depth", self.depth, "at least 1", "plain decoding is a chain of no guesses")
        if self.top_k < 1:
            raise ConfigError("tree.top_k", self.top_k, "at least 1; with 1 the tree is a chain")
        if not self.depth <= self.budget <= self.n_candidates:
            expected = f"{self.depth}, one node a level, to {self.n_candidates}, all that are drafted"
            raise ConfigError("tree.budget", self.budget, expected, "the root is not counted")

    @property
    def n_candidates(self) -> int:
        """Nodes that are drafted."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def room(self) -> int:
        """Rows from the length on that a round may write in the target's cache, and in the drafter's."""
        return max(self.budget + 1, self.depth + 1, (self.depth - 1) * self.top_k)

    def check(self, config: DraftConfig) -> None:
        """ConfigError if the drafter has fewer tokens than a node is to have children."""
        if self.top_k > config.draft_vocab_size:
            raise ConfigError("tree.top_k", self.top_k, f"at most {config.draft_vocab_size}, the draft's vocabulary")


class Tree(NamedTuple):
    """The nodes of B rows; node 0 is the root, node i + 1 is guess i; T = budget + 1."""

    tokens: jax.Array  # int32 [B, budget], target ids; NO_TOKEN: none, such a node is never accepted
    parents: jax.Array  # int32 [B, budget], node numbers, each below the node's own

    def ancestors(self, depth: int) -> jax.Array:
        """bool [B, T, T]: [b, i, j] if j is i, or on the way from the root to i; `depth`: of the tree."""
        n = self.parents.shape[1] + 1
        up = jnp.pad(self.parents, ((0, 0), (1, 0)))  # the root is its own
        here = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None], up.shape)
        found = jax.nn.one_hot(here, n, dtype=jnp.bool)
        for _ in range(depth):
            here = jnp.take_along_axis(up, here, axis=1)
            found = found | jax.nn.one_hot(here, n, dtype=jnp.bool)
        return found


def depths(ancestors: jax.Array) -> jax.Array:
    """Of each node, int32 [B, T]; 0 is the root."""
    return ancestors.sum(axis=-1, dtype=jnp.int32) - 1


def tree_visible(ancestors: jax.Array, length: jax.Array, size: int) -> jax.Array:
    """Which rows of a cache nodes see whose own rows lie from the length on: bool [B, T, size].

    Args:
      ancestors: bool [B, T, N], of N rows from the length on.
      length: int32 [B]; all rows before it are seen.
      size: rows of the cache.
    """
    row = jnp.arange(size, dtype=jnp.int32)[None] - length[:, None]  # [B, S]
    n = ancestors.shape[-1]
    index = jnp.broadcast_to(jnp.clip(row, 0, n - 1)[:, None], (*ancestors.shape[:2], size))
    own = jnp.take_along_axis(ancestors, index, axis=-1)
    return (row < 0)[:, None] | (own & (row < n)[:, None])


class Walk(NamedTuple):
    """The way that the target's tokens took through a tree."""

    found: Verified  # tokens [B, depth + 1]
    nodes: jax.Array  # int32 [B, depth + 1], those of tokens cached: the root, the accepted nodes, then the last again


def walk(logits: jax.Array, tree: Tree, rows: SamplingRows, position: jax.Array, n_tokens: int, depth: int) -> Walk:
    """Draw the target's own tokens along the tree, as long as they are in it.

    Args:
      logits: float32 [B, T, V], after each node.
      tree: the nodes.
      rows: settings.
      position: int32 [B], index in its request of the token that the root's children are for.
      n_tokens: ids from here on are never drawn.
      depth: of the tree.
    """

    def down(
        carry: tuple[jax.Array, jax.Array], d: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        node, inside = carry
        here = _take(logits, node[:, None])[:, 0]
        drawn = sample(here, rows, position + d, n_tokens)
        child = (tree.parents == node[:, None]) & (tree.tokens == drawn[:, None]) & (drawn >= 0)[:, None]
        goes_on = inside & child.any(axis=1)
        after = jnp.where(goes_on, jnp.argmax(child, axis=1).astype(jnp.int32) + 1, node)
        return (after, goes_on), (jnp.where(inside, drawn, NO_TOKEN), node)

    b = logits.shape[0]
    begin = jnp.zeros(b, jnp.int32), jnp.ones(b, jnp.bool)
    _, (tokens, nodes) = jax.lax.scan(down, begin, jnp.arange(depth + 1, dtype=jnp.int32))
    n = (nodes[1:] != nodes[:-1]).sum(axis=0, dtype=jnp.int32)
    return Walk(Verified(tokens.T, n), nodes.T)


class DraftTree[View: CacheView](DraftChain[View]):
    """The tree of an EAGLE-3 head. A `Proposer` as its base is: prefill and what it observes are a chain's, so that
    rounds with trees and with chains may alternate."""

    def __init__(self, drafter: Drafter, n_tokens: int, shape: TreeShape) -> None:
        super().__init__(drafter, n_tokens)
        shape.check(drafter.config)
        self.shape = shape

    def grow(self, state: ChainState[View], length: jax.Array) -> tuple[Tree, ChainState[View]]:
        """The best nodes after `length` (int32 [B]) cached tokens and the token drawn last.

        The rows of level i + 2's parents follow from length + i * K on; they see the true rows and, of those, their
        ancestors' and their own. As those of `propose` they count for nothing afterwards.
        """
        d, top_k, view = self.drafter, self.shape.top_k, state.view
        log_p = self._log_p(d.logits(state.normed[:, None]))  # [B, 1, Vd]
        log_p = jnp.where(state.ready[:, None, None], log_p, -jnp.inf)
        feedback = jnp.repeat(state.feedback[:, None], top_k, axis=1)
        b, n_rows = length.shape[0], (self.shape.depth - 1) * top_k
        scores, tokens = self._children(jnp.zeros((b, 1), jnp.float32), log_p)
        levels = [(scores, tokens, jnp.full((b, top_k), -1, jnp.int32))]  # and the parent's number among candidates
        beams, beam_tokens = jnp.arange(top_k, dtype=jnp.int32)[None] + jnp.zeros((b, 1), jnp.int32), tokens
        seen = jnp.zeros((b, top_k, n_rows), jnp.bool)
        for i in range(self.shape.depth - 1):
            seen = seen | jax.nn.one_hot(jnp.arange(top_k) + i * top_k, n_rows, dtype=jnp.bool)[None]
            out, view = self._level(beam_tokens, feedback, length, i, seen, view)
            grown, ids = self._children(scores, self._log_p(d.logits(out.normed)))  # [B, K * K]
            levels.append((grown, ids, jnp.repeat(beams, top_k, axis=1)))
            scores, chosen = jax.lax.top_k(grown, top_k)
            source = chosen // top_k
            feedback, seen = _take(out.feedback, source), _take(seen, source)
            beam_tokens, beams = _take(ids, chosen), chosen + (top_k + i * top_k**2)
        return best_nodes(levels, self.shape.budget), replace(state, view=view)

    def _level(
        self, tokens: jax.Array, features: jax.Array, length: jax.Array, i: int, seen: jax.Array, view: View
    ) -> tuple[DraftHidden, View]:
        """The layer over the K parents of level i + 2, all of them at position length + i.

        Args:
          tokens: int32 [B, K].
          features: [B, K, D], what the layer gave where their own parent was its input.
          length: int32 [B].
          i: how many such levels are in the cache.
          seen: bool [B, K, (depth - 1) K], the rows from the length on that belong to them and to their ancestors.
          view: of the draft's cache.
        """
        d, k = self.drafter, self.shape.top_k
        positions = jnp.broadcast_to((length + i)[:, None], tokens.shape)
        visible = tree_visible(seen, length, view.length)
        if d.config.window is not None:
            row = jnp.arange(view.length, dtype=jnp.int32)[None]
            below = row - length[:, None]
            stands = jnp.where(below < 0, row, length[:, None] + below // k)
            visible = visible & ((length + i)[:, None] - stands < d.config.window)[:, None]

        def over(attention: DraftAttention, query: jax.Array, rows: jax.Array) -> jax.Array:
            nonlocal view
            view = view.store(0, rows, length + i * k)
            return attention.over(query, view.keys(0).astype(rows.dtype), visible)

        hidden = d.run(jnp.maximum(tokens, 0), features, positions, over)
        return hidden, view

    def _log_p(self, logits: jax.Array) -> jax.Array:
        """Log-probabilities [B, N, Vd]; -inf for what is no token, and where logits are not a number."""
        logits = self._only_tokens(logits.reshape(-1, logits.shape[-1])).reshape(logits.shape)
        # Never above 0 by rounding: a child would pass its parent.
        log_p = jnp.minimum(jax.nn.log_softmax(logits, axis=-1), 0.0)
        return jnp.where(jnp.isnan(log_p), -jnp.inf, log_p)

    def _children(self, scores: jax.Array, log_p: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Scores and target ids [B, N * K] of the K best children of N nodes; scores [B, N], log_p [B, N, Vd]."""
        best, ids = jax.lax.top_k(log_p, self.shape.top_k)
        total = scores[..., None] + best
        tokens = jnp.where(jnp.isfinite(total), self.drafter.to_target(ids), NO_TOKEN)
        return total.reshape(len(scores), -1), tokens.reshape(len(scores), -1)


def best_nodes(levels: Sequence[tuple[jax.Array, jax.Array, jax.Array]], budget: int) -> Tree:
    """The nodes of the highest scores, in the order in which they were drafted.

    Args:
      levels: of each level the scores, tokens and parents [B, N]; parents are numbered through all levels, -1 is the
        root; no node scores above its parent.
      budget: nodes to keep.
    """
    scores, tokens, parents = (jnp.concatenate(part, axis=1) for part in zip(*levels, strict=True))
    _, kept = jax.lax.top_k(scores, budget)  # of equals the first: parents
    kept = jnp.sort(kept, axis=1)
    above = _take(parents, kept)
    # A parent's new number: the root, and the kept nodes before it.
    number = jnp.where(above < 0, 0, 1 + (kept[:, None] < above[..., None]).sum(axis=-1, dtype=jnp.int32))
    return Tree(_take(tokens, kept), number)


def pack[View: CacheView](view: View, n_layers: int, length: jax.Array, nodes: jax.Array) -> View:
    """Move the rows of nodes int32 [B, N], which ascend along N, to the length (int32 [B]) and the rows behind it."""
    for layer in range(n_layers):
        view = view.store(layer, view.at(layer, length[:, None] + nodes), length)
    return view


def tree_round[View: CacheView](
    target: Target,
    proposer: DraftTree[View],
    state: RowState[ChainState[View], View],
    rows: SamplingRows,
    budget: jax.Array,
    ends: jax.Array,
    *,
    n_tokens: int,
    experts: str = "reference",
) -> tuple[Round, RowState[ChainState[View], View]]:
    """One round of B requests, with a tree: `speculative_round` otherwise.

    Args:
      target: the model.
      proposer: of guesses; its tree's shape is the program's.
      state: both views have `TreeShape.room` rows from the length on.
      rows: settings.
      budget: int32 [B], most tokens to commit; 0: the row idles, and stays as it is.
      ends: int32 [B, E], ids that end the row, padded with NO_TOKEN: nothing after the first of them is committed.
      n_tokens: ids that belong to a token.
      experts: implementation of the target's expert product.
    Returns:
      What was done, the guesses of all nodes, tokens up to depth + 1; and the rows after it.
    """
    depth = proposer.shape.depth
    tree, draft = proposer.grow(state.proposer, state.length)
    ids = jnp.maximum(jnp.concatenate([state.token[:, None], tree.tokens], axis=1), 0)
    ancestors = tree.ancestors(depth)
    hidden, view = target.decode(
        ids,
        state.length,
        state.view,
        taps=proposer.taps,
        experts=experts,
        positions=state.length[:, None] + depths(ancestors),
        visible=tree_visible(ancestors, state.length, state.view.length),
    )
    found, nodes = walk(target.logits(hidden.last), tree, rows, state.length + 1, n_tokens, depth)
    view = pack(view, target.config.n_layers, state.length, nodes)
    taps = {tap: _take(h, nodes) for tap, h in hidden.taps.items()}
    committed = committed_tokens(found, budget, ends)
    proposed = proposer.observe(draft, taps, found.tokens, state.length, committed)
    made = Round(tree.tokens, found.accepted, found.tokens, committed)
    return made, after_round(state, found, committed, view, proposed)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [B, T, ...] at int32 [B, N] of axis 1: [B, N, ...]."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)
