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

_Layouts = Dict[bytes, Callable[[bytes], Tuple[Any, ...]]]

# Functions that split a request into its deadline and its frames, and an answer into its frames, by the bytes of the
# framing. The oldest entries are dropped first.
_KNOWN_LAYOUTS: _Layouts = {}
_KNOWN_ANSWER_LAYOUTS: _Layouts = {}
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
        deadline_us, *frames = _learn_layout(packet, DEADLINE_BYTES, _KNOWN_LAYOUTS)(packet)
    return deadline_us, frames


def split_answer(packet: bytes) -> Tuple[bytes, ...]:
    """Return the frames of an answer. Unlike a request, it may consist of the envelope alone.

    Raises:
        RemoteProtocolError: the packet is not exactly one message.
    """
    try:
        return _KNOWN_ANSWER_LAYOUTS[packet[: 4 * (1 + packet[0])]](packet)
    except (LookupError, struct.error):
        return _learn_layout(packet, 0, _KNOWN_ANSWER_LAYOUTS)(packet)


def _learn_layout(packet: bytes, begin: int, known: _Layouts) -> Callable[[bytes], Tuple[Any, ...]]:
    """Return the function that splits a packet, whose framing begins at `begin`, and add it to the known layouts."""
    size = len(packet)
    count_end = begin + _COUNT.size
    if not count_end <= size <= limits.MAX_PACKET_BYTES:
        raise RemoteProtocolError(f"packet: expected {count_end} to {limits.MAX_PACKET_BYTES} bytes, got {size}")
    (count,) = _COUNT.unpack_from(packet, begin)
    lowest = limits.MAX_HEADER_FRAMES if begin else 1
    if not lowest <= count <= MAX_FRAMES:
        raise RemoteProtocolError(f"frames: expected {lowest} to {MAX_FRAMES} frames, got {count}")
    end = count_end + _COUNT.size * count
    if end > size:
        raise RemoteProtocolError(f"packet: expected the lengths of {count} frames, got {size} bytes")
    lengths = struct.unpack_from(f"<{count}I", packet, count_end)
    if end + sum(lengths) != size:
        raise RemoteProtocolError(f"packet: expected {end + sum(lengths)} bytes, got {size}")
    deadline = "Q" if begin else ""
    unpack = struct.Struct(f"<{deadline}{end - begin}x{''.join([f'{length}s' for length in lengths])}").unpack
    if len(known) >= _MAX_KNOWN_LAYOUTS:
        known.pop(next(iter(known)), None)
    known[packet[begin:end]] = unpack
    return unpack
