"""Packets of direct channels: a request is its deadline and one message, an answer is one message. No I/O.

A packet is complete when it arrives, so its length must be the length of its message. The message is framed as in a
byte stream (`framing`).
"""

from __future__ import annotations

import struct
from typing import Any, Callable, Dict, List, Tuple

from weightd_protocol import limits
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import MAX_FRAMES
from weightd_protocol.messages.channels import DEADLINE_BYTES

_COUNT = struct.Struct("<I")
_COUNT_END = DEADLINE_BYTES + _COUNT.size

# Functions that split a request into its deadline and its frames, by the bytes of its framing. The oldest entries are
# dropped first.
_KNOWN_LAYOUTS: Dict[bytes, Callable[[bytes], Tuple[Any, ...]]] = {}
_MAX_KNOWN_LAYOUTS = 1024


def split_request(packet: bytes) -> Tuple[int, List[bytes]]:
    """Return the deadline of a request in microseconds of CLOCK_MONOTONIC, and the frames of its message.

    Raises:
        RemoteProtocolError: the packet is not a deadline and exactly one message of header frames and tensor frames.
    """
    try:
        # The first byte after the deadline is the number of frames, because the largest number fits into one byte.
        deadline_us, *frames = _KNOWN_LAYOUTS[packet[DEADLINE_BYTES : _COUNT_END + 4 * packet[DEADLINE_BYTES]]](packet)
    except (LookupError, struct.error):
        return _split_slowly(packet)
    return deadline_us, frames


def _split_slowly(packet: bytes) -> Tuple[int, List[bytes]]:
    size = len(packet)
    if not _COUNT_END <= size <= limits.MAX_PACKET_BYTES:
        raise RemoteProtocolError(f"packet: expected {_COUNT_END} to {limits.MAX_PACKET_BYTES} bytes, got {size}")
    (count,) = _COUNT.unpack_from(packet, DEADLINE_BYTES)
    if not limits.MAX_HEADER_FRAMES <= count <= MAX_FRAMES:
        raise RemoteProtocolError(f"frames: expected {limits.MAX_HEADER_FRAMES} to {MAX_FRAMES} frames, got {count}")
    begin = _COUNT_END + _COUNT.size * count
    if begin > size:
        raise RemoteProtocolError(f"packet: expected the lengths of {count} frames, got {size} bytes")
    lengths = struct.unpack_from(f"<{count}I", packet, _COUNT_END)
    if begin + sum(lengths) != size:
        raise RemoteProtocolError(f"packet: expected {begin + sum(lengths)} bytes, got {size}")
    framing = f"{begin - DEADLINE_BYTES}x"
    unpack = struct.Struct(f"<Q{framing}{''.join([f'{length}s' for length in lengths])}").unpack
    if len(_KNOWN_LAYOUTS) >= _MAX_KNOWN_LAYOUTS:
        _KNOWN_LAYOUTS.pop(next(iter(_KNOWN_LAYOUTS)), None)
    _KNOWN_LAYOUTS[packet[DEADLINE_BYTES:begin]] = unpack
    deadline_us, *frames = unpack(packet)
    return deadline_us, frames
