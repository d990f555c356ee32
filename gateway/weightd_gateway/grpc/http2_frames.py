"""Limits on the HTTP/2 frames of one connection, applied before gRPC's library reads the frames. Pure: no I/O.

Only the 9-byte head of each frame is read: the frame's length, type, flags and stream (RFC 9113, section 4.1).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
_NAMES = (
    "DATA",
    "HEADERS",
    "PRIORITY",
    "RST_STREAM",
    "SETTINGS",
    "PUSH_PROMISE",
    "PING",
    "GOAWAY",
    "WINDOW_UPDATE",
    "CONTINUATION",
)
_END_HEADERS = 0x4
_END_STREAM = 0x1
_HEAD = struct.Struct(">3sBBI")

# Maximum number of frame heads that `FrameHeads.feed` parses before it returns.
MAX_HEADS_AT_ONCE = 64
_ENHANCE_YOUR_CALM = 0xB

MAX_HEADER_BYTES = 64 * 1024
"""Maximum bytes of the compressed headers of one call. gRPC's library limits their uncompressed size."""

MAX_CONTINUATIONS = 16
"""Maximum number of CONTINUATION frames with headers of one call."""

MAX_CONTROL_BYTES = 16 * 1024
"""Maximum bytes of a frame that is neither DATA nor part of headers. HTTP/2 requires every peer to accept this size."""

BURST_TOKENS = 256.0
"""Maximum number of control frames that a connection may send at once."""

TOKENS_PER_S = 64.0
"""Maximum number of control frames per second that a connection may send on average."""

TOKENS_PER_CALL = 8.0
"""Number of additional control frames that a connection may send for each call."""

TOKENS_PER_BYTE = 1 / 2048
"""Number of additional control frames that a connection may send for each byte of messages in either direction, because
receivers acknowledge messages with control frames."""

MIN_DATA_BYTES = 256
"""A DATA frame with fewer bytes counts as a control frame."""


SHORT_BYTES = 64 * 1024
"""Maximum bytes of messages that each call in progress may send before it gets a response. The limit does not apply
while a call of the connection expects a long message."""

MAX_UNANSWERED_BYTES = 512 * 1024
"""Maximum bytes of messages that a connection may send without responses, in addition to `SHORT_BYTES` for each call. A
client may send them while the gateway still authenticates its calls."""


class LimitExceeded(Exception):
    """A connection has exceeded a limit; the text names the limit and the received value."""


class FrameHeads:
    """Finds the heads of frames in a byte stream that arrives in arbitrary parts.

    Attributes:
        is_at_boundary: whether the next byte begins a frame.
    """

    def __init__(self) -> None:
        self._head = b""
        self._payload_left = 0

    @property
    def is_at_boundary(self) -> bool:
        """Whether the next byte begins a frame."""
        return not self._head and not self._payload_left

    def feed(self, data: bytes, position: int = 0) -> Iterable[tuple[int, int, int, int]]:
        """Return type, flags, length and stream of each frame whose head ends in `data[position:]`.

        Further frames after the first `MAX_HEADS_AT_ONCE` are parsed lazily, so that the caller can stop early.
        """
        end = len(data)
        if not self._head:
            # Fast path: the data usually consists of whole frames, so the loop need not join parts of a head.
            found: list[tuple[int, int, int, int]] = []
            position += self._payload_left
            while position + HEAD_BYTES <= end and len(found) < MAX_HEADS_AT_ONCE:
                size, kind, flags, stream = _HEAD.unpack_from(data, position)
                length = size[0] << 16 | size[1] << 8 | size[2]
                found.append((kind, flags, length, stream))
                position += HEAD_BYTES + length
            self._payload_left = max(0, position - end)
            if position >= end:
                return found
            return itertools.chain(found, self._feed_stepwise(data, position))
        return self._feed_stepwise(data, position)

    def _feed_stepwise(self, data: bytes, position: int) -> Iterator[tuple[int, int, int, int]]:
        end = len(data)
        while position < end:
            if self._payload_left:
                skipped = min(self._payload_left, end - position)
                self._payload_left -= skipped
                position += skipped
                continue
            head = self._head + data[position : position + HEAD_BYTES - len(self._head)]
            position += len(head) - len(self._head)
            if len(head) < HEAD_BYTES:
                self._head = head
                return
            self._head = b""
            self._payload_left = head[0] << 16 | head[1] << 8 | head[2]
            yield head[3], head[4], self._payload_left, int.from_bytes(head[5:], "big")


