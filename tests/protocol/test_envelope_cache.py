"""Tests that cached envelopes equal the result of msgpack and the schema."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weightd_protocol import limits
from weightd_protocol.codec import Decoder, decode, encode
from weightd_protocol.errors import LocalProtocolError, RemoteProtocolError
from weightd_protocol.messages.inference import (
    Infer,
    InferResponse,
    Parameters,
    RequestDescription,
    ResponseDescription,
    TensorSpec,
)
from weightd_protocol.messages.regions import (
    InputLocation,
    MappedInput,
    MappedOutput,
    MappedRegions,
    OutputLocation,
    Regions,
)
from weightd_protocol.messages.types import FROM_CLIENT, TO_CLIENT
from weightd_protocol.messages.worker import FROM_CHILD, TO_CHILD, Predict, PredictResult
from weightd_protocol.schema import FieldError, plain

REQUEST, RESPONSE = RequestDescription("m", ()), ResponseDescription("m", ())
X = TensorSpec("x", "UINT8", (0,))
TWO, THREE = RequestDescription("m", (X, X)), ResponseDescription("m", (X, X, X))
PLACES = Regions((InputLocation(1, "r", 7),), (OutputLocation(0, "r", 7, 8),))
MAPPED = MappedRegions((MappedInput(1, 2**40, 7),), (MappedOutput(0, 2**40, 7, 8),))
TAGS = {Infer: "infer", InferResponse: "infer_response", Predict: "predict", PredictResult: "predict_result"}

texts = st.text(max_size=130) | st.integers(0, 40).map("i".__mul__)
numbers = st.integers(-1, 2**64 - 1) | st.sampled_from([2**32 - 1, 2**32, 2**63 - 1, 2**63])
timeouts = st.none() | st.integers(0, limits.MAX_TIMEOUT_US + 1)
offered = st.none() | st.sampled_from([Regions(), PLACES])
steps = st.integers(-1, 2**63) | st.booleans()
members = st.integers(-1, 16) | st.booleans()
placed = st.none() | st.lists(st.integers(-1, 64) | st.just(True), max_size=20).map(tuple)
messages = (
    st.builds(Infer, texts, st.just(REQUEST), st.builds(Parameters, timeouts, offered))
    | st.builds(InferResponse, texts, st.just(RESPONSE), placed, st.none() | st.booleans())
    | st.builds(Predict, numbers, st.just(REQUEST), st.none() | st.sampled_from([MappedRegions(), MAPPED]))
    | st.builds(Predict, numbers, st.just(REQUEST), st.none() | st.just(MAPPED), steps, members)
    | st.builds(PredictResult, numbers, st.just(RESPONSE), placed)
)


@st.composite
def frames(draw: Any) -> bytes:
    """Return envelopes with correct or wrong fields, some truncated or with changed bytes near the end."""
    named = {"id": draw(texts)}
    numbered = {"request": draw(st.integers(0, 2**64 - 1) | st.sampled_from([2**32, 2**63 - 1, 2**63]))}
    asked = {**named, "parameters": {"timeout": draw(st.integers(0, 9))}}
    tag, fields = draw(
        st.sampled_from(
            [
                ("infer", asked),
                ("infer", named),
                ("infer", {**named, "parameters": plain(Parameters(1, PLACES))}),
                ("infer_response", named),
                ("infer_response", {**named, "shared_outputs": [2, 0]}),
                ("infer_response", {**named, "may_still_write": True, "shared_outputs": [0]}),
                ("predict", numbered),
                ("predict", {**numbered, "regions": plain(MAPPED)}),
                ("predict", {**numbered, "step": draw(st.integers(0, 2)), "member": draw(st.integers(0, 1))}),
                ("predict_result", numbered),
                ("predict_result", {**numbered, "shared_outputs": [2, 0]}),
            ]
        )
    )
    frame: bytes = msgpack.packb({"v": limits.PROTOCOL_VERSION, "type": tag, **fields})
    if draw(st.booleans()):
        begin = len(frame) - draw(st.sampled_from([0, 1, 2, 8, 12]))
        frame = frame[:begin] + draw(st.binary(max_size=4)) + frame[begin + draw(st.integers(0, 4)) :]
    return frame


def packed(message: Any) -> Optional[bytes]:
    """Return the envelope as msgpack and the schema encode it, or None if they reject the message."""
    try:
        return msgpack.packb({"v": limits.PROTOCOL_VERSION, "type": TAGS[type(message)], **plain(message)})
    except FieldError:
        return None


@given(messages)
def test_encodes_envelope_like_msgpack(message: Any) -> None:
    expected = packed(message)
    for _ in range(2):  # The second call uses cached parameters.
        if expected is None:
            with pytest.raises(LocalProtocolError):
                encode(message)
        else:
            assert encode(message)[0] == expected


@given(st.builds(Infer, st.just("i"), st.just(REQUEST), st.builds(Parameters, st.integers(1, 9))), frames())
@example(Infer("i", REQUEST, Parameters(1)), b"\x83\xa1v\x01\xa4type\xaeinfer_response\xa2id\xa1\xff")
def test_decodes_any_envelope_like_the_schema(before: Infer, frame: bytes) -> None:
    valid: List[Tuple[Any, Any]] = [
        (FROM_CLIENT, before),
        (TO_CLIENT, InferResponse("i", RESPONSE)),
        (FROM_CHILD, PredictResult(0, RESPONSE)),
    ]
    for table, first in [*valid, (TO_CHILD, Predict(0, REQUEST))]:
        known = Decoder(table)
        known.decode(encode(first))
        for described in (REQUEST, RESPONSE, TWO, THREE):
            for tensors in range(4):
                header = [frame, plain_frame(described), *[b""] * tensors]
                # The second call finds cached bytes, if they are cached at all.
                assert {outcome(header, table, known) for _ in range(2)} == {outcome(header, table, None)}


def test_cached_message_needs_its_frames() -> None:
    known = Decoder(TO_CHILD)
    frames = encode(Predict(2**40, REQUEST))
    for _ in range(2):
        assert known.decode(frames) == Predict(2**40, REQUEST)
    for others in ([*frames, b""], frames[:1]):
        with pytest.raises(RemoteProtocolError):
            known.decode(others)


def plain_frame(description: Any) -> bytes:
    return msgpack.packb(plain(description))


def outcome(frames: Any, table: Any, known: Optional[Decoder[Any]]) -> Any:
    try:
        return decode(frames, table) if known is None else known.decode(frames)
    except RemoteProtocolError as error:
        return str(error), error.request_id


def test_limits_cached_regions() -> None:
    known: Decoder[Any] = Decoder(TO_CHILD, max_cached=2)
    frames = [
        [*encode(Predict(2**40 + index, TWO, MappedRegions((MappedInput(0, 1, index),)))), b""] for index in range(3)
    ]
    first, *others = (known.decode(each).regions for each in frames)
    assert [known.decode(each).regions for each in frames[1:]] == others
    assert all(known.decode(each).regions is other for each, other in zip(frames[1:], others))
    assert known.decode(frames[0]).regions is not first
