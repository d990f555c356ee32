"""Framing of messages in a byte stream: frame count, frame lengths, frames. No I/O.

A message is a list of frames. In a stream it is written as ::

    count     unsigned 32-bit integer, little-endian: 1 to MAX_FRAMES
    lengths   `count` integers of the same type
    frames    one after another, without padding

All limits are checked before any byte of a frame is stored. An invalid count or an oversized frame ends the stream,
because the start of the next message is then unknown. A message with an oversized header is read to its end, dropped
and reported.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections import deque
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Sequence, Tuple, Type, cast

from weightd_protocol import limits
from weightd_protocol.errors import RemoteProtocolError

MAX_FRAMES = limits.MAX_HEADER_FRAMES + limits.MAX_TENSORS

# A frame of at least this length is read directly into its final buffer instead of being copied there.
LARGE_BYTES = 64 * 1024

# Memory for longer frames comes from the kernel, which allocates pages only when they are written: announcing a long
# frame costs nothing. For shorter frames the allocator's memory is reused faster.
_MMAP_THRESHOLD_BYTES = 4 * 1024 * 1024

# The kernel accepts 1,024 chunks in one call.
_MAX_CHUNKS = 256

_COUNT = struct.Struct("<I")
_LENGTHS: Dict[int, struct.Struct] = {count: struct.Struct(f"<{count}I") for count in range(1, MAX_FRAMES + 1)}

# Functions that pack the prefix of a message (frame count and lengths), by the frame count.
PREFIX_PACKERS: Dict[int, Callable[..., bytes]] = {
    count: struct.Struct(f"<{1 + count}I").pack for count in range(1, MAX_FRAMES + 1)
}

# For small messages: the function that splits all frames at once, and their lengths, by the prefix of the message. The
# oldest entries are dropped first.
_KNOWN_LAYOUTS: Dict[bytes, Tuple[Callable[[bytes], Tuple[bytes, ...]], Tuple[int, ...]]] = {}
_MAX_KNOWN_LAYOUTS = 1024

# Destination for bytes that are dropped.
_DISCARD_BUFFER = memoryview(bytearray(256 * 1024))


class Message(NamedTuple):
    """A received message.

    Attributes:
        frames: all frames; of a message that was too long, the frames before the first dropped one.
        lengths: the announced lengths of all frames.
    """

    frames: Sequence[Any]
    lengths: Tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        """Whether no frame was dropped."""
        return len(self.frames) == len(self.lengths)


# The constructor of the named tuple without the overhead of a Python function.
_new_message: Callable[[Type[Message], Tuple[Sequence[Any], Tuple[int, ...]]], Message] = cast(Any, tuple).__new__


def message_prefix(frames: Sequence[Any]) -> bytes:
    """Return the prefix of a message: its frame count and frame lengths."""
    return PREFIX_PACKERS[len(frames)](len(frames), *map(len, frames))


def _admit_all(nbytes: int) -> bool:
    return True


class FrameReader:
    """Parses the messages in a byte stream.

    A header frame is always returned as `bytes`, any other frame as an object with the buffer interface.

    Args:
        max_header_bytes: the limit for a header frame. Of a message with a longer one, that frame and all later frames
            are dropped.
        max_frame_bytes: the limit for any frame. A longer one is a protocol violation.
        admit: called with the size of a message that has not arrived completely or is larger than a header may be. If
            it returns False, only the header frames are kept.
        max_messages: the maximum number of messages returned at once. The bytes of further messages are kept.

    Attributes:
        is_backlogged: whether kept bytes may contain complete messages. Call `receive` again to get them, even without
            new data.
        admitted_bytes: the admitted size of the message in progress; 0 if there is no such message or it is being
            dropped.
        missing_bytes: bytes still missing from the frame in progress; 0 if there is no such frame.
    """

    def __init__(
        self,
        max_header_bytes: int = limits.MAX_HEADER_BYTES,
        max_frame_bytes: int = limits.MAX_FRAME_BYTES,
        admit: Callable[[int], bool] = _admit_all,
        max_messages: int = sys.maxsize,
    ) -> None:
        self.is_backlogged = False
        self.admitted_bytes = self.missing_bytes = 0
        self._max_header_bytes = max_header_bytes
        self._max_frame_bytes = max_frame_bytes
        # In a message of at most this size no frame can exceed a limit.
        self._fast_path_bytes = min(max_header_bytes, max_frame_bytes)
        self._admit = admit
        self._max_messages = max_messages
        # The beginning of a message whose lengths have not arrived completely; with a backlog, the bytes of further
        # messages.
        self._unparsed = b""
        # State of the message in progress: its lengths, () if there is no such message; the frames so far; the number
        # of frames to keep; and the buffer of the frame in progress, None if that frame is dropped.
        self._lengths: Tuple[int, ...] = ()
        self._frames: List[Any] = []
        self._kept_frames = 0
        self._buffer: Any = None
        # The index of the frame in progress, including dropped frames.
        self._frame_index = 0

    @property
    def is_idle(self) -> bool:
        """Whether no message is in progress."""
        return not (self._lengths or self._unparsed)

    def read_buffer(self) -> memoryview:
        """Return the buffer for the next bytes. Use it if `missing_bytes` is at least LARGE_BYTES.

        After reading into it, call `on_filled`. In all other cases pass the bytes to `receive`.
        """
        if self._buffer is None:
            return _DISCARD_BUFFER[: self.missing_bytes]
        return memoryview(self._buffer)[-self.missing_bytes :]

    def on_filled(self, count: int) -> List[Message]:
        """Record that `count` bytes were read into `read_buffer`. Return the message if it is now complete."""
        messages: List[Message] = []
        self.missing_bytes -= count
        if not self.missing_bytes:
            self._fill_frames(b"", 0, messages)
        return messages

    def receive(self, data: bytes) -> List[Message]:
        """Parse the next bytes of the stream and return the messages that they complete.

        Raises:
            RemoteProtocolError: the framing is invalid, so the rest of the stream cannot be parsed.
        """
        if self._lengths:
            messages: List[Message] = []
            return self._parse(data, self._fill_frames(data, 0, messages), messages)
        if self._unparsed:
            data = self._unparsed + data
        elif len(data) <= self._fast_path_bytes:
            # Usually the data is exactly one message with the same prefix as an earlier one.
            try:
                unpack, lengths = _KNOWN_LAYOUTS[data[: 4 * (1 + data[0])]]
                return [_new_message(Message, ([*unpack(data)], lengths))]
            except (LookupError, struct.error):
                pass
        return self._parse(data, 0, [])

    def _parse(self, data: bytes, position: int, messages: List[Message]) -> List[Message]:
        size = len(data)
        while size - position >= _COUNT.size and not self._lengths and len(messages) < self._max_messages:
            (count,) = _COUNT.unpack_from(data, position)
            layout = _LENGTHS.get(count)
            if layout is None:
                raise RemoteProtocolError(f"frames: expected a message of 1 to {MAX_FRAMES} frames, got {count}")
            begin = position + _COUNT.size + layout.size
            if begin > size:
                break
            lengths: Tuple[int, ...] = layout.unpack_from(data, position + _COUNT.size)
            nbytes = sum(lengths)
            position = begin + nbytes
            if position <= size and nbytes <= self._fast_path_bytes:
                frames: List[Any] = []
                for length in lengths:
                    frames.append(data[begin : begin + length])
                    begin += length
                messages.append(Message(frames, lengths))
                if position == size and len(messages) == 1:
                    _remember_layout(data[: size - nbytes], lengths)
            else:
                self._begin_message(lengths, nbytes)
                position = self._fill_frames(data, begin, messages)
        self._unparsed = data[position:] if position < size else b""
        self.is_backlogged = position < size and len(messages) >= self._max_messages
        return messages

    def _begin_message(self, lengths: Tuple[int, ...], nbytes: int) -> None:
        longest = max(lengths)
        if longest > self._max_frame_bytes:
            raise RemoteProtocolError(
                f"frames: expected at most {self._max_frame_bytes} bytes in a frame, got {longest}"
            )
        headers = lengths[: limits.MAX_HEADER_FRAMES]
        self._kept_frames = next(
            (index for index, length in enumerate(headers) if length > self._max_header_bytes), len(lengths)
        )
        if self._kept_frames == len(lengths):
            if self._admit(nbytes):
                self.admitted_bytes = nbytes
            else:
                self._kept_frames = len(headers)
        self._lengths, self._frames, self._frame_index = lengths, [], -1
        self._buffer, self.missing_bytes = None, 0

    def _fill_frames(self, data: bytes, position: int, messages: List[Message]) -> int:
        """Store bytes in the frames of the message in progress, up to its end. Return the next position."""
        view = memoryview(data)
        while True:
            if not self.missing_bytes and self._next_frame():
                messages.append(Message(self._frames, self._lengths))
                self._lengths, self._frames, self.admitted_bytes = (), [], 0
                return position
            taken = min(self.missing_bytes, len(data) - position)
            if not taken and self.missing_bytes:
                return position
            if self._buffer is not None:
                begin = len(self._buffer) - self.missing_bytes
                self._buffer[begin : begin + taken] = view[position : position + taken]
            self.missing_bytes -= taken
            position += taken

    def _next_frame(self) -> bool:
        """Finish the current frame and start the next one. Return True if it was the last."""
        if self._buffer is not None:
            small = len(self._buffer) < LARGE_BYTES or self._frame_index < limits.MAX_HEADER_FRAMES
            self._frames.append(bytes(self._buffer) if small else self._buffer)
            self._buffer = None
        self._frame_index += 1
        if self._frame_index == len(self._lengths):
            return True
        self.missing_bytes = self._lengths[self._frame_index]
        if self._frame_index < self._kept_frames:
            self._buffer = allocate(self.missing_bytes)
        return False


def _remember_layout(prefix: bytes, lengths: Tuple[int, ...]) -> None:
    if len(_KNOWN_LAYOUTS) >= _MAX_KNOWN_LAYOUTS:
        _KNOWN_LAYOUTS.pop(next(iter(_KNOWN_LAYOUTS)), None)  # another thread may have removed it first
    layout = struct.Struct(f"{len(prefix)}x{''.join([f'{length}s' for length in lengths])}")
    _KNOWN_LAYOUTS[prefix] = layout.unpack, lengths


def allocate(nbytes: int) -> Any:
    """Return a buffer of zeros. The pages of a large one are allocated only when they are written."""
    return bytearray(nbytes) if nbytes < _MMAP_THRESHOLD_BYTES else mmap.mmap(-1, nbytes)


class FrameWriter:
    """Outgoing bytes of a stream.

    Attributes:
        nbytes: the number of bytes that have not been written.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        # Each chunk with the descriptors to send with its first byte.
        self._chunks: Deque[Tuple[Any, Sequence[int]]] = deque()

    def put(self, chunks: Sequence[Any], descriptors: Sequence[int] = ()) -> None:
        """Add chunks. They are not copied and must not change before they are written."""
        for chunk in chunks:
            if len(chunk):
                self._chunks.append((chunk, descriptors))
                self.nbytes += len(chunk)
                descriptors = ()

    def next_chunks(self) -> Tuple[List[Any], Sequence[int]]:
        """Return the chunks that can be written by one call, and the descriptors to send with them."""
        chunks: List[Any] = []
        for chunk, descriptors in self._chunks:
            if chunks and (descriptors or len(chunks) == _MAX_CHUNKS):
                break
            chunks.append(chunk)
        return chunks, self._chunks[0][1] if chunks else ()

    def on_written(self, count: int) -> None:
        """Remove `count` written bytes. The descriptors of the first chunk were sent with them."""
        self.nbytes -= count
        while count:
            first, _ = self._chunks.popleft()
            if count < len(first):
                self._chunks.appendleft((memoryview(first)[count:], ()))
            count -= min(count, len(first))

    def clear(self) -> List[int]:
        """Drop all chunks, and return the descriptors that were never sent."""
        descriptors = [each for _, several in self._chunks for each in several]
        self.nbytes = 0
        self._chunks.clear()
        return descriptors
