"""Target for the ZeroMQ proxy's ZMTP parser: split anywhere, a stream yields exactly the messages that it contains.

An input is parts of a stream, after a handshake if the first byte says so: a byte with the length of a part, and the
part. A length of `FILLER` stands for as many bytes as make a frame large enough to be read directly.
"""

from __future__ import annotations

from collections.abc import Iterator

from targets.reader import Reader
from weightd_daemon.zmq_proxy.zmtp import (
    COMMAND,
    LONG,
    MAX_COMMAND_BYTES,
    MORE,
    NullMechanism,
    ZmtpConnection,
    ZmtpLimits,
)
from weightd_protocol.framing import LARGE_BYTES, MAX_FRAMES

FILLER = 255
# At the beginning of a frame this byte is an error; zeros would be thousands of frames.
_FILLING = b"\xff" * LARGE_BYTES
BOUNDS = ZmtpLimits(max_frame_bytes=3 * LARGE_BYTES, max_message_bytes=4 * LARGE_BYTES)

MAX_BYTES = 1024
GREETING = b"\xff" + bytes(8) + b"\x7f\3\0NULL" + bytes(48)
READY = b"\4\x1c\5READY\x0bSocket-Type\0\0\0\6DEALER"
WORDS = (
    GREETING,
    READY,
    b"\4\x07\4PING\0\0",
    b"\2\0\0\0\0\0\x01\0\0",
    b"\3\0\0\0\0\0\x03\0\0",
    b"\2\0\0\0\0\0\x03\0\1",
)


def one_input(data: bytes) -> None:
    reader = Reader(data)
    is_ready = bool(reader.number() & 1)
    connection = ZmtpConnection(NullMechanism(), BOUNDS)
    stream = GREETING + READY if is_ready else b""
    messages = _fed(connection, stream)
    while reader.left():
        size = reader.number()
        piece = _FILLING if size == FILLER else reader.take(size)
        stream += piece
        messages += _fed(connection, piece)
    assert connection.error.isprintable()
    assert len(connection.error) < 256
    if is_ready:
        expected = list(_standing(stream[len(GREETING + READY) :]))
        assert bool(connection.error) == (expected[-1:] == [None])
        assert messages == [each for each in expected if each is not None]


def written(*pieces: bytes | int, is_ready: bool = True) -> bytes:
    """Return the input for parts of a stream; a number stands for that many fillers."""
    return bytes([is_ready]) + b"".join(
        bytes([FILLER]) * piece if isinstance(piece, int) else bytes([len(piece)]) + piece for piece in pieces
    )


def _fed(connection: ZmtpConnection, piece: bytes) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    while piece or connection.is_backlogged:
        if connection.error:
            break
        if connection.missing_bytes >= LARGE_BYTES and not connection.is_backlogged:
            target = connection.read_buffer()
            taken = min(len(target), len(piece))
            target[:taken] = piece[:taken]
            found, piece = connection.on_filled(taken), piece[taken:]
        else:
            data, piece = (b"", piece) if connection.is_backlogged else (piece, b"")
            found = connection.receive(data)
        messages += [[bytes(frame) for frame in each] for each in found]
        assert connection.held_bytes <= BOUNDS.max_message_bytes + 2 * LARGE_BYTES
    return messages


def _standing(stream: bytes) -> Iterator[list[bytes] | None]:
    """Yield the messages of a stream, and None where a limit is exceeded."""
    frames: list[bytes] = []
    while len(stream) >= 2:
        flags, begin = stream[0], 9 if stream[0] & LONG else 2
        if len(stream) < begin:
            return
        length = int.from_bytes(stream[1:begin], "big")
        is_command = bool(flags & COMMAND)
        if (
            flags > MORE | LONG | COMMAND
            or length > (MAX_COMMAND_BYTES if is_command else BOUNDS.max_frame_bytes)
            or (not is_command and sum(map(len, frames)) + length > BOUNDS.max_message_bytes)
            or (not is_command and len(frames) == MAX_FRAMES)
        ):
            yield None
            return
        if len(stream) < begin + length:
            return
        if not is_command:
            frames.append(stream[begin : begin + length])
            if not flags & MORE:
                yield frames
                frames = []
        stream = stream[begin + length :]
