"""Reads tensors by byte range straight into sharded device arrays.

For every distinct shard of a parameter that this process holds, a buffer is made; reader threads fill it by row blocks;
each buffer then becomes the shard on its devices. Several parameters are under way at once: while one is on its
way to its devices the next ones are read, and a small one keeps no reader waiting. `in_flight_bytes` bounds what their
buffers take. They are aligned so that JAX's CPU devices adopt them without a copy: nothing may write to one afterwards.

Rows that no local shard needs are not read, and rows that several local shards need, or cut into columns, are read once
for all of them. A row is read whole, along the first dimension of a piece's view. So where a split runs along another
dimension (the inputs of the down projections and of the attention's output, under every preset that splits them), each
process reads the whole tensor: a third of the bytes of INT4 experts split by width. And the rows of a head in kv_b are
read once for the keys and once for the values.
"""

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from .errors import CheckpointError
from .names import Path, Piece
from .quant import Rounding, dequantize_words, first_bad_scale
from .safetensors_io import DTYPES, FilePool, TensorInfo
from .startup_progress import Shown, reading

_ALIGNMENT = 64  # what XLA's CPU client asks of a buffer that it adopts
_DIRECT_BYTES = 16 << 20  # a block read into its place needs no scratch memory
_SCRATCH_VALUES = 1 << 20  # a block that is converted or cut: a few MB of scratch memory a thread
_IN_FLIGHT = 2 << 30  # bytes of buffers that may always be under way
_SHOWN = 40  # lines of one sort that a message spells out; the rest are counted

type Box = tuple[tuple[int, int], ...]  # one [start, stop) for each dimension


@dataclass(frozen=True)
class Source:
    """The tensors behind one piece of a parameter, and how they are stored.

    `form`: "plain" (the values themselves), "int4" (`weight` holds words, `scale` a scale per group of inputs) or "fp8"
    (e4m3 times the f32 `scale` of its block of `fp8_block` = [out, in] values).
    """

    piece: Piece
    form: str
    weight: TensorInfo
    scale: TensorInfo | None = None
    fp8_block: tuple[int, int] | None = None

    @property
    def is_scale(self) -> bool:
        """Whether the values themselves are INT4 scales that stay beside their words."""
        return self.piece.name.endswith(".weight_scale")


@dataclass(frozen=True)
class Leaf:
    """One parameter: shape, dtype and its sources, which together cover it exactly once."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    sources: tuple[Source, ...]

    @property
    def position(self) -> tuple[str, int]:
        """Where its first tensor lies: reading in this order keeps the disk's head, or its read-ahead, in place."""
        first = self.sources[0].weight
        return str(first.file), first.begin


@dataclass(frozen=True)
class _Target:
    """Where a block of rows goes: `out[rows - first] = block[:, columns]`, rows counted along the piece's view."""

    out: np.ndarray
    first: int
    columns: tuple[slice, ...]


type _Block = tuple[int, int, tuple[_Target, ...]]  # rows [start, stop) of a piece's view, and where they go


@dataclass(frozen=True)
class _Task:
    """A parameter that is being read."""

    leaf: Leaf
    sharding: Sharding
    boxes: Mapping[Any, Box]  # by jax.Device
    buffers: Mapping[Box, np.ndarray]
    futures: tuple[Future[None], ...]
    nbytes: int  # of the buffers

    def finish(self) -> jax.Array:
        """The array, once everything is read and on its devices: from then on accelerators need no buffer."""
        for f in self.futures:
            f.result()
        shards = [jax.device_put(self.buffers[box], device) for device, box in self.boxes.items()]
        array = jax.make_array_from_single_device_arrays(self.leaf.shape, self.sharding, shards)
        return jax.block_until_ready(array)

    def cancel(self) -> None:
        """Lets nothing queue that is not yet being read."""
        for f in self.futures:
            f.cancel()


