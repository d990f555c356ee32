"""Envelopes of messages that say where tensors are: read and written by their bytes, as others by `envelopes`.

Such a message is a head, the number or the id, and a tail: all that it says beside. Many have the same tail, for arrays
tend to be where others were before, so it is taken apart once, and then found by its bytes.
"""

from __future__ import annotations

import struct
from dataclasses import fields
from typing import Any, Dict, Optional, Tuple, Type

import msgpack

from weightd.protocol import limits
from weightd.protocol.messages.children import Predict, Result
from weightd.protocol.messages.data import Infer, InferResponse, Parameters
from weightd.protocol.messages.regions import MappedRegions

# The fields that a tail stands for, by the first byte of the envelope, which is the number of fields, and the tail.
Tails = Dict[bytes, Dict[str, Any]]

# Tails that are known; those that came first go first. A longer one is read anew each time.
_MAX_TAILS = 256
_MAX_TAIL_BYTES = 512

# The least number that msgpack writes in eight bytes: the daemon's are larger.
_LEAST_NUMBER = 2**32
_NUMBER = struct.Struct(">Q")

# The first byte of a text of n bytes is the first of these plus n, if there are less than 32; that of a list of n items
# the other one plus n, if there are less than 16. A position is a byte.
_SHORT_TEXT, _SHORT_BYTES = 0xA0, 32
_SHORT_LIST, _SHORT_ITEMS = 0x90, 16

_PLACED: bytes = msgpack.packb("placed")


class _Form:
    """What all envelopes of a class have in common.

    Attributes:
        head: their beginning, where one field follows the number or the id.
        is_named: whether it has an id, else it is a number.
        rest: the fields of the tail; those that are absent are None.
    """

    __slots__ = ("head", "is_named", "rest")

    def __init__(self, cls: Type[Any], tag: str) -> None:
        name = fields(cls)[0].name
        self.is_named = name == "id"
        first = "" if self.is_named else _LEAST_NUMBER
        packed: bytes = msgpack.packb({"v": limits.PROTOCOL_VERSION, "type": tag, name: first})
        head = packed[:-1] if self.is_named else packed[: -_NUMBER.size]
        self.head = bytes([head[0] + 1]) + head[1:]
        self.rest = {field.name: None for field in fields(cls) if field.name not in (name, "description")}

    def split(self, frame: bytes) -> Tuple[Any, int]:
        """Return id or number of an envelope, and where its tail begins; 0 where it has not this form."""
        begin = len(self.head)
        if frame[1:begin] != self.head[1:]:
            return None, 0
        if self.is_named:
            size = frame[begin] - _SHORT_TEXT if len(frame) > begin else 0
            end = begin + 1 + size
            text = frame[begin + 1 : end]
            return (text.decode(), end) if 0 < size < _SHORT_BYTES and text.isascii() else (None, 0)
        end = begin + _NUMBER.size
        if len(frame) <= end:
            return None, 0
        (number,) = _NUMBER.unpack_from(frame, begin)
        return number, end if number <= limits.MAX_COUNT else 0


_FORMS: Dict[Type[Any], _Form] = {
    cls: _Form(cls, tag)
    for cls, tag in ((Infer, "infer"), (InferResponse, "infer_response"), (Predict, "predict"), (Result, "result"))
}


def learn(frame: Any, message: Any, tails: Optional[Tails] = None) -> None:
    """The frame is the envelope of this message: remember what it says of places, if it does."""
    said = _said(message)
    if said is None or type(frame) is not bytes:
        return
    form = _FORMS[type(message)]
    _, end = form.split(frame)
    tail = frame[end:]
    if not end or not 0 < len(tail) <= _MAX_TAIL_BYTES:
        return
    if frame[0] == form.head[0]:
        for value in said.values():
            if type(value) in (Parameters, MappedRegions):
                value.__dict__["_placed_tail"] = tail
    if tails is not None:
        if len(tails) >= _MAX_TAILS:
            del tails[next(iter(tails))]
        tails[frame[:1] + tail] = said


def read(cls: Type[Any], frame: bytes, tails: Tails) -> Optional[Any]:
    """Return the message whose envelope this is, without its description; None where its tail is not known."""
    form = _FORMS[cls]
    first, end = form.split(frame)
    more = tails.get(frame[:1] + frame[end:]) if end else None
    if more is None:
        return None
    message: Any = object.__new__(cls)
    message.__dict__.update(form.rest)
    message.__dict__.update(more)
    message.__dict__["id" if form.is_named else "request"] = first
    return message


def write(message: Any) -> Optional[bytes]:
    """Return the envelope of `message`; None where it has no such form, or a field may not be what it has to be."""
    said = _said(message)
    if said is None or len(said) > 1:
        return None
    if "placed" in said:
        tail = _positions(said["placed"])
    else:
        [value] = said.values()
        tail = getattr(value, "_placed_tail", None)
    form = _FORMS[type(message)]
    first = _text(message.id) if form.is_named else _number(message.request)
    return None if tail is None or first is None else b"".join((form.head, first, tail))


def _said(message: Any) -> Optional[Dict[str, Any]]:
    """The fields beside the first that it has, if it is a message that says where tensors are."""
    cls: Type[Any] = message.__class__
    if cls is Infer:
        regions = getattr(message.parameters, "regions", None)
        return None if regions is None else {"parameters": message.parameters}
    if cls is Predict:
        return None if message.regions is None else {"regions": message.regions}
    if cls is Result:
        return None if message.placed is None else {"placed": message.placed}
    if cls is not InferResponse or message.placed is None:
        return None
    running = {} if message.running is None else {"running": message.running}
    return {"placed": message.placed, **running}


def _positions(positions: Any) -> Optional[bytes]:
    """A few positions as msgpack has the field, None if they are not that simple."""
    if positions.__class__ is not tuple or len(positions) >= _SHORT_ITEMS:
        return None
    for each in positions:
        if type(each) is not int or not 0 <= each < limits.MAX_TENSORS:
            return None
    return _PLACED + bytes((_SHORT_LIST + len(positions), *positions))


def _text(text: Any) -> Optional[bytes]:
    if type(text) is str and text.isascii() and 0 < len(text) < _SHORT_BYTES:
        return bytes((_SHORT_TEXT + len(text),)) + text.encode()
    return None


def _number(number: Any) -> Optional[bytes]:
    if type(number) is int and _LEAST_NUMBER <= number <= limits.MAX_COUNT:
        return _NUMBER.pack(number)
    return None
