"""What is static of one call, and how its work is cut into programs.

The cut is decided from shapes alone, never from the rows that are live.

Split s of S takes the blocks s, s + S, s + 2 S, ... of a row, so that every split has its share whatever the row's
length is. A plan made for a long window therefore keeps all multiprocessors busy on short rows too, and the order in
which a row's numbers are added does not depend on what stands beside it in the batch.
"""

from dataclasses import dataclass

import jax

MAX_SPLITS = 128  # the merging kernel holds one column of all splits in registers
LEAST_BLOCKS = 2  # of a split over a full window: what a split writes for the merge is then less than what it reads


@dataclass(frozen=True)
class Plan:
    """One call's tile and grid.

    Args:
      rows: (token, head) rows of one program, a power of two from 16.
      block: cached rows of one step, a power of two from 16.
      splits: programs that share one row's window, 1 to MAX_SPLITS; with more than one a second kernel merges.
      num_warps: of the attending kernel.
      num_stages: of its pipeline.
    """

    rows: int
    block: int
    splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name, least in (("rows", 16), ("block", 16), ("num_warps", 1), ("num_stages", 1)):
            value = getattr(self, name)
            if value < least or (value & (value - 1) and name != "num_stages"):
                raise ValueError(f"mla_decode plan: {name}={value}, expected a power of two from {least}")
        if not 1 <= self.splits <= MAX_SPLITS:
            raise ValueError(f"mla_decode plan: splits={self.splits}, expected 1 to {MAX_SPLITS}")


@dataclass(frozen=True)
class Sizes:
    """What is static of one call."""

    tokens: int  # T
    heads: int  # N
    rank: int  # R
    rope: int
    table: int  # n
    part: int  # positions of each page that the device has
    page: int  # positions of a page
    scale: float
    is_tree: bool
    plan: Plan

    @property
    def rows(self) -> int:
        return self.tokens * self.heads


@dataclass(frozen=True)
class Tile:
    """What one program works on, and with."""

    rows: int
    block: int
    num_warps: int
    num_stages: int
    programs: int  # that a multiprocessor has room for


@dataclass(frozen=True)
class Chip:
    """What of a GPU the plan depends on."""

    kind: str  # how its device kind begins
    processors: int  # streaming multiprocessors
    shared_memory: int  # bytes a program can have
    tiles: tuple[Tile, ...]  # by rows, ascending


# For R = 512 and rope = 64, a row of queries takes 1152 bytes of shared memory, and so does each row of the two blocks
# that are there at a time. The page of a block is loaded before the block is, and the compiler leaves as many stages
# between the two loads as behind them: it takes five to have one block under way while another is multiplied. With 64
# rows the products are asynchronous, and two stages have the same effect. None of the tiles spills.
_SMALL = (Tile(16, 32, 4, 5, 1), Tile(32, 16, 8, 5, 1))
H200 = Chip("NVIDIA H200", 132, 232_448, (Tile(16, 32, 4, 5, 2), Tile(32, 64, 8, 5, 1), Tile(64, 32, 8, 2, 1)))
RTX_PRO_6000 = Chip("NVIDIA RTX PRO 6000", 188, 101_376, _SMALL)
CHIPS = (H200, RTX_PRO_6000)
# For a GPU that is not listed, and for interpret mode: tiles that fit every GPU with 99 KiB of shared memory.
ANY_CHIP = Chip("any", 132, 101_376, _SMALL)


def chip_here() -> Chip:
    """The listed chip that is being compiled for: that of the mesh which is set, else of the first device."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    kind = jax.devices()[0].device_kind if device is None else device.device_kind
    return next((chip for chip in CHIPS if kind.startswith(chip.kind)), ANY_CHIP)


def plan_for(batch: int, rows: int, table: int, part: int, chip: Chip) -> Plan:
    """The plan of a bucket.

    Args:
      batch: B.
      rows: T * N, (token, head) rows of a batch row.
      table: n, pages of a table row.
      part: positions of a page that a device has.
      chip: compiled for.
    """
    # 64 rows leave no registers for a page for each cached row.
    tiles = [tile for tile in chip.tiles if tile.rows < 64 or part % tile.block == 0]
    tile = next((tile for tile in tiles if tile.rows >= rows), tiles[-1])
    wanted = chip.processors * tile.programs // (batch * -(-rows // tile.rows))
    most = table * part // (tile.block * LEAST_BLOCKS)
    splits = max(1, min(wanted, most, MAX_SPLITS))
    return Plan(tile.rows, tile.block, splits, tile.num_warps, tile.num_stages)
