"""The envelopes of requests and answers, taken apart by their bytes: of these there are thousands a second.

Such an envelope is the number or the id of its message, which is another one each time, and the rest, which many have
in common: the type, the parameters, where tensors are. A rest is read by msgpack and the schema once, and then found by
its bytes; an envelope that is not of this form is left to them, who would say the same in four times the time.
"""

from __future__ import annotations

import struct
from dataclasses import fields
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Type

import msgpack

from weightd_protocol import limits
from weightd_protocol.messages.inference import Infer, InferResponse
from weightd_protocol.messages.worker import Predict, PredictResult

# A longer rest is read, and written, anew each time.
_MAX_REST_BYTES = 512

# The least number that msgpack writes in eight bytes: the daemon's are larger.
_MIN_NUMBER = 2**32
_NUMBER = struct.Struct(">Q")

# The first byte of a text of n bytes is the first of these plus n, if there are less than 32; that of a list of n items
# the other one plus n, if there are less than 16. A position is a byte.
_SHORT_TEXT, _SHORT_BYTES = 0xA0, 32
_SHORT_LIST, _SHORT_ITEMS = 0x90, 16

_NO_SPLIT = None, b""

# Where what was written after the number or the id is kept, with the value that it says.
_TAIL_KEY = "_tail"


class EnvelopeSplitter(NamedTuple):
    """Takes the envelopes of a type apart.

    Attributes:
        field: the name of the number or the id.
        split: what returns that and the rest of an envelope, which is empty where it has no such form.
        type_prefix: what the rest begins with: the type, up to the number or the id, without the number of fields.
    """

    field: str
    split: Callable[[bytes], Tuple[Any, bytes]]
    type_prefix: bytes


def shared_rest(splitter: EnvelopeSplitter, envelope: bytes) -> Optional[bytes]:
    """Return the rest of an envelope by which another one may be found; None where it has none."""
    _, rest = splitter.split(envelope)
    return rest if len(rest) <= _MAX_REST_BYTES and rest.startswith(splitter.type_prefix, 1) else None


def remember_tail(envelope: bytes, message: Any) -> None:
    """The envelope was written of this message: others with the same parameters or regions end with the same bytes."""
    cls = message.__class__
    shared = message.parameters if cls is Infer else getattr(message, "regions", None)
    if cls is Predict and (message.step or message.model_index):
        return  # these are not those of the next one
    splitter = SPLITTERS.get(cls)
    rest = None if splitter is None or shared is None else shared_rest(splitter, envelope)
    if splitter is not None and rest is not None:
        shared.__dict__[_TAIL_KEY] = rest[1 + len(splitter.type_prefix) :]


def _pack_head(tag: str, **first: object) -> bytes:
    """An envelope that has this field alone."""
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
        # It is not longer, nor cut, nor empty, nor anything else than a text.
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
    """The beginnings of an envelope that ends with the number or the id, and of one that has a field more."""
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
    if tail is None or type(text) is not str or not text.isascii() or not 0 < len(text) < _SHORT_BYTES:
        return None
    return _INFER_PREFIX_WITH_FIELD + _TEXT_PREFIXES[len(text)] + text.encode() + tail


def _pack_positions(positions: Tuple[int, ...]) -> Optional[bytes]:
    """A few positions as msgpack has the field, None if they are not that simple."""
    if positions.__class__ is not tuple or len(positions) >= _SHORT_ITEMS:
        return None
    for each in positions:
        if each.__class__ is not int or not 0 <= each <= _MAX_POSITION:
            return None
    return _SHARED_OUTPUTS_PREFIXES[len(positions)] + bytes(positions)


# What returns the envelope of a message; None where that has no such form, or a field may not be what it has to be.
WRITERS: Dict[Type[Any], Callable[[Any], Optional[bytes]]] = {
    Infer: _write_infer,
    InferResponse: _write_response,
    Predict: _write_predict,
    PredictResult: _write_result,
}