class FrameCounter:
    """Counts the frames that one client sends and enforces the limits.

    Args:
        now: the current time in seconds; the parameter has this meaning in all methods.
    """

    def __init__(self, now: float) -> None:
        # By stream number, the bytes of messages that a call in progress has sent since its last response.
        self._calls: dict[int, int] = {}
        self._unanswered_bytes = 0
        self._heads = FrameHeads()
        self._preface_left = len(PREFACE)
        self._tokens = BURST_TOKENS
        self._updated_at = now
        self._header_bytes = 0
        self._continuations = 0
        self._in_headers = False

    @property
    def has_preface(self) -> bool:
        """Whether the client has sent the complete HTTP/2 preface."""
        return not self._preface_left

    @property
    def is_full(self) -> bool:
        """Whether the calls in progress have sent more bytes than short messages need, without getting a response."""
        return self._unanswered_bytes > MAX_UNANSWERED_BYTES + SHORT_BYTES * len(self._calls)

    def forget(self) -> None:
        """Set the number of bytes that calls have sent without a response to 0."""
        if self._unanswered_bytes:
            self._calls = dict.fromkeys(self._calls, 0)
            self._unanswered_bytes = 0

    def answered(self, kind: int, flags: int, stream: int) -> None:
        """Update the number of bytes that calls have sent without a response, after a frame was sent to the client."""
        if kind == RST_STREAM or (kind == HEADERS and flags & _END_STREAM):
            self._ended(stream)
        elif kind == DATA and self._calls.get(stream):
            self._unanswered_bytes -= self._calls[stream]
            self._calls[stream] = 0

    def _ended(self, stream: int) -> None:
        self._unanswered_bytes -= self._calls.pop(stream, 0)

    def count_sent(self, nbytes: int) -> None:
        """Allow further control frames for `nbytes` bytes that were sent to the client."""
        self._tokens += nbytes * TOKENS_PER_BYTE

    def feed(self, data: bytes, now: float) -> int:
        """Count the frames in received data and return the number of calls that begin in it.

        Raises:
            LimitExceeded: the connection must be closed without using any of `data`.
        """
        self._tokens = min(BURST_TOKENS, self._tokens + (now - self._updated_at) * TOKENS_PER_S)
        self._updated_at = now
        position = 0
        if self._preface_left:
            position = min(self._preface_left, len(data))
            begin = len(PREFACE) - self._preface_left
            if data[:position] != PREFACE[begin : begin + position]:
                raise LimitExceeded("expected the HTTP/2 connection preface")
            self._preface_left -= position
        calls = 0
        for kind, flags, length, stream in self._heads.feed(data, position):
            self._count(kind, flags, length)
            if kind == HEADERS:
                calls += 1
                self._calls.setdefault(stream, 0)
            elif kind == DATA and stream in self._calls:
                self._calls[stream] += length
                self._unanswered_bytes += length
            elif kind == RST_STREAM:
                self._ended(stream)
        return calls

    def _count(self, kind: int, flags: int, length: int) -> None:
        if self._in_headers and kind != CONTINUATION:
            raise LimitExceeded(f"expected CONTINUATION after headers without END_HEADERS, got {_frame_name(kind)}")
        if kind == DATA:
            self._tokens = min(BURST_TOKENS, self._tokens + length * TOKENS_PER_BYTE)
            if length < MIN_DATA_BYTES:
                self._spend(kind)
        elif kind == HEADERS:
            self._tokens = min(BURST_TOKENS, self._tokens + TOKENS_PER_CALL)
            self._header_bytes, self._continuations = 0, 0
            self._add_headers(flags, length)
        elif kind == CONTINUATION:
            self._continuations += 1
            if self._continuations > MAX_CONTINUATIONS:
                raise LimitExceeded(f"expected at most {MAX_CONTINUATIONS} CONTINUATION frames per call, got more")
            self._add_headers(flags, length)
        else:
            if length > MAX_CONTROL_BYTES:
                raise LimitExceeded(f"expected at most {MAX_CONTROL_BYTES} bytes of {_frame_name(kind)}, got {length}")
            self._spend(kind)

    def _add_headers(self, flags: int, length: int) -> None:
        self._header_bytes += length
        if self._header_bytes > MAX_HEADER_BYTES:
            text = f"expected at most {MAX_HEADER_BYTES} bytes of headers of a call, got {self._header_bytes}"
            raise LimitExceeded(text)
        self._in_headers = not flags & _END_HEADERS

    def _spend(self, kind: int) -> None:
        self._tokens -= 1.0
        if self._tokens < 0.0:
            raise LimitExceeded(
                f"expected at most {BURST_TOKENS:g} control frames at once, {TOKENS_PER_S:g} a second,"
                f" {TOKENS_PER_CALL:g} for each call and one for {1 / TOKENS_PER_BYTE:g} bytes of messages, got more,"
                f" the last one {_frame_name(kind)}"
            )


def goaway_frame(reason: str) -> bytes:
    """Return a GOAWAY frame that tells the client why its connection is closed."""
    text = reason.encode()[:1024]
    payload = bytes(4) + _ENHANCE_YOUR_CALM.to_bytes(4, "big") + text
    return len(payload).to_bytes(3, "big") + bytes([GOAWAY, 0]) + bytes(4) + payload


def _frame_name(kind: int) -> str:
    return _NAMES[kind] if kind < len(_NAMES) else f"type {kind}"
