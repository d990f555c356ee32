"""Reads the protobuf wire format of messages without protobuf. Pure: no I/O.

Protobuf creates an object for each field of a message; the objects can take a hundred times the size of the message.
Therefore `check_fields` limits the number of fields before a message is parsed. `fast_parse` splits a
`ModelInferRequest`: tensors and id differ from request to request. The other fields, which form the header, are often
the same, so the parsed header can be cached. No tensor is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from weightd_gateway.error_codes import TooLarge

MAX_FIELDS = 2048
"""Maximum number of fields of a message, including all nested messages.

A request with 64 inputs and 64 outputs in shared memory has about 1,930 fields. A packed list of values counts as one
field. Checking `MAX_FIELDS` fields takes about two milliseconds of the event loop's time.
"""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZE = {_FIXED64: 8, _FIXED32: 4}

# Maximum bytes of a variable-length integer (varint) that protobuf accepts.
_MAX_VARINT_BYTES = 10

# Tags of two fields of `ModelInferRequest`: the field number times eight, plus the wire type 2 (length and bytes).
_ID = 3 << 3 | 2
_RAW_INPUT_CONTENTS = 7 << 3 | 2

# Maximum number of top-level fields of a request that `fast_parse` splits. Ordinary requests have fewer: one for each
# input, raw content, output and parameter.
MAX_FAST_FIELDS = 512

# Maximum bytes of a length prefix. Five bytes can express more than the size of any message.
_MAX_LENGTH_BYTES = 5


# --- fields ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """A message type, with only the fields that have messages as values.

    Attributes:
        nested: by field number, the name of the field and the layout of its messages.
    """

    nested: Mapping[int, tuple[str, Layout]]


class _NestedSpan(NamedTuple):
    path: str
    layout: Layout
    begin: int
    end: int


def layout_of(descriptor: Any) -> Layout:
    """Return the layout of a message type, which must not be recursive."""
    return Layout(
        {each.number: (each.name, layout_of(each.message_type)) for each in descriptor.fields if each.message_type}
    )


def checked_parser(message_class: Any) -> Callable[[bytes], Any]:
    """Return a function that checks the number of fields in the bytes of a message and then parses them.

    The function raises `TooLarge` for too many fields, and `DecodeError` for bytes that are not a valid message.
    """
    return functools.partial(_parse, message_class, layout_of(message_class.DESCRIPTOR))


def _parse(message_class: Any, layout: Layout, message: bytes) -> Any:
    check_fields(message, layout)
    return message_class.FromString(message)


def check_fields(message: bytes, layout: Layout, max_fields: int = MAX_FIELDS) -> None:
    """Check the number of fields in a message and in all nested messages.

    The check stops at the first field beyond the limit, so that its own cost is limited, too.

    Raises:
        TooLarge: the message has more than `max_fields` fields.
        DecodeError: the bytes are not a message, or contain groups, which proto3 does not have.
    """
    count = 0
    ranges = [_NestedSpan("", layout, 0, len(message))]
    while ranges:
        path, inner, position, end = ranges.pop()
        while position < end:
            # Most tags and lengths have one byte and need no function call.
            tag = message[position]
            position += 1
            if tag > 0x7F:
                tag, position = _read_varint(message, position - 1, end)
            count += 1
            if count > max_fields:
                name = _field_path(path, inner, tag >> 3) or "the message"
                text = f"expected at most {max_fields} fields in a message, including nested ones, got {count} or more"
                raise TooLarge(f"{name}: {text}")
            kind = tag & 7
            if kind == _BYTES:
                size = message[position] if position < end else 0x80
                begin = position + 1
                if size > 0x7F:
                    size, begin = _read_varint(message, position, end)
                position = begin + size
                found = inner.nested.get(tag >> 3)
                if found is not None and position <= end:
                    ranges.append(_NestedSpan(_field_path(path, inner, tag >> 3), found[1], begin, position))
            else:
                position = _skip_number(kind, message, position, end)
        if position > end:
            raise DecodeError("a field extends beyond its message")


def _skip_number(kind: int, message: bytes, position: int, end: int) -> int:
    """Return the position after the number with wire type `kind` at `position`."""
    if kind == _VARINT:
        return _read_varint(message, position, end)[1]
    if kind in _FIXED_SIZE:
        return position + _FIXED_SIZE[kind]
    raise DecodeError("groups are not supported")


def _field_path(path: str, layout: Layout, number: int) -> str:
    """Return the path of field `number` if its value is a message, otherwise the path of the containing message."""
    if number not in layout.nested:
        return path
    name, _ = layout.nested[number]
    return f"{path}.{name}" if path else name


def _read_varint(message: bytes, position: int, end: int) -> tuple[int, int]:
    """Return the variable-length integer at a position, and the position after the integer."""
    value = 0
    for index in range(position, min(end, position + _MAX_VARINT_BYTES)):
        byte = message[index]
        value |= (byte & 0x7F) << 7 * (index - position)
        if byte < 0x80:
            return value, index + 1
    raise DecodeError("truncated or too long number")


# --- requests --------------------------------------------------------------------------------------------------------


class ParsedRequest(NamedTuple):
    """The parts of a `ModelInferRequest` message.

    Attributes:
        header: the message without the fields `id` and `raw_input_contents`.
        id: the bytes of the field `id`.
        contents: the values of the field `raw_input_contents`.
    """

    header: bytes
    id: bytes = b""
    contents: tuple[memoryview, ...] = ()


def fast_parse(message: bytes) -> ParsedRequest:
    """Split a `ModelInferRequest` message. A message with unusual fields is not split: it is the header."""
    header, contents, request_id = bytearray(), list[memoryview](), b""
    view = memoryview(message)
    position, end = 0, len(message)
    for _ in range(MAX_FAST_FIELDS):
        if position == end:
            return ParsedRequest(bytes(header), request_id, tuple(contents))
        tag = message[position]
        value, begin = _read_short_varint(message, position + 1)
        # Leave unusual fields to protobuf. A tag of more than one byte can only be the tag of an unknown field.
        if begin == 0 or tag > 0x7F or tag & 7 not in (_VARINT, _BYTES):
            break
        after = begin if tag & 7 == _VARINT else begin + value
        if after > end:
            break
        if tag == _RAW_INPUT_CONTENTS:
            contents.append(view[begin:after])
        elif tag == _ID:
            if not request_id.isascii():
                break  # this is a second id; protobuf has to check the encoding of the first one, too
            request_id = message[begin:after]
        else:
            header += view[position:after]
        position = after
    return ParsedRequest(message)


def _read_short_varint(message: bytes, position: int) -> tuple[int, int]:
    """Return the integer at a position and the position after it; 0, 0 if the integer is incomplete or too long."""
    value = 0
    for shift, byte in enumerate(message[position : position + _MAX_LENGTH_BYTES]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, position + shift + 1
    return 0, 0
