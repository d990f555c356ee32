"""The accepting side of ZMTP 3.0 and 3.1, without I/O: https://rfc.zeromq.org/spec/23 and /37.

A peer sends a greeting of 64 bytes, then frames. A frame consists of one byte of flags, its length in one or eight
bytes, and its content. A frame is either a command or a part of a message. The first commands are the handshake of a
security mechanism: `NullMechanism`, or `weightd_daemon.zmq_proxy.curve.CurveMechanism` if the listener has a key.

The limits are checked as soon as the length of a frame is known, before its content is stored.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from weightd_protocol.framing import LARGE_BYTES, MAX_FRAMES, allocate

MORE, LONG, COMMAND = 1, 2, 4

# Maximum size of a command in bytes. READY of libzmq has about 40 bytes, and INITIATE of CURVE about 300.
MAX_COMMAND_BYTES = 4096

# Maximum numbers of messages and frames that one call of `ZmtpConnection.receive` parses, for fairness.
MAX_MESSAGES_PER_PARSE = 16
MAX_FRAMES_PER_PARSE = 128

# With CURVE, frames of at least this number of bytes are encrypted and decrypted in the crypto thread, because this
# takes about a millisecond for each MiB: see `ZmtpConnection.pending_work`.
CRYPTO_THREAD_BYTES = 512 * 1024

# An incomplete frame of at least this number of bytes gets its own buffer. A smaller incomplete frame stays among the
# unparsed bytes.
_LARGE_FRAME_BYTES = 8 * 1024

_SIGNATURE_BYTES, _GREETING_BYTES = 10, 64
_MECHANISM_FIELD = slice(12, 32)

_PING, _PONG = b"\4PING", b"\4PONG"
_TTL_BYTES = 2
_CONTEXT_BYTES = 16

# Socket types of clients. REQ is not supported, because weightd's messages have no empty delimiter frame.
_SOCKET_TYPES = (b"DEALER", b"ROUTER")

MessageFrames = list[Any]


class ZmtpLimits(NamedTuple):
    """Maximum sizes, in bytes, of a frame and of a message from a peer."""

    max_frame_bytes: int
    max_message_bytes: int


class MechanismError(Exception):
    """A peer has violated the security mechanism, or is not allowed to connect.

    Args:
        text: the reason, for the log.
        status: the reason that is sent to the peer in an ERROR command; "" if no ERROR is sent.
    """

    def __init__(self, text: str, status: str = "") -> None:
        super().__init__(text)
        self.status = status


class Mechanism(Protocol):
    """Interface of the security mechanism of one connection.

    Attributes:
        name: the name of the mechanism in the greeting.
        as_server: the value of the field `as-server` in the greeting.
        peer_key: the peer's public key in Z85, verified by the handshake; "" before that and without keys.
        is_complete: whether the handshake is complete.
        overhead_bytes: the number of bytes that `seal` adds to a frame; 0 if frames are not encrypted.
    """

    name: bytes
    as_server: bool
    peer_key: str
    is_complete: bool
    overhead_bytes: int

    def handle_handshake_command(self, command: bytes) -> bytes:
        """Handle the peer's next command of the handshake, and return the command to send as a reply.

        Raises:
            MechanismError: the command is invalid, or the peer is not allowed to connect.
        """
        ...

    def open(self, content: Any) -> tuple[int, Any]:
        """Decrypt the content of a received frame; return the frame's flags and plain content.

        Raises:
            MechanismError: the frame was not encrypted by the peer for this connection, or it was received before.
        """
        ...

    def seal(self, flags: int, content: Any) -> Any:
        """Return the encrypted content of a frame with these flags and this plain content."""
        ...


class NullMechanism:
    """The mechanism NULL, without encryption and authentication."""

    name, as_server, peer_key, overhead_bytes = b"NULL", False, "", 0

    def __init__(self) -> None:
        self.is_complete = False

    def handle_handshake_command(self, command: bytes) -> bytes:
        """See `Mechanism.handle_handshake_command`."""
        if not command.startswith(b"\5READY"):
            raise MechanismError("expected a READY command")
        check_metadata(command[6:])
        self.is_complete = True
        return b"\5READY" + SOCKET_METADATA

    def open(self, content: Any) -> tuple[int, Any]:
        """See `Mechanism.open`."""
        return 0, content

    def seal(self, flags: int, content: Any) -> Any:
        """See `Mechanism.seal`."""
        return content


class ZmtpConnection:
    """Parser of the bytes that a peer sends over one connection.

    Args:
        mechanism: the mechanism that the peer has to use.
        limits: the maximum sizes of frames and messages.

    Attributes:
        mechanism: the security mechanism of the connection.
        replies: bytes to send to the peer, in order. The caller sends and removes them.
        pending_pong: the PONG to send for the last PING, or None. The caller sends it and sets this to None.
        error: why the caller has to close the connection, or "". After an error, nothing more is parsed.
        is_backlogged: whether there are unparsed bytes that `receive(b"")` can parse.
        missing_bytes: the number of bytes that an incomplete large frame still needs; 0 without such a frame.
        held_bytes: the number of stored bytes: of the incomplete message and frame, and of unparsed data.
        pending_work: None, or a function that decrypts a large frame. The caller calls it in any thread and passes the
            result to `on_work_done`. Until then, nothing more is parsed.
    """

    __slots__ = (
        "_has_greeting",
        "_large_frame",
        "_large_frame_flags",
        "_limits",
        "_message_bytes",
        "_message_frames",
        "_unparsed",
        "error",
        "held_bytes",
        "is_backlogged",
        "mechanism",
        "missing_bytes",
        "pending_pong",
        "pending_work",
        "replies",
    )

    def __init__(self, mechanism: Mechanism, limits: ZmtpLimits) -> None:
        self.mechanism = mechanism
        self.replies: list[bytes] = [_encode_greeting(mechanism)]
        self.pending_pong: bytes | None = None
        self.error = ""
        self.is_backlogged = False
        self.missing_bytes = self.held_bytes = 0
        self.pending_work: Callable[[], tuple[int, Any] | str] | None = None
        self._limits = limits
        self._has_greeting = False
        self._unparsed = b""
        # Frames and size in bytes of the incomplete message; flags and buffer of the incomplete large frame.
        self._message_frames: MessageFrames = []
        self._message_bytes = 0
        self._large_frame_flags = 0
        self._large_frame: Any = None

    @property
    def is_ready(self) -> bool:
        """Whether the handshake is complete."""
        return self.mechanism.is_complete

    def read_buffer(self) -> memoryview:
        """Return the buffer for the large frame's missing bytes. After reading into it, call `on_filled`."""
        return memoryview(self._large_frame)[-self.missing_bytes :]

    def on_filled(self, count: int) -> list[MessageFrames]:
        """Handle `count` bytes that were read into `read_buffer`; return the message that is complete now, if any."""
        messages: list[MessageFrames] = []
        self._fill_large_frame(count, messages)
        self._update_held_bytes()
        return messages

    def receive(self, data: bytes) -> list[MessageFrames]:
        """Handle the next bytes from the peer; return the messages that are complete now."""
        messages: list[MessageFrames] = []
        if self.error:
            return messages
        if self.missing_bytes:
            filled_bytes = min(self.missing_bytes, len(data))
            self.read_buffer()[:filled_bytes] = memoryview(data)[:filled_bytes]
            self._fill_large_frame(filled_bytes, messages)
            data = data[filled_bytes:]
        elif self._unparsed:
            data = self._unparsed + data
        # While a large frame is incomplete or being decrypted, no other frame can be parsed.
        is_waiting = self.missing_bytes > 0 or self.pending_work is not None
        position = 0 if is_waiting else self._parse(data, messages)
        self._unparsed = data[position:] if position else data
        self._update_held_bytes()
        return messages

    def on_work_done(self, result: tuple[int, Any] | str) -> list[MessageFrames]:
        """Handle the result of `pending_work`; return the message that is complete now, if any."""
        self.pending_work = None
        self.is_backlogged = True
        messages: list[MessageFrames] = []
        if isinstance(result, str):
            self._fail(result)
        else:
            self._add_frame(*result, messages)
        self._update_held_bytes()
        return messages

    def _update_held_bytes(self) -> None:
        if self.error:
            self._unparsed = b""
        self.held_bytes = (
            len(self._unparsed) + self._message_bytes + (0 if self._large_frame is None else len(self._large_frame))
        )

    def _parse(self, data: bytes, messages: list[MessageFrames]) -> int:
        """Parse complete frames, up to a limit; return the position in `data` after the last one."""
        self.is_backlogged = False
        position, size = 0, len(data)
        if not self._has_greeting:
            if not self._check_greeting(data):
                return 0
            position = _GREETING_BYTES
        for _ in range(MAX_FRAMES_PER_PARSE):
            if size - position < 2:
                return position
            flags = data[position]
            if flags & LONG:
                begin = position + 9
                length = int.from_bytes(data[position + 1 : begin], "big")
            else:
                begin = position + 2
                length = data[position + 1]
            end = begin + length
            if (
                begin > size
                or not self._check_frame_header(flags, length)
                or (end > size and length < _LARGE_FRAME_BYTES)
            ):
                return position
            if end > size:
                self._begin_large_frame(flags, length, memoryview(data)[begin:])
                return size
            position = end
            self._on_frame(flags, data[begin:end], messages)
            if len(messages) == MAX_MESSAGES_PER_PARSE or self.pending_work is not None or self.error:
                break
        self.is_backlogged = position < size
        return position

    def _check_greeting(self, data: bytes) -> bool:
        """Check the received part of the greeting; return whether the greeting is complete and valid."""
        has_signature = data[:1] == b"\xff" and data[9:10] in (b"", b"\x7f")
        if data and not has_signature:
            self._fail("expected a greeting of ZMTP")
        elif data[_SIGNATURE_BYTES : _SIGNATURE_BYTES + 1] and data[_SIGNATURE_BYTES] < 3:
            self._fail(f"expected ZMTP 3.0 or later, got version {data[_SIGNATURE_BYTES]}")
        elif len(data) >= _GREETING_BYTES:
            name = data[_MECHANISM_FIELD].rstrip(b"\0")
            if name == self.mechanism.name:
                self._has_greeting = True
                return True
            self._fail(
                f"expected the mechanism {self.mechanism.name.decode()}, got {name.decode('ascii', 'replace')!r}"
            )
        return False

    def _check_frame_header(self, flags: int, length: int) -> bool:
        """Check the flags and the length of the next frame; return whether the frame is allowed."""
        mechanism, limits = self.mechanism, self._limits
        if flags & ~(MORE | LONG | COMMAND):
            self._fail(f"expected a frame of ZMTP 3, got one with the flags {flags:#x}")
        elif not mechanism.is_complete or (flags & COMMAND and not mechanism.overhead_bytes):
            if length > MAX_COMMAND_BYTES:
                self._fail(f"expected a command of at most {MAX_COMMAND_BYTES} bytes, got {length}")
        elif length > limits.max_frame_bytes + mechanism.overhead_bytes:
            self._fail(f"frames: expected at most {limits.max_frame_bytes} bytes in a frame, got {length}")
        elif self._message_bytes + length > limits.max_message_bytes + mechanism.overhead_bytes:
            text = f"frames: expected a message of at most {limits.max_message_bytes} bytes (max_memory_bytes)"
            self._fail(f"{text}, got {self._message_bytes + length} or more")
        elif len(self._message_frames) == MAX_FRAMES:
            self._fail(f"frames: expected a message of at most {MAX_FRAMES} frames, got more")
        return not self.error

    def _on_frame(self, flags: int, content: Any, messages: list[MessageFrames]) -> None:
        """Handle a complete frame."""
        mechanism = self.mechanism
        if not mechanism.is_complete:
            self._on_handshake_frame(flags, content)
        elif not mechanism.overhead_bytes:
            self._add_frame(flags, content, messages)
        elif len(content) >= CRYPTO_THREAD_BYTES:
            self.pending_work = lambda: _try_open(mechanism, content)
        else:
            opened = _try_open(mechanism, content)
            if isinstance(opened, str):
                self._fail(opened)
            else:
                self._add_frame(*opened, messages)

    def _begin_large_frame(self, flags: int, length: int, begin: memoryview) -> None:
        """Allocate a buffer for a large frame, and copy the received part of its content into the buffer."""
        self._large_frame_flags = flags
        self._large_frame = allocate(length)
        self.missing_bytes = length - len(begin)
        memoryview(self._large_frame)[: len(begin)] = begin

    def _fill_large_frame(self, count: int, messages: list[MessageFrames]) -> None:
        """Count `count` received bytes of the large frame, and handle the frame once it is complete."""
        self.missing_bytes -= count
        if self.missing_bytes:
            return
        content, self._large_frame = self._large_frame, None
        is_small = len(content) < LARGE_BYTES
        self._on_frame(self._large_frame_flags, bytes(content) if is_small else content, messages)

    def _on_handshake_frame(self, flags: int, content: bytes) -> None:
        if not flags & COMMAND:
            self._fail("expected a command before the end of the handshake, got a message")
            return
        try:
            reply = self.mechanism.handle_handshake_command(content)
        except MechanismError as error:
            if error.status:
                self.replies.append(encode_command(b"\5ERROR" + bytes([len(error.status)]) + error.status.encode()))
            self._fail(str(error))
        else:
            self.replies.append(encode_command(reply))

    def _add_frame(self, flags: int, content: Any, messages: list[MessageFrames]) -> None:
        """Add a frame to the incomplete message, or handle it if it is a command."""
        if flags & COMMAND:
            if content[:5] == _PING:
                context = bytes(content[5 + _TTL_BYTES :][:_CONTEXT_BYTES])
                self.pending_pong = _PONG + context
            # Ignore all other commands, which have no meaning for a ROUTER socket.
            return
        self._message_frames.append(content)
        if flags & MORE:
            self._message_bytes += len(content)
        else:
            messages.append(self._message_frames)
            self._message_frames, self._message_bytes = [], 0

    def _fail(self, text: str) -> None:
        self.error = text
        self._message_frames, self._message_bytes, self._large_frame, self.missing_bytes = [], 0, None, 0


