"""Target for the framing of a stream: split anywhere, a stream yields exactly the messages that it contains.

An input is a byte of flags (which messages are admitted), and parts of a stream: a byte with the length of a part,
and the part. A length of `FILLER` stands for as many zeros as make a frame large enough to be read directly.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from targets.reader import Reader
from weightd_protocol import limits
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import LARGE_BYTES, MAX_FRAMES, FrameReader, Message, message_prefix

FILLER = 255
HEADER_BYTES = 32
FRAME_BYTES = 4 * LARGE_BYTES

MAX_BYTES = 1024
WORDS = tuple(
    struct.pack("<I", number)
    for number in (1, 2, 3, HEADER_BYTES, HEADER_BYTES + 1, MAX_FRAMES, LARGE_BYTES, FRAME_BYTES, FRAME_BYTES + 1)
)


def one_input(data: bytes) -> None:
    reader = Reader(data)
    is_admitted = bool(reader.number() & 1)
    incoming = FrameReader(HEADER_BYTES, FRAME_BYTES, lambda nbytes: is_admitted)
    stream, messages, error = b"", list[Message](), ""
    while reader.left() and not error:
        size = reader.number()
        piece = bytes(LARGE_BYTES) if size == FILLER else reader.take(size)
        stream += piece
        try:
            messages += _received(incoming, piece)
        except RemoteProtocolError as caught:
            error = str(caught)
        assert incoming.admitted_bytes <= FRAME_BYTES * MAX_FRAMES
    expected = list(_standing(stream))
    assert bool(error) == (expected[-1:] == [None])
    assert error.isprintable()
    assert len(error) < 1024
    # Messages in the same part as a framing error are not returned.
    messages += [Message([], ()) for frames in expected[len(messages) :] if frames is not None and error]
    assert len(messages) + bool(error) == len(expected)
    for message, frames in zip(messages, expected, strict=False):
        if message.lengths and frames is not None:
            _check(message, frames, is_admitted=is_admitted)


def written(*pieces: bytes | int, admitted: bool = True) -> bytes:
    """Return the input for parts of a stream; a number stands for that many fillers."""
    return bytes([admitted]) + b"".join(
        bytes([FILLER]) * piece if isinstance(piece, int) else bytes([len(piece)]) + piece for piece in pieces
    )


def _received(incoming: FrameReader, piece: bytes) -> list[Message]:
    messages: list[Message] = []
    while piece:
        if incoming.missing_bytes < LARGE_BYTES:
            return messages + incoming.receive(piece)
        target = incoming.read_buffer()
        taken = min(len(target), len(piece))
        target[:taken] = piece[:taken]
        messages += incoming.on_filled(taken)
        piece = piece[taken:]
    return messages


def _standing(stream: bytes) -> Iterator[list[bytes] | None]:
    """Yield the messages of a stream, and None where the framing is broken."""
    while len(stream) >= 4:
        (count,) = struct.unpack_from("<I", stream)
        if not 1 <= count <= MAX_FRAMES:
            yield None
            return
        if len(stream) < 4 + 4 * count:
            return
        lengths = struct.unpack_from(f"<{count}I", stream, 4)
        if max(lengths) > FRAME_BYTES:
            yield None
            return
        stream = stream[4 + 4 * count :]
        if len(stream) < sum(lengths):
            return
        yield [stream[sum(lengths[:index]) :][:length] for index, length in enumerate(lengths)]
        stream = stream[sum(lengths) :]


def _check(message: Message, frames: Sequence[bytes], *, is_admitted: bool) -> None:
    assert message.lengths == tuple(map(len, frames))
    assert message_prefix(frames) == struct.pack(f"<{1 + len(frames)}I", len(frames), *message.lengths)
    arrived = [bytes(frame) for frame in message.frames]
    assert arrived == frames[: len(arrived)]
    headers = message.lengths[: limits.MAX_HEADER_FRAMES]
    fitting = next((index for index, length in enumerate(headers) if length > HEADER_BYTES), len(frames))
    # A message that arrives at once needs no admission.
    assert len(arrived) in ({fitting} if is_admitted else {fitting, min(fitting, len(headers))})
