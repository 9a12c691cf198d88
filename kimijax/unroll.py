"""The training-time test of EAGLE-3 (arXiv:2503.01840, section 3.2): a drafter's steps on its own outputs, as served.

Row t holds the target's features of position t. In step j it takes token x[t + 1 + j] at rotary position t + j, fed
with its own output of step j - 1, and predicts x[t + 2 + j]. That is round by round what a server computes that
stands at position t and accepts every token that it drafts: training rows and served rows are the same numbers.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .chained_attention import by_head, chained
from .draft_attention import DraftAttention
from .drafter import Drafter


def valid_rows(mask: jax.Array, segments: jax.Array, n_steps: int) -> jax.Array:
    """Which rows learn in each step: those whose tokens t + 1 ... t + 2 + j are all of an answer, and in t's document.

    The last token of a prompt is such a row: there the server drafts for the first time.

    Args:
      mask: bool [B, T], tokens of an answer.
      segments: int32 [B, T], the tokens' documents; negative: padding.
      n_steps: of the unrolling.
    Returns:
      bool [n_steps, B, T].
    """
    out: list[jax.Array] = []
    valid = (segments >= 0) & _same(mask, segments, 1)
    for j in range(n_steps):
        valid = valid & _same(mask, segments, 2 + j)
        out.append(valid)
    return jnp.stack(out)


def _same(mask: jax.Array, segments: jax.Array, by: int) -> jax.Array:
    """Whether the token `by` positions after each row is of an answer, and in the row's document."""
    return ahead(mask, by, False) & (ahead(segments, by, -1) == segments)


def ahead(x: jax.Array, by: int, fill: float) -> jax.Array:
    """x [B, T, ...] moved to the left: what stands `by` positions after each, `fill` after the end."""
    by = min(by, x.shape[1])
    return jnp.concatenate([x[:, by:], jnp.full_like(x[:, :by], fill)], axis=1)


def unroll(
    drafter: Drafter,
    features: jax.Array,
    ids: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    n_steps: int,
    *,
    positions_of_step: Callable[[int], jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """The hidden states of every step, for the head.

    Args:
      features: [B, T, D], `drafter.fuse(taps)`.
      ids: int32 [B, T], the documents' own tokens, not shifted.
      positions: int32 [B, T], rising by one from 0 in each document.
      segments: int32 [B, T], the documents; negative: padding.
      n_steps: at least 1.
      positions_of_step: rotary positions int32 [B, T] of a step, in place of positions + j.
    Returns:
      `DraftHidden.normed` [B, T, D] of each step.
    """
    window = drafter.config.window
    first: list[jax.Array] = []
    own_keys: list[jax.Array] = []
    own_values: list[jax.Array] = []

    def attend(attention: DraftAttention, query: jax.Array, rows: jax.Array) -> jax.Array:
        keys, values = map(by_head, attention.expand(rows))
        if not first:
            first.extend((keys, values))
        else:
            own_keys.append(keys)
            own_values.append(values)
        return chained(
            query, first[0], first[1], tuple(own_keys), tuple(own_values), positions, segments, attention.scale, window
        )

    out: list[jax.Array] = []
    tokens = drafter.token_inputs(ids)
    for j in range(n_steps):
        at = positions + j if positions_of_step is None else positions_of_step(j)
        with jax.named_scope(f"step_{j}"):
            # The barrier keeps the sum of the steps' gradients from being made in one loop over shifted arrays.
            moved = tuple(ahead(jax.lax.optimization_barrier(x), 1 + j, 0) for x in tokens)
            hidden = drafter.run_on(moved, features, at, attend)
        features = hidden.feedback
        out.append(hidden.normed)
    return tuple(out)
