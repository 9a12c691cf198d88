"""The file format, against the safetensors library, and every way in which a file can be broken."""

import errno
import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kimijax import safetensors_io
from kimijax.errors import CheckpointError
from kimijax.safetensors_io import DTYPES, FilePool, TensorSpec, read_header, write_file, write_sparse_file

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(5, dtype=np.int64),
    "c": np.array([[1.5], [-2]], ml_dtypes.bfloat16),
    "scalar": np.array(3, np.int32),
    "empty": np.zeros((0, 4), np.float16),
    "odd": np.array([1, 2, 3], np.uint8),  # leaves what follows it unaligned
    "z": np.array([1.0, 2.0]),
}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file(TENSORS, file, metadata={"format": "pt"})
    infos = {t.name: t for t in read_header(file)}
    assert infos.keys() == TENSORS.keys()
    with FilePool() as pool:
        for name, value in TENSORS.items():
            assert (infos[name].shape, infos[name].nbytes) == (value.shape, value.nbytes)
            found = pool.read(infos[name])
            assert found.dtype == value.dtype
            assert np.array_equal(found, value)
        assert np.array_equal(pool.read(infos["a"], slice(1, 3)), TENSORS["a"][1:3])


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write_file(file, [TensorSpec(n, a.dtype, a.shape) for n, a in TENSORS.items()], TENSORS.values())
    found = load_file(file)
    assert found.keys() == TENSORS.keys()
    assert all(np.array_equal(found[n], a) and found[n].dtype == a.dtype for n, a in TENSORS.items())
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0
    with pytest.raises(FileExistsError):
        write_file(file, [], [])


def test_what_is_written_must_be_what_was_declared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a: found float32"):
        write_file(tmp_path / "x", [TensorSpec("a", np.dtype(np.int32), (3, 4))], [TENSORS["a"]])


def build(entries: Any, data: bytes, length: int | None = None) -> bytes:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(begin: int, end: int, shape: Any = (4,), dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header length of 0 in a file of 0 bytes"),
        (b"abc", "in a file of 3 bytes"),
        (b"PK\x03\x04" + b"x" * 40, "expected a safetensors file"),
        (build({}, b"", length=500), "header length of 500"),
        (build(b"{", b""), "corrupt header"),
        (build(b"\xff\xfe{}", b""), "corrupt header"),
        (build([], b""), "found a JSON list, expected an object"),
        (build(b'{"a": 1, "a": 2}', b""), "'a' occurs twice"),
        (build({"a": 1}, b""), "a: found 1, expected dtype, shape and data_offsets"),
        (build({"a": {"dtype": "U8", "shape": [4]}}, b"1234"), "expected dtype, shape and data_offsets"),
        (build({"a": entry(0, 4, dtype="F4")}, b"1234"), "a: found dtype 'F4'"),
        (build({"a": entry(0, 4, shape=[-4])}, b"1234"), r"found shape \[-4\]"),
        (build({"a": entry(0, 4, shape=[True])}, b"1234"), r"found shape \[True\]"),
        (build({"a": entry(0, 4, shape=[2])}, b"1234"), "found 4 bytes, expected 2"),
        (build({"a": entry(0, 4)}, b"123"), "truncated"),
        (build({"a": entry(0, 4)}, b"12345"), "trailing bytes"),
        (build({"a": entry(0, 4), "b": entry(2, 6)}, b"123456"), "overlap or hole"),
        (build({"a": entry(0, 4), "b": entry(5, 9)}, b"123456789"), "overlap or hole"),
    ],
)
def test_broken_files_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as error:
        read_header(file)
    assert "broken.safetensors" in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.safetensors: cannot be read"):
        read_header(tmp_path / "none.safetensors")


def test_every_dtype_has_the_size_of_its_name() -> None:
    for name, dtype in DTYPES.items():
        digits = "".join(c for c in name.partition("_")[0] if c.isdigit())
        assert dtype.itemsize * 8 == int(digits or 8)


def direct_pool(file: Path) -> FilePool:
    """Reads past the page cache; skips where the file system of the tests cannot."""
    try:
        with FilePool(direct=True) as probe:
            probe.read(read_header(file)[0])
    except CheckpointError as e:
        pytest.skip(str(e))
    return FilePool(direct=True)


@pytest.mark.parametrize("size", [2, 4095, 4096, 8192, 70_001])
def test_direct_reads_of_any_range(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies around sectors, over several blocks, and up to the end of a file that ends inside a sector."""
    monkeypatch.setattr(safetensors_io, "_DIRECT_BLOCK", 8192)
    file = tmp_path / "x.safetensors"
    data = np.arange(size, dtype=np.uint32).astype(np.uint8)
    write_file(
        file,
        [TensorSpec("odd", np.dtype(np.uint8), (3,)), TensorSpec("a", data.dtype, data.shape)],
        [data[:1].repeat(3), data],
    )
    _, info = read_header(file)
    with direct_pool(file) as pool:
        for start, stop in ((0, size), (size // 2, size), (1, size - 1), (0, 1), (size - 1, size)):
            assert np.array_equal(pool.read(info, slice(start, stop)), data[start:stop])
        with pytest.raises(CheckpointError, match="truncated while in use"):
            pool.read_into(info, 1, np.empty(size, np.uint8))


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_file_system_without_direct_reads_is_refused(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.safetensors"
    write_file(file, [TensorSpec("a", np.dtype(np.uint8), (3,))], [np.zeros(3, np.uint8)])
    [info] = read_header(file)

    def refuse(*_: Any) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, call, refuse)
    if call == "preadv":
        monkeypatch.setattr(safetensors_io, "_direct_flag", lambda _: 0)  # so that the file opens anywhere
    with FilePool(direct=True) as pool, pytest.raises(CheckpointError, match=r"x\.safetensors.*load without direct"):
        pool.read(info)


def test_sparse_files_read_as_zeros_but_for_what_is_written(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    specs = [TensorSpec(n, a.dtype, a.shape) for n, a in TENSORS.items()]
    write_sparse_file(file, specs, {n: TENSORS[n] for n in ("b", "scalar")})
    found = load_file(file)
    for name, value in TENSORS.items():
        assert np.array_equal(found[name], value if name in ("b", "scalar") else np.zeros_like(value)), name
    with pytest.raises(ValueError, match="a: found float64"):
        write_sparse_file(tmp_path / "y", specs, {"a": np.zeros((3, 4))})
