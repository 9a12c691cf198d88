"""The loss of one batch: the unrolled steps of the drafter against the target's own distributions."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kimijax.drafter import Borrowed, Drafter
from kimijax.layers import rms_norm
from kimijax.model import Tables
from kimijax.sharding import n_replicas
from kimijax.unroll import unroll, valid_rows

from .draft_recipe import FitTable
from .losses import Settings, chunks_of, distance, target_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of packed documents, and what the target computed on them."""

    ids: jax.Array  # int32 [B, T]
    mask: jax.Array  # bool [B, T], tokens of an answer
    segments: jax.Array  # int32 [B, T], the tokens' documents; -1: padding
    positions: jax.Array  # int32 [B, T], from 0 in each document
    taps: dict[int, jax.Array]  # [B, T, target width] each
    last: jax.Array  # [B, T, target width], the residual stream before the final norm
    # Whether `last` is what the final norm returned, as some stores of features have it.
    last_is_normed: bool = dataclasses.field(default=False, metadata={"static": True})


class StepSums(NamedTuple):
    """Sums over the rows of each unrolled step, float32 [J]."""

    loss: jax.Array  # over rows whose most likely target token is in the draft vocabulary
    valid: jax.Array  # rows that count
    correct: jax.Array  # of those, whose most likely draft token is the target's
    accepted: jax.Array  # over those, one less the total variation of the draft's and the target's distribution


def ttt_loss(drafter: Drafter, tables: Tables, batch: Batch, fit: FitTable) -> tuple[jax.Array, StepSums]:
    """The loss of a batch, float32, and its counts. Pure; computes in the dtype of the drafter's parameters.

    Step j weighs decay ** j. A row learns where its tokens are of an answer (`valid_rows`) and the target's most likely
    token is in the draft vocabulary; the sum of a step's rows is divided by B * T, or by their number.

    Args:
      drafter: in the dtype to compute in.
      tables: the target's final norm and head, which are not trained.
      batch: of this target.
      fit: steps, decay, loss and normaliser.
    """
    steps = fit.ttt_steps
    hidden = unroll(drafter, drafter.fuse(batch.taps), batch.ids, batch.positions, batch.segments, steps)
    last = batch.last.astype(tables.norm[...].dtype)
    normed = last if batch.last_is_normed else rms_norm(last, tables.norm[...], tables.config.norm_eps)
    normed = jax.lax.stop_gradient(normed)
    ids = drafter.target_ids[...]
    b, t = batch.ids.shape
    n_chunks = chunks_of(-(-b // n_replicas()), t, steps)
    target = jax.lax.stop_gradient(target_rows(tables, normed, ids, n_chunks))
    target_head = tables.lm_head[...][ids] if drafter.config.is_reduced else tables.lm_head[...]

    valid = valid_rows(batch.mask, batch.segments, steps)
    learns = valid & _speaks_about(target.label >= 0, steps)
    rows = jnp.float32(batch.ids.size)
    counts = learns.sum(axis=(1, 2)).astype(jnp.float32) if fit.normaliser == "valid" else jnp.full(steps, rows)
    factor = jnp.float32(fit.decay) ** jnp.arange(steps, dtype=jnp.float32) / jnp.maximum(counts, 1.0)
    weight = jnp.where(learns, factor[:, None, None], 0.0)
    settings = Settings(fit.loss, fit.lk_rate, n_chunks, wants_head=not isinstance(drafter.lm_head, Borrowed))
    head = drafter.lm_head[...]
    hidden = tuple(h.astype(head.dtype) for h in hidden)
    total, sums = distance(settings, hidden, head, normed, target_head, target, weight, valid)
    n_valid = valid.sum(axis=(1, 2)).astype(jnp.float32)
    return total, StepSums(sums.loss, n_valid, sums.correct, sums.accepted)


def _speaks_about(x: jax.Array, n_steps: int) -> jax.Array:
    """What holds at the position that each row speaks about, t + 1 + j in step j: bool [J, B, T] of [B, T]."""
    padded = jnp.pad(x, ((0, 0), (0, n_steps + 1)))
    return jnp.stack([padded[:, 1 + j : 1 + j + x.shape[1]] for j in range(n_steps)])
