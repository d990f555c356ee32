"""Fast encoding and decoding of the envelopes of inference messages, of which thousands are exchanged per second.

Such an envelope consists of two parts: the id of the message (a text, or a number between daemon and worker), which
differs in every message, and the rest, which is equal in many messages: type, parameters and locations of tensors.
msgpack and the schema process a rest only once. Later, the decoder finds the decoded fields by the bytes of the rest,
and the encoder reuses these bytes. Envelopes of any other form are processed by msgpack and the schema, with the same
result in four times the time.
"""

from __future__ import annotations

import struct
from dataclasses import fields
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Type

import msgpack

from weightd_protocol import limits
from weightd_protocol.messages.inference import Infer, InferResponse
from weightd_protocol.messages.worker import Predict, PredictResult

# Maximum size of a cached rest in bytes. A longer rest is decoded again for each message.
_MAX_REST_BYTES = 512

# Smallest message number that this module encodes. msgpack writes numbers from 2**32 on in eight bytes. The daemon
# assigns only such numbers to messages.
_MIN_NUMBER = 2**32
_NUMBER = struct.Struct(">Q")

# The first byte of a msgpack text of n < 32 bytes is 0xA0 + n. The first byte of a list of n < 16 items is 0x90 + n. An
# item that is the position of a tensor takes one byte.
_SHORT_TEXT, _SHORT_BYTES = 0xA0, 32
_SHORT_LIST, _SHORT_ITEMS = 0x90, 16

_NO_SPLIT = None, b""

# Attribute of a parameters or regions object in which `remember_tail` stores the object's encoded bytes. They are the
# end of an envelope.
_TAIL_KEY = "_tail"


class EnvelopeSplitter(NamedTuple):
    """Splits the envelopes of one message type into the id of the message and the rest.

    Attributes:
        field: the name of the field with the id: `id`, or `request` for a number.
        split: returns the id and the rest of an envelope. The rest is empty if the envelope has another form.
        type_prefix: the part of the rest before the id, without the first byte of the envelope, which holds the number
            of fields.
    """

    field: str
    split: Callable[[bytes], Tuple[Any, bytes]]
    type_prefix: bytes


def shared_rest(splitter: EnvelopeSplitter, envelope: bytes) -> Optional[bytes]:
    """Return the rest of an envelope, or None if the rest cannot be cached."""
    _, rest = splitter.split(envelope)
    return rest if len(rest) <= _MAX_REST_BYTES and rest.startswith(splitter.type_prefix, 1) else None


def remember_tail(envelope: bytes, message: Any) -> None:
    """Store the encoded bytes of a message's parameters or regions in this object, for use in later messages."""
    cls = message.__class__
    shared = message.parameters if cls is Infer else getattr(message, "regions", None)
    if cls is Predict and (message.step or message.model_index):
        return  # The stored bytes would contain these two fields, whose values may differ in the next message
    splitter = SPLITTERS.get(cls)
    rest = None if splitter is None or shared is None else shared_rest(splitter, envelope)
    if splitter is not None and rest is not None:
        shared.__dict__[_TAIL_KEY] = rest[1 + len(splitter.type_prefix) :]


def _pack_head(tag: str, **first: object) -> bytes:
    """Return an envelope whose only field is `first`."""
    packed: bytes = msgpack.packb({"v": limits.PROTOCOL_VERSION, "type": tag, **first})
    return packed


def _splitter_by_number(cls: Type[Any], tag: str) -> EnvelopeSplitter:
    field = fields(cls)[0].name
    head = _pack_head(tag, **{field: _MIN_NUMBER})[1 : -_NUMBER.size]
    begin = 1 + len(head)
    end = begin + _NUMBER.size
    unpack = struct.Struct(f">{begin}xQ").unpack_from

    def split(envelope: bytes) -> Tuple[Any, bytes]:
        try:
            (number,) = unpack(envelope)
        except struct.error:
            return _NO_SPLIT
        return _NO_SPLIT if number > limits.MAX_COUNT else (number, envelope[:begin] + envelope[end:])

    return EnvelopeSplitter(field, split, head)


def _splitter_by_text(cls: Type[Any], tag: str) -> EnvelopeSplitter:
    field = fields(cls)[0].name
    head = _pack_head(tag, **{field: ""})[1:-1]
    begin = 1 + len(head)
    after = begin + 1

    def split(envelope: bytes) -> Tuple[Any, bytes]:
        try:
            first = envelope[begin]
        except IndexError:
            return _NO_SPLIT
        end = after + first % _SHORT_BYTES
        text = envelope[after:end]
        # Check that the id is a short text that is not empty, and that it is complete.
        if not text or first != _SHORT_TEXT + len(text) or not text.isascii():
            return _NO_SPLIT
        return text.decode(), envelope[:begin] + envelope[end:]

    return EnvelopeSplitter(field, split, head)


