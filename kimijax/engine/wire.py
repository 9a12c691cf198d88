"""Frames of the control channel between hosts: a header of JSON, then arrays as raw little-endian bytes.

A frame is data and nothing else: no pickles, and of types only those that both sides have named.

    b"kjc1"  uint32 bytes of header  uint64 bytes of arrays  header  arrays, one after the other
"""

import dataclasses
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import orjson

_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"kjc1"
_MAX_HEADER, _MAX_BODY = 2**20, 2**32  # bytes; more is no frame of ours
_DTYPES = {np.dtype(t).name: np.dtype(t) for t in ("bool", "int32", "uint32", "int64", "float32")}
_ONCE = 4096  # bytes from which an array that cannot be written is sent once


class WireError(ConnectionError):
    """What came is no frame of this protocol."""


@dataclass(frozen=True)
class Message:
    """One frame.

    Attributes:
      kind: what it is about.
      fields: JSON.
      arrays: bool, int32, uint32, int64 or float32, of any shape.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    arrays: tuple[np.ndarray, ...] = ()


def encode(message: Message) -> list[bytes | memoryview]:
    """The parts of a frame, in order. TypeError: an array of a type that frames do not have."""
    kinds: list[tuple[str, tuple[int, ...]]] = []
    parts: list[bytes | memoryview] = []
    for x in message.arrays:
        if x.dtype.name not in _DTYPES or x.dtype != _DTYPES[x.dtype.name]:  # None would be float64
            raise TypeError(f"found an array of {x.dtype}, expected one of {', '.join(_DTYPES)}, little-endian")
        kinds.append((x.dtype.name, x.shape))
        if x.size:
            parts.append(memoryview(np.ascontiguousarray(x).reshape(-1)).cast("B"))
    header = orjson.dumps({"kind": message.kind, "fields": message.fields, "arrays": kinds})
    return [_PREFIX.pack(_MAGIC, len(header), sum(len(p) for p in parts)), header, *parts]


def decode(read: Callable[[int], bytearray]) -> Message:
    """The next frame.

    Args:
      read: gets exactly so many bytes, or raises.
    Raises:
      WireError: they are no frame.
    """
    magic, n_header, n_body = _PREFIX.unpack(read(_PREFIX.size))
    if magic != _MAGIC or n_header > _MAX_HEADER or n_body > _MAX_BODY:
        raise WireError(f"found a frame that begins with {magic!r}, {n_header} and {n_body} bytes, expected {_MAGIC!r}")
    try:
        header = orjson.loads(read(n_header))
        kind, fields, kinds = header["kind"], header["fields"], header["arrays"]
        shapes = [(_DTYPES[name], tuple(shape)) for name, shape in kinds]
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes]
    except (ValueError, KeyError, TypeError) as e:
        raise WireError(f"found a frame whose header cannot be read: {type(e).__name__}: {e}") from e
    counted = [n for _, shape in shapes for n in shape]
    if not isinstance(kind, str) or not isinstance(fields, dict) or any(type(n) is not int or n < 0 for n in counted):
        raise WireError("found a frame whose header is malformed")
    if sum(sizes) != n_body:
        raise WireError(f"found {n_body} bytes of arrays, expected {sum(sizes)}")
    body, arrays, at = read(n_body), list[np.ndarray](), 0
    for (dtype, shape), size in zip(shapes, sizes, strict=True):
        arrays.append(np.frombuffer(body, dtype, math.prod(shape), at if size else 0).reshape(shape))
        at += size
    return Message(kind, cast(dict[str, Any], fields), tuple(arrays))


class Held(NamedTuple):
    """Stands, among a program's arguments, for a result of the one called before: every host holds its own."""

    number: int


class Packer:
    """From arguments of a program to JSON and arrays.

    Arrays that own their memory and cannot be written are constants: the second time their number is sent alone.
    """

    def __init__(self, types: Sequence[type]) -> None:
        """types: named tuples and dataclasses that arguments may be made of."""
        self._fields = {t: _field_names(t) for t in types}
        self._constants: dict[int, tuple[int, np.ndarray]] = {}  # id -> number, and the array, which keeps the id

    def pack(self, value: Any, arrays: list[np.ndarray]) -> Any:
        """JSON that describes a value; its arrays are appended. TypeError: it holds something that cannot be sent."""
        if value is None:
            return None
        if isinstance(value, np.ndarray):
            return self._array(value, arrays)
        if isinstance(value, np.generic):
            arrays.append(np.asarray(value))
            return 0
        kind = type(value)
        if kind is Held:
            return ["held", value.number]
        if kind is tuple:
            return ["tuple", [self.pack(x, arrays) for x in value]]
        names = self._fields.get(kind)
        if names is None:
            what = "an array on a device" if isinstance(value, jax.Array) else kind.__name__
            raise TypeError(f"found {what} among a program's arguments, expected host arrays: it cannot be sent")
        return [kind.__name__, [self.pack(x, arrays) for x in map(value.__getattribute__, names)]]

    def _array(self, value: np.ndarray, arrays: list[np.ndarray]) -> Any:
        if value.flags.writeable or value.nbytes < _ONCE or value.base is not None:
            arrays.append(value)
            return 0
        known = self._constants.get(id(value))
        if known is not None:
            return ["known", known[0]]
        number = len(self._constants)
        self._constants[id(value)] = number, value
        arrays.append(value)
        return ["constant", number]


class Unpacker:
    """The other end of a `Packer` of the same types."""

    def __init__(self, types: Sequence[type]) -> None:
        self._types = {t.__name__: (t, _field_names(t)) for t in types}
        self._constants: dict[int, np.ndarray] = {}

    def unpack(self, packed: Any, arrays: Sequence[np.ndarray]) -> Any:
        """The value again; numbers are NumPy scalars. WireError: JSON and arrays do not fit."""
        left = iter(arrays)
        try:
            value = self._value(packed, left)
        except (ValueError, KeyError, IndexError, TypeError, StopIteration) as e:
            raise WireError(f"found arguments that cannot be read: {type(e).__name__}: {e}") from e
        if next(left, None) is not None:
            raise WireError("found more arrays than arguments")
        return value

    def _value(self, packed: Any, left: Iterator[np.ndarray]) -> Any:
        if packed is None:
            return None
        if packed == 0:
            x = next(left)
            return x[()] if x.ndim == 0 else x
        name, rest = packed
        match name:
            case "held":
                return Held(rest)
            case "tuple":
                return tuple([self._value(x, left) for x in rest])
            case "constant":
                self._constants[rest] = next(left)
                return self._constants[rest]
            case "known":
                return self._constants[rest]
            case _:
                kind, names = self._types[name]
                values = [self._value(x, left) for x in rest]
                return kind(**dict(zip(names, values, strict=True)))


def _field_names(kind: type) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(f.name for f in dataclasses.fields(kind))
    return tuple(cast(Any, kind)._fields)
