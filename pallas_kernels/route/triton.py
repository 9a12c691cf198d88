"""Routing in Pallas for its Triton backend: one kernel.

The E experts of a token lie in a tile of the next power of two, filled up with -inf. The best is found K times, each
time by its lowest index, and taken out. Without a work list a program has one token, in one warp: no reduction leaves
it. With one, a program has all tokens, some at a time: it writes the choice, waits for its threads, and ranks the rows
by comparing each with each, which sorts them without a sort; counts per expert and their running sums are the items.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from .reference import TINY, Routed, Rule, WorkList, n_items

type Ref = Any  # a reference within a kernel: JAX's own type for it is not public

TOKENS = 16  # whose experts a program with a work list chooses at a time
CHUNK = 16  # rows that all rows are compared with at a time
LIST_WARPS = 16


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _best(choice: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index of the greatest of each row of [BT, EP], int32 [BT], and where it stands, bool [BT, EP]."""
    index = jnp.argmax(choice, axis=1).astype(jnp.int32)
    return index, columns == index[:, None]


def _keep_groups(choice: jax.Array, columns: jax.Array, rule: Rule, size: int) -> jax.Array:
    """`choice` [BT, EP] with -inf outside the kept groups of `size` experts."""
    totals, inside = [], []
    for g in range(rule.n_groups):
        inside.append((columns >= g * size) & (columns < (g + 1) * size))
        group = jnp.where(inside[g], choice, -jnp.inf)
        _, first = _best(group, columns)
        totals.append(group.max(axis=1) + jnp.where(first, -jnp.inf, group).max(axis=1))
    kept = jnp.zeros(choice.shape, jnp.bool_)
    for g, total in enumerate(totals):
        ahead = jnp.zeros(total.shape, jnp.int32)
        for other_g, other in enumerate(totals):
            if other_g != g:
                ahead += ((other > total) | ((other == total) & (other_g < g))).astype(jnp.int32)
        kept = kept | (inside[g] & (ahead < rule.n_groups_kept)[:, None])
    return jnp.where(kept, choice, -jnp.inf)


