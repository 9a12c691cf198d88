"""What a decoding step reads, multiplies and waits for on each device, and the time that it cannot take less than.

Reading bounds the speed of decoding from below: every weight but those of experts that no token chose, and the cache.
With k drafts a step reads more experts, and the drafter k times; the ratio to a step without drafts is the acceptance
length from which on drafting pays. Assumes that tokens choose experts independently and evenly, where real text shares
more; what a step takes on a machine is measured at warm-up (`engine.adaptive`).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .config import TargetConfig
from .drafter import Borrowed, Drafter
from .loader import Placement
from .memory import Footprint
from .names import parameters
from .plan_gpus import Gpu
from .plan_weights import Plan
from .sharding import Preset, abstract_mesh, n_parts
from .speculative_options import SpeculativeOptions

BATCHES = (1, 4, 16)
DRAWS = 200  # of a batch's routing, for the busiest device

# Collectives of one layer of the target in a decoding step, as compiled (tests count them): under `tp` a sum after
# attention and one after the experts; under `dp-attention` rows are gathered and sums scattered around the experts;
# `dcp` gathers queries, takes the maximum, scatters partial attention, and has the two sums of `tp`.
LAYER_COLLECTIVES: dict[Preset, int] = {"tp": 2, "ep": 2, "dp-attention": 2, "dcp": 5}
# Of one step of a chain: the drafter's embedding and layer.
DRAFT_COLLECTIVES: dict[Preset, int] = {"tp": 3, "ep": 3, "dp-attention": 3, "dcp": 6}
# Of the rest of a step, without drafts and with them: embedding, choice of the tokens at temperature 0, bookkeeping.
OTHER_COLLECTIVES: dict[Preset, tuple[int, int]] = {
    "tp": (4, 10),
    "ep": (4, 10),
    "dp-attention": (31, 47),
    "dcp": (4, 10),
}


@dataclass(frozen=True)
class Step:
    """One decoding step.

    Attributes:
      batch: requests.
      draft_tokens: k of each.
      tokens: that the target runs over, all requests together.
      experts: distinct routed experts of a layer that they are expected to need.
      busiest: of a layer's experts that a device holds, the share that the busiest one is expected to read.
      read: bytes on the busiest device.
      flops: on each device, two for a multiplication and an addition.
      collectives: that devices wait for, one after the other.
    """

    batch: int
    draft_tokens: int
    tokens: int
    experts: float
    busiest: float
    read: int
    flops: float
    collectives: int

    def seconds(self, gpu: Gpu) -> float:
        """The least that the step takes."""
        return gpu.seconds(self.read, self.flops, self.collectives)


@dataclass(frozen=True)
class Roofline:
    """Steps of requests with `cached` tokens each."""

    steps: tuple[Step, ...]
    cached: int

    def plain(self, step: Step) -> Step:
        """The same requests without drafts."""
        return next(s for s in self.steps if s.batch == step.batch and s.draft_tokens == 0)

    def break_even(self, step: Step, gpu: Gpu | None = None) -> float:
        """Acceptance length from which on the step pays on a GPU; None: if reading were all."""
        plain = self.plain(step)
        return step.read / plain.read if gpu is None else step.seconds(gpu) / plain.seconds(gpu)


def distinct_experts(n_experts: int, n_chosen: int, tokens: int) -> float:
    """Expected number of different experts that independent tokens choose: E (1 - (1 - K / E)^tokens)."""
    return n_experts * (1 - (1 - n_chosen / n_experts) ** tokens)


@functools.cache
def busiest_share(n_experts: int, n_chosen: int, tokens: int, groups: int) -> float:
    """Expected share of its own experts that the busiest of `groups` devices needs, each with E / groups whole ones.

    The mean of draws with a fixed seed; with one group it is `distinct_experts` over E.
    """
    if groups == 1:
        return distinct_experts(n_experts, n_chosen, tokens) / n_experts
    rng = np.random.default_rng(0)
    most = 0
    for _ in range(DRAWS):
        chosen = np.zeros(n_experts, bool)
        keys = rng.random((tokens, n_experts), np.float32)
        chosen[np.argpartition(keys, n_chosen, axis=1)[:, :n_chosen]] = True
        most += int(chosen.reshape(groups, -1).sum(1).max())
    return most / DRAWS / (n_experts // groups)


def roofline(
    target: TargetConfig,
    weights: Plan,
    drafter: Drafter | None,
    options: SpeculativeOptions | None,
    placement: Placement,
    *,
    cached: int,
    batches: Sequence[int] = BATCHES,
    draft_counts: Sequence[int] | None = None,
) -> Roofline:
    """Steps without drafts and with them.

    Args:
      target: the model.
      weights: its plan, which says how many devices there are and how they lie.
      drafter: declared.
      options: how many drafts; None: none.
      placement: dtype.
      cached: tokens of each request.
      batches: requests.
      draft_counts: numbers of drafts in a chain, in place of 0 and that of the options.
    """
    counts = draft_counts or ((0,) if options is None else (0, options.draft_tokens))
    found: list[Step] = []
    for batch in batches:
        for k in counts:
            n_passes = 0
            if k and drafter is not None:
                n_passes = k if options is None or draft_counts is not None else options.num_steps
            found.append(_step(target, weights, drafter, placement, batch, k, n_passes, cached))
    return Roofline(tuple(found), cached)


def _step(
    target: TargetConfig,
    weights: Plan,
    drafter: Drafter | None,
    placement: Placement,
    batch: int,
    k: int,
    n_passes: int,
    cached: int,
) -> Step:
    d, moe = weights.device, target.moe
    mesh = abstract_mesh(d.devices, preset=d.preset)
    tokens, rows = batch * (k + 1), -(-batch // d.cache_groups)  # requests whose cache a device reads
    embedding = next(c for c in weights.components if c.name == "embedding")
    # A lookup reads a few rows of the embedding; everything else but the experts is read whole.
    read = d.other_sharded_bytes + d.replicated_bytes
    read -= embedding.sharded_bytes // d.devices + embedding.replicated_bytes
    experts = busiest = 0.0
    if moe is not None:
        experts = distinct_experts(moe.n_experts, moe.n_chosen, tokens)
        busiest = busiest_share(moe.n_experts, moe.n_chosen, tokens, n_parts("experts", mesh))
        read += int(d.expert_bytes * busiest)
    read += rows * cached * d.cache_bytes_per_token
    flops = tokens * _flops_per_token(target, weights, cached) / d.devices
    if n_passes and drafter is not None:
        fusion, each = _draft_bytes(drafter, d.devices, d.preset)
        own = draft_cache_bytes(drafter, placement.dtype, d.devices, d.preset)
        read += fusion + n_passes * (each + rows * cached * own)
        flops += batch * n_passes * 2 * sum(p.get_value().size for p in parameters(drafter).values()) / d.devices
    collectives = 0
    if d.devices > 1:
        collectives = target.n_layers * LAYER_COLLECTIVES[d.preset] + OTHER_COLLECTIVES[d.preset][bool(k)]
        collectives += n_passes * DRAFT_COLLECTIVES[d.preset]
    return Step(batch, k, tokens, experts, busiest, read, flops, collectives)


def draft_cache_bytes(drafter: Drafter, dtype: Any, devices: int, preset: Preset) -> int:
    """Of a token in the drafter's cache, on a device that holds it or a part of it."""
    mesh = abstract_mesh(devices, preset=preset)
    parts = math.prod(n_parts(axis, mesh) for axis in drafter.cache_axes[1:])
    return -(-drafter.config.cache_width * np.dtype(dtype).itemsize // parts)


def _flops_per_token(target: TargetConfig, weights: Plan, cached: int) -> float:
    """Of one token on all devices together: two for each weight that it uses, and latent attention to the cache."""
    embedding = next(c for c in weights.components if c.name == "embedding")
    attention = target.n_layers * target.n_heads * (target.latent_dim + target.kv_lora_rank) * cached
    return 2 * (weights.active_params - embedding.params + attention)


def _draft_bytes(drafter: Drafter, devices: int, preset: Preset) -> tuple[int, int]:
    """On each device: of the fusion layer, read once a round, and of the layer and head (own or borrowed) of a pass."""
    own = parameters(drafter)
    fusion = Footprint.of({path: p for path, p in own.items() if path == ("fc",)}, preset).on_each(devices)
    passed = {path: p for path, p in own.items() if path not in (("fc",), ("embed",))}
    read = Footprint.of(passed, preset).on_each(devices)
    if isinstance(drafter.lm_head, Borrowed):
        head = drafter.lm_head.get_value()
        read += head.size * head.dtype.itemsize // devices
    return fusion, read
