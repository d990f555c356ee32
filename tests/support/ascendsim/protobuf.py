"""Minimal protobuf for the simulated files: numbers, and fields with bytes."""

from __future__ import annotations

from typing import Iterator, Tuple, Union

Field = Tuple[int, Union[int, bytes]]


def number(field: int, value: int) -> bytes:
    """Encode a field with a number."""
    return varint(field << 3) + varint(value)


def data(field: int, value: bytes) -> bytes:
    """Encode a field with bytes, a text or a message."""
    return varint(field << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    """Encode a number; a negative number is 64 bits of two's complement."""
    value %= 1 << 64
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])


def fields(message: bytes) -> Iterator[Field]:
    """Yield the fields of a message. Raises ValueError for invalid bytes."""
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        value, position = _read_varint(message, position)
        if tag & 7 == 0:
            yield tag >> 3, value
        elif tag & 7 == 2 and position + value <= len(message):
            yield tag >> 3, message[position : position + value]
            position += value
        else:
            raise ValueError("no such message")


def _read_varint(message: bytes, position: int) -> Tuple[int, int]:
    value = shift = 0
    while position < len(message):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("no such message")