def _choose(
    row: jax.Array,
    logits_ref: Ref,
    bias_ref: Ref | None,
    out: tuple[Ref, ...],
    *,
    rule: Rule,
    interpret: bool,
) -> None:
    """Write choice, weights and scores, `out`, of the tokens `row` [BT]."""
    chosen_ref, weights_ref, scores_ref = out
    n_parts, n_tokens, n_experts = logits_ref.shape
    column = jnp.arange(_power_of_two(n_experts), dtype=jnp.int32)
    columns = jnp.broadcast_to(column[None, :], (row.size, column.size))
    exists, valid = columns < n_experts, row < n_tokens
    mask = exists & valid[:, None]
    at = [logits_ref.at[part, row[:, None], column[None, :]] for part in range(n_parts)]
    logits = functools.reduce(jnp.add, [plt.load(part, mask=mask, other=0.0) for part in at])
    if rule.scoring == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    else:
        logits = jnp.where(exists, logits, -jnp.inf)
        powers = jnp.exp(logits - logits.max(axis=1)[:, None])
        scores = powers / powers.sum(axis=1)[:, None]
    plt.store(scores_ref.at[row[:, None], column[None, :]], scores, mask=mask)
    choice = scores
    if bias_ref is not None:
        choice = choice + plt.load(bias_ref.at[column], mask=column < n_experts, other=0.0)[None, :]
    choice = jnp.where(exists, choice, -jnp.inf)
    if rule.n_groups > 1:
        choice = _keep_groups(choice, columns, rule, n_experts // rule.n_groups)
    best = []
    for _ in range(rule.n_chosen):
        index, here = _best(choice, columns)
        best.append(jnp.minimum(index, n_experts - 1))
        choice = jnp.where(here, -jnp.inf, choice)
    if not interpret:
        plt.debug_barrier()  # the scores are read back by whichever thread has the token's row of `best`
    weights = [plt.load(scores_ref.at[row, index], mask=valid, other=0.0) for index in best]
    total = functools.reduce(jnp.add, weights) + jnp.float32(TINY)
    for k, (index, weight) in enumerate(zip(best, weights, strict=True)):
        weight = (weight / total if rule.renormalise else weight) * jnp.float32(rule.scale)
        plt.store(chosen_ref.at[row * rule.n_chosen + k], index, mask=valid)
        plt.store(weights_ref.at[row * rule.n_chosen + k], weight, mask=valid)


def _route_kernel(*refs: Ref, rule: Rule, has_bias: bool, block: int | None, interpret: bool) -> None:
    """Refs: logits [S, T, E], bias [E] if there is one; out: chosen [T * K], weights [T * K], scores [T, E], and with a
    `block` order [T * K] and items [3, n_items]. Grid (T) without a block, else one program."""
    logits_ref, *rest = refs
    bias_ref = rest.pop(0) if has_bias else None
    *out, last = rest
    if block is None:
        row = pl.program_id(0) + jnp.arange(1, dtype=jnp.int32)
        _choose(row, logits_ref, bias_ref, (*out, last), rule=rule, interpret=interpret)
        return
    *out, order_ref = out
    _, n_tokens, n_experts = logits_ref.shape

    def step(i: jax.Array, _: None) -> None:
        row = i * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)
        _choose(row, logits_ref, bias_ref, tuple(out), rule=rule, interpret=interpret)

    lax.fori_loop(0, -(-n_tokens // TOKENS), step, None)
    if not interpret:
        plt.debug_barrier()
    _list_rows(out[0], order_ref, last, n_rows=n_tokens * rule.n_chosen, n_experts=n_experts, block=block)


def _list_rows(chosen_ref: Ref, order_ref: Ref, items_ref: Ref, *, n_rows: int, n_experts: int, block: int) -> None:
    """Write the list of the rows `chosen_ref` [R]: order [R] and items [3, n_items]."""
    row = jnp.arange(max(CHUNK, _power_of_two(n_rows)), dtype=jnp.int32)
    expert = jnp.arange(_power_of_two(n_experts), dtype=jnp.int32)

    def keys(rows: jax.Array) -> jax.Array:
        """The experts of rows; n_experts for a row without one here, and more for what is no row: they stand last."""
        e = plt.load(chosen_ref.at[jnp.minimum(rows, n_rows - 1)])
        return jnp.where(rows >= n_rows, n_experts + 1, jnp.where(e < 0, n_experts, e))

    mine = keys(row)

    def compare(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rank, count = carry
        others = i * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        theirs = keys(others)
        less = theirs[None, :] < mine[:, None]
        same = (theirs[None, :] == mine[:, None]) & (others[None, :] < row[:, None])
        rank += (less | same).astype(jnp.int32).sum(axis=1)
        return rank, count + (theirs[:, None] == expert[None, :]).astype(jnp.int32).sum(axis=0)

    zeros = jnp.zeros(row.shape, jnp.int32), jnp.zeros(expert.shape, jnp.int32)
    rank, count = lax.fori_loop(0, row.size // CHUNK, compare, zeros)
    plt.store(order_ref.at[rank], row, mask=row < n_rows)
    count = jnp.where(expert < n_experts, count, 0)
    blocks = lax.div(count + (block - 1), jnp.full_like(count, block))
    end, item = jnp.cumsum(count), jnp.cumsum(blocks) - blocks
    static = n_items(n_rows, n_experts, block)

    def write(i: jax.Array, _: None) -> None:
        start = end - count + i * block
        # The interpreter writes back what a masked place held: it must not be the place of another expert's item.
        place = jnp.where(i < blocks, item + i, static)
        for at, value in enumerate((expert, start, jnp.minimum(start + block, end))):
            plt.store(items_ref.at[at, place], value, mask=i < blocks)

    lax.fori_loop(0, blocks.max(), write, None)
    slot = jnp.arange(_power_of_two(static), dtype=jnp.int32)
    for at in range(3):
        plt.store(items_ref.at[at, slot], jnp.zeros_like(slot), mask=(slot >= blocks.sum()) & (slot < static))


def _call(
    kernel: Callable[..., None],
    grid: tuple[int],
    out: list[jax.ShapeDtypeStruct],
    warps: int,
    interpret: bool,
    name: str,
) -> Callable[..., list[jax.Array]]:
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return lambda *operands: pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[anywhere] * len(operands),
        out_specs=[anywhere] * len(out),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*operands)


def _list_shapes(n_rows: int, n_experts: int, block: int) -> list[jax.ShapeDtypeStruct]:
    items = (3, n_items(n_rows, n_experts, block))
    return [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((n_rows,), items)]


def route(logits: jax.Array, bias: jax.Array | None, rule: Rule, block: int | None, interpret: bool) -> Routed:
    """See `route` of the package; with a work list where there is a `block`."""
    logits = logits.reshape(-1, *logits.shape[-2:])
    _, n_tokens, n_experts = logits.shape
    n_rows = n_tokens * rule.n_chosen
    out = [
        jax.ShapeDtypeStruct((n_rows,), jnp.int32),
        jax.ShapeDtypeStruct((n_rows,), jnp.float32),
        jax.ShapeDtypeStruct((n_tokens, n_experts), jnp.float32),
        *([] if block is None else _list_shapes(n_rows, n_experts, block)),
    ]
    kernel = functools.partial(_route_kernel, rule=rule, has_bias=bias is not None, block=block, interpret=interpret)
    grid, warps = ((n_tokens,), 1) if block is None else ((1,), LIST_WARPS)
    operands = (logits,) if bias is None else (logits, bias)
    chosen, weights, scores, *lists = _call(kernel, grid, out, warps, interpret, "route")(*operands)
    shape = (n_tokens, rule.n_chosen)
    return Routed(chosen.reshape(shape), weights.reshape(shape), scores, WorkList(*lists) if lists else None)


def work_list(chosen: jax.Array, n_experts: int, block: int, interpret: bool) -> WorkList:
    """See `work_list` of the package."""
    kernel = functools.partial(_list_rows, n_rows=chosen.size, n_experts=n_experts, block=block)
    out = _list_shapes(chosen.size, n_experts, block)
    return WorkList(*_call(kernel, (1,), out, LIST_WARPS, interpret, "work_list")(chosen.reshape(-1)))