def _try_open(mechanism: Mechanism, content: Any) -> tuple[int, Any] | str:
    try:
        return mechanism.open(content)
    except MechanismError as error:
        return str(error)


# --- encoding ---------------------------------------------------------------------------------------------------------


def encode_message(mechanism: Mechanism, frames: Sequence[Any]) -> list[Any]:
    """Return an encoded message as chunks of bytes. The frames are not copied, except to encrypt them."""
    chunks: list[Any] = []
    last = len(frames) - 1
    if mechanism.overhead_bytes:
        frames = [mechanism.seal(MORE if index < last else 0, frame) for index, frame in enumerate(frames)]
        last = 0
    for index, frame in enumerate(frames):
        chunks += (_frame_header(MORE if index < last else 0, len(frame)), frame)
    return chunks


def encode_pong(mechanism: Mechanism, content: bytes) -> bytes:
    """Return an encoded PONG."""
    if mechanism.overhead_bytes:
        sealed = bytes(mechanism.seal(COMMAND, content))
        return _frame_header(0, len(sealed)) + sealed
    return encode_command(content)


def encode_command(content: bytes) -> bytes:
    """Return an encoded command."""
    return _frame_header(COMMAND, len(content)) + content


def _frame_header(flags: int, length: int) -> bytes:
    return bytes((flags, length)) if length < 256 else struct.pack(">BQ", flags | LONG, length)


