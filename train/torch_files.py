"""Tensors of files that `torch.save` wrote, without torch: a zip with a pickle and raw storages.

A pickle can name any function of any module for the reader to call. This reader builds tensors from the zip's storages
and plain containers, and refuses every other name: a file from a stranger cannot run code here.
"""

import gzip
import io
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np

from kimijax.errors import CheckpointError

_STORAGES: Mapping[str, np.dtype] = {
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "HalfStorage": np.dtype(np.float16),
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


class TorchFileError(CheckpointError):
    """A file that is not what `torch.save` writes for plain tensors, or is damaged."""


@dataclass(frozen=True)
class _Storage:
    """A storage that the pickle refers to."""

    key: str
    dtype: np.dtype
    size: int  # numbers


@dataclass(frozen=True)
class _Tensor:
    """A strided view of a storage, which is not read yet. Offset and strides count numbers."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class TorchFile:
    """A dictionary of tensors in a `.ckpt` or `.pt` file, gzipped if its name ends in `.gz`. Use it with `with`.

    Its names are known at once, a tensor is read when it is asked for. Every error is a TorchFileError with the
    file's name: damaged, another format, a value that is no tensor, or a pickle that asks for anything but tensors.
    """

    def __init__(self, path: Path) -> None:
        """Reads the pickle."""
        self.path = path
        with _named(path):
            if path.suffix == ".gz":
                with gzip.open(path, "rb") as f:
                    self._archive = zipfile.ZipFile(io.BytesIO(f.read()))
            else:
                self._archive = zipfile.ZipFile(path)
        try:
            with _named(path):
                self._root, self._tensors = self._load()
        except BaseException:
            self._archive.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    @property
    def names(self) -> list[str]:
        """Of the tensors, sorted."""
        return sorted(self._tensors)

    def read(self, name: str) -> np.ndarray:
        """A tensor, as an array of its own. KeyError: there is none of that name."""
        t = self._tensors[name]
        with _named(self.path):
            raw = self._archive.read(f"{self._root}data/{t.storage.key}")  # checks the zip's checksum
        if len(raw) != t.storage.size * t.storage.dtype.itemsize:
            raise TorchFileError(
                f"{self.path}: {name}: found {len(raw)} bytes, expected {t.storage.size} of {t.storage.dtype}"
            )
        flat = np.frombuffer(raw, t.storage.dtype)
        last = t.offset + sum((n - 1) * s for n, s in zip(t.shape, t.stride, strict=True))
        if min((*t.shape, *t.stride, t.offset)) < 0 or (0 not in t.shape and last >= len(flat)):
            raise TorchFileError(
                f"{self.path}: {name}: shape {list(t.shape)}, stride {list(t.stride)} and offset {t.offset} lie "
                f"outside a storage of {len(flat)}"
            )
        stride = [s * flat.itemsize for s in t.stride]
        return np.lib.stride_tricks.as_strided(flat[t.offset :], t.shape, stride).copy()

    def _load(self) -> tuple[str, dict[str, _Tensor]]:
        names = self._archive.namelist()
        pickles = [n for n in names if n.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise TorchFileError(f"{self.path}: found {len(pickles)} data.pkl in the zip, expected one: not torch's")
        root = pickles[0].removesuffix("data.pkl")
        order = self._archive.read(f"{root}byteorder") if f"{root}byteorder" in names else b"little"
        if order != b"little":
            raise TorchFileError(f"{self.path}: found byte order {order!r}, expected little")
        data = _Unpickler(self.path, self._archive.read(pickles[0])).load()
        if not isinstance(data, dict):
            raise TorchFileError(f"{self.path}: found a {type(data).__name__}, expected a dictionary of tensors")
        for name, value in data.items():
            if not isinstance(name, str) or not isinstance(value, _Tensor):
                raise TorchFileError(f"{self.path}: {name!r}: found a {type(value).__name__}, expected a tensor")
        return root, data


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What the readers of zips and pickles raise on a damaged file, with its name."""
    try:
        yield
    except TorchFileError:
        raise
    # RuntimeError: a header that asks for a password, or for a compression or zip version that Python does not have.
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as e:
        raise TorchFileError(f"{path}: found {e}, expected a file that torch.save wrote: truncated, or damaged") from e
    except (pickle.UnpicklingError, KeyError, ValueError, TypeError, IndexError, AttributeError) as e:
        raise TorchFileError(f"{path}: its pickle cannot be read: {e!r}") from e


class _Unpickler(pickle.Unpickler):
    """Knows tensors, their storages and OrderedDict; nothing else."""

    def __init__(self, path: Path, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._tensor
        if module_name == "torch" and global_name in _STORAGES:
            return _STORAGES[global_name]
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise TorchFileError(
            f"{self._path}: its pickle asks for {module_name}.{global_name}, expected tensors only; refused, for it "
            "could run code"
        )

    def persistent_load(self, pid: Any, /) -> _Storage:
        kind, dtype, key, _, size = pid
        if kind != "storage" or not isinstance(dtype, np.dtype) or not str(key).isdigit():
            raise TorchFileError(f"{self._path}: found a reference {pid!r}, expected a storage")
        return _Storage(str(key), dtype, int(size))

    def _tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _Tensor:
        if not isinstance(storage, _Storage) or len(shape) != len(stride):
            raise TorchFileError(f"{self._path}: found a tensor of {storage!r}, expected one of a storage")
        return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))
