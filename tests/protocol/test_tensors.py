"""Tests of the conversion of numpy arrays to frames and back."""

from __future__ import annotations

import functools
import operator
from typing import Any, Dict, List

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_protocol import limits
from weightd_protocol.codec import decode, encode
from weightd_protocol.datatypes import ITEM_BYTES, NUMPY_DTYPE
from weightd_protocol.errors import InvalidArgument, RemoteProtocolError
from weightd_protocol.messages.inference import Infer, RequestDescription, TensorSpec
from weightd_protocol.messages.types import FROM_CLIENT
from weightd_protocol.tensors import frame_of, from_frame, spec_of, to_wire

CUBE = np.arange(24).reshape(2, 3, 4)


def round_trip(value: Any) -> Any:
    """Return the array that the receiver decodes from the bytes."""
    array = to_wire(value)
    header = encode(Infer("7", RequestDescription("m", (spec_of("x", array),))))
    frame = bytes(frame_of(array))
    message = decode([*header, frame], FROM_CLIENT)
    assert isinstance(message, Infer)
    return from_frame(message.description.inputs[0], frame)


@pytest.mark.parametrize("datatype", ITEM_BYTES)
@pytest.mark.parametrize("order", ["<", ">", "="])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,), (3, 0, 2), (1,) * 16])
def test_every_datatype_byte_order_and_shape(datatype: str, order: Any, shape: Any) -> None:
    dtype = np.dtype(NUMPY_DTYPE[datatype])
    array = np.asarray(np.arange(np.prod(shape, dtype=int)), dtype.newbyteorder(order)).reshape(shape)
    arrived = round_trip(array)
    assert arrived.dtype == dtype
    assert arrived.shape == shape
    assert np.array_equal(arrived, array)


VIEWS: Dict[str, Any] = {
    "in F order": np.asfortranarray(CUBE),
    "permuted": CUBE.transpose(1, 0, 2),
    "every second": CUBE[:, ::2],
    "backwards": CUBE[::-1, ::-1],
    "broadcast": np.broadcast_to(np.int64(3), (2, 3)),
    "empty in F order": np.zeros((3, 0, 2), order="F"),
    "big-endian in F order": np.asfortranarray(CUBE.astype(">i4")),
    "not aligned": np.frombuffer(bytes(range(9)), dtype=np.uint8)[1:].view("<f4"),
    "a field of records": np.array([(1, 2.5), (2, 3.5)], dtype=[("a", "<i4"), ("b", "<f8")])["b"],
    "a numpy scalar": np.float32(2.5),
    "a Python boolean": True,
    "a list": [[1, 2], [3, 4]],
    "a matrix": np.eye(2).view(np.matrix),
}


@pytest.mark.parametrize("value", VIEWS.values(), ids=VIEWS)
def test_any_memory_layout(value: Any) -> None:
    arrived = round_trip(value)
    assert arrived.shape == np.shape(value)
    assert np.array_equal(arrived, value)


def test_frame_is_little_endian_in_c_order() -> None:
    array = np.array([[1, 2], [3, 4]], dtype=">u2", order="F")
    assert bytes(frame_of(to_wire(array))) == bytes([1, 0, 2, 0, 3, 0, 4, 0])


def address(array: Any) -> Any:
    return array.__array_interface__["data"][0]


def test_does_not_copy_suitable_arrays() -> None:
    frozen = CUBE.copy()
    frozen.flags.writeable = False
    for array in (CUBE, np.zeros((), "<f4"), np.zeros((2, 0, 3), "<f4"), CUBE[1:], frozen):
        wired = to_wire(array)
        assert address(wired) == address(array)
        assert not array.size or np.shares_memory(np.asarray(frame_of(wired)), array)
    # A read-only array stays read-only.
    assert frame_of(to_wire(frozen)).readonly
    for frame, writable in ((bytes(frame_of(frozen)), False), (bytearray(frame_of(frozen)), True)):
        assert from_frame(spec_of("x", frozen), frame).flags.writeable is writable


