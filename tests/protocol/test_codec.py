"""Tests of hostile frames, and of how header and tensor frames fit together.

`test_messages` tests the limits of each field of each message in both directions.
"""

from __future__ import annotations

import ast
import importlib
import tracemalloc
from pathlib import Path
from typing import Any, Dict, List, Tuple

import msgpack
import pytest
import zmq

from weightd_protocol import codec, description_cache, limits
from weightd_protocol.codec import clip, decode, encode
from weightd_protocol.errors import LocalProtocolError, RemoteProtocolError
from weightd_protocol.messages.control import ReadyResponse
from weightd_protocol.messages.inference import (
    Error,
    Infer,
    InferResponse,
    Parameters,
    RequestDescription,
    ResponseDescription,
    TensorSpec,
)
from weightd_protocol.messages.status import Status, StatusResponse
from weightd_protocol.messages.types import FROM_CLIENT, TO_CLIENT
from weightd_protocol.messages.worker import TO_CHILD, Predict

X = TensorSpec("x", "FP32", (2, 3))
INFER = encode(Infer("7", RequestDescription("digits", (X,)), Parameters(500_000)))
RESPONSE = encode(
    InferResponse("7", ResponseDescription("m", (X, TensorSpec("s", "FP64", ()), TensorSpec("e", "INT8", (0, 5)))))
)
EXTENSION = msgpack.ExtType(5, b"7")


def header(**fields: Any) -> bytes:
    return msgpack.packb({"v": 2, "type": "status", "id": "7", **fields})


def refusal(*frames: Any, table: Any = FROM_CLIENT) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(frames, table)
    return caught.value


@pytest.fixture(params=["compiled", "pure"])
def unpacker(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use msgpack's C extension and its pure Python version, which is installed where there is no wheel or compiler."""
    if request.param == "pure":
        monkeypatch.setattr(msgpack, "unpackb", importlib.import_module("msgpack.fallback").unpackb)


@pytest.mark.usefixtures("unpacker")
@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, zmq.Frame])
def test_decodes_any_buffer(wrap: Any) -> None:
    assert encode(decode([*map(wrap, INFER), wrap(bytes(24))], FROM_CLIENT)) == INFER


# --- hostile headers ---------------------------------------------------------------------------------------------

MALFORMED: Dict[str, Tuple[bytes, str]] = {
    "nothing": (b"", "map"),
    "nil": (b"\xc0", "got NoneType"),
    "an integer": (b"\x07", "got int"),
    "a list": (msgpack.packb(["v", 1]), "got list"),
    "a text": (msgpack.packb("status"), "got str"),
    "a code that msgpack does not use": (b"\xc1", "map"),
    "trailing bytes": (header() + b"\x00", "map"),
    "two maps": (header() * 2, "map"),
    "half a map": (header()[:-1], "map"),
    "10 GB of text": (b"\x81\xa2id\xdb\xff\xff\xff\xff", "map"),
    "10 GB of bytes": (b"\x81\xa2id\xc6\xff\xff\xff\xff", "map"),
    "10 GB of extension": (b"\x81\xa2id\xc9\xff\xff\xff\xff\x05", "map"),
    "a list of 4 billion": (b"\x81\xa2id\xdd\xff\xff\xff\xff", "map"),
    "a map of 4 billion": (b"\xdf\xff\xff\xff\xff", "map"),
    "a key twice": (b"\x83\xa1v\x01\xa4type\xa6status\xa4type\xa5error", "map: the field type is given twice"),
    "a key twice, deep inside": (b"\x81\xa2id\x91\x82\xa1a\x01\xa1a\x02", "the field a is given twice"),
    "a bad timestamp": (b"\x81\xa2id\xd4\xff\x00", "map"),
    "a text that is not UTF-8": (b"\x81\xa2id\xa1\xff", "map"),
    "a key that is not UTF-8": (b"\x81\xa1\xff\x01", "map"),
    "a lone surrogate": (b"\x81\xa2id\xa3\xed\xa0\x80", "map"),
    "lists, nested without end": (b"\x91" * 60_000, "expected at most 2036 items, got at least"),
    "maps, nested without end": (b"\x81\xa1a" * 20_000, "expected at most 2036 items, got at least"),
}


