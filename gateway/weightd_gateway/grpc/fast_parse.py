"""A `ModelInferRequest` cut into what is the same in many requests, and what is not: nothing of tensors is copied."""

from __future__ import annotations

from typing import NamedTuple

# Tags of fields of bytes: the number times eight, and 2.
_ID = 3 << 3 | 2
_RAW_INPUT_CONTENTS = 7 << 3 | 2

# The wire types that these messages have.
_VARINT, _BYTES = 0, 2

# As many as any request has: one for each tensor of three kinds, and parameters.
MAX_FIELDS = 512

# Of a length: more than a message has.
_MAX_VARINT_BYTES = 5


class ParsedRequest(NamedTuple):
    """A message in pieces.

    Attributes:
        header: the message, but for what follows.
        id: the field of that name, not decoded.
        contents: `raw_input_contents`.
    """

    header: bytes
    id: bytes = b""
    contents: tuple[memoryview, ...] = ()


def fast_parse(message: bytes) -> ParsedRequest:
    """Return the message in pieces. One that is unusual is its own header, with all that is in it."""
    header, contents, request_id = bytearray(), list[memoryview](), b""
    view = memoryview(message)
    position, end = 0, len(message)
    for _ in range(MAX_FIELDS):
        if position == end:
            return ParsedRequest(bytes(header), request_id, tuple(contents))
        tag = message[position]
        value, begin = _read_varint(message, position + 1)
        # A tag of two bytes is of a field that nobody knows here.
        if begin == 0 or tag > 0x7F or tag & 7 not in (_VARINT, _BYTES):
            break
        after = begin if tag & 7 == _VARINT else begin + value
        if after > end:
            break
        if tag == _RAW_INPUT_CONTENTS:
            contents.append(view[begin:after])
        elif tag == _ID:
            if not request_id.isascii():
                break  # protobuf looks whether an id that a later one replaces is text
            request_id = message[begin:after]
        else:
            header += view[position:after]
        position = after
    return ParsedRequest(message)


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Return the number that is there, and where it ends; 0 where there is none."""
    value = 0
    for shift, byte in enumerate(message[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, position + shift + 1
    return 0, 0
