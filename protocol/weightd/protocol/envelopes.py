"""The envelopes of requests and answers, read and written by their bytes: of these there are thousands a second.

This side writes each in one form: a head that is the same for all messages of the type, then the number or the id, then
for a client's request a tail that is the same for all with the same parameters. Whatever has another form is left to
msgpack and the schema, which would say the same of what is read here, in four times the time.
"""

from __future__ import annotations

import struct
from dataclasses import fields
from typing import Any, Callable, Dict, Optional, Tuple, Type

import msgpack

from weightd.protocol import limits
from weightd.protocol.messages.children import Predict, Result
from weightd.protocol.messages.data import Infer, InferResponse, Parameters

# Parameters by their tails.
Tails = Dict[bytes, Parameters]

# Tails that are known; those that came first go first. A longer one is read anew each time.
_MAX_TAILS = 256
_MAX_TAIL_BYTES = 256

# The least number that msgpack writes in eight bytes: the daemon's are larger.
_LEAST_NUMBER = 2**32
_NUMBER = struct.Struct(">Q")

# The first byte of a text of n bytes is this plus n, if there are less than 32.
_SHORT_TEXT = 0xA0
_SHORT_BYTES = 32
_SHORT = [bytes([_SHORT_TEXT + size]) for size in range(_SHORT_BYTES)]

# All heads differ in these.
_KEY_BYTES = 16


def write(message: Any) -> Optional[bytes]:
    """Return the envelope of `message`; None where it has no such form, or a field may not be what it has to be."""
    cls: Type[Any] = message.__class__
    writer = _WRITERS.get(cls)
    return None if writer is None else writer(message)


def read(frame: Any, tails: Tails) -> Optional[Any]:
    """Return the message whose envelope this is, without its description; None where it has no form that is known."""
    if type(frame) is not bytes:
        return None
    reader = _READERS.get(frame[:_KEY_BYTES])
    return None if reader is None else reader(frame, tails)


def learn(frame: Any, message: Any, tails: Optional[Tails] = None) -> None:
    """The frame is the envelope of this message: remember what others may have in common with it."""
    if type(message) is not Infer or type(frame) is not bytes or not frame.startswith(_INFER):
        return
    _, end = _text(frame, len(_INFER))
    if not end or len(frame) - end > _MAX_TAIL_BYTES or message.parameters.regions is not None:
        return
    message.parameters.__dict__["_tail"] = frame[end:]
    if tails is not None:
        if len(tails) >= _MAX_TAILS:
            del tails[next(iter(tails))]
        tails[frame[end:]] = message.parameters


def _more(cls: Type[Any], *written: str) -> Dict[str, None]:
    """The fields that are absent from the form, None in a message that has it."""
    more = [field for field in fields(cls) if field.name not in (*written, "description")]
    assert all(field.default is None for field in more)  # noqa: S101 - else the form would have to change
    return dict.fromkeys(field.name for field in more)


def _head(tag: str, **last: object) -> bytes:
    """An envelope that ends with the field `last`."""
    packed: bytes = msgpack.packb({"v": limits.PROTOCOL_VERSION, "type": tag, **last})
    return packed


_PREDICT = _head("predict", request=_LEAST_NUMBER)[: -_NUMBER.size]
_RESULT = _head("result", request=_LEAST_NUMBER)[: -_NUMBER.size]
_RESPONSE = _head("infer_response", id="")[:-1]
# That of a map with one field more.
_INFER = bytes([_RESPONSE[0] + 1]) + _head("infer", id="")[1:-1]


def _number_writer(cls: Type[Any], head: bytes) -> Callable[[Any], Optional[bytes]]:
    more = (*_more(cls, "request"),)

    def write(message: Any) -> Optional[bytes]:
        number = message.request
        for name in more:
            if getattr(message, name) is not None:
                return None
        if type(number) is int and _LEAST_NUMBER <= number <= limits.MAX_COUNT:
            return head + _NUMBER.pack(number)
        return None

    return write


def _number_reader(cls: Type[Any], head: bytes) -> Callable[[bytes, Tails], Optional[Any]]:
    nbytes = len(head) + _NUMBER.size
    more = _more(cls, "request")

    def read(frame: bytes, tails: Tails) -> Optional[Any]:
        if len(frame) != nbytes or not frame.startswith(head):
            return None
        (number,) = _NUMBER.unpack_from(frame, len(head))
        if number > limits.MAX_COUNT:
            return None
        message: Any = object.__new__(cls)
        message.__dict__.update(more, request=number)
        return message

    return read


_RESPONSE_MORE = _more(InferResponse, "id")
_INFER_MORE = _more(Infer, "id", "parameters")


def _write_response(message: InferResponse) -> Optional[bytes]:
    text = _short(message.id)
    for name in _RESPONSE_MORE:
        if getattr(message, name) is not None:
            return None
    return None if text is None else _RESPONSE + text


def _read_response(frame: bytes, tails: Tails) -> Optional[InferResponse]:
    if not frame.startswith(_RESPONSE):
        return None
    request_id, end = _text(frame, len(_RESPONSE))
    if not end or end != len(frame):
        return None
    message = object.__new__(InferResponse)
    message.__dict__.update(_RESPONSE_MORE, id=request_id)
    return message


def _write_infer(message: Infer) -> Optional[bytes]:
    text = _short(message.id)
    parameters = message.parameters
    if text is None or type(parameters) is not Parameters:
        return None
    for name in _INFER_MORE:
        if getattr(message, name) is not None:
            return None
    tail: Optional[bytes] = parameters.__dict__.get("_tail")
    return None if tail is None else b"".join((_INFER, text, tail))


def _read_infer(frame: bytes, tails: Tails) -> Optional[Infer]:
    if not frame.startswith(_INFER):
        return None
    request_id, end = _text(frame, len(_INFER))
    parameters = tails.get(frame[end:]) if end else None
    if parameters is None:
        return None
    message = object.__new__(Infer)
    message.__dict__.update(_INFER_MORE, id=request_id, parameters=parameters)
    return message


def _short(text: Any) -> Optional[bytes]:
    """A short text as msgpack has it, None if it is not that simple."""
    if type(text) is str and text.isascii() and 0 < len(text) < _SHORT_BYTES:
        return _SHORT[len(text)] + text.encode()
    return None


def _text(frame: bytes, begin: int) -> Tuple[str, int]:
    """A short text that begins here, and where it should end; 0 if it is not that simple."""
    size = frame[begin] - _SHORT_TEXT if len(frame) > begin else 0
    end = begin + 1 + size
    text = frame[begin + 1 : end]
    if 0 < size < _SHORT_BYTES and text.isascii():
        return text.decode(), end
    return "", 0


_WRITERS: Dict[Type[Any], Callable[[Any], Optional[bytes]]] = {
    Predict: _number_writer(Predict, _PREDICT),
    Result: _number_writer(Result, _RESULT),
    InferResponse: _write_response,
    Infer: _write_infer,
}

_READERS: Dict[bytes, Callable[[bytes, Tails], Optional[Any]]] = {
    _PREDICT[:_KEY_BYTES]: _number_reader(Predict, _PREDICT),
    _RESULT[:_KEY_BYTES]: _number_reader(Result, _RESULT),
    _RESPONSE[:_KEY_BYTES]: _read_response,
    _INFER[:_KEY_BYTES]: _read_infer,
}
