"""Tests of messages that are read without protobuf: the limit on fields, and requests split into parts."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.service_pb2 import ModelInferRequest

from weightd_gateway.error_codes import TooLarge
from weightd_gateway.grpc.schema import HEALTH, INFERENCE
from weightd_gateway.grpc.wire_format import (
    MAX_FIELDS,
    ParsedRequest,
    check_fields,
    checked_parser,
    fast_parse,
    layout_of,
)
from weightd_protocol import limits

LAYOUT = layout_of(INFERENCE["ModelInferRequest"].DESCRIPTOR)

PARAMETERS = st.dictionaries(
    st.text(max_size=4),
    st.one_of(
        st.just({}),
        st.builds(lambda value: {"int64_param": value}, st.integers(-(2**63), 2**63 - 1)),
        st.builds(lambda value: {"double_param": value}, st.floats(allow_nan=False)),
        st.builds(lambda value: {"string_param": value}, st.text(max_size=200)),
    ),
    max_size=3,
)
CONTENTS = st.builds(lambda values: {"fp32_contents": values}, st.lists(st.floats(width=32), max_size=50))
TENSORS = st.fixed_dictionaries(
    {"name": st.text(max_size=4), "shape": st.lists(st.integers(0, 2**40), max_size=3), "parameters": PARAMETERS}
)
INPUTS = st.builds(lambda tensor, contents: {**tensor, "contents": contents}, TENSORS, CONTENTS)
MESSAGES = st.builds(
    lambda inputs, parameters, raw: ModelInferRequest(
        model_name="m", inputs=inputs, parameters=parameters, raw_input_contents=raw
    ),
    st.lists(INPUTS, max_size=3),
    PARAMETERS,
    st.lists(st.binary(max_size=8), max_size=2),
).map(ModelInferRequest.SerializeToString)


def count(content: bytes) -> int:
    """Return the lowest field limit that accepts a message."""
    bound = 0
    while True:
        try:
            check_fields(content, LAYOUT, bound)
        except TooLarge:
            bound += 1
        else:
            return bound


def test_counts_nested_fields() -> None:
    tensor = {"name": "x", "parameters": {"key": {"int64_param": 1}}, "contents": {"fp32_contents": [1.0, 2.0, 3.0]}}
    # The fields: model_name, input, its name, parameter, key, value, number, contents, values.
    assert count(ModelInferRequest(model_name="m", inputs=[tensor]).SerializeToString()) == 9


@given(MESSAGES)
def test_accepts_messages_of_protobuf(content: bytes) -> None:
    check_fields(content, LAYOUT)


@st.composite
def damaged(draw: st.DrawFn, messages: st.SearchStrategy[bytes]) -> bytes:
    """Return the bytes of a message, truncated or with one byte changed."""
    content = draw(messages)
    changed = bytearray(content[: draw(st.integers(0, len(content)))])
    position = draw(st.integers(0, max(0, len(changed) - 1)))
    changed[position : position + 1] = bytes([draw(st.integers(0, 255))])
    return bytes(changed)


@given(damaged(MESSAGES))
def test_rejects_only_what_protobuf_rejects(content: bytes) -> None:
    try:
        check_fields(content, LAYOUT)
    except DecodeError as error:
        if "groups" not in str(error):
            with pytest.raises(DecodeError):
                ModelInferRequest.FromString(content)


@given(st.binary(max_size=100))
def test_any_bytes_pass_or_raise_decode_error(content: bytes) -> None:
    with contextlib.suppress(DecodeError, TooLarge):
        check_fields(content, LAYOUT, 20)


def test_accepts_largest_useful_request() -> None:
    place = {
        "shared_memory_region": {"string_param": "region"},
        "shared_memory_offset": {"int64_param": 8},
        "shared_memory_byte_size": {"int64_param": 8},
    }
    names = [f"tensor {number}" for number in range(limits.MAX_TENSORS)]
    inputs = [{"name": name, "datatype": "FP32", "shape": [1, 2], "parameters": place} for name in names]
    outputs = [{"name": name, "parameters": place} for name in names]
    given = ModelInferRequest(model_name="m", id="1", inputs=inputs, outputs=outputs, parameters={"priority": {}})
    check_fields(given.SerializeToString(), LAYOUT)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (ModelInferRequest(parameters={str(n): {} for n in range(MAX_FIELDS)}).SerializeToString(), "parameters"),
        (b"\x2a\x00" * (MAX_FIELDS + 1), "inputs"),
        (b"\x2a\x80\x80\x01" + b"\x22\x00" * 8192, r"inputs\.parameters"),
        (b"\x2a\x84\x80\x01\x2a\x80\x80\x01" + b"\x10\x01" * 8192, r"inputs\.contents"),
        (b"\x22\x84\x80\x01\x12\x80\x80\x01" + b"\x08\x01" * 8192, r"parameters\.value"),
        (b"\x78\x01" * (MAX_FIELDS + 1), "the message"),
    ],
)
def test_error_names_field_limit_and_number(content: bytes, field: str) -> None:
    bound = f"expected at most {MAX_FIELDS} fields in a message, including nested ones"
    text = f"^{field}: {bound}, got {MAX_FIELDS + 1} or more$"
    with pytest.raises(TooLarge, match=text):
        check_fields(content, LAYOUT)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("RepositoryModelLoadRequest", {"parameters": {str(n): {} for n in range(2000)}}),
        ("TraceSettingRequest", {"settings": {str(n): {"value": [""]} for n in range(2000)}}),
    ],
)
def test_limit_applies_to_all_messages(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(TooLarge, match=f"expected at most {MAX_FIELDS} fields"):
        checked_parser(INFERENCE[name])(INFERENCE[name](**fields).SerializeToString())


def test_each_request_type_has_a_layout() -> None:
    for messages in (INFERENCE, HEALTH):
        for each in messages.requests.values():
            assert checked_parser(each)(b"") == each()


TEXT = st.text(max_size=8)


def request(name: str, request_id: str, names: list[str], contents: list[bytes]) -> ModelInferRequest:
    inputs = [{"name": each, "datatype": "FP32", "shape": [1]} for each in names]
    return ModelInferRequest(model_name=name, id=request_id, inputs=inputs, raw_input_contents=contents)


REQUESTS = st.builds(request, TEXT, TEXT, st.lists(TEXT, max_size=2), st.lists(st.binary(max_size=200), max_size=2))


def together(pieces: ParsedRequest) -> ModelInferRequest:
    whole = ModelInferRequest.FromString(pieces.header)
    if pieces.id:
        whole.id = pieces.id.decode()
    whole.raw_input_contents.extend(map(bytes, pieces.contents))
    return whole


@given(REQUESTS)
def test_splits_off_tensors_and_id(whole: ModelInferRequest) -> None:
    pieces = fast_parse(whole.SerializeToString())
    assert together(pieces) == whole
    assert not ModelInferRequest.FromString(pieces.header).raw_input_contents
    assert pieces.id == whole.id.encode()


def test_header_excludes_tensors_and_id() -> None:
    one, other = (
        ModelInferRequest(model_name="m", id=request_id, raw_input_contents=[content]).SerializeToString()
        for request_id, content in (("1", b"a"), ("another", b"b"))
    )
    assert fast_parse(one).header == fast_parse(other).header


def test_last_id_wins() -> None:
    assert (
        fast_parse(ModelInferRequest(id="1").SerializeToString() + ModelInferRequest(id="2").SerializeToString()).id
        == b"2"
    )


@given(damaged(st.lists(REQUESTS.map(ModelInferRequest.SerializeToString), max_size=2).map(b"".join)))
def test_parts_agree_with_the_whole_message(content: bytes) -> None:
    pieces = fast_parse(content)
    try:
        whole = ModelInferRequest.FromString(content)
    except DecodeError:
        whole = None
    try:
        in_pieces = together(pieces)
    except (DecodeError, UnicodeDecodeError):
        in_pieces = None
    assert whole == in_pieces


@pytest.mark.parametrize(
    "content",
    [
        # A field of four bytes that resemble contents.
        bytes([7 << 3 | 5, 0, 7 << 3 | 2, 1, 65]),
        ModelInferRequest(raw_input_contents=[b""] * 600).SerializeToString(),
    ],
    ids=["unknown field", "many fields"],
)
def test_does_not_split_unusual_message(content: bytes) -> None:
    assert fast_parse(content) == ParsedRequest(content)
