"""What serving a model takes before it is loaded: memory of each device, and bytes that a decoding step reads.

Reading bounds the speed of decoding from below. With k drafts a step reads more experts, and the drafter k times; the
ratio to a step without drafts is the acceptance length from which on drafting pays where reading is all that counts.
What it is on a machine is measured at warm-up (`engine.adaptive`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from .config import TargetConfig
from .drafter import Borrowed, Drafter
from .engine.config import EngineConfig
from .errors import ConfigError
from .loader import Placement
from .memory import Footprint, FreeMemory, free_memory
from .names import parameters
from .plan import Plan, make_plan
from .speculative_options import SpeculativeOptions

BATCHES = (1, 4, 16)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device; on CPUs of the host, whose memory their devices share.

    Attributes:
      devices: tensor-parallel.
      items: name and bytes of what lies there from the start; activations and programs come on top.
      available: None: unknown.
      fixed: bytes of the weights among the items.
      cache_bytes_per_token: of target and drafter.
      cached_tokens: that the pages hold.
      copies: how often the cache of all running requests is held beside the pages.
      engine: the sizes behind it.
      has_draft: whether a drafter is among the items.
    """

    devices: int
    items: tuple[tuple[str, int], ...]
    available: int | None
    fixed: int
    cache_bytes_per_token: int
    cached_tokens: int
    copies: int
    engine: EngineConfig
    has_draft: bool

    @property
    def total(self) -> int:
        return sum(size for _, size in self.items)

    def check(self) -> None:
        """Refuses a plan that does not fit. ConfigError: what is needed, what there is, and what would fit."""
        if self.available is None or self.total <= self.available:
            return
        found = f"{_gb(self.available)} free on each of {self.devices} device{'s' * (self.devices > 1)}"
        parts = ", ".join(f"{name} {_gb(size)}" for name, size in self.items)
        fix = "; ".join(self._reductions()[:3])
        raise ConfigError("memory", found, f"{_gb(self.total)}: {parts}", fix)

    def _reductions(self) -> list[str]:
        """Settings that would fit, the cheapest first."""
        e, per_token, spare = self.engine, self.cache_bytes_per_token, (self.available or 0) - self.fixed
        out: list[str] = []
        copied = self.copies * e.max_batch * e.context_length
        tokens = (spare // per_token - copied) // e.page_size * e.page_size
        if tokens >= e.context_length:
            out.append(f"--max-total-tokens {tokens} fits, with which requests wait for pages or give way")
        requests = spare // (per_token * e.context_length * (1 + self.copies))
        if 0 < requests < e.max_batch:
            out.append(f"--max-running-requests {requests} fits")
        context = spare // (per_token * e.max_batch * (1 + self.copies)) // e.page_size * e.page_size
        if 0 < context < e.context_length:
            out.append(f"--context-length {context} fits")
        if not out:
            out.append(f"the weights leave {_gb(max(0, spare))}: use more devices (--tp), or larger ones")
        if self.has_draft:
            out.append("without the draft less is needed")
        return out


@dataclass(frozen=True)
class Step:
    """One decoding step.

    Attributes:
      batch: requests.
      draft_tokens: k of each.
      tokens: that the target runs over, all requests together.
      experts: distinct routed experts of a layer that they are expected to need.
      read: bytes on each device.
    """

    batch: int
    draft_tokens: int
    tokens: int
    experts: float
    read: int


@dataclass(frozen=True)
class Roofline:
    """What steps read. Assumes that tokens choose experts independently and evenly, and requests of `cached` tokens."""

    steps: tuple[Step, ...]
    cached: int

    def break_even(self, step: Step) -> float:
        """Acceptance length from which on the step pays, if reading were all."""
        plain = next(s for s in self.steps if s.batch == step.batch and s.draft_tokens == 0)
        return step.read / plain.read


def plan_memory(
    directory: str | Path,
    engine: EngineConfig,
    drafter: Drafter | None,
    options: SpeculativeOptions | None,
    placement: Placement,
    devices: int,
    *,
    here: bool = True,
    free: FreeMemory = free_memory,
) -> tuple[MemoryPlan, Plan]:
    """Memory for serving.

    Args:
      directory: the target's checkpoint, or a config alone.
      engine: sizes.
      drafter: declared; None: none.
      options: how it is used.
      placement: dtype, and whether INT4 is unpacked.
      devices: tensor-parallel.
      here: whether it is this machine that will serve.
      free: bytes that a device can hold.
    Returns:
      The plan, and that of the target's weights alone.
    Raises:
      ConfigError, CheckpointError: as `plan.make_plan`.
    """
    weights = make_plan(
        directory, devices=devices, dtype=str(np.dtype(placement.dtype)), unpack_int4=placement.unpack_int4
    )
    on_host = here and jax.default_backend() == "cpu"
    d = weights.device
    sharded = d.expert_bytes + d.other_sharded_bytes
    target = (sharded * devices if on_host else sharded) + d.replicated_bytes
    items = [("target", target)]
    itemsize, per_token = np.dtype(placement.dtype).itemsize, weights.cache_bytes_per_token
    if drafter is not None:
        own = Footprint.of(parameters(drafter))
        items.append(("drafter", own.sharded + own.replicated if on_host else own.on_each(devices)))
        per_token += drafter.config.cache_width * itemsize
    fixed = sum(size for _, size in items)
    room = 0 if options is None else options.room
    tokens = engine.pages(room) * engine.page_size
    items.append(("cache of the target", tokens * weights.cache_bytes_per_token))
    if drafter is not None:
        items.append(("cache of the drafter", tokens * drafter.config.cache_width * itemsize))
    copies = int(engine.decode_view == "dense" or (engine.decode_view == "auto" and on_host))
    if copies:
        items.append(("copy of it for decoding", engine.max_batch * engine.windows(room)[-1] * per_token))
    available = free(jax.local_devices()[0]) if here else None
    plan = MemoryPlan(
        devices, tuple(items), available, fixed, per_token, tokens, copies, engine, has_draft=drafter is not None
    )
    return plan, weights


def distinct_experts(n_experts: int, n_chosen: int, tokens: int) -> float:
    """Expected number of different experts that independent tokens choose: E (1 - (1 - K / E)^tokens)."""
    return n_experts * (1 - (1 - n_chosen / n_experts) ** tokens)


def roofline(
    target: TargetConfig,
    weights: Plan,
    drafter: Drafter | None,
    options: SpeculativeOptions | None,
    placement: Placement,
    *,
    cached: int,
    batches: Sequence[int] = BATCHES,
) -> Roofline:
    """Bytes that steps read on each device, without drafts and with all of them.

    Args:
      target: the model.
      weights: its plan.
      drafter: declared.
      options: how many drafts.
      placement: dtype.
      cached: tokens of each request.
      batches: requests.
    """
    d, itemsize = weights.device, np.dtype(placement.dtype).itemsize
    embedding = next(c for c in weights.components if c.name == "embedding")
    # A lookup reads a few rows of the embedding; everything else but the experts is read whole.
    shared = d.other_sharded_bytes + d.replicated_bytes
    shared -= embedding.sharded_bytes // d.devices + embedding.replicated_bytes
    moe = target.moe
    steps: list[Step] = []
    for batch in batches:
        for k in (0,) if options is None else (0, options.draft_tokens):
            tokens = batch * (k + 1)
            experts = 0.0 if moe is None else distinct_experts(moe.n_experts, moe.n_chosen, tokens)
            read = shared + (0 if moe is None else int(d.expert_bytes * experts / moe.n_experts))
            read += batch * cached * weights.cache_bytes_per_token
            if k and drafter is not None and options is not None:
                own_cache = batch * cached * drafter.config.cache_width * itemsize
                fusion, each = _draft_bytes(drafter, d.devices)
                read += fusion + options.num_steps * (each + own_cache)
            steps.append(Step(batch, k, tokens, experts, read))
    return Roofline(tuple(steps), cached)


def _draft_bytes(drafter: Drafter, devices: int) -> tuple[int, int]:
    """On each device: of the fusion layer, read once a round, and of the layer and head (own or borrowed) of a pass."""
    own = parameters(drafter)
    fusion = Footprint.of({path: p for path, p in own.items() if path == ("fc",)}).on_each(devices)
    passed = {path: p for path, p in own.items() if path not in (("fc",), ("embed",))}
    read = Footprint.of(passed).on_each(devices)
    if isinstance(drafter.lm_head, Borrowed):
        head = drafter.lm_head.get_value()
        read += head.size * head.dtype.itemsize // devices
    return fusion, read


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB"
