"""Frames as an enemy would send them, and the seams between header and tensor frames."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any, Dict, List, Sequence, Type

import msgpack
import pytest

from weightd.protocol import codec, limits
from weightd.protocol.codec import clip, decode, encode
from weightd.protocol.errors import LocalProtocolError, RemoteProtocolError
from weightd.protocol.messages.children import TO_CHILD, Predict, Settle, Stop
from weightd.protocol.messages.control import ModelMetadata
from weightd.protocol.messages.data import Error, Infer, InferResponse, Parameters, TensorSpec
from weightd.protocol.messages.status import Status, StatusResponse
from weightd.protocol.messages.types import FROM_CLIENT, TO_CLIENT

Raw = Dict[str, Any]

X = TensorSpec("x", "FP32", (2, 3))
INFER = Infer("7", "digits", (X,), Parameters(500_000))
X_FRAME = bytes(24)


def header(**fields: Any) -> bytes:
    return msgpack.packb({"v": 1, "type": "status", "id": "7", **fields})


def refusal(*frames: Any, table: Any = FROM_CLIENT) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(frames, table)
    return caught.value


# --- what passes -------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_header_do_not_change_in_silence() -> None:
    assert encode(Status("7")) == b"\x83\xa1v\x01\xa4type\xa6status\xa2id\xa17"


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_any_buffer_is_a_frame(wrap: Type[Any]) -> None:
    assert decode([wrap(encode(INFER)), wrap(X_FRAME)], FROM_CLIENT) == INFER


def test_a_zmq_frame_is_a_frame() -> None:
    zmq = pytest.importorskip("zmq")
    assert decode([zmq.Frame(encode(INFER)), zmq.Frame(X_FRAME)], FROM_CLIENT) == INFER


def test_tensor_frames_are_measured_but_never_read() -> None:
    class Length:
        def __len__(self) -> int:
            return 24

    assert decode([encode(INFER), Length()], FROM_CLIENT) == INFER


@pytest.mark.parametrize("message", [Stop(), Settle()])
def test_a_message_without_fields(message: object) -> None:
    assert decode([encode(message)], TO_CHILD) == message


def test_an_absent_parameter_is_not_sent_and_a_nil_is_not_accepted() -> None:
    assert msgpack.unpackb(encode(Infer("7", "m", ())))["parameters"] == {}
    raw: Raw = {"v": 1, "type": "infer", "id": "7", "model_name": "m", "inputs": [], "parameters": {"timeout": None}}
    expected = "infer: parameters.timeout: expected integer, 1 to 3600000000, got NoneType None"
    assert str(refusal(msgpack.packb(raw))) == expected


# --- hostile headers ---------------------------------------------------------------------------------------------

MALFORMED: Dict[str, bytes] = {
    "nothing": b"",
    "nil": b"\xc0",
    "an integer": b"\x07",
    "a list": msgpack.packb(["v", 1]),
    "a text": msgpack.packb("status"),
    "a code that msgpack does not use": b"\xc1",
    "trailing bytes": header() + b"\x00",
    "two maps": header() * 2,
    "half a map": header()[:-1],
    "10 GB of text": b"\x81\xa2id\xdb\xff\xff\xff\xff",
    "10 GB of bytes": b"\x81\xa2id\xc6\xff\xff\xff\xff",
    "10 GB of extension": b"\x81\xa2id\xc9\xff\xff\xff\xff\x05",
    "a list of 4 billion": b"\x81\xa2id\xdd\xff\xff\xff\xff",
    "a map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "a key twice": b"\x82\xa1v\x01\xa1v\x01",
    "a key twice, deep inside": b"\x81\xa2id\x91\x82\xa1a\x01\xa1a\x02",
    "a list as key": b"\x81\x91\x01\x01",
    "a map as key": b"\x81\x80\x01",
    "an integer as key": b"\x81\x01\x01",
    "NaN as key": b"\x81\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x01",
    "a timestamp as key": b"\x81\xd6\xff\x00\x00\x00\x01\x01",
    "a bad timestamp": b"\x81\xa2id\xd4\xff\x00",
    "a text that is not UTF-8": b"\x81\xa2id\xa1\xff",
    "a key that is not UTF-8": b"\x81\xa1\xff\x01",
    "a lone surrogate": b"\x81\xa2id\xa3\xed\xa0\x80",
    "lists, nested without end": b"\x91" * 60_000,
    "maps, nested without end": b"\x81\xa1a" * 20_000,
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_map_is_refused(raw: bytes) -> None:
    error = refusal(raw)
    assert str(error).startswith("header: ")
    assert len(str(error)) < 300
    assert error.request_id == ""


def test_a_field_that_is_given_twice_is_named() -> None:
    raw = b"\x83\xa1v\x01\xa4type\xa6status\xa4type\xa5error"
    assert str(refusal(raw)) == "header: expected one msgpack map: the field type is given twice"


def test_nesting_is_said_to_be_the_cause() -> None:
    assert str(refusal(b"\x91" * 60_000)) == "header: nested too deep"


# Just below what the unpacker refuses, a value is deeper than Python's own stack: nothing may recurse into it.
@pytest.mark.parametrize("depth", [1, 10, 100, 400, 500, 505, 510, 900, 990, 1000, 1010, 1016, 1020, 1022, 1024, 2000])
@pytest.mark.parametrize("name", ["v", "type", "id", "inputs", "surplus"])
@pytest.mark.parametrize("nest", [b"\x91", b"\x81\xa1a"])
def test_no_depth_is_too_deep(depth: int, name: str, nest: bytes) -> None:
    fields = [msgpack.packb(key) + msgpack.packb(value) for key, value in BASE.items() if key != name]
    raw = bytes([0x81 + len(fields)]) + b"".join(fields) + msgpack.packb(name) + nest * depth + b"\xc0"
    assert name in str(refusal(raw)) or "nested too deep" in str(refusal(raw))


BASE = {"v": 1, "type": "infer", "id": "7", "model_name": "m"}


def test_claimed_lengths_cost_no_memory() -> None:
    """A list or a map that claims thousands of items, in each of a thousand levels."""
    bombs = [b"\xdd\x00\x00\xf0\x00" * 1000, b"\xdd\x00\x00\x10\x00" * 1000, b"\xdf\x00\x00\x70\x00\xa1a" * 1000]
    tracemalloc.start()
    try:
        for bomb in bombs:
            refusal(bomb.ljust(limits.MAX_HEADER_BYTES, b"\xc0"))
        assert tracemalloc.get_traced_memory()[1] < 48 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_a_header_may_be_as_long_as_its_bound_but_no_longer() -> None:
    size = len(header(surplus=""))
    fits = header(surplus="x" * (limits.MAX_HEADER_BYTES - size - 2))
    assert len(fits) == limits.MAX_HEADER_BYTES
    assert "surplus: unknown field" in str(refusal(fits))
    too_long = header(surplus="x" * (limits.MAX_HEADER_BYTES - size - 1))
    assert str(refusal(too_long)) == "header: expected at most 65536 bytes, got 65537"


def test_only_who_asks_for_it_accepts_a_larger_header() -> None:
    many = StatusResponse("7", "1", "x" * 256, 1, 1.0, 0, ())
    raw = encode(many)
    assert decode([raw], TO_CLIENT, max_bytes=len(raw)) == many
    with pytest.raises(RemoteProtocolError, match=r"^header: expected at most"):
        decode([raw], TO_CLIENT, max_bytes=len(raw) - 1)


def test_msgpack_in_pure_python_does_as_well() -> None:
    """Where there is no wheel and no compiler. Before 1.1 it lets other keys than texts in: the schema refuses them."""
    names = "(a_message or a_field or nesting or what_is_no_map or an_error_carries) and not key"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", names, __file__]
    done = subprocess.run(
        command,
        cwd=str(Path(__file__).parents[2]),
        env={**os.environ, "MSGPACK_PUREPYTHON": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode()
    assert b" passed" in done.stdout


EXTENSION = msgpack.ExtType(5, b"abc")


# --- version, type, id -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 2, -1, 1.0, True, "1", None, [1], {}, b"\x01", 2**64 - 1, EXTENSION])
def test_another_version_is_refused(version: object) -> None:
    error = refusal(header(v=version))
    assert str(error).startswith("v: this side speaks protocol version 1, the peer sent ")
    # Its kind is told, or a list would be "of 1 items".
    assert f"the peer sent {type(version).__name__} " in str(error)
    assert error.request_id == "7"


@pytest.mark.parametrize(
    "tag", ["", "Status", "status ", "predict", "infer_response", b"status", 1, None, [], EXTENSION]
)
def test_another_type_is_refused(tag: object) -> None:
    error = refusal(header(type=tag))
    assert str(error).startswith(f"type: expected one of {', '.join(FROM_CLIENT)}, got {type(tag).__name__} ")
    assert error.request_id == "7"


@pytest.mark.parametrize("name", ["v", "type"])
def test_version_and_type_are_required(name: str) -> None:
    raw = {"v": 1, "type": "status", "id": "7"}
    del raw[name]
    assert str(refusal(msgpack.packb(raw))).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("request_id", "echoed"),
    [
        ("7", "7"),
        ("i" * 128, "i" * 128),
        ("é" * 64, "é" * 64),
        ("\n\x00", "\n\x00"),
        ("i" * 129, ""),
        ("é" * 64 + "i", ""),
        ("", ""),
        (7, ""),
        (None, ""),
        (b"7", ""),
        (["7"], ""),
        (msgpack.ExtType(5, b"7"), ""),
        (msgpack.ExtType(5, b""), ""),
    ],
)
def test_an_error_carries_the_id_if_it_is_a_legal_one(request_id: object, echoed: str) -> None:
    error = refusal(header(id=request_id, surplus=1))
    assert error.request_id == echoed
    assert encode(Error(error.request_id, "INVALID_ARGUMENT", clip(str(error))))


# --- what an error shows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("surplus", "surplus"),
        ("", "''"),
        (".", "."),
        ("..x", "..x"),
        ("a\nWARNING forged", repr("a\nWARNING forged")),
        ("\x1b[2J", repr("\x1b[2J")),
        ("x" * 60_000, "'" + "x" * 36 + "..."),
        (b"id", "b'id'"),
        (b"\xff" * 1000, repr(b"\xff" * 40)[:37] + "..."),
    ],
)
def test_a_foreign_name_can_neither_flood_nor_forge_a_log(name: Any, written: str) -> None:
    error = refusal(msgpack.packb({**RAW_STATUS, name: 1}))
    assert str(error) == f"status: {written}: unknown field; expected one of id"


RAW_STATUS = {"v": 1, "type": "status", "id": "7"}


LARGE: List[Any] = ["x" * 60_000, b"x" * 60_000, list(range(4000)), [[]] * 4000, {"x" * 60_000: 1}]


@pytest.mark.parametrize("value", LARGE)
def test_a_foreign_value_is_shown_in_short(value: object) -> None:
    for name in ("v", "type", "id"):
        assert len(str(refusal(msgpack.packb({**RAW_STATUS, name: value})))) < 200


# --- tensor frames -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ([], "frames: expected 1 tensor frames after the header, got 0"),
        ([X_FRAME, b""], "frames: expected 1 tensor frames after the header, got 2"),
        ([X_FRAME] * 65, "frames: expected 1 tensor frames after the header, got 65"),
        ([X_FRAME[:-1]], "frames[1] (x): FP32 of shape [2, 3] is 24 bytes, got 23"),
        ([X_FRAME + b"\0"], "frames[1] (x): FP32 of shape [2, 3] is 24 bytes, got 25"),
        ([b""], "frames[1] (x): FP32 of shape [2, 3] is 24 bytes, got 0"),
    ],
)
def test_frames_that_do_not_fit_the_header(tensors: Sequence[bytes], problem: str) -> None:
    error = refusal(encode(INFER), *tensors)
    assert str(error) == problem
    assert error.request_id == "7"


def test_a_message_without_tensors_has_no_frames() -> None:
    assert str(refusal(encode(Status("7")), b"")) == "frames: expected 0 tensor frames after the header, got 1"
    assert str(refusal()) == "header: expected a frame, got an empty message"


def test_each_tensor_has_its_own_frame() -> None:
    message = InferResponse("7", "m", (X, TensorSpec("s", "FP64", ()), TensorSpec("e", "INT8", (0, 5))))
    assert decode([encode(message), X_FRAME, bytes(8), b""], TO_CLIENT) == message
    assert str(refusal(encode(message), bytes(8), X_FRAME, b"", table=TO_CLIENT)).startswith("frames[1] (x): ")
    assert str(refusal(encode(message), X_FRAME, bytes(8), b"\0", table=TO_CLIENT)).startswith("frames[3] (e): ")


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "FP32", "FP64"])
def test_an_empty_tensor_must_be_one_that_can_be_described(datatype: str) -> None:
    """The elements are counted in an int64, with the dimensions of 0 left out."""
    size = TensorSpec("x", datatype, ()).nbytes
    largest = TensorSpec("x", datatype, (2**40, 0, 2**22 // size))
    assert decode([encode(Predict(1, (largest,))), b""], TO_CHILD).tensors == (largest,)  # type: ignore[union-attr]
    beyond = TensorSpec("x", datatype, (2**40, 0, 2**23 // size))
    expected = (
        f"frames[1] (x): {datatype} of shape {list(beyond.shape)} is too large to be described, even if it is empty"
    )
    assert str(refusal(encode(Predict(1, (beyond,))), b"", table=TO_CHILD)) == expected


def test_a_product_of_dimensions_does_not_wrap_around() -> None:
    """2^40 · 2^24 is 0 in 64 bits, and -(2^63) · 2 as well."""
    for shape in [(2**40, 2**24), (2**40, 2**23, 2), (2**40,) * 16]:
        assert str(refusal(encode(Predict(1, (TensorSpec("x", "INT8", shape),))), b"", table=TO_CHILD)).startswith(
            "frames[1]"
        )


def test_a_tensor_name_cannot_forge_a_log() -> None:
    raw = encode(Predict(1, (TensorSpec("a\nb", "INT8", (1,)),)))
    assert str(refusal(raw, b"", table=TO_CHILD)).startswith(r"frames[1] ('a\nb'): ")


# --- this side ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [object(), None, "status", {"type": "status"}, X, Parameters()])
def test_what_is_no_message_is_not_sent(thing: object) -> None:
    with pytest.raises(LocalProtocolError, match="is not a message of the wire"):
        encode(thing)


def test_a_header_beyond_its_bound_is_not_sent() -> None:
    raw = encode(INFER)
    assert encode(INFER, max_bytes=len(raw)) == raw
    with pytest.raises(
        LocalProtocolError, match=f"^infer: expected a header of at most {len(raw) - 1} bytes, got {len(raw)}$"
    ):
        encode(INFER, max_bytes=len(raw) - 1)


def test_a_wrong_value_is_not_sent() -> None:
    wrong: Any = Infer("7", "m", (TensorSpec("x", "FP32", (2, True)),))
    with pytest.raises(
        LocalProtocolError, match=r"^infer: inputs\[0\].shape\[1\]: expected integer, .* got bool True$"
    ):
        encode(wrong)
    with pytest.raises(
        LocalProtocolError, match=r"^model_metadata: model_name: expected text, 1 to 256 bytes, got 257$"
    ):
        encode(ModelMetadata("7", "m" * 257))


# --- clip --------------------------------------------------------------------------------------------------------


TEXTS = ["", "x", "x" * 4096, "x" * 4097, "é" * 2048, "é" * 2049, "€" * 1366, "\U0001f600" * 1025, "a\ud800b"]


@pytest.mark.parametrize("text", [*TEXTS, "\ud800" * 5000])
def test_a_clipped_text_can_always_be_sent(text: str) -> None:
    clipped = clip(text)
    assert encode(Error("", "INTERNAL", clipped))
    whole = text.encode("utf-8", "replace")
    if len(whole) <= limits.MAX_TEXT_BYTES:
        assert clipped.encode() == whole
    else:
        assert clipped.endswith("...")
        assert whole.startswith(clipped[:-3].encode())
        assert limits.MAX_TEXT_BYTES - 3 <= len(clipped.encode()) <= limits.MAX_TEXT_BYTES


# --- sans I/O ----------------------------------------------------------------------------------------------------


def imported(path: Path) -> List[str]:
    names: List[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return [name.split(".")[0] for name in names]


@pytest.mark.parametrize("module", sorted(Path(codec.__file__).parent.glob("**/*.py")), ids=lambda path: path.stem)
def test_the_wire_does_no_io(module: Path) -> None:
    """No socket, clock, thread or file, and numpy only in `tensors`."""
    allowed = {"__future__", "dataclasses", "sys", "typing", "msgpack", "weightd"}
    if module.stem == "tensors":
        allowed |= {"numpy", "functools"}
    assert {*imported(module)} <= allowed
