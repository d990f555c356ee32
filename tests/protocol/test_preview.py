"""Tests of the preview, which rejects headers that cost more to unpack than a legal message, before msgpack builds
objects."""

from __future__ import annotations

from typing import Any, Dict, List

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weightd_protocol import limits, preview, schema
from weightd_protocol.codec import decode, encode, heading, max_request_items
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.control import ModelMetadata
from weightd_protocol.messages.inference import Infer, Parameters, RequestDescription, TensorSignature, TensorSpec
from weightd_protocol.messages.regions import InputLocation, OutputLocation, Regions
from weightd_protocol.messages.types import FROM_CLIENT
from weightd_protocol.messages.worker import FROM_CHILD, AnnounceSelfTest, Built
from weightd_protocol.messages.worker_common import SelfTestCases

SCALARS: Any = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=80) | st.binary()
)
VALUES: Any = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=40), inner, max_size=5),
    max_leaves=10,
)
# Lengths around the limits of each msgpack format.
LENGTHS = [0, 1, 15, 16, 31, 32, 255, 256, 65_535, 65_536]
FORMS: List[Any] = [
    *[["t" * each for each in LENGTHS], [b"b" * each for each in LENGTHS], [[None] * each for each in LENGTHS]],
    [dict.fromkeys(map(str, range(each))) for each in LENGTHS],
]
LONG = "x" * preview.SHORT_BYTES


def items_of(value: Any) -> int:
    """Return the number of items of a value, itself included."""
    if isinstance(value, dict):
        return limits.CONTAINER_ITEMS + sum(items_of(key) + items_of(each) for key, each in value.items())
    return limits.CONTAINER_ITEMS + sum(map(items_of, value)) if isinstance(value, list) else 1


@settings(max_examples=50)
@example(FORMS)
@given(VALUES)
def test_counts_items_of_any_value(value: Any) -> None:
    value = [LONG, value]
    frame, items = msgpack.packb(value), items_of(value)
    assert preview.find_problem(frame, items) == ""
    assert preview.find_problem(frame, items - 1).startswith(f"expected at most {items - 1} items, got at least ")


@settings(max_examples=50)
@given(st.binary(max_size=200) | VALUES.map(msgpack.packb), st.data())
def test_leaves_invalid_data_to_msgpack(raw: bytes, data: Any) -> None:
    frame = msgpack.packb(LONG)[:-1] + raw
    preview.find_problem(frame[: data.draw(st.integers(0, len(frame)))], 50)
    preview.find_problem(raw.ljust(preview.SHORT_BYTES + 1, b"\xc1"), 50)
    preview.leading_fields(raw)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 8, 16, 17, 300, 70_000])
def test_rejects_extension_types(size: int) -> None:
    frame = msgpack.packb([LONG, msgpack.ExtType(5, bytes(size))])
    assert preview.find_problem(frame, 1000) == "expected no extension type, got one"


# --- messages ----------------------------------------------------------------------------------------------------

SPECS = tuple(TensorSpec(f"{number:02}" + "n" * 254, "FP32", (1,) * 16) for number in range(64))
SIGNATURES = tuple(TensorSignature(each.name, each.datatype, each.shape) for each in SPECS)
REGIONS = Regions(
    tuple(InputLocation(number, "r" * 32, 2**62) for number in range(64)),
    tuple(OutputLocation(number, "r" * 32, 2**62, 2**62) for number in range(64)),
)
DESCRIPTION = RequestDescription("m" * 256, SPECS, tuple("o" * 256 for _ in range(64)))
CASES: SelfTestCases = tuple({each.name: each.shape for each in SPECS} for _ in range(16))


@pytest.mark.parametrize(
    ("message", "table"),
    [
        (Infer("i" * 128, DESCRIPTION, Parameters(1, REGIONS, 1, "t" * 256)), FROM_CLIENT),
        (AnnounceSelfTest(CASES[:4], CASES), FROM_CHILD),
        (Built("", SIGNATURES, SIGNATURES, CASES[:4], "", 0, gears=((1,) * 4,) * 100), FROM_CHILD),
    ],
    ids=lambda each: type(each).__name__,
)
def test_accepts_largest_legal_message(message: Any, table: Any) -> None:
    header = encode(message, max_bytes=limits.MAX_CHILD_HEADER_BYTES)
    assert sum(map(len, header)) > 40_000
    assert decode(header, table, max_bytes=limits.MAX_CHILD_HEADER_BYTES) == message