@pytest.mark.usefixtures("unpacker")
@pytest.mark.parametrize(("raw", "expected"), MALFORMED.values(), ids=MALFORMED)
def test_rejects_other_than_maps(raw: bytes, expected: str) -> None:
    error = refusal(raw)
    assert str(error).startswith("envelope: ")
    assert expected in str(error)
    assert len(str(error)) < 300
    assert error.request_id == ("7" if raw.startswith(header()) else "")


# The pure Python msgpack before 1.1 accepts some of these keys; the schema then rejects them.
KEYS = {
    "a list": b"\x81\x91\x01\x01",
    "a map": b"\x81\x80\x01",
    "an integer": b"\x81\x01\x01",
    "NaN": b"\x81\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x01",
    "a timestamp": b"\x81\xd6\xff\x00\x00\x00\x01\x01",
}


@pytest.mark.parametrize("raw", KEYS.values(), ids=KEYS)
def test_keys_are_strings(raw: bytes) -> None:
    assert str(refusal(raw)).startswith("envelope: ")


# Just below the unpacker's limit a value is deeper than Python's stack, so no code may recurse into it.
@pytest.mark.usefixtures("unpacker")
@pytest.mark.parametrize("depth", [1, 10, 100, 400, 500, 505, 510, 900, 990, 1000, 1010, 1016, 1020, 1022, 1024, 2000])
@pytest.mark.parametrize("nest", [b"\x91", b"\x81\xa1a"])
def test_handles_any_depth(depth: int, nest: bytes) -> None:
    for name in ("v", "type", "id", "model_name", "surplus"):
        known = {"v": 2, "type": "model_ready", "id": "7", "model_name": "m"}
        fields = [msgpack.packb(key) + msgpack.packb(value) for key, value in known.items() if key != name]
        raw = bytes([0x81 + len(fields)]) + b"".join(fields) + msgpack.packb(name) + nest * depth + b"\xc0"
        error = str(refusal(raw))
        assert name in error or "expected at most" in error or "nested too deep" in error


def test_claimed_lengths_allocate_no_memory() -> None:
    """Each of a thousand levels claims a list or a map with thousands of items."""
    bombs = [b"\xdd\x00\x00\xf0\x00" * 1000, b"\xdd\x00\x00\x10\x00" * 1000, b"\xdf\x00\x00\x70\x00\xa1a" * 1000]
    tracemalloc.start()
    try:
        for table in (FROM_CLIENT, TO_CLIENT):
            for bomb in bombs:
                refusal(bomb.ljust(limits.MAX_HEADER_BYTES, b"\xc0"), table=table)
        assert tracemalloc.get_traced_memory()[1] < 48 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_limits_length_of_header() -> None:
    fits = header(surplus="x" * (limits.MAX_HEADER_BYTES - len(header(surplus="")) - 2))
    assert len(fits) == limits.MAX_HEADER_BYTES
    assert "surplus: unknown field" in str(refusal(fits))
    assert str(refusal(fits + b"x")) == "envelope: expected at most 65536 bytes, got 65537"
    # A higher limit applies only where a caller passes it.
    answer = StatusResponse("7", "1", "x" * 256, 1, 1.0, 0, ())
    size = len(encode(answer)[0])
    assert decode(encode(answer, max_bytes=size), TO_CLIENT, max_bytes=size) == answer
    with pytest.raises(RemoteProtocolError, match=r"^envelope: expected at most"):
        decode(encode(answer), TO_CLIENT, max_bytes=size - 1)
    expected = f"^status_response: expected a header of at most {size - 1} bytes, got {size}$"
    with pytest.raises(LocalProtocolError, match=expected):
        encode(answer, max_bytes=size - 1)


# --- version, type, id -------------------------------------------------------------------------------------------

# Other versions and types, and values of other types. The last one is so long that it is truncated.
VERSIONS: List[Any] = [0, 1, -1, 2.0, True, "2", None, [2], {}, b"\x02", 2**64 - 1, EXTENSION, list(range(1000))]
TAGS: List[Any] = [
    "",
    "Status",
    "status ",
    "predict",
    "infer_response",
    b"status",
    1,
    None,
    [],
    EXTENSION,
    "x" * 60_000,
]
OTHERS = [("v", each) for each in VERSIONS] + [("type", each) for each in TAGS]


