"""What serving a model takes before it is loaded: the memory of each device. What steps read: `plan_roofline`."""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from .drafter import Drafter
from .engine.config import EngineConfig
from .errors import ConfigError
from .loader import Placement
from .memory import Footprint, FreeMemory, free_memory
from .names import parameters
from .plan_roofline import draft_cache_bytes
from .plan_weights import Plan, make_plan
from .sharding import Preset
from .speculative_options import SpeculativeOptions


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device; on CPUs of the host, whose memory their devices share.

    Attributes:
      devices: of the group.
      items: name and bytes of what lies there from the start; activations and programs come on top.
      available: None: unknown.
      fixed: bytes of the weights among the items.
      cache_bytes_per_token: of target and drafter, on a device that holds the token or a part of it.
      groups: of devices that hold different tokens.
      cached_tokens: that the pages hold, in all.
      copies: how often the cache of all running requests is held beside the pages.
      engine: the sizes behind it.
      has_draft: whether a drafter is among the items.
    """

    devices: int
    items: tuple[tuple[str, int], ...]
    available: int | None
    fixed: int
    cache_bytes_per_token: int
    groups: int
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
        e, per_token, groups = self.engine, self.cache_bytes_per_token, self.groups
        spare, unit = (self.available or 0) - self.fixed, e.page_size * groups
        out: list[str] = []
        copied = self.copies * e.max_batch * e.context_length
        tokens = (spare // per_token * groups - copied) // unit * unit
        if tokens >= e.context_length * groups:
            out.append(f"--max-total-tokens {tokens} fits, with which requests wait for pages or give way")
        requests = spare // (per_token * e.context_length * (1 + self.copies)) * groups
        if 0 < requests < e.max_batch:
            out.append(f"--max-running-requests {requests} fits")
        context = spare * groups // (per_token * e.max_batch * (1 + self.copies)) // e.page_size * e.page_size
        if 0 < context < e.context_length:
            out.append(f"--context-length {context} fits")
        if not out:
            out.append(f"the weights leave {_gb(max(0, spare))}: use more devices (--tp), or larger ones")
        if self.has_draft:
            out.append("without the draft less is needed")
        return out


def plan_memory(
    directory: str | Path,
    engine: EngineConfig,
    drafter: Drafter | None,
    options: SpeculativeOptions | None,
    placement: Placement,
    devices: int,
    *,
    preset: Preset = "tp",
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
      devices: of the group.
      preset: how they lie.
      here: whether it is this machine that will serve.
      free: bytes that a device can hold.
    Returns:
      The plan, and that of the target's weights alone.
    Raises:
      ConfigError, CheckpointError: as `plan.make_plan`.
    """
    weights = make_plan(
        directory,
        devices=devices,
        preset=preset,
        dtype=str(np.dtype(placement.dtype)),
        unpack_int4=placement.unpack_int4,
    )
    on_host = here and jax.default_backend() == "cpu"
    d = weights.device
    sharded = d.expert_bytes + d.other_sharded_bytes
    target = (sharded * devices if on_host else sharded) + d.replicated_bytes
    items = [("target", target)]
    per_token, of_draft = d.cache_bytes_per_token, 0
    if drafter is not None:
        own = Footprint.of(parameters(drafter), preset)
        items.append(("drafter", own.sharded + own.replicated if on_host else own.on_each(devices)))
        of_draft = draft_cache_bytes(drafter, placement.dtype, devices, preset)
        per_token += of_draft
    fixed = sum(size for _, size in items)
    room = 0 if options is None else options.room
    tokens = engine.pages(room, d.cache_groups) * engine.page_size
    # A host has the parts of all its devices, but of what they all hold one.
    on_each = tokens if on_host else tokens // d.cache_groups
    parts = weights.cache_bytes_per_token // d.cache_bytes_per_token if on_host else 1
    items.append(("cache of the target", on_each * d.cache_bytes_per_token * parts))
    if drafter is not None:
        items.append(("cache of the drafter", on_each * of_draft * parts))
    is_split = d.cache_groups > 1 or d.cache_bytes_per_token < weights.cache_bytes_per_token
    dense = engine.decode_view == "dense" or (engine.decode_view == "auto" and on_host)
    copies = int(dense and not is_split)
    if copies:
        items.append(("copy of it for decoding", engine.max_batch * engine.windows(room)[-1] * per_token))
    available = free(jax.local_devices()[0]) if here else None
    plan = MemoryPlan(
        devices=devices,
        items=tuple(items),
        available=available,
        fixed=fixed,
        cache_bytes_per_token=per_token,
        groups=d.cache_groups,
        cached_tokens=tokens,
        copies=copies,
        engine=engine,
        has_draft=drafter is not None,
    )
    return plan, weights


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB"