UNITS: Dict[str, bytes] = {
    "empty map": b"\x80",
    "map": b"\x81\xa1x\xc0",
    "empty list": b"\x90",
    "nil": b"\xc0",
    "empty text": b"\xa0",
    "text": b"\xa2\xc3\xa9",
    "float": b"\xca\x00\x00\x00\x01",
    "integer": b"\xcf" + b"\xff" * 8,
    "bytes": b"\xc4\x01x",
    "extension": b"\xd4\x05x",
    "timestamp": b"\xd6\xff\x00\x00\x00\x01",
}


def filled(unit: bytes, nbytes: int, *, nested: bool) -> bytes:
    """Return lists of 60 such units, nested or side by side."""
    part = b"\xdc\x00\x3d" + unit * 60 if nested else b"\xdc\x00\x3c" + unit * 60
    count = nbytes // len(part)
    return part * count + b"\xc0" if nested else b"\xdd" + count.to_bytes(4, "big") + part * count


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> List[int]:
    """Return a list that records the number of items of each frame that msgpack unpacks."""
    found: List[int] = []
    unpack = msgpack.unpackb

    def counting(frame: bytes, **options: Any) -> Any:
        value = unpack(frame, **options)
        found.append(items_of(value))
        return value

    monkeypatch.setattr(msgpack, "unpackb", counting)
    return found


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
@pytest.mark.parametrize(
    ("tag", "table", "nbytes"),
    [
        ("infer", FROM_CLIENT, 65_000),
        ("status", FROM_CLIENT, 65_000),
        ("update", FROM_CLIENT, 65_000),
        ("pong", FROM_CHILD, 1_000_000),
        ("predict_result", FROM_CHILD, 1_000_000),
    ],
)
def test_rejects_envelope_with_too_many_items(
    unpacked: List[int], tag: str, table: Any, nbytes: int, unit: bytes, nested: bool
) -> None:
    head = msgpack.packb({"v": 2, "type": tag, "id": "7"})[1:]
    envelope = b"\x84" + head + msgpack.packb("parameters") + filled(unit, nbytes, nested=nested)
    with pytest.raises(RemoteProtocolError, match=r"^envelope: expected (at most|no extension)") as caught:
        decode([envelope], table, max_bytes=limits.MAX_CHILD_HEADER_BYTES)
    assert caught.value.request_id == "7"
    assert not unpacked


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_rejects_description_with_too_many_items(unpacked: List[int], unit: bytes, nested: bool) -> None:
    envelope = msgpack.packb({"v": 2, "type": "infer", "id": "7"})
    names = b"".join(map(msgpack.packb, ("model_name", "m", "inputs")))
    with pytest.raises(RemoteProtocolError, match=r"^infer: description: expected (at most|no extension)") as caught:
        decode([envelope, b"\x82" + names + filled(unit, 65_000, nested=nested)], FROM_CLIENT)
    assert caught.value.request_id == "7"
    assert len(unpacked) == 1


def test_limit_depends_on_number_of_tensors() -> None:
    description = RequestDescription("m" * 256, SPECS[:2], tuple("o" * 256 for _ in range(3)))
    frame = msgpack.packb(schema.plain(description))
    assert preview.find_problem(frame, max_request_items(2, 3)) == ""
    assert max_request_items(64, 64) - max_request_items(2, 3) == 62 * schema.max_record_items(TensorSpec) + 61
    more = msgpack.packb(schema.plain(DESCRIPTION))
    assert preview.find_problem(more, max_request_items(2, 3)).startswith("expected at most")
    assert preview.find_problem(more, max_request_items(64, 64)) == ""


# --- type and id of a message that is not decoded ------------------------------------------------------------------


def test_reads_type_and_id_before_lists_and_maps() -> None:
    assert heading(encode(ModelMetadata("7", "m"))) == ("model_metadata", "7")
    assert heading([msgpack.packb({"id": "7", "type": "infer", "parameters": [1] * 60_000})]) == ("infer", "7")
    assert heading([msgpack.packb({"type": "infer", "parameters": [1], "id": "7"})]) == ("infer", "")
    assert heading([msgpack.packb({"id": "i" * 129, "type": 7})]) == ("", "")


@pytest.mark.parametrize(
    "frame", [b"", b"\xc0", b"\x81", b"\x81\xa2id", b"\x81\xa2id\xa2x", b"\x81\xa2id\xa1\xff", b"\xc1"]
)
def test_invalid_frame_has_no_type_and_id(frame: bytes) -> None:
    assert heading([frame]) == ("", "")
    assert heading([]) == ("", "")