SPLITTERS: Dict[Type[Any], EnvelopeSplitter] = {
    Infer: _splitter_by_text(Infer, "infer"),
    InferResponse: _splitter_by_text(InferResponse, "infer_response"),
    Predict: _splitter_by_number(Predict, "predict"),
    PredictResult: _splitter_by_number(PredictResult, "predict_result"),
}


def _type_prefixes(cls: Type[Any]) -> Tuple[bytes, bytes]:
    """Return two beginnings of an envelope, up to the id: with no field after the id, and with one field after it."""
    head = SPLITTERS[cls].type_prefix
    return bytes([0x83]) + head, bytes([0x84]) + head


_PREDICT_PREFIX, _PREDICT_PREFIX_WITH_FIELD = _type_prefixes(Predict)
_RESULT_PREFIX, _RESULT_PREFIX_WITH_FIELD = _type_prefixes(PredictResult)
_RESPONSE_PREFIX, _RESPONSE_PREFIX_WITH_FIELD = _type_prefixes(InferResponse)
_, _INFER_PREFIX_WITH_FIELD = _type_prefixes(Infer)
_SHARED_OUTPUTS_PREFIXES: List[bytes] = [
    msgpack.packb("shared_outputs") + bytes([_SHORT_LIST + size]) for size in range(_SHORT_ITEMS)
]
_MAX_POSITION = limits.MAX_TENSORS - 1
_TEXT_PREFIXES = [bytes([_SHORT_TEXT + size]) for size in range(_SHORT_BYTES)]


def _write_predict(message: Predict) -> Optional[bytes]:
    number, regions, step, member = message.request, message.regions, message.step, message.model_index
    if type(number) is not int or not _MIN_NUMBER <= number <= limits.MAX_COUNT:
        return None
    if step or member or type(step) is not int or type(member) is not int:
        return None
    if regions is None:
        return _PREDICT_PREFIX + _NUMBER.pack(number)
    tail = regions.__dict__.get(_TAIL_KEY)
    return None if tail is None else _PREDICT_PREFIX_WITH_FIELD + _NUMBER.pack(number) + tail


def _write_result(message: PredictResult) -> Optional[bytes]:
    number, positions = message.request, message.shared_outputs
    if type(number) is not int or not _MIN_NUMBER <= number <= limits.MAX_COUNT:
        return None
    if positions is None:
        return _RESULT_PREFIX + _NUMBER.pack(number)
    tail = _pack_positions(positions)
    return None if tail is None else _RESULT_PREFIX_WITH_FIELD + _NUMBER.pack(number) + tail


def _write_response(message: InferResponse) -> Optional[bytes]:
    text, positions = message.id, message.shared_outputs
    if (
        type(text) is not str
        or not text.isascii()
        or not 0 < len(text) < _SHORT_BYTES
        or message.may_still_write is not None
    ):
        return None
    if positions is None:
        return _RESPONSE_PREFIX + _TEXT_PREFIXES[len(text)] + text.encode()
    tail = _pack_positions(positions)
    return None if tail is None else _RESPONSE_PREFIX_WITH_FIELD + _TEXT_PREFIXES[len(text)] + text.encode() + tail


def _write_infer(message: Infer) -> Optional[bytes]:
    text = message.id
    tail: Optional[bytes] = getattr(message.parameters, _TAIL_KEY, None)
    if tail is None or type(text) is not str or not text.isascii():
        return None
    size = len(text)
    return _INFER_PREFIX_WITH_FIELD + _TEXT_PREFIXES[size] + text.encode() + tail if 0 < size < _SHORT_BYTES else None


def _pack_positions(positions: Tuple[int, ...]) -> Optional[bytes]:
    """Encode the field `shared_outputs`, a tuple of positions.

    Return None if there are too many or invalid positions.
    """
    if positions.__class__ is not tuple or len(positions) >= _SHORT_ITEMS:
        return None
    for each in positions:
        if each.__class__ is not int or not 0 <= each <= _MAX_POSITION:
            return None
    return _SHARED_OUTPUTS_PREFIXES[len(positions)] + bytes(positions)


# A function for each message type that returns a message's envelope. It returns None if the envelope has another form,
# or if a field may be invalid.
WRITERS: Dict[Type[Any], Callable[[Any], Optional[bytes]]] = {
    Infer: _write_infer,
    InferResponse: _write_response,
    Predict: _write_predict,
    PredictResult: _write_result,
}