@pytest.mark.parametrize(("name", "value"), OTHERS, ids=lambda value: repr(value)[:20])
def test_rejects_other_versions_and_types(name: str, value: object) -> None:
    error = refusal(header(**{name: value}))
    expected = {"v": "this side speaks protocol version 2, the peer sent", "type": "expected one of infer, "}
    assert str(error).startswith(f"{name}: {expected[name]}")
    # The error names the type of the value; otherwise a list would be "of 1 items".
    assert f" {type(value).__name__} " in str(error)
    assert len(str(error)) < 300
    assert error.request_id == "7"
    if value is None:
        assert str(refusal(header().replace(msgpack.packb(name), b"\xa1w"))) == str(error)


@pytest.mark.parametrize("request_id", ["7", "i" * 128, "é" * 64, "\n\x00"])
def test_error_has_valid_request_id(request_id: str) -> None:
    error = refusal(header(id=request_id, surplus=1))
    assert error.request_id == request_id
    assert encode(Error(error.request_id, "INVALID_ARGUMENT", str(error)))


@pytest.mark.parametrize(
    "request_id", ["i" * 129, "é" * 64 + "i", "", 7, None, b"7", ["7"], EXTENSION, msgpack.ExtType(5, b"")]
)
def test_error_omits_invalid_request_id(request_id: object) -> None:
    assert refusal(header(id=request_id, surplus=1)).request_id == ""


# --- tensor frames -----------------------------------------------------------------------------------------------

FORGED = encode(Infer("7", RequestDescription("m", (TensorSpec("a\nb", "INT8", (1,)),))))


@pytest.mark.parametrize(
    ("header", "lengths", "problem"),
    [
        (INFER, [], "frames: expected 1 tensor frames after the header, got 0"),
        (INFER, [24, 0], "frames: expected 1 tensor frames after the header, got 2"),
        (INFER, [24] * 65, "frames: expected 1 tensor frames after the header, got 65"),
        (INFER, [23], "frames[2] (x): FP32 of shape [2, 3] is 24 bytes, got 23"),
        (INFER, [25], "frames[2] (x): FP32 of shape [2, 3] is 24 bytes, got 25"),
        (INFER, [0], "frames[2] (x): FP32 of shape [2, 3] is 24 bytes, got 0"),
        (encode(Status("7")), [0], "frames: expected the envelope alone, got 2"),
        (RESPONSE, [8, 24, 0], "frames[2] (x): FP32 of shape [2, 3] is 24 bytes, got 8"),
        (RESPONSE, [24, 8, 1], "frames[4] (e): INT8 of shape [0, 5] is 0 bytes, got 1"),
        (FORGED, [0], r"frames[2] ('a\nb'): INT8 of shape [1] is 1 bytes, got 0"),
    ],
)
def test_rejects_frames_that_do_not_fit_the_header(header: List[bytes], lengths: List[int], problem: str) -> None:
    error = refusal(*header, *map(bytes, lengths), table=TO_CLIENT if header is RESPONSE else FROM_CLIENT)
    assert str(error) == problem
    assert error.request_id == "7"


PLACED = ResponseDescription("m", (X, TensorSpec("s", "FP64", ())))


def test_tensor_in_shared_memory_has_no_frame() -> None:
    frames = [*encode(InferResponse("7", PLACED, (0,))), bytes(8)]
    assert decode(frames, TO_CLIENT) == InferResponse("7", PLACED, (0,))
    assert "frames[2] (s): FP64 of shape [] is 8 bytes, got 24" in str(refusal(*frames[:2], bytes(24), table=TO_CLIENT))


@pytest.mark.parametrize("positions", [(2,), (0, 0)])
def test_rejects_wrong_positions_of_shared_tensors(positions: Tuple[int, ...]) -> None:
    expected = f"regions: expected positions of 2 tensors, each once, got {', '.join(map(str, positions))}"
    assert str(refusal(*encode(InferResponse("7", PLACED, positions)), table=TO_CLIENT)) == expected


def test_caches_equal_descriptions() -> None:
    known: codec.Decoder[Any] = codec.Decoder(FROM_CLIENT, max_cached=2)
    first, same = (known.decode([*INFER, bytes(24)]) for _ in range(2))
    assert first.description is same.description
    # The oldest descriptions are dropped first; a long one is never cached.
    for name in ("a", "b"):
        known.decode(encode(Infer("7", RequestDescription(name, ()))))
    assert known.decode([*INFER, bytes(24)]).description is not first.description
    long = encode(Infer("7", RequestDescription("é" * 60, (), ("é" * 120,) * 64)))
    assert len(long[1]) > 15 * 1024
    one, other = (known.decode(long) for _ in range(2))
    assert one.description is other.description
    longer = encode(Infer("7", RequestDescription("m", (), ("o" * 256,) * 64)))
    one, other = (known.decode(longer) for _ in range(2))
    assert one.description is not other.description


