"""The envelopes of requests and answers, read and written by their bytes: of these there are thousands a second.

This side writes each in one form: a head that is the same for all messages of the type, then the number or the id, then
for a client's request a tail that is the same for all with the same parameters. Whatever has another form is left to
msgpack and the schema, which would say the same of what is read here, in four times the time.
"""

from __future__ import annotations

import struct
from dataclasses import fields
from typing import Any, Callable, Dict, Optional, Type

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


def learn(frame: Any, message: Any, tails: Optional[Tails] = None) -> None:
    """The frame is the envelope of this message: remember what others may have in common with it."""
    if type(message) is not Infer or type(frame) is not bytes or message.parameters.regions is not None:
        return
    tail = frame[_end(frame) :]
    if not 0 < len(tail) <= _MAX_TAIL_BYTES:
        return
    message.parameters.__dict__["_tail"] = tail
    if tails is not None:
        if len(tails) >= _MAX_TAILS:
            del tails[next(iter(tails))]
        tails[tail] = message.parameters


def _head(tag: str, **last: object) -> bytes:
    """An envelope that ends with the field `last`."""
    packed: bytes = msgpack.packb({"v": limits.PROTOCOL_VERSION, "type": tag, **last})
    return packed


_PREDICT = _head("predict", request=_LEAST_NUMBER)[: -_NUMBER.size]
_RESULT = _head("result", request=_LEAST_NUMBER)[: -_NUMBER.size]
_RESPONSE = _head("infer_response", id="")[:-1]
# That of a map with one field more.
_INFER = bytes([_RESPONSE[0] + 1]) + _head("infer", id="")[1:-1]

# With what msgpack writes before a text of so many bytes, by their number: nothing is, and has, none.
_RESPONSES = [_RESPONSE + bytes([_SHORT_TEXT + size]) for size in range(_SHORT_BYTES)]
_INFERS = [_INFER + bytes([_SHORT_TEXT + size]) for size in range(_SHORT_BYTES)]
# Where the text begins.
_RESPONSE_ID = len(_RESPONSE) + 1
_INFER_ID = len(_INFER) + 1


def _absent(cls: Type[Any], *written: str) -> Dict[str, None]:
    """The fields that a form does not have: None in each message of that form."""
    absent = [field for field in fields(cls) if field.name not in (*written, "description")]
    assert all(field.default is None for field in absent)  # noqa: S101 - else there would be no such form
    return dict.fromkeys(field.name for field in absent)


_RESPONSE_ABSENT = _absent(InferResponse, "id")
assert (*_RESPONSE_ABSENT,) == ("placed", "running")  # noqa: S101 - as they are written
assert not _absent(Infer, "id", "parameters")  # noqa: S101


def _number_writer(cls: Type[Any], head: bytes) -> Callable[[Any], Optional[bytes]]:
    [absent] = _absent(cls, "request")

    def write(message: Any) -> Optional[bytes]:
        number = message.request
        if type(number) is int and _LEAST_NUMBER <= number <= limits.MAX_COUNT and getattr(message, absent) is None:
            return head + _NUMBER.pack(number)
        return None

    return write


def _number_reader(cls: Type[Any], head: bytes) -> Callable[[bytes, Tails], Optional[Any]]:
    begin, nbytes = len(head), len(head) + _NUMBER.size
    absent = _absent(cls, "request")

    def read(frame: bytes, tails: Tails) -> Optional[Any]:
        if len(frame) != nbytes or not frame.startswith(head):
            return None
        (number,) = _NUMBER.unpack_from(frame, begin)
        if number > limits.MAX_COUNT:
            return None
        message: Any = object.__new__(cls)
        message.__dict__.update(absent, request=number)
        return message

    return read


def _write_response(message: InferResponse) -> Optional[bytes]:
    text = message.id
    if message.placed is not None or message.running is not None or type(text) is not str:
        return None
    return _RESPONSES[len(text)] + text.encode() if text.isascii() and 0 < len(text) < _SHORT_BYTES else None


def _read_response(frame: bytes, tails: Tails) -> Optional[InferResponse]:
    size = len(frame) - _RESPONSE_ID
    if not 0 < size < _SHORT_BYTES or not frame.startswith(_RESPONSES[size]):
        return None
    text = frame[_RESPONSE_ID:]
    if not text.isascii():
        return None
    message = object.__new__(InferResponse)
    message.__dict__.update(_RESPONSE_ABSENT, id=text.decode())
    return message


def _write_infer(message: Infer) -> Optional[bytes]:
    text = message.id
    tail: Optional[bytes] = getattr(message.parameters, "_tail", None)
    if tail is None or type(text) is not str or not text.isascii() or not 0 < len(text) < _SHORT_BYTES:
        return None
    return b"".join((_INFERS[len(text)], text.encode(), tail))


def _read_infer(frame: bytes, tails: Tails) -> Optional[Infer]:
    end = _end(frame)
    parameters = tails.get(frame[end:])
    if parameters is None:
        return None
    text = frame[_INFER_ID:end]
    if not text.isascii():
        return None
    message = object.__new__(Infer)
    message.__dict__.update(id=text.decode(), parameters=parameters)
    return message


def _end(frame: bytes) -> int:
    """Where the id of a request ends that has this form; where the frame does, if it has not."""
    size = frame[_INFER_ID - 1] - _SHORT_TEXT if len(frame) > _INFER_ID else 0
    if 0 < size < _SHORT_BYTES and frame.startswith(_INFER):
        return _INFER_ID + size
    return len(frame)


# What returns the envelope of a message; None where that has no such form, or a field may not be what it has to be.
WRITERS: Dict[Type[Any], Callable[[Any], Optional[bytes]]] = {
    Predict: _number_writer(Predict, _PREDICT),
    Result: _number_writer(Result, _RESULT),
    InferResponse: _write_response,
    Infer: _write_infer,
}

# What returns the message of an envelope, without its description; None where that has no form that is known.
READERS: Dict[Type[Any], Callable[[bytes, Tails], Optional[Any]]] = {
    Predict: _number_reader(Predict, _PREDICT),
    Result: _number_reader(Result, _RESULT),
    InferResponse: _read_response,
    Infer: _read_infer,
}
