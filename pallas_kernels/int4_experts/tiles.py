"""Which tile sizes the kernels run with, by the number of rows, the widths and the chip: one place for all of them.

Chosen from compiled code (instructions, registers, shared memory) and from the number of programs a chip needs to be
busy; `tests/kernels` holds them to the limits of each chip.
"""

from dataclasses import dataclass
from typing import Literal

import jax

from .layout import block_width

DIRECT_ROWS = 64  # (token, slot) rows up to which each row is a work item of its own
WAVES = 1.0  # programs per multiprocessor that a split aims at, no fewer: more partial sums cost more than they bring
# Where whole experts are split, a device is taken to have one in so many rows: tile sizes only depend on it.
OWN_SHARE = 4


@dataclass(frozen=True)
class Chip:
    """What the tile sizes depend on."""

    multiprocessors: int
    family: Literal["datacenter", "workstation"]  # 227 kB of shared memory a program and wgmma, or 99 kB and mma


# By a part of JAX's `device_kind`.
CHIPS = {
    "H100": Chip(132, "datacenter"),
    "H200": Chip(132, "datacenter"),
    "H20": Chip(78, "datacenter"),
    "RTX PRO 6000": Chip(188, "workstation"),
}


@dataclass(frozen=True)
class Tiles:
    """One kernel's sizes.

    bm: rows of x (tokens) in a program, the short side of the tensor core's product.
    bn: rows of each weight matrix in a program (the kernel for gate and up has two matrices).
    split: programs among which the inputs K (gate and up) or a token's slots (down, direct) are divided.
    scale: where the group's scale goes. "sum": on the float32 sum of a group, with the offset of the nibbles taken
      off by a product of its own: fewest instructions for few rows. "weight": on the bf16 weight, before the product.
    """

    bm: int
    bn: int
    split: int
    scale: Literal["sum", "weight"]
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Plan:
    """Tiles of both kernels, and whether each (token, slot) row is its own work item."""

    direct: bool
    gate_up: Tiles
    down: Tiles


# (bn, warps, stages) of gate and up, and of down, by the family and bm, for the longest K. Blocks of few rows are bound
# by memory: many stages. At 64 rows on a datacenter chip two programs share a multiprocessor, so that one prepares
# weights while the other multiplies. A workstation chip has the same registers and no operand in shared memory is
# multiplied from there: more rows are fewer weights.
_SIZES = {
    ("datacenter", 8): ((64, 4, 4), (128, 4, 4)),
    ("datacenter", 16): ((64, 4, 4), (128, 4, 4)),
    ("datacenter", 32): ((64, 4, 3), (128, 4, 3)),
    ("datacenter", 64): ((64, 4, 2), (128, 4, 2)),
    ("workstation", 8): ((64, 4, 3), (128, 4, 3)),
    ("workstation", 16): ((64, 4, 3), (128, 4, 3)),
    ("workstation", 32): ((64, 4, 2), (128, 4, 3)),
    ("workstation", 64): ((32, 4, 2), (64, 4, 3)),
}


def chip_of(kind: str) -> Chip:
    """The chip of a `device_kind`, such as "NVIDIA H200".

    Raises NotImplementedError for one that is not in `CHIPS`.
    """
    for name in sorted(CHIPS, key=len, reverse=True):
        if name in kind:
            return CHIPS[name]
    raise NotImplementedError(f"tile sizes of int4_experts: found the device {kind!r}, known are {', '.join(CHIPS)}")


def current_chip() -> Chip:
    """The chip that is traced for: the mesh's abstract device where there is one, else JAX's first device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return chip_of((device or jax.devices()[0]).device_kind)


def block_rows(n_rows: int, n_experts: int, partial: bool = False) -> int | None:
    """Rows of one expert that a work item has at most, for `route.work_list`; None where no work list is needed.

    Args:
      n_rows: T * K.
      n_experts: E, the experts of this device.
      partial: other devices have others, and so most of the rows.
    """
    if n_rows <= DIRECT_ROWS:
        return None
    mean = n_rows / n_experts / (OWN_SHARE if partial else 1)
    return next((bm for bm, most in ((8, 2), (16, 8), (32, 24)) if mean <= most), 64)


def plan(n_rows: int, n_chosen: int, hidden: int, n_experts: int, width: int, partial: bool, chip: Chip) -> Plan:
    """Tiles for T * K `n_rows`, K `n_chosen`, D `hidden`, and E `n_experts` of width F `width` on this device."""
    bm = block_rows(n_rows, n_experts, partial)
    (up_bn, up_warps, up_stages), (bn, warps, stages) = _SIZES[chip.family, bm or 8]
    split = slots = 1
    if bm is None:
        live = max(1, n_rows // OWN_SHARE) if partial else n_rows
        split = _split(live * (width // up_bn), hidden // block_width(hidden), chip)
        slots = _split(n_rows // n_chosen * (hidden // bn), n_chosen, chip)
        # The expert's number is itself fetched within the loop, which takes every second stage.
        stages = stages if partial else 2 * stages - 1
    scale: Literal["sum", "weight"] = "sum" if (bm or 8) <= 16 else "weight"
    return Plan(
        direct=bm is None,
        gate_up=Tiles(bm or 8, up_bn, split, scale, up_warps, up_stages),
        down=Tiles(bm or 8, bn, slots, scale, warps, stages),
    )


def _split(programs: int, most: int, chip: Chip) -> int:
    """The smallest divisor of `most` that gives every multiprocessor work."""
    wanted = WAVES * chip.multiprocessors / programs
    return next(n for n in range(1, most + 1) if most % n == 0 and (n >= wanted or n == most))
