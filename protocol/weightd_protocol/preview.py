"""Looks at the header frame of an untrusted message before msgpack builds objects from it.

The cost of unpacking depends on the number of items, not on the number of bytes: 64 KiB can hold 65,000 empty maps, and
each of them costs as much as a field of a legal message. So a header frame that is not short is scanned first, and the
scan stops as soon as the frame has, or announces, more items than its message may have.

Each value is an item, also each key of a map. A list or a map itself counts as `limits.CONTAINER_ITEMS`.
"""

from __future__ import annotations

import struct
from typing import Any, Callable, Dict, List, Mapping, Tuple

import msgpack

from weightd_protocol import limits

# A frame of so many bytes costs little whatever it contains, and is unpacked without a scan.
SHORT_BYTES = 512

# `front` looks at so many bytes, and at so many fields: the type, the id and the name of a model fit several times.
_MAX_FRONT_BYTES = 512
_MAX_FRONT_FIELDS = 4

_COUNTS: Mapping[int, Callable[..., Tuple[Any, ...]]] = {
    size: struct.Struct(f">{code}").unpack_from for size, code in ((1, "B"), (2, "H"), (4, "I"))
}


def _lengths() -> List[int]:
    """Return for each first byte the length of its item, which has no other items in it; 0 where more bytes decide."""
    lengths = [0] * 256
    lengths[0x00:0x80] = [1] * 0x80  # positive fixint
    lengths[0xA0:0xC0] = range(1, 33)  # fixstr
    lengths[0xC0:0xC4] = [1] * 4  # nil, unused, false, true
    lengths[0xCA:0xD4] = [5, 9, 2, 3, 5, 9, 2, 3, 5, 9]  # floats and integers
    lengths[0xE0:0x100] = [1] * 0x20  # negative fixint
    return lengths


_LENGTHS = _lengths()

# By the first byte: the bytes of the count behind it, which is that of the bytes that follow.
_COUNTED: Mapping[int, int] = {
    **{0xC4 + index: 2**index for index in range(3)},  # bin
    **{0xD9 + index: 2**index for index in range(3)},  # str
}

# By the first byte: the bytes of the count behind it, and the items for each that is counted.
_CONTAINERS: Mapping[int, Tuple[int, int]] = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


_EXTENSIONS = frozenset([*range(0xC7, 0xCA), *range(0xD4, 0xD9)])


def find_problem(frame: Any, max_items: int) -> str:
    """Return why a header frame is not to be unpacked; "" if it may be.

    Args:
        frame: its first value is looked at. A frame that is cut short, or is not msgpack, is left to msgpack, which
            fails after no more items than `max_items`.
        max_items: the largest number of items that it may have or announce.
    """
    if len(frame) <= SHORT_BYTES:
        return ""
    # Values that were announced and not reached yet.
    remaining = items = 1
    position: int = 0
    try:
        while remaining:
            remaining -= 1
            first: int = frame[position]
            length: int = _LENGTHS[first]
            if length:
                position += length
                continue
            if first in _COUNTED:
                size = _COUNTED[first]
                (count,) = _COUNTS[size](frame, position + 1)
                position += 1 + size + count
                continue
            if first < 0xA0:
                inside = first & 15 if first >= 0x90 else 2 * (first & 15)
                position += 1
            elif first in _EXTENSIONS:
                return "expected no extension type, got one"
            else:
                size, each = _CONTAINERS[first]
                (count,) = _COUNTS[size](frame, position + 1)
                inside = each * count
                position += 1 + size
            remaining += inside
            items += limits.CONTAINER_ITEMS - 1 + inside
            if items > max_items:
                return f"expected at most {max_items} items, got at least {items}"
    except (LookupError, struct.error):
        return ""
    return ""


def leading_fields(frame: Any) -> Dict[str, Any]:
    """Return the fields that a map begins with, up to the first one whose value is a list or a map.

    No more than a few fields, and no more than a few hundred bytes, are looked at. What is not a map has no fields.
    """
    # Not kept between calls: after an error it cannot be used again.
    unpacker = msgpack.Unpacker(max_buffer_size=_MAX_FRONT_BYTES, max_array_len=0, max_map_len=0, max_ext_len=0)
    fields: Dict[str, Any] = {}
    unpacker.feed(bytes(frame[:_MAX_FRONT_BYTES]))
    try:
        for _ in range(min(unpacker.read_map_header(), _MAX_FRONT_FIELDS)):
            key, value = unpacker.unpack(), unpacker.unpack()
            if type(key) is str:
                fields.setdefault(key, value)
    except (ValueError, TypeError, msgpack.UnpackException):
        pass  # the front ends here
    return fields