def test_limits_bytes_of_cached_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    known: codec.Decoder[Any] = codec.Decoder(FROM_CLIENT)
    asked = [encode(Infer("7", RequestDescription(name, (), ("o" * 200,) * 20))) for name in "abc"]
    monkeypatch.setattr(description_cache, "MAX_CACHED_BYTES", 2 * sum(map(len, asked[0])))
    first = known.decode(asked[0])
    for each in asked[1:]:
        known.decode(each)
    assert known.decode(asked[2]).description is known.decode(asked[2]).description
    assert known.decode(asked[0]).description is not first.description


def test_ignores_unknown_fields_of_responses() -> None:
    """Requests with unknown fields are rejected. A later daemon may thus send more fields to an earlier client."""
    fields = {"id": "7", "ready": True, "color": "red"}
    assert decode([msgpack.packb({"v": 2, "type": "ready_response", **fields})], TO_CLIENT) == ReadyResponse("7", True)
    tensor = {"name": "x", "datatype": "INT8", "shape": [1], "color": "red"}
    header = [{"v": 2, "type": "infer_response", "id": "7"}, {"model_name": "m", "outputs": [tensor], "color": "red"}]
    answer = decode([*map(msgpack.packb, header), b"x"], TO_CLIENT)
    assert answer == InferResponse("7", ResponseDescription("m", (TensorSpec("x", "INT8", (1,)),)))


def test_rejects_empty_message() -> None:
    assert str(refusal()) == "envelope: expected a frame, got an empty message"


@pytest.mark.parametrize(("datatype", "size"), [("INT8", 1), ("BOOL", 1), ("FP16", 2), ("FP32", 4), ("FP64", 8)])
def test_limits_dimensions_of_empty_tensor(datatype: str, size: int) -> None:
    """The elements are counted in an int64, without the dimensions of 0."""
    largest = Predict(1, RequestDescription("m", (TensorSpec("x", datatype, (2**40, 0, 2**22 // size)),)))
    assert decode([*encode(largest), b""], TO_CHILD) == largest
    shape = (2**40, 0, 2**23 // size)
    refused = encode(Predict(1, RequestDescription("m", (TensorSpec("x", datatype, shape),))))
    what = f"frames[2] (x): {datatype} of shape {list(shape)} is too large to be described, even if it is empty"
    assert str(refusal(*refused, b"", table=TO_CHILD)) == f"predict: {what}"


# --- sending -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [object(), None, "status", {"type": "status"}, X, Parameters()])
def test_does_not_encode_other_objects(thing: object) -> None:
    with pytest.raises(LocalProtocolError, match="is not a message of the protocol"):
        encode(thing)


TEXTS = [
    "",
    "x" * 4096,
    "x" * 4097,
    "é" * 2048,
    "é" * 2049,
    "€" * 1366,
    "\U0001f600" * 1025,
    "a\ud800b",
    "\ud800" * 5000,
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_clipped_text_is_valid(text: str) -> None:
    clipped = clip(text)
    assert encode(Error("", "INTERNAL", clipped))
    whole = text.encode("utf-8", "replace")
    if len(whole) <= limits.MAX_TEXT_BYTES:
        assert clipped.encode() == whole
    else:
        assert clipped.endswith("...")
        assert whole.startswith(clipped[:-3].encode())
        assert limits.MAX_TEXT_BYTES - 3 <= len(clipped.encode()) <= limits.MAX_TEXT_BYTES


@pytest.mark.parametrize("module", sorted(Path(codec.__file__).parent.glob("**/*.py")), ids=lambda path: path.stem)
def test_protocol_does_no_io(module: Path) -> None:
    """The modules import no sockets, clocks, threads or files, and numpy only in `tensors`."""
    imported: List[str] = []
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported.append(node.module or "")
    allowed = {"__future__", "collections", "dataclasses", "functools", "mmap", "struct", "sys", "typing", "msgpack"}
    allowed |= {"weightd_protocol", *(("numpy",) if module.stem == "tensors" else ())}
    assert {name.split(".")[0] for name in imported} <= allowed