def read_leaves(
    leaves: Mapping[Path, Leaf],
    shardings: Mapping[Path, Sharding],
    *,
    rounding: Rounding,
    progress: Shown,
    threads: int,
    direct: bool = False,
    what: str = "loading weights",
) -> dict[Path, jax.Array]:
    """Reads every parameter into an array of its sharding; each process fills the shards of its own devices.

    Args:
      leaves: the parameters, verified against the headers.
      shardings: by the same paths.
      rounding: how INT4 weights are dequantised where the parameter is a float.
      progress: where to show how far it is.
      threads: readers at work at the same time.
      direct: pass by the system's page cache, see `FilePool`.
      what: the name of the stage that is shown.
    Raises:
      CheckpointError: a file that cannot be read so, or that ends too early. Or lists every tensor with an INT4 scale
        that is not finite and positive: that is looked at while reading, since it takes the values, so it is known only
        when everything has been read.
    """
    arrays: dict[Path, jax.Array] = {}
    bad: list[tuple[str, int, float]] = []
    # GB of the files as a whole: of blocks that other processes read, the bar counts the whole parameter too.
    total = sum(_bytes_of(leaf) for leaf in leaves.values())
    order = sorted(leaves.values(), key=lambda leaf: leaf.position)
    bound = in_flight_bytes(_local_bytes(leaf, shardings[leaf.path]) for leaf in order)
    tasks: deque[_Task] = deque()
    with (
        FilePool(direct=direct) as pool,
        ThreadPoolExecutor(threads) as executor,
        reading(progress, what, total) as advance,
    ):

        def finish() -> None:
            arrays[tasks[0].leaf.path] = tasks[0].finish()
            advance(_bytes_of(tasks.popleft().leaf))

        try:
            for leaf in order:
                needed = _local_bytes(leaf, shardings[leaf.path])
                while tasks and needed + sum(t.nbytes for t in tasks) > bound:
                    finish()
                reader = _Reader(pool, leaf.dtype, rounding, bad)
                tasks.append(_begin(leaf, shardings[leaf.path], reader, executor))
            while tasks:
                finish()
        finally:
            for task in tasks:
                task.cancel()
    if bad:
        raise _bad_scales(leaves, bad)
    return arrays


def in_flight_bytes(sizes: Iterator[int]) -> int:
    """Bytes of host memory that parameters under way may take, of the bytes that each has on this process's devices.

    At least _IN_FLIGHT, and twice the largest, so that one such can be read while another is being transferred.
    """
    return max(_IN_FLIGHT, 2 * max(sizes, default=0))


def _bad_scales(leaves: Mapping[Path, Leaf], bad: Sequence[tuple[str, int, float]]) -> CheckpointError:
    """The error for INT4 scales (tensor, row, value) that the format does not allow."""
    first = {name: (row, value) for name, row, value in sorted(bad, key=lambda b: b[1], reverse=True)}
    directory = next(iter(leaves.values())).sources[0].weight.file.parent
    lines = [f"  {name}: found {value} in row {row}" for name, (row, value) in sorted(first.items())]
    head = f"{directory}: INT4 scales that are not finite and positive; nothing was loaded"
    return CheckpointError("\n".join([head, f"tensors ({len(lines)}):", *shortened(lines), "download the files again"]))


def shortened(lines: Sequence[str]) -> list[str]:
    """The first lines of a list in a message, and how many more there are."""
    rest = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"  ... and {rest} more"] if rest > 0 else [])]


