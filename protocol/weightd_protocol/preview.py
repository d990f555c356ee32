"""Checks of untrusted header frames before msgpack creates objects from them.

The cost of unpacking a frame depends on the number of its items, not on its bytes: 64 KiB can hold 65,000 empty maps,
each of which costs as much as a field of a legal message. So every header frame longer than `SHORT_BYTES` is scanned
before it is unpacked. The scan stops when the frame contains or announces more items than a message of its type may
have.

Each value counts as one item, and so does each key of a map. A list or map itself counts as `limits.CONTAINER_ITEMS`.
"""

from __future__ import annotations

import struct
from typing import Any, Callable, Dict, List, Mapping, Tuple

import msgpack

from weightd_protocol import limits

# Frames of at most this many bytes are not scanned, because they are cheap to unpack whatever they contain.
SHORT_BYTES = 512

# Maximum number of bytes and of fields that `leading_fields` inspects. Type, id and model name fit several times.
_MAX_FRONT_BYTES = 512
_MAX_FRONT_FIELDS = 4

_COUNTS: Mapping[int, Callable[..., Tuple[Any, ...]]] = {
    size: struct.Struct(f">{code}").unpack_from for size, code in ((1, "B"), (2, "H"), (4, "I"))
}


def _lengths() -> List[int]:
    """Return a table of the lengths of msgpack items by their first byte.

    The length is 0 if it depends on further bytes, or if the item contains other items.
    """
    lengths = [0] * 256
    lengths[0x00:0x80] = [1] * 0x80  # positive fixint
    lengths[0xA0:0xC0] = range(1, 33)  # fixstr
    lengths[0xC0:0xC4] = [1] * 4  # nil, unused, false, true
    lengths[0xCA:0xD4] = [5, 9, 2, 3, 5, 9, 2, 3, 5, 9]  # floats and integers
    lengths[0xE0:0x100] = [1] * 0x20  # negative fixint
    return lengths


_LENGTHS = _lengths()

# Size of the length field of a msgpack item, by the item's first byte. The length field follows the first byte. It
# holds the number of bytes that follow.
_COUNTED: Mapping[int, int] = {
    **{0xC4 + index: 2**index for index in range(3)},  # bin
    **{0xD9 + index: 2**index for index in range(3)},  # str
}

# Size of the count field of a msgpack list or map, by its first byte, and the number of items for each entry counted:
# one in a list, two (key and value) in a map.
_CONTAINERS: Mapping[int, Tuple[int, int]] = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


_EXTENSIONS = frozenset([*range(0xC7, 0xCA), *range(0xD4, 0xD9)])


def find_problem(frame: Any, max_items: int) -> str:
    """Return the reason why a header frame must not be unpacked, or "" if it may be unpacked.

    Args:
        frame: the header frame. Only its first msgpack value is inspected. A frame that is truncated or is not msgpack
            passes, because msgpack rejects it after at most `max_items` items.
        max_items: the maximum number of items that the frame may contain or announce.
    """
    if len(frame) <= SHORT_BYTES:
        return ""
    # `remaining` counts the values that were announced and not reached yet.
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
    """Return the leading fields of a msgpack map: those before the first field whose value is a list or map.

    Only a few fields and a few hundred bytes are inspected. The result is empty if the frame is not a map.
    """
    # Each call creates an unpacker, because an unpacker that has raised an error cannot be used again.
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
