"""Tests that messages split anywhere arrive complete and in order, and that data beyond a limit is not kept."""

from __future__ import annotations

import struct
from typing import Any, List, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_protocol import framing, limits
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import LARGE_BYTES, FrameReader, FrameWriter, Message, message_prefix

HEADER_BYTES, LARGE_HEADER, LIMIT = 40, LARGE_BYTES + 7, 8 * LARGE_BYTES

MOST = 3

# Small frames, frames that are read directly into their buffer, and, with the limits of a test, mapped frames.
SIZES = st.integers(0, 30) | st.sampled_from(
    [HEADER_BYTES, HEADER_BYTES + 1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_HEADER, 3 * LARGE_BYTES]
)
SHAPES = st.lists(SIZES, min_size=1, max_size=5) | st.just([1] * framing.MAX_FRAMES)
CUTS = st.lists(st.integers(1, 60) | st.integers(LARGE_BYTES - 60, 4 * LARGE_BYTES), min_size=1, max_size=10)


def written(shapes: List[List[int]]) -> Tuple[List[List[bytes]], bytes]:
    """Return distinct messages with frames of these lengths, and their byte stream."""
    sent = [
        [bytes([number % 251, index]) * (size // 2) + b"x" * (size % 2) for index, size in enumerate(shape)]
        for number, shape in enumerate(shapes)
    ]
    return sent, b"".join(message_prefix(frames) + b"".join(frames) for frames in sent)


def read(incoming: FrameReader, stream: bytes, cuts: List[int], *, targets: bool = True) -> List[Message]:
    """Return the messages of a stream that arrives in parts; the part lengths repeat."""
    messages: List[Message] = []
    position = turn = 0
    while position < len(stream):
        piece = stream[position : position + cuts[turn % len(cuts)]]
        target = incoming.read_buffer() if targets and incoming.missing_bytes >= LARGE_BYTES else None
        if target is None:
            messages += incoming.receive(piece)
        else:
            piece = piece[: len(target)]
            target[: len(piece)] = piece
            messages += incoming.on_filled(len(piece))
        while incoming.is_backlogged:
            more = incoming.receive(b"")
            assert len(more) <= MOST
            messages += more
        position += len(piece)
        turn += 1
    return messages


@given(st.lists(SHAPES, max_size=6), CUTS, st.data())
def test_messages_split_anywhere_arrive_in_order(shapes: List[List[int]], cuts: List[int], data: st.DataObject) -> None:
    sent, stream = written(shapes)
    refused = set(data.draw(st.lists(st.sampled_from([sum(each) for each in shapes] or [0]))))
    asked: List[int] = []

    def admit(nbytes: int) -> bool:
        asked.append(nbytes)
        return nbytes not in refused

    bound = data.draw(st.sampled_from([HEADER_BYTES, LARGE_HEADER]))
    incoming = FrameReader(bound, LIMIT, admit, data.draw(st.sampled_from([1, MOST])))
    messages = read(incoming, stream, cuts, targets=data.draw(st.booleans()))
    assert [list(message.lengths) for message in messages] == shapes
    for message, frames in zip(messages, sent):
        headers = frames[: limits.MAX_HEADER_FRAMES]
        fitting = next((index for index, each in enumerate(headers) if len(each) > bound), len(frames))
        arrived = [bytes(frame) for frame in message.frames]
        assert all(type(frame) is bytes for frame in message.frames[: limits.MAX_HEADER_FRAMES])
        if len(arrived) == fitting:
            assert arrived == frames[:fitting]
        else:
            # The message did not arrive at once and was not admitted.
            nbytes = sum(message.lengths)
            assert nbytes in refused & {*asked}
            assert arrived == headers
        assert message.is_complete == (arrived == frames)
    assert (incoming.is_idle, incoming.admitted_bytes) == (True, 0)


@given(st.lists(SHAPES, min_size=1, max_size=3), st.data())
def test_incomplete_message_is_not_returned(shapes: List[List[int]], data: st.DataObject) -> None:
    """The announced bytes count until the message is complete."""
    sent, stream = written(shapes)
    size = len(message_prefix(sent[-1])) + sum(shapes[-1])
    came = data.draw(st.integers(1, size - 1))
    incoming = FrameReader(LIMIT, LIMIT)
    assert len(read(incoming, stream[: len(stream) - size + came], [4 * LARGE_BYTES])) == len(shapes) - 1
    assert not incoming.is_idle
    assert incoming.admitted_bytes == (sum(shapes[-1]) if came >= len(message_prefix(sent[-1])) else 0)


def test_reads_frame_into_mapped_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "_MMAP_THRESHOLD_BYTES", LARGE_BYTES)
    sent, stream = written([[3, 3, 3 * LARGE_BYTES, 5], [2]])
    messages = read(FrameReader(), stream, [LARGE_BYTES + 1])
    assert [[bytes(frame) for frame in message.frames] for message in messages] == sent
    assert type(messages[0].frames[2]) is not bytes


def test_cached_layout_respects_limits_of_each_reader() -> None:
    """All readers share the cache of layouts."""
    data = message_prefix([bytes(100)]) + bytes(100)
    for _ in range(2):
        assert FrameReader().receive(data)[0].is_complete
    assert not FrameReader(max_header_bytes=99).receive(data)[0].is_complete


def test_limits_cached_layouts() -> None:
    for size in range(1, 1200):
        FrameReader().receive(message_prefix([bytes(size)]) + bytes(size))
    assert len(framing._KNOWN_LAYOUTS) <= 1024  # pyright: ignore[reportPrivateUsage]


def test_rejected_message_needs_no_memory() -> None:
    incoming = FrameReader(admit=lambda nbytes: False)
    incoming.receive(struct.pack("<4I", 3, 1, 1, limits.MAX_FRAME_BYTES) + b"ab")
    target = incoming.read_buffer()
    assert len(target) <= 2**20
    assert incoming.admitted_bytes == 0


BROKEN = {
    "no frames": (struct.pack("<I", 0), f"1 to {framing.MAX_FRAMES} frames, got 0"),
    "too many frames": (struct.pack("<I", framing.MAX_FRAMES + 1), f"got {framing.MAX_FRAMES + 1}"),
    "text": (b"GET / HTTP/1.1\r\n", "frames, got"),
    "a frame that is too long": (struct.pack("<3I", 2, 1, LIMIT + 1), f"at most {LIMIT} bytes .*got {LIMIT + 1}"),
    "one that has come": (struct.pack("<2I", 1, LIMIT + 1) + bytes(LIMIT + 1), f"at most {LIMIT} bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("before", [b"", b"".join(written([[3, 2]])[1:])])
def test_reports_broken_framing(name: str, before: bytes) -> None:
    broken, text = BROKEN[name]
    incoming = FrameReader(2 * LIMIT, LIMIT)
    with pytest.raises(RemoteProtocolError, match=text):
        incoming.receive(before + broken)


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.booleans())), st.data())
def test_writes_messages_in_parts(puts: List[Tuple[List[int], bool]], data: st.DataObject) -> None:
    """Descriptors are sent with the first byte of their message."""
    outgoing = FrameWriter()
    stream, expected, descriptors = b"", {}, 0
    for sizes, wanted in puts:
        pieces: List[Any] = [bytes([size]) * size for size in sizes]
        brings = wanted and sum(sizes) > 0
        if brings:
            expected[len(stream)] = [descriptors]
        outgoing.put(pieces, [descriptors] if brings else ())
        descriptors += brings
        stream += b"".join(pieces)
    written, sent = b"", {}
    while outgoing.nbytes:
        assert outgoing.nbytes == len(stream) - len(written)
        ahead, brought = outgoing.next_chunks()
        assert ahead
        if brought:
            sent[len(written)] = list(brought)
        count = data.draw(st.integers(1, sum(map(len, ahead))))
        outgoing.on_written(count)
        written += b"".join(ahead)[:count]
    assert (written, sent, outgoing.next_chunks()) == (stream, expected, ([], ()))


def test_limits_chunks_per_write() -> None:
    outgoing = FrameWriter()
    outgoing.put([b"x"] * 2000)
    assert len(outgoing.next_chunks()[0]) <= 1024


def test_returns_unsent_descriptors() -> None:
    outgoing = FrameWriter()
    outgoing.put([b"ab"], [3])
    outgoing.put([b"cd"], [4, 5])
    outgoing.on_written(1)
    assert (outgoing.clear(), outgoing.nbytes, outgoing.next_chunks()) == ([4, 5], 0, ([], ()))
