"""Kimi-K2.5's sizes, and those of its parts on eight devices: what tests and benchmarks run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertShapes:
    """One device's share of a layer's routed experts."""

    n_experts: int  # E on this device
    hidden: int  # D
    width: int  # F on this device
    n_chosen: int = 8  # K
    partial: bool = False  # other devices hold the other experts


KIMI = ExpertShapes(n_experts=384, hidden=7168, width=2048)
KIMI_TP8 = ExpertShapes(n_experts=384, hidden=7168, width=256)  # each expert's width split over eight devices
KIMI_EP8 = ExpertShapes(n_experts=48, hidden=7168, width=2048, partial=True)  # whole experts split over eight
DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64)
PREFILL_TOKENS = (512, 2048, 16384)
