"""Packets of direct channels: splitting requests. Runs on Python 3.7."""

from __future__ import annotations

import struct
from typing import Any, List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_protocol import limits, packets
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import MAX_FRAMES, message_prefix
from weightd_protocol.messages.channels import pack_deadline
from weightd_protocol.packets import split_request

FRAMES = st.lists(st.binary(max_size=20), min_size=limits.MAX_HEADER_FRAMES, max_size=MAX_FRAMES)


def packet_of(frames: List[bytes], deadline_us: int = 7) -> bytes:
    return pack_deadline(deadline_us) + message_prefix(frames) + b"".join(frames)


@given(FRAMES, st.integers(0, 2**64 - 1))
def test_splits_each_packet_twice(frames: List[bytes], deadline_us: int) -> None:
    packet = packet_of(frames, deadline_us)
    # The second call knows the layout.
    assert split_request(packet) == split_request(packet) == (deadline_us, frames)


@given(FRAMES, st.data())
def test_a_packet_that_is_cut_or_longer_is_invalid(frames: List[bytes], data: Any) -> None:
    packet = packet_of(frames)
    split_request(packet)
    size = data.draw(st.integers(0, len(packet) - 1))
    for each in (packet[:size], packet + b"x"):
        with pytest.raises(RemoteProtocolError):
            split_request(each)


@given(st.binary(max_size=100))
def test_any_bytes_are_a_request_or_an_error(packet: bytes) -> None:
    try:
        deadline_us, frames = split_request(packet)
    except RemoteProtocolError:
        return
    assert packet_of(frames, deadline_us) == packet


@pytest.mark.parametrize("count", [0, 1, MAX_FRAMES + 1, 255, 2**32 - 1])
def test_the_number_of_frames_is_limited(count: int) -> None:
    lengths = struct.pack("<I", count) + bytes(4 * min(count, 300))
    with pytest.raises(RemoteProtocolError, match="frames: expected 2 to 66 frames"):
        split_request(pack_deadline(7) + lengths)


def test_the_size_of_a_packet_is_limited() -> None:
    overhead = len(packet_of([b"e", b"d", b""]))
    largest = packet_of([b"e", b"d", bytes(limits.MAX_PACKET_BYTES - overhead)])
    assert len(split_request(largest)[1]) == 3
    with pytest.raises(
        RemoteProtocolError, match=f"to {limits.MAX_PACKET_BYTES} bytes, got {limits.MAX_PACKET_BYTES + 1}"
    ):
        split_request(packet_of([b"e", b"d", bytes(limits.MAX_PACKET_BYTES - overhead + 1)]))


def test_lengths_beyond_the_packet_are_invalid() -> None:
    with pytest.raises(RemoteProtocolError, match="packet: expected"):
        split_request(pack_deadline(7) + struct.pack("<3I", 2, 2**32 - 1, 2**32 - 1))


def test_known_layouts_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets, "_MAX_KNOWN_LAYOUTS", 3)
    known: Any = {}
    monkeypatch.setattr(packets, "_KNOWN_LAYOUTS", known)
    for size in range(10):
        packet = packet_of([b"e", bytes(size)])
        assert split_request(packet) == split_request(packet)
    assert len(known) == 3
