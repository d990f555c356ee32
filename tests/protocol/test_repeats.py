"""A recognised header gives what the full decoder gives, and a repeated message the bytes of the full encoder."""

from __future__ import annotations

import dataclasses
from typing import Any, List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd.protocol import codec
from weightd.protocol.codec import decode, encode
from weightd.protocol.errors import LocalProtocolError, RemoteProtocolError
from weightd.protocol.messages.children import FROM_CHILD, TO_CHILD, Predict, Result
from weightd.protocol.messages.data import Infer, InferResponse, Parameters, TensorSpec
from weightd.protocol.messages.types import FROM_CLIENT, TO_CLIENT
from weightd.protocol.repeats import Repeats

SPECS = (TensorSpec("x", "FP32", (1, 4)), TensorSpec("y", "INT8", ()))
FRAMES = [bytes(16), bytes(1)]
TEXTS = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=32) | st.just("é" * 64)
NUMBERS = st.integers(0, 300) | st.integers(0, 2**63 - 1) | st.sampled_from([2**16, 2**32 - 1, 2**32])


def anew(message: Any) -> bytes:
    return codec._encode_anew(message, 65536)  # pyright: ignore[reportPrivateUsage]


def decoded_anew(frames: List[bytes], table: Any) -> Any:
    return codec._decode_anew(frames, table, 65536)  # pyright: ignore[reportPrivateUsage]


@given(st.lists(TEXTS, min_size=2, max_size=5), st.lists(NUMBERS, min_size=2, max_size=5))
def test_ids(texts: List[str], numbers: List[int]) -> None:
    sent: List[Any] = [(Infer(each, "m", SPECS, Parameters(7)), FROM_CLIENT) for each in texts]
    sent += [(InferResponse(each, "m", SPECS), TO_CLIENT) for each in texts]
    sent += [(Predict(each, SPECS), TO_CHILD) for each in numbers]
    sent += [(Result(each, SPECS), FROM_CHILD) for each in numbers]
    for message, table in sent:
        header = encode(message)
        assert header == anew(message)
        assert decode([header, *FRAMES], table) == message == decoded_anew([header, *FRAMES], table)


def test_equal_headers_give_the_same_tensors() -> None:
    first, second = (decode([encode(Infer(each, "same", SPECS)), *FRAMES], FROM_CLIENT) for each in "12")
    assert isinstance(first, Infer)
    assert isinstance(second, Infer)
    assert first.inputs is second.inputs
    assert (first.id, second.id) == ("1", "2")


@given(st.data())
def test_a_changed_byte_is_seen_as_ever(data: st.DataObject) -> None:
    """Whatever happens to a header that is known: the answer is the full decoder's."""
    header = bytearray(encode(Infer("a1", "known", SPECS, Parameters(9))))
    decode([bytes(header), *FRAMES], FROM_CLIENT)
    for _ in range(data.draw(st.integers(1, 3))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    frames = [bytes(header[: data.draw(st.integers(0, len(header)))]), *FRAMES]
    try:
        expected = decoded_anew(frames, FROM_CLIENT)
    except RemoteProtocolError as error:
        with pytest.raises(RemoteProtocolError) as caught:
            decode(frames, FROM_CLIENT)
        assert (str(caught.value), caught.value.request_id) == (str(error), error.request_id)  # noqa: PT017
    else:
        assert decode(frames, FROM_CLIENT) == expected


@pytest.mark.parametrize("frames", [[], FRAMES[:1], [*FRAMES, b""], [bytes(15), bytes(1)], [bytes(1), bytes(16)]])
def test_a_known_header_does_not_excuse_its_frames(frames: List[bytes]) -> None:
    header = encode(Infer("1", "frames", SPECS))
    decode([header, *FRAMES], FROM_CLIENT)
    with pytest.raises(RemoteProtocolError, match="frames"):
        decode([header, *frames], FROM_CLIENT)


@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
def test_a_number_out_of_bounds_is_refused_in_a_known_header(number: int) -> None:
    header = encode(Predict(2**62, SPECS))
    decode([header, *FRAMES], TO_CHILD)
    with pytest.raises(RemoteProtocolError, match="request"):
        decode([header.replace((2**62).to_bytes(8, "big"), number.to_bytes(8, "big")), *FRAMES], TO_CHILD)


class Text(str):
    """Equal to a text, and not one that may be sent."""

    __slots__ = ()


WRONG: List[Any] = [
    *(Predict(each, SPECS) for each in (-1, 2**63, True, 1.0, "1")),  # type: ignore[arg-type]
    *(Infer(each, "m", SPECS) for each in ("", "i" * 129, "\ud800", Text("1"))),
    Infer("1", Text("m"), SPECS),
]


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_nothing_wrong_is_written_for_known_tensors(wrong: Any) -> None:
    encode(Predict(5, SPECS))
    encode(Infer("1", "m", SPECS))
    with pytest.raises(LocalProtocolError, match=r"(request|id|model_name): "):
        encode(wrong)


@pytest.mark.parametrize("other", [{"model_name": "two"}, {"parameters": Parameters(2)}, {"parameters": Parameters()}])
def test_other_fields_are_compared(other: Any) -> None:
    known = Infer("1", "one", SPECS, Parameters(1))
    encode(known)
    changed = dataclasses.replace(known, **other)
    assert encode(changed) == anew(changed) != anew(known)


def test_what_is_known_is_bounded() -> None:
    repeats = Repeats(Predict, "predict", "request", is_text=False)
    for size in range(1000):
        message = Predict(1, (TensorSpec("x", "INT8", (size,)),))
        header = anew(message)
        repeats.wrote(message, header)
        repeats.learn([header, bytes(size)], message)
    assert len(repeats._read) <= 256  # pyright: ignore[reportPrivateUsage]
    assert len(repeats._written) <= 256  # pyright: ignore[reportPrivateUsage]
