"""Protobuf, as far as it takes to find one's way in a file of any size: a field is read, or skipped by its length."""

from __future__ import annotations

from typing import BinaryIO, Iterator, List, Tuple, Union

_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)  # wire types
_MAX_VARINT_BYTES = 10

Span = Tuple[int, int]
"""Where bytes are in the file: start and end."""
Field = Tuple[int, Union[int, Span]]


class Malformed(Exception):
    """The bytes are not the protobuf that they should be."""


def fields(file: BinaryIO, start: int, end: int) -> Iterator[Field]:
    """Yield (field number, value) for each field; bytes are given as (start, end)."""
    position = start
    groups: List[int] = []
    while position < end:
        # Whoever takes the fields may read elsewhere in between.
        file.seek(position)
        tag, size = _varint(file)
        position += size
        number, wire_type = tag >> 3, tag & 7
        value: Union[int, Span] = 0
        if wire_type == _VARINT:
            value, size = _varint(file)
        elif wire_type == _BYTES:
            length, size = _varint(file)
            value = (position + size, position + size + length)
            size += length
        elif wire_type in (_FIXED64, _FIXED32):
            size = 8 if wire_type == _FIXED64 else 4
        elif wire_type == _GROUP:
            # Engines skip what they do not know, also in this old form.
            groups.append(number)
            size = 0
        elif wire_type == _END_GROUP and groups and groups.pop() == number:
            size = 0
        else:
            raise Malformed
        position += size
        # Number 0 is illegal: a file of zeros would otherwise be a valid message, and take a long time.
        if position > end or number == 0:
            raise Malformed
        if not groups and wire_type not in (_GROUP, _END_GROUP):
            yield number, value
    if groups:
        raise Malformed


def _varint(file: BinaryIO) -> Tuple[int, int]:
    """Return the number at the file's position, and how many bytes it takes."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        byte = file.read(1)
        if not byte:
            raise Malformed
        value |= (byte[0] & 0x7F) << 7 * index
        if byte[0] < 0x80:
            return value, index + 1
    raise Malformed
