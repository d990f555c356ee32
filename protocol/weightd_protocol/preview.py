"""Inspection of untrusted header frames before msgpack creates objects from them.

The cost of unpacking depends on the number of items, not on the number of bytes: 64 KiB can hold 65,000 empty maps,
each of which costs as much as a field of a legal message. So every header frame that is not short is scanned first. The
scan stops as soon as the frame contains or announces more items than its message may have.

Each value is an item, and so is each key of a map. A list or map itself counts as `limits.CONTAINER_ITEMS`.
"""

from __future__ import annotations

import struct
from typing import Any, Callable, Dict, List, Mapping, Tuple

import msgpack

from weightd_protocol import limits

# A frame of this size is cheap to unpack whatever it contains, so it is not scanned.
SHORT_BYTES = 512

# Limits for `leading_fields`: type, id and model name fit several times.
_MAX_FRONT_BYTES = 512
_MAX_FRONT_FIELDS = 4

_COUNTS: Mapping[int, Callable[..., Tuple[Any, ...]]] = {
    size: struct.Struct(f">{code}").unpack_from for size, code in ((1, "B"), (2, "H"), (4, "I"))
}


def _lengths() -> List[int]:
    """Return the length of an item without nested items by its first byte; 0 if further bytes determine the length."""
    lengths = [0] * 256
    lengths[0x00:0x80] = [1] * 0x80  # positive fixint
    lengths[0xA0:0xC0] = range(1, 33)  # fixstr
    lengths[0xC0:0xC4] = [1] * 4  # nil, unused, false, true
    lengths[0xCA:0xD4] = [5, 9, 2, 3, 5, 9, 2, 3, 5, 9]  # floats and integers
    lengths[0xE0:0x100] = [1] * 0x20  # negative fixint
    return lengths


_LENGTHS = _lengths()

# By the first byte of an item: the size of the length field after it. That field contains the number of following
# bytes.
_COUNTED: Mapping[int, int] = {
    **{0xC4 + index: 2**index for index in range(3)},  # bin
    **{0xD9 + index: 2**index for index in range(3)},  # str
}

# By the first byte of a container: the size of the count field after it, and the items for each counted entry.
_CONTAINERS: Mapping[int, Tuple[int, int]] = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


_EXTENSIONS = frozenset([*range(0xC7, 0xCA), *range(0xD4, 0xD9)])


def find_problem(frame: Any, max_items: int) -> str:
    """Return the reason why a header frame must not be unpacked, or "" if it may be.

    Args:
        frame: the frame, of which only the first value is inspected. A truncated frame or one that is not msgpack
            passes: msgpack rejects it after at most `max_items` items.
        max_items: the largest number of items that the frame may contain or announce.
    """
    if len(frame) <= SHORT_BYTES:
        return ""
    # Announced values that were not reached yet.
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
    """Return the leading fields of a map, up to the first field whose value is a list or map.

    The function inspects only a few fields and a few hundred bytes. The result is empty if the frame is not a map.
    """
    # Created for each call, because an unpacker cannot be used after an error.
    unpacker = msgpack.Unpacker(max_buffer_size=_MAX_FRONT_BYTES, max_array_len=0, max_map_len=0, max_ext_len=0)
    fields: Dict[str, Any] = {}
    unpacker.feed(bytes(frame[:_MAX_FRONT_BYTES]))
    try:
        for _ in range(min(unpacker.read_map_header(), _MAX_FRONT_FIELDS)):
            key, value = unpacker.unpack(), unpacker.unpack()
            if type(key) is str:
                fields.setdefault(key, value)
    except (ValueError, TypeError, msgpack.UnpackException):
        pass  # no further leading fields
    return fields
