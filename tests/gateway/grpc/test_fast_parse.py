"""A message in pieces says what the whole one says."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.service_pb2 import ModelInferRequest

from weightd_gateway.grpc.fast_parse import ParsedRequest, fast_parse

TEXT = st.text(max_size=8)


def message(name: str, request_id: str, names: list[str], contents: list[bytes]) -> ModelInferRequest:
    inputs = [{"name": each, "datatype": "FP32", "shape": [1]} for each in names]
    return ModelInferRequest(model_name=name, id=request_id, inputs=inputs, raw_input_contents=contents)


MESSAGES = st.builds(message, TEXT, TEXT, st.lists(TEXT, max_size=2), st.lists(st.binary(max_size=200), max_size=2))


def together(pieces: ParsedRequest) -> ModelInferRequest:
    whole = ModelInferRequest.FromString(pieces.header)
    if pieces.id:
        whole.id = pieces.id.decode()
    whole.raw_input_contents.extend(map(bytes, pieces.contents))
    return whole


@given(MESSAGES)
def test_tensors_and_the_id_are_cut_out(whole: ModelInferRequest) -> None:
    pieces = fast_parse(whole.SerializeToString())
    assert together(pieces) == whole
    assert not ModelInferRequest.FromString(pieces.header).raw_input_contents
    assert pieces.id == whole.id.encode()


def test_what_differs_in_tensors_and_id_alone_has_one_header() -> None:
    one, other = (
        ModelInferRequest(model_name="m", id=request_id, raw_input_contents=[content]).SerializeToString()
        for request_id, content in (("1", b"a"), ("another", b"b"))
    )
    assert fast_parse(one).header == fast_parse(other).header


def test_of_two_ids_the_last_one_is_meant_as_protobuf_has_it() -> None:
    assert (
        fast_parse(ModelInferRequest(id="1").SerializeToString() + ModelInferRequest(id="2").SerializeToString()).id
        == b"2"
    )


@given(st.lists(MESSAGES.map(lambda each: each.SerializeToString()), max_size=2).map(b"".join), st.data())
def test_whatever_it_is_no_piece_says_what_the_whole_does_not(content: bytes, data: st.DataObject) -> None:
    # Cut short, or with a byte changed: what is no message is none in pieces, either.
    end = data.draw(st.integers(0, len(content)))
    position, byte = data.draw(st.integers(0, max(0, end - 1))), data.draw(st.integers(0, 255))
    spoilt = bytearray(content[:end])
    spoilt[position : position + 1] = bytes([byte])
    pieces = fast_parse(bytes(spoilt))
    try:
        whole = ModelInferRequest.FromString(bytes(spoilt))
    except DecodeError:
        whole = None
    try:
        in_pieces = together(pieces)
    except (DecodeError, UnicodeDecodeError):
        in_pieces = None
    assert whole == in_pieces


def test_of_a_field_that_no_request_has_none_is_looked_at() -> None:
    looks_like_contents = bytes([0, 7 << 3 | 2, 1, 65])
    content = bytes([7 << 3 | 5]) + looks_like_contents
    assert fast_parse(content) == ParsedRequest(content)


def test_of_many_fields_none_is_looked_at() -> None:
    content = ModelInferRequest(raw_input_contents=[b""] * 600).SerializeToString()
    assert fast_parse(content) == ParsedRequest(content)