def _encode_greeting(mechanism: Mechanism) -> bytes:
    signature = b"\xff" + bytes(8) + b"\x7f"
    return signature + b"\3\1" + mechanism.name.ljust(20, b"\0") + bytes([mechanism.as_server]) + bytes(31)


# --- metadata ---------------------------------------------------------------------------------------------------------


def _encode_property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


SOCKET_METADATA = _encode_property(b"Socket-Type", b"ROUTER") + _encode_property(b"Identity", b"")
"""The encoded metadata that the proxy sends in the handshake. They announce a ROUTER socket."""


def check_metadata(data: bytes) -> None:
    """Check the metadata from a peer's handshake.

    Raises:
        MechanismError: the metadata are malformed, or the type of the peer's socket is not supported.
    """
    properties: dict[bytes, bytes] = {}
    position = 0
    while position < len(data):
        end = position + 1 + data[position]
        value = end + 4
        after = value + int.from_bytes(data[end:value], "big")
        if value > len(data) or after > len(data):
            raise MechanismError("expected metadata of ZMTP 3")
        properties[data[position + 1 : end].lower()] = data[value:after]
        position = after
    socket_type = properties.get(b"socket-type", b"")
    if socket_type not in _SOCKET_TYPES:
        got = socket_type[:16].decode("ascii", "replace")
        text = f"expected a socket of type DEALER, got {got!r}"
        raise MechanismError(text, text)