def _bytes_of(leaf: Leaf) -> int:
    """Bytes of the parameter's part of the files."""
    return sum(s.weight.nbytes * math.prod(s.piece.block) // math.prod(s.piece.view) for s in leaf.sources)


def _boxes(leaf: Leaf, sharding: Sharding) -> dict[Any, Box]:
    """The part of a parameter that each local `jax.Device` holds."""
    return {d: _box(index, leaf.shape) for d, index in sharding.addressable_devices_indices_map(leaf.shape).items()}


def _local_bytes(leaf: Leaf, sharding: Sharding) -> int:
    """Bytes of the buffers of a parameter: of its distinct shards here."""
    boxes = set(_boxes(leaf, sharding).values())
    return sum(math.prod(b - a for a, b in box) for box in boxes) * leaf.dtype.itemsize


def _begin(leaf: Leaf, sharding: Sharding, reader: "_Reader", executor: ThreadPoolExecutor) -> _Task:
    """Makes the buffers of a parameter and has the readers fill them."""
    boxes = _boxes(leaf, sharding)
    buffers = {box: _aligned([b - a for a, b in box], leaf.dtype) for box in set(boxes.values())}
    futures = tuple(
        executor.submit(reader.fill_all, source, blocks)
        for source in leaf.sources
        for blocks in _jobs(source, _blocks(source, leaf.dtype, buffers))
    )
    return _Task(leaf, sharding, boxes, buffers, futures, sum(b.nbytes for b in buffers.values()))


def _box(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    assert index is not None
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array whose first byte lies at a multiple of `_ALIGNMENT`; a `_Reader` writes every byte."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)


def _jobs(source: Source, blocks: Sequence[_Block]) -> Iterator[Sequence[_Block]]:
    """The blocks of a piece in portions of up to about _DIRECT_BYTES of the file: what a thread takes at a time."""
    row_bytes = source.weight.nbytes // source.piece.view[0]
    job: list[_Block] = []
    for start, stop, targets in blocks:
        job.append((start, stop, targets))
        if sum(b - a for a, b, _ in job) * row_bytes >= _DIRECT_BYTES:
            yield job
            job = []
    if job:
        yield job


def _blocks(source: Source, dtype: np.dtype, buffers: Mapping[Box, np.ndarray]) -> list[_Block]:
    """Row blocks [start, stop) of a piece's view that some shard needs, each with the shards it goes to.

    A block never crosses the edge of a shard, so all of it goes to all of its targets.
    """
    piece = source.piece
    spans: dict[tuple[int, int], list[_Target]] = defaultdict(list)
    n_at = len(piece.at)
    for box, buffer in buffers.items():
        if not all(a <= i < b for i, (a, b) in zip(piece.at, box, strict=False)):
            continue
        out = buffer[tuple(i - a for i, (a, _) in zip(piece.at, box, strict=False))]
        (first, last), *rest = [(a + o, b + o) for (a, b), o in zip(box[n_at:], piece.begin, strict=True)]
        if first < last:
            spans[first, last].append(_Target(out, first, tuple(slice(a, b) for a, b in rest)))
    edges = sorted({edge for span in spans for edge in span})
    blocks = []
    for start, stop in itertools.pairwise(edges):
        targets = tuple(t for (a, b), ts in spans.items() if a <= start and stop <= b for t in ts)
        if targets:
            step = _rows_per_block(source, dtype, targets)
            blocks += [(r, min(r + step, stop), targets) for r in range(start, stop, step)]
    return blocks


def _rows_per_block(source: Source, dtype: np.dtype, targets: Sequence[_Target]) -> int:
    row_values = math.prod(source.piece.view[1:])
    if _is_direct(source, dtype, targets):
        return max(1, _DIRECT_BYTES // (row_values * dtype.itemsize))
    return max(1, _SCRATCH_VALUES // row_values)


def _is_direct(source: Source, dtype: np.dtype, targets: Sequence[_Target]) -> bool:
    """Whether the file's bytes are the shard's: same dtype, whole rows, one shard."""
    view = source.piece.view
    whole = len(targets) == 1 and all(
        (c.start, c.stop) == (0, n) for c, n in zip(targets[0].columns, view[1:], strict=True)
    )
    return source.form == "plain" and DTYPES[source.weight.dtype] == dtype and whole


@dataclass(frozen=True)
class _Reader:
    """Fills the buffers of one parameter; its methods run in several threads."""

    pool: FilePool
    dtype: np.dtype
    rounding: Rounding
    bad: list[tuple[str, int, float]]  # INT4 scales that break the format: tensor, row, value; one for each block

    def fill_all(self, source: Source, blocks: Sequence[_Block]) -> None:
        """`fill` for one block after the other."""
        for start, stop, targets in blocks:
            self.fill(source, start, stop, targets)

    def fill(self, source: Source, start: int, stop: int, targets: Sequence[_Target]) -> None:
        """Reads the rows [start, stop) of a piece's view into its targets, converting to `dtype`."""
        unit = source.piece.rows_per_unit
        if _is_direct(source, self.dtype, targets):
            (target,) = targets
            out = target.out[start - target.first : stop - target.first]
            self.pool.read_into(source.weight, start * (source.weight.nbytes // source.piece.view[0]), out)
            if source.is_scale:
                self.check_scale(source, start * unit, out)
            return
        block = self.rows(source, slice(start * unit, stop * unit))
        block = block.reshape(stop - start, *source.piece.view[1:])
        for t in targets:
            t.out[start - t.first : stop - t.first] = block[:, *t.columns]

    def rows(self, source: Source, rows: slice) -> np.ndarray:
        """Whole rows of a tensor: as stored where it is plain (the assignment converts), else dequantised."""
        weight = self.pool.read(source.weight, rows)
        if source.form == "plain":
            if source.is_scale:
                self.check_scale(source, rows.start, weight)
            return weight
        assert source.scale is not None
        if source.form == "int4":
            scale = self.pool.read(source.scale, rows)
            self.check_scale(source, rows.start, scale)
            with np.errstate(invalid="ignore"):  # of bad scales, which end in an error anyway
                return dequantize_words(weight, scale, self.dtype, self.rounding)
        assert source.fp8_block is not None
        return _dequantize_fp8(weight, self.pool.read(source.scale), rows.start, source.fp8_block).astype(self.dtype)

    def check_scale(self, source: Source, first_row: int, scale: np.ndarray) -> None:
        """Notes the first bad one of the scales [rows, groups] that begin at a row of their tensor."""
        at = first_bad_scale(scale)
        if at is not None:
            row = first_row + at // scale.shape[1]
            self.bad.append((f"{source.piece.stem}.weight_scale", row, float(scale.flat[at])))


def _dequantize_fp8(weight: np.ndarray, scale: np.ndarray, first_row: int, block: tuple[int, int]) -> np.ndarray:
    """e4m3 rows from `first_row` on, times the scale of their block: float32 [rows, in]."""
    row_blocks = (first_row + np.arange(weight.shape[0])) // block[0]
    per_row = scale.astype(np.float32)[row_blocks]  # [rows, ceil(in / block)]
    return weight.astype(np.float32) * np.repeat(per_row, block[1], axis=1)[:, : weight.shape[1]]
