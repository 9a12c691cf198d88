"""Frames between hosts: everything that is sent comes out the same, and nothing else gets in."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kimijax.engine.wire import Held, Message, Packer, Unpacker, WireError, decode, encode

DTYPES = ("bool", "int32", "uint32", "int64", "float32")
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda name: hnp.arrays(np.dtype(name), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
JSON = st.dictionaries(st.text(max_size=5), st.integers(-5, 5) | st.text(max_size=5) | st.booleans(), max_size=4)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Rows:
    values: Any
    allowed: Any = None


TYPES = (Pair, Rows)
VALUES = st.recursive(
    st.none() | ARRAYS | st.integers(-(2**31), 2**31 - 1).map(np.int32) | st.integers(0, 3).map(Held),
    lambda inner: (
        st.builds(Pair, inner, inner) | st.builds(Rows, inner, inner) | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=6,
)


class Bytes:
    """What came over a connection."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read(self, n: int) -> bytearray:
        found = self._data[self._at : self._at + n]
        self._at += n
        if len(found) < n:
            raise ConnectionResetError("the connection was closed")
        return bytearray(found)


def sent(message: Message) -> bytes:
    return b"".join(encode(message))


def assert_same(found: Any, right: Any) -> None:
    assert type(found) is type(right)
    if isinstance(right, np.ndarray | np.generic):
        assert found.dtype == right.dtype
        assert found.shape == right.shape
        assert found.tobytes() == right.tobytes()  # NaN too
    elif isinstance(right, Rows):
        assert_same(found.values, right.values)
        assert_same(found.allowed, right.allowed)
    elif isinstance(right, tuple):
        for a, b in zip(found, right, strict=True):
            assert_same(a, b)
    else:
        assert found == right


@given(st.text(max_size=8), JSON, st.lists(ARRAYS, max_size=3))
def test_a_frame_comes_out_as_it_went_in(kind: str, fields: dict[str, Any], arrays: list[np.ndarray]) -> None:
    first, second = Message(kind, fields, tuple(arrays)), Message("beat")
    source = Bytes(sent(first) + sent(second))
    found = decode(source.read)
    assert (found.kind, found.fields) == (kind, fields)
    for a, b in zip(found.arrays, arrays, strict=True):
        assert_same(a, b)
    assert decode(source.read).kind == "beat"  # nothing is left of the first


@given(st.lists(VALUES, max_size=4).map(tuple))
def test_arguments_come_out_as_they_went_in(args: tuple[Any, ...]) -> None:
    arrays: list[np.ndarray] = []
    packed = Packer(TYPES).pack(args, arrays)
    message = decode(Bytes(sent(Message("call", {"args": packed}, tuple(arrays)))).read)
    # 0-dimensional arrays come out as scalars, which is what programs get for them.
    right = _scalars(args)
    assert_same(Unpacker(TYPES).unpack(message.fields["args"], message.arrays), right)


def _scalars(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value[()] if value.ndim == 0 else value
    if isinstance(value, Rows):
        return Rows(_scalars(value.values), _scalars(value.allowed))
    if isinstance(value, Pair):
        return Pair(*map(_scalars, value))
    return tuple(map(_scalars, value)) if type(value) is tuple else value


@given(st.data())
def test_a_damaged_frame_is_an_error_and_never_something_else(data: st.DataObject) -> None:
    frame = bytearray(sent(Message("call", {"k": 1}, (np.arange(4, dtype=np.int32),))))
    at = data.draw(st.integers(0, len(frame) - 17))  # header and prefix; the numbers of an array can be anything
    frame[at] ^= data.draw(st.integers(1, 255))
    try:
        found = decode(Bytes(bytes(frame)).read)
    except ConnectionError:  # WireError, or the end before all was there
        return
    assert isinstance(found.kind, str)
    assert sum(x.nbytes for x in found.arrays) == 16


def test_a_constant_is_sent_once() -> None:
    packer, unpacker = Packer(TYPES), Unpacker(TYPES)
    constant = np.arange(5000, dtype=np.int32)
    constant.flags.writeable = False
    for n_sent in (1, 0, 0):
        arrays: list[np.ndarray] = []
        packed = packer.pack((constant, np.int32(3)), arrays)
        assert len(arrays) == n_sent + 1
        found = unpacker.unpack(packed, arrays)
        assert_same(found, (constant, np.int32(3)))
    written = constant.copy()
    for value in (1, 2):
        written[0] = value
        arrays = []
        assert unpacker.unpack(packer.pack((written,), arrays), arrays)[0][0] == value


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((jnp.zeros(2),), "an array on a device"),
        (("text",), "str"),
        (([1],), "list"),
        ((np.zeros(2, np.float64),), "float64"),
        ((np.zeros(2, ">i4"),), ">i4"),
    ],
)
def test_what_cannot_be_sent_is_refused(args: tuple[Any, ...], match: str) -> None:
    def send() -> None:
        arrays: list[np.ndarray] = []
        encode(Message("call", {"args": Packer(TYPES).pack(args, arrays)}, tuple(arrays)))

    with pytest.raises(TypeError, match=match):
        send()


@pytest.mark.parametrize(
    ("packed", "n"),
    [(["os.system", [0]], 1), (["known", 7], 0), (0, 0), (None, 1), (["Pair", [0]], 1), ("x", 0), (["tuple", 3], 0)],
)
def test_arguments_that_do_not_fit_are_refused(packed: Any, n: int) -> None:
    with pytest.raises(WireError):
        Unpacker(TYPES).unpack(packed, [np.zeros(1, np.int32)] * n)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" + b" " * 20, b"kjc1" + b"\xff" * 12, b"kjc1" + b"\0" * 12])
def test_strangers_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(Bytes(data).read)
