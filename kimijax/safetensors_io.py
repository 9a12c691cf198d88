"""The safetensors file format: headers, byte ranges, writing.

A file is an 8-byte little-endian header length, a JSON header, then the data. The header maps a tensor's name to its
dtype, shape and `data_offsets` [begin, end), counted from the first data byte; tensors are C-contiguous and
little-endian, fill the data part without holes, and need not be aligned. Reading goes through `os.preadv` into buffers
of the caller's, never through a memory map: what was read does not count as resident memory twice.
"""

import errno
import json
import math
import mmap
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, local
from typing import Any

import ml_dtypes
import numpy as np

from .errors import CheckpointError

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
INDEX_FILE = "model.safetensors.index.json"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_SECTOR = 4096  # what direct reads are aligned to: the largest logical block of today's disks
_DIRECT_BLOCK = 8 << 20  # bytes of one direct read, a multiple of _SECTOR

# The limit of the format's own library: a length beyond it means that the file is not a safetensors file.
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `begin` counts from the start of the file, `dtype` is the format's name for it."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * DTYPES[self.dtype].itemsize


def read_header(file: Path) -> list[TensorInfo]:
    """The tensors of a safetensors file, from its header alone, in the order of their bytes.

    Raises:
      CheckpointError: naming the file, if it is missing, shorter or longer than its header says, or malformed.
    """
    try:
        with file.open("rb") as f:
            total = os.fstat(f.fileno()).st_size
            length = int.from_bytes(f.read(8), "little")
            if total < 8 or length > min(_MAX_HEADER, total - 8):
                raise CheckpointError(
                    f"{file}: found a header length of {length} in a file of {total} bytes, expected a safetensors "
                    "file: truncated, or another format"
                )
            raw = f.read(length)
    except OSError as e:
        raise CheckpointError(f"{file}: cannot be read: {e.strerror}") from e
    tensors = _parse_header(file, raw, 8 + length)
    tensors.sort(key=lambda t: t.begin)
    end = 8 + length
    for t in tensors:
        if t.begin != end:
            raise CheckpointError(f"{file}: {t.name} begins at byte {t.begin}, expected {end}: overlap or hole")
        end += t.nbytes
    if end != total:
        what = "truncated" if end > total else "trailing bytes"
        raise CheckpointError(f"{file}: found {total} bytes, expected {end} by its header: {what}")
    return tensors


