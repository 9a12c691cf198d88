"""Routing: from a router's logits to the chosen experts, their weights, and the list of work for the experts' kernels.

Implementations by name, of `route` and of `work_list`:
  reference   plain jax.numpy, for any number of tokens.
  pallas      one kernel for Pallas' Triton backend, on CUDA. The work list is made in the same kernel for up to
              `LISTED_ROWS` (token, slot) rows; beyond, by the reference, which sorts.
  interpret   the same kernels run by Pallas' interpreter, on any platform.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from . import triton
from .reference import Routed as Routed
from .reference import Rule, route_reference, work_list_reference
from .reference import WorkList as WorkList
from .reference import n_items as n_items
from .reference import router_logits as router_logits

IMPLEMENTATIONS = ("reference", "pallas", "interpret")
LISTED_ROWS = 512  # rows that one program lists by comparing each with each


def route(
    logits: jax.Array,
    bias: jax.Array | None,
    *,
    n_chosen: int,
    scoring: Literal["sigmoid", "softmax"],
    n_groups: int = 1,
    n_groups_kept: int = 1,
    renormalise: bool,
    scale: float,
    block: int | None = None,
    implementation: str,
) -> Routed:
    """Choose K of E experts for each token (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    Scores, sigmoid or softmax of the logits, plus `bias` pick the experts (after keeping the `n_groups_kept` groups
    whose two best biased scores sum highest); the scores without bias weigh them. Ties go to the lower index.

    Args:
      logits: float32 [T, E], or [S, T, E] to be summed over S first (`router_logits`).
      bias: float32 [E], or None.
      n_chosen: K.
      scoring: "sigmoid" or "softmax".
      n_groups: runs of experts of equal length; 1: no groups.
      n_groups_kept: groups that a token may choose from.
      renormalise: the weights of a token are divided by their sum, plus 1e-20.
      scale: what the weights are multiplied by at last.
      block: rows of a work item (`int4_experts.block_rows`); None: no work list is wanted.
      implementation: a name of `IMPLEMENTATIONS`.
    Returns:
      `Routed`; its `work` is None where `block` is.
    Raises:
      NotImplementedError: no such implementation.
      ValueError: an operand's shape or dtype, or numbers that do not fit E.
    """
    _check_name("route", implementation)
    (*_, t, e), f32 = logits.shape, jnp.float32
    if (
        logits.dtype != f32
        or logits.ndim not in (2, 3)
        or (bias is not None and (bias.dtype, bias.shape) != (f32, (e,)))
    ):
        found = f"{logits.dtype} and {'none' if bias is None else f'{bias.dtype} {list(bias.shape)}'}"
        raise ValueError(f"logits and bias: found {found}, expected float32 [T, {e}] (or [S, T, {e}]) and [{e}]")
    if scoring not in ("sigmoid", "softmax"):
        raise ValueError(f"scoring: found {scoring!r}, expected 'sigmoid' or 'softmax'")
    if not 0 < n_chosen <= e or e % n_groups or not 0 < n_groups_kept <= n_groups:
        found = f"{n_chosen} of {e} experts in {n_groups_kept} of {n_groups} groups"
        raise ValueError(f"found {found}, expected that many experts, and groups of equal length")
    if n_groups > 1 and not (e // n_groups >= 2 and n_chosen <= n_groups_kept * (e // n_groups)):
        raise ValueError(f"found {n_groups_kept} groups of {e // n_groups} experts, expected {n_chosen} and 2 a group")
    rule = Rule(n_chosen, scoring, n_groups, n_groups_kept, renormalise, scale)
    if implementation == "reference":
        routed = route_reference(logits, bias, rule)
        listed = False
    else:
        listed = block is not None and t * n_chosen <= LISTED_ROWS
        routed = triton.route(logits, bias, rule, block if listed else None, implementation == "interpret")
    if block is None or listed:
        return routed
    return routed._replace(work=work_list_reference(routed.chosen, e, block))


def work_list(chosen: jax.Array, n_experts: int, block: int, *, implementation: str) -> WorkList:
    """The list of work alone, of experts chosen before.

    Args:
      chosen: int32 [T, K]; a negative one is another device's, and its row is in no item.
      n_experts: E, of this device.
      block: rows of a work item.
      implementation: a name of `IMPLEMENTATIONS`.
    """
    _check_name("work_list", implementation)
    if implementation == "reference" or chosen.size > LISTED_ROWS:
        return work_list_reference(chosen, n_experts, block)
    return triton.work_list(chosen, n_experts, block, implementation == "interpret")


def _check_name(op: str, implementation: str) -> None:
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise NotImplementedError(f"{op} implementation {implementation!r}: this build has {names}")


__all__ = ["IMPLEMENTATIONS", "Routed", "WorkList", "n_items", "route", "router_logits", "work_list"]
