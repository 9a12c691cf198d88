"""Reads tensors by byte range straight into sharded device arrays.

One parameter at a time: for every distinct shard that this process holds, a buffer is made; reader threads fill the
buffers by row blocks; each buffer then becomes the shard on its devices. Rows that no local shard needs are not read,
and rows that several shards cut into columns are read once. The buffers are aligned so that JAX's CPU devices adopt
them without a copy: nothing may write to one afterwards.
"""

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Sharding
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from .errors import CheckpointError
from .names import Path, Piece
from .quant import Rounding, dequantize_words, first_bad_scale
from .safetensors_io import DTYPES, FilePool, TensorInfo

_ALIGNMENT = 64  # what XLA's CPU client asks of a buffer that it adopts
_DIRECT_BYTES = 16 << 20  # a block read into its place needs no scratch memory
_SCRATCH_VALUES = 1 << 20  # a block that is converted or cut: a few MB of scratch memory a thread
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


def read_leaves(
    leaves: Mapping[Path, Leaf],
    shardings: Mapping[Path, Sharding],
    *,
    rounding: Rounding,
    progress: bool,
    threads: int,
) -> dict[Path, jax.Array]:
    """Reads every parameter into an array of its sharding; each process fills the shards of its own devices.

    Args:
      leaves: the parameters, verified against the headers.
      shardings: by the same paths.
      rounding: how INT4 weights are dequantised where the parameter is a float.
      progress: show a bar on stderr.
      threads: readers at work at the same time.
    Raises:
      CheckpointError: lists every tensor with an INT4 scale that is not finite and positive. That is looked at while
        reading, since it takes the values, so it is known only when everything has been read.
    """
    arrays: dict[Path, jax.Array] = {}
    bad: list[tuple[str, int, float]] = []
    # GB of the files as a whole: of blocks that other processes read, the bar counts the whole parameter too.
    total = sum(_bytes_of(leaf) for leaf in leaves.values())
    with FilePool() as pool, ThreadPoolExecutor(threads) as executor, _progress_bar(progress, total) as advance:
        for path, leaf in sorted(leaves.items(), key=lambda item: item[1].position):
            arrays[path] = _read_leaf(leaf, shardings[path], _Reader(pool, leaf.dtype, rounding, bad), executor)
            advance(_bytes_of(leaf))
    if bad:
        raise _bad_scales(leaves, bad)
    return arrays


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


def _read_leaf(leaf: Leaf, sharding: Sharding, reader: "_Reader", executor: ThreadPoolExecutor) -> jax.Array:
    boxes = {d: _box(index, leaf.shape) for d, index in sharding.addressable_devices_indices_map(leaf.shape).items()}
    buffers = {box: _aligned([b - a for a, b in box], leaf.dtype) for box in set(boxes.values())}
    futures = [
        executor.submit(reader.fill, source, start, stop, targets)
        for source in leaf.sources
        for start, stop, targets in _blocks(source, leaf.dtype, buffers)
    ]
    _wait(futures)
    shards = [jax.device_put(buffers[box], device) for device, box in boxes.items()]
    array = jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)
    return jax.block_until_ready(array)  # the buffers of accelerators are free from here on


def _wait(futures: Sequence[Future[None]]) -> None:
    """Raises the first failure, and lets nothing queue behind it."""
    try:
        for f in futures:
            f.result()
    finally:
        for f in futures:
            f.cancel()


def _box(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    assert index is not None
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array whose first byte lies at a multiple of `_ALIGNMENT`; a `_Reader` writes every byte."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)


def _blocks(
    source: Source, dtype: np.dtype, buffers: Mapping[Box, np.ndarray]
) -> list[tuple[int, int, tuple[_Target, ...]]]:
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


@contextmanager
def _progress_bar(shown: bool, total: int) -> Generator[Callable[[int], None]]:
    """Yields `advance(bytes)`, which moves a bar on stderr where it is shown."""
    if not shown:
        yield lambda _: None
        return
    with _bar(Console(stderr=True)) as bar:
        task = bar.add_task("loading weights", total=total)
        yield lambda n: bar.advance(task, n)


def _bar(console: Console, clock: Callable[[], float] = time.monotonic) -> Progress:
    """A bar that shows bytes of all bytes, bytes a second and the time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, get_time=clock)