def test_keeps_bits_of_nan_and_infinity() -> None:
    bits = np.array([0x7FC00001, 0x7F800001, 0x7F800000, 0xFF800000, 0x80000000], dtype="<u4")
    assert np.array_equal(round_trip(bits.view("<f4")).view("<u4"), bits)


REFUSED: Dict[str, Any] = {
    "objects": np.array([None]),
    "text": np.array(["a"]),
    "bytes": np.array([b"a"]),
    "complex numbers": np.zeros(1, np.complex64),
    "dates": np.array(["2020-01-01"], "M8[D]"),
    "spans of time": np.array([1], "m8[s]"),
    "records": np.zeros(1, [("a", "<i4")]),
    "raw memory": np.zeros(1, "V2"),
    "an integer beyond 64 bits": [2**70],
    "nothing": None,
    "a map": {"a": 1},
}
if np.dtype(np.longdouble).itemsize > 8:
    REFUSED["a long double"] = np.zeros(1, np.longdouble)


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_rejects_unsupported_datatypes(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="is not a supported datatype; expected one of BOOL, UINT8, "):
        to_wire(value)


def test_rejects_extension_datatypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ("bfloat16", "float8_e5m2", "int4"):
        with pytest.raises(InvalidArgument, match=f"dtype {name} is not a supported datatype"):
            to_wire(np.zeros(1, getattr(ml_dtypes, name)))


@pytest.mark.skipif(np.__version__ < "1.24", reason="this numpy makes an array of objects, with a warning")
def test_rejects_other_than_arrays() -> None:
    with pytest.raises(InvalidArgument, match="expected an array: "):
        to_wire([[1], [1, 2]])


def test_checks_limits_before_copying() -> None:
    assert round_trip(np.zeros((1,) * limits.MAX_RANK)).ndim == 16
    with pytest.raises(InvalidArgument, match="expected at most 16 dimensions, got 17"):
        to_wire(np.zeros((1,) * (limits.MAX_RANK + 1)))
    with pytest.raises(InvalidArgument, match="expected at most 1073741824 bytes, got 1073741825"):
        to_wire(np.broadcast_to(np.int8(0), (limits.MAX_FRAME_BYTES + 1,)))


def test_booleans_are_0_or_1() -> None:
    spec = TensorSpec("x", "BOOL", (3,))
    assert from_frame(spec, b"\x00\x01\x01").tolist() == [False, True, True]
    for frame in (b"\x00\x01\x02", b"\xff\x00\x00"):
        with pytest.raises(InvalidArgument, match=r"^x: expected 0 or 1 in each byte of a BOOL$"):
            from_frame(spec, frame)
    assert from_frame(TensorSpec("x", "BOOL", (0,)), b"").size == 0


SHAPES = st.lists(st.integers(0, 4), max_size=16) | st.lists(st.integers(0, 2**40), max_size=16)


@given(st.sampled_from(sorted(ITEM_BYTES)), SHAPES, st.randoms(use_true_random=False))
def test_any_decoded_tensor_is_an_array(datatype: str, shape: List[int], random: Any) -> None:
    """An empty tensor may claim dimensions whose product numpy cannot compute; none of these may reach numpy."""
    if random.random() < 0.5:
        shape = [*shape[:15], 0]
    spec = TensorSpec("x", datatype, tuple(shape))
    if spec.nbytes > 1 << 20:
        return
    frame = bytes(spec.nbytes)
    try:
        decode([*encode(Infer("7", RequestDescription("m", (spec,)))), frame], FROM_CLIENT)
    except RemoteProtocolError:
        assert 0 in shape
        assert functools.reduce(operator.mul, filter(None, shape), ITEM_BYTES[datatype]) >= 2**63
        return
    assert from_frame(spec, frame).shape == spec.shape
