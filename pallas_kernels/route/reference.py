"""jax.numpy implementations of routing and of the work list."""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

TINY = 1e-20  # added to the sum that weights are divided by
FEW_TOKENS = 8  # up to which the router's product is made in parts
MOST_PARTS, PART = 16, 128  # parts at most, and inputs that each has a multiple of


class Rule(NamedTuple):
    """How experts are chosen: see `route`."""

    n_chosen: int
    scoring: Literal["sigmoid", "softmax"]
    n_groups: int
    n_groups_kept: int
    renormalise: bool
    scale: float


class WorkList(NamedTuple):
    """(token, slot) rows sorted by expert, and cut into items of at most `block` rows of one expert."""

    order: jax.Array  # int32 [R]: which row stands at a position; rows without an expert here stand last
    items: jax.Array  # int32 [3, n_items]: expert, first position, end; items that do not exist are 0, 0, 0, and last


class Routed(NamedTuple):
    """The choice for T tokens."""

    chosen: jax.Array  # int32 [T, K], best first
    weights: jax.Array  # float32 [T, K]
    scores: jax.Array  # float32 [T, E], without bias
    work: WorkList | None


def router_logits(x: jax.Array, router: jax.Array) -> jax.Array:
    """x times the router's weights transposed, in float32, for `route`.

    For few tokens the product is made in parts of the inputs, which `route` adds up: XLA would split the inputs of so
    small a product itself, and add up the parts in a kernel of its own.

    Args:
      x: float [T, D].
      router: float [E, D].
    Returns:
      float32 [S, T, E], to be summed over S parts, or [T, E].
    """
    x, router = x.astype(jnp.float32), router.astype(jnp.float32)
    (t, d), (e, _), highest = x.shape, router.shape, jax.lax.Precision.HIGHEST
    parts = next(n for n in range(MOST_PARTS, 0, -1) if d % (n * PART) == 0 or n == 1)
    if t > FEW_TOKENS or parts == 1:
        return jnp.matmul(x, router.T, precision=highest)
    x, router = x.reshape(t, parts, -1), router.reshape(e, parts, -1)
    return jnp.einsum("tsd,esd->ste", x, router, precision=highest)


def whole(logits: jax.Array) -> jax.Array:
    """[S, T, E] or [T, E] to [T, E], the parts added up in their order."""
    return logits if logits.ndim == 2 else functools.reduce(jnp.add, list(logits))


def n_items(n_rows: int, n_experts: int, block: int) -> int:
    """Items that are enough for any routing: each expert that has rows wastes less than one."""
    return min(n_experts, n_rows) + n_rows // block


def route_reference(logits: jax.Array, bias: jax.Array | None, rule: Rule) -> Routed:
    """See `route`; without a work list."""
    logits = whole(logits)
    scores = jax.nn.sigmoid(logits) if rule.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    choice = scores if bias is None else scores + bias[None]
    if rule.n_groups > 1:
        grouped = choice.reshape(choice.shape[0], rule.n_groups, -1)
        group_score = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
        _, kept = jax.lax.top_k(group_score, rule.n_groups_kept)
        mask = jax.nn.one_hot(kept, rule.n_groups, dtype=jnp.bool_).any(axis=-2)
        choice = jnp.where(mask[..., None], grouped, -jnp.inf).reshape(choice.shape)
    _, chosen = jax.lax.top_k(choice, rule.n_chosen)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if rule.renormalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + jnp.float32(TINY))
    return Routed(chosen.astype(jnp.int32), weights * jnp.float32(rule.scale), scores, None)


def work_list_reference(chosen: jax.Array, n_experts: int, block: int) -> WorkList:
    """See `work_list`."""
    flat = chosen.reshape(-1)
    keys = jnp.where(flat < 0, n_experts, flat)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    # compare_all: the default of searchsorted is a loop, which on a GPU is a dozen kernels
    edges = jnp.searchsorted(keys[order], jnp.arange(n_experts + 1, dtype=jnp.int32), method="compare_all")
    first, end = edges[:-1].astype(jnp.int32), edges[1:].astype(jnp.int32)
    blocks = -(-(end - first) // block)
    last = jnp.cumsum(blocks, dtype=jnp.int32)
    item = jnp.arange(n_items(flat.size, n_experts, block), dtype=jnp.int32)
    expert = jnp.searchsorted(last, item, side="right", method="compare_all").astype(jnp.int32)
    exists, expert = expert < n_experts, jnp.minimum(expert, n_experts - 1)
    start = first[expert] + (item - last[expert] + blocks[expert]) * block
    items = jnp.stack([expert, start, jnp.minimum(start + block, end[expert])])
    return WorkList(order, jnp.where(exists[None], items, 0))