def _parse_header(file: Path, raw: bytes, data_start: int) -> list[TensorInfo]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            names = [k for k, _ in pairs]
            twice = next(k for k in names if names.count(k) > 1)
            raise CheckpointError(f"{file}: corrupt header: {twice!r} occurs twice")
        return out

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{file}: corrupt header: {e}") from e
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: corrupt header: found a JSON {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    return [_parse_entry(file, name, entry, data_start) for name, entry in header.items()]


def _parse_entry(file: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    def naturals(values: Any) -> bool:
        return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{file}: {name}: found {entry!r}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: {name}: found dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    if not naturals(shape) or not naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{file}: {name}: found shape {shape} and data_offsets {offsets}, expected naturals")
    info = TensorInfo(file, name, dtype, tuple(shape), data_start + offsets[0])
    if offsets[1] - offsets[0] != info.nbytes:
        raise CheckpointError(
            f"{file}: {name}: found {offsets[1] - offsets[0]} bytes, expected {info.nbytes} for {dtype} {shape}"
        )
    return info


def _not_direct(file: Path) -> CheckpointError:
    return CheckpointError(
        f"{file}: found a file system that cannot read it directly, expected one with O_DIRECT; load without direct "
        "reads, or copy the files to a local disk"
    )


def _direct_flag(file: Path) -> int:
    """O_DIRECT. CheckpointError: the system has none."""
    if sys.platform != "linux":
        raise _not_direct(file)
    return os.O_DIRECT


class _Block(local):
    """Memory of a thread's own, of _DIRECT_BLOCK bytes; a memory map begins at a page."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, _DIRECT_BLOCK)


class FilePool:
    """Open files, read at any offset by several threads at once. A context manager: leaving it closes the files.

    With `direct`, reads pass by the system's page cache (O_DIRECT), through an aligned block of _DIRECT_BLOCK bytes for
    each thread, and what was cached stays so. The file system must support that: the first read tells.
    """

    def __init__(self, *, direct: bool = False) -> None:
        self._direct = direct
        self._open: dict[Path, int] = {}
        self._lock = Lock()
        self._block = _Block()

    def __enter__(self) -> "FilePool":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def read_into(self, info: TensorInfo, start: int, out: np.ndarray) -> None:
        """Fills `out` (C-contiguous) with the bytes of the tensor from its byte `start` on.

        Raises:
          CheckpointError: the file ends before `out` is full (it was cut after its header was read), or cannot be read
            directly.
        """
        fd = self._file(info.file)
        view = memoryview(out.reshape(-1).view(np.uint8))
        at = info.begin + start
        while view:
            n = self._read_direct(fd, info.file, view, at) if self._direct else os.preadv(fd, [view], at)
            if n == 0:
                raise CheckpointError(f"{info.file}: ends at byte {at}, inside {info.name}: truncated while in use")
            view, at = view[n:], at + n

    def _file(self, file: Path) -> int:
        with self._lock:
            fd = self._open.get(file)
            if fd is None:
                flags = os.O_RDONLY | os.O_CLOEXEC
                if self._direct:
                    flags |= _direct_flag(file)
                try:
                    fd = self._open[file] = os.open(file, flags)
                except OSError as e:
                    if self._direct and e.errno == errno.EINVAL:
                        raise _not_direct(file) from e
                    raise
            return fd

    def _read_direct(self, fd: int, file: Path, view: memoryview, at: int) -> int:
        """Reads some of the bytes from `at` on into `view`, by whole sectors; how many, 0 at the end of the file."""
        first = at % _SECTOR
        wanted = min(-(-(first + len(view)) // _SECTOR) * _SECTOR, _DIRECT_BLOCK)
        with memoryview(self._block.memory) as block:
            try:
                found = os.preadv(fd, [block[:wanted]], at - first)
            except OSError as e:
                if e.errno == errno.EINVAL:
                    raise _not_direct(file) from e
                raise
            n = max(min(found - first, len(view)), 0)
            # NumPy copies without holding up the other threads, a memoryview does not
            np.frombuffer(view, np.uint8, n)[...] = np.frombuffer(block, np.uint8, n, first)
        return n

    def read(self, info: TensorInfo, rows: slice = slice(None)) -> np.ndarray:
        """The tensor's rows `rows` (along its first dimension), as a new array of its own dtype."""
        if not info.shape:
            out = np.empty((), DTYPES[info.dtype])
            self.read_into(info, 0, out)
            return out
        first, last, _ = rows.indices(info.shape[0])
        out = np.empty((last - first, *info.shape[1:]), DTYPES[info.dtype])
        self.read_into(info, first * (info.nbytes // max(info.shape[0], 1)), out)
        return out


@dataclass(frozen=True)
class TensorSpec:
    """A tensor about to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _header(tensors: Sequence[TensorSpec]) -> bytes:
    """The first bytes of a file of tensors, up to the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in tensors:
        header[t.name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [end, end + t.nbytes]}
        end += t.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # keeps the data aligned for readers that map the file
    return struct.pack("<Q", len(raw)) + raw


def write_file(file: Path, tensors: Sequence[TensorSpec], arrays: Iterable[np.ndarray]) -> None:
    """Writes one safetensors file and flushes it to the disk, holding one array at a time.

    Args:
      file: created; an existing one is refused, so that nothing is overwritten half-way.
      tensors: what the header declares.
      arrays: the data, in the same order, each of the declared dtype and shape.
    """

    def write(f: Any) -> None:
        f.write(_header(tensors))
        for t, array in zip(tensors, arrays, strict=True):
            _check_array(t, array)
            f.write(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))

    write_synced(file, write)


def write_sparse_file(file: Path, tensors: Sequence[TensorSpec], arrays: Mapping[str, np.ndarray]) -> None:
    """As `write_file`, but only the tensors of `arrays` are written: the others read as zeros and take no disk space.

    Args:
      file, tensors: as for `write_file`.
      arrays: by name.
    """

    def write(f: Any) -> None:
        f.write(_header(tensors))
        for t in tensors:
            if t.name in arrays:
                _check_array(t, arrays[t.name])
                f.write(memoryview(np.ascontiguousarray(arrays[t.name]).reshape(-1).view(np.uint8)))
            else:
                f.seek(t.nbytes, os.SEEK_CUR)
        f.truncate()

    write_synced(file, write)


def _check_array(spec: TensorSpec, array: np.ndarray) -> None:
    if array.dtype != spec.dtype or array.shape != spec.shape:
        raise ValueError(f"{spec.name}: found {array.dtype} {array.shape}, declared {spec.dtype} {spec.shape}")


def write_synced(file: Path, write: Callable[[Any], None]) -> None:
    """Creates `file`, lets `write` fill the binary stream, and returns once it is on the disk."""
    with file.open("xb") as f:
        write(f)
        f.flush()
        os.fsync(f.fileno())


def sync_directory(directory: Path) -> None:
    """Makes names created in, or renamed into, the directory durable."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A folder to write into that takes `directory`'s place, synced, when the block ends; nothing is left if it raises.

    Raises:
      ValueError: `directory` exists and is not an empty folder: nothing is ever overwritten.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"directory: found {directory} in use, expected a new or empty one")
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = directory.parent / f".{directory.name}.{os.getpid()}.part"
    part.mkdir()
    try:
        yield part
        sync_directory(part)
        part.replace(directory)
        sync_directory(directory.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
