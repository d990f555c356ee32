"""Framing of messages in a byte stream. No I/O.

A message is a list of frames. In a byte stream a message is written as ::

    count     unsigned 32-bit integer, little-endian: 1 to MAX_FRAMES
    lengths   `count` integers of the same type
    frames    one after another, without padding

`FrameReader` checks all limits before it stores any byte of a frame. After an invalid count or an oversized frame
nothing more can be read from the stream, because the start of the next message is unknown. A message with an oversized
header is read to its end; the reader drops its frames and returns it as incomplete.
"""

from __future__ import annotations

import functools
import mmap
import struct
import sys
from collections import deque
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Sequence, Tuple, Type, cast

from weightd_protocol import limits
from weightd_protocol.errors import RemoteProtocolError

MAX_FRAMES = limits.MAX_HEADER_FRAMES + limits.MAX_TENSORS

# A frame of at least this many bytes is read from the socket directly into its own buffer, without copying it there.
LARGE_BYTES = 64 * 1024

# Frames of at least this many bytes are stored in memory from mmap. The kernel allocates its pages only when they are
# written, so a peer that only announces a long frame costs no memory. For shorter frames the allocator is faster,
# because it reuses memory.
_MMAP_THRESHOLD_BYTES = 4 * 1024 * 1024

# Maximum number of chunks for one call of sendmsg. The kernel accepts 1,024.
_MAX_CHUNKS = 256

_COUNT = struct.Struct("<I")
_LENGTHS: Dict[int, struct.Struct] = {count: struct.Struct(f"<{count}I") for count in range(1, MAX_FRAMES + 1)}

# Layouts of small messages that were received before, by the prefix of the message. Each entry has a function that
# splits the message into its frames, and the lengths of the frames. The oldest entries are dropped first.
_KNOWN_LAYOUTS: Dict[bytes, Tuple[Callable[[bytes], Tuple[bytes, ...]], Tuple[int, ...]]] = {}
_MAX_KNOWN_LAYOUTS = 1024

# Buffer for bytes that are read only to be dropped.
_DISCARD_BUFFER = memoryview(bytearray(256 * 1024))


class Message(NamedTuple):
    """A message received from a stream.

    Attributes:
        frames: all frames of the message. If some were dropped because they were too long or not admitted, only the
            frames before the first dropped one.
        lengths: the lengths of all frames, also of dropped ones, as the sender announced them.
    """

    frames: Sequence[Any]
    lengths: Tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        """Whether all frames of the message were kept."""
        return len(self.frames) == len(self.lengths)


# Constructor of `Message`, without the cost of the Python function that a named tuple has as its constructor.
_new_message: Callable[[Type[Message], Tuple[Sequence[Any], Tuple[int, ...]]], Message] = cast(Any, tuple).__new__


@functools.lru_cache(maxsize=_MAX_KNOWN_LAYOUTS)
def prefix_of(lengths: Tuple[int, ...]) -> Tuple[bytes, int]:
    """Return the bytes with which a message begins in a stream, and the total size of its frames.

    The prefix consists of the number of frames and of their lengths.
    """
    return struct.pack(f"<{1 + len(lengths)}I", len(lengths), *lengths), sum(lengths)


def message_prefix(frames: Sequence[Any]) -> bytes:
    """Return the bytes with which a message of these frames begins in a stream."""
    return prefix_of(tuple(map(len, frames)))[0]


def _admit_all(nbytes: int) -> bool:
    return True


class FrameReader:
    """Parses the messages in a byte stream.

    Header frames are always returned as `bytes`, tensor frames as objects with the buffer interface.

    Args:
        max_header_bytes: the maximum size of a header frame. If a header frame is longer, the reader drops this frame
            and all later frames of the message.
        max_frame_bytes: the maximum size of any frame. A longer frame is a protocol violation.
        admit: a function that decides whether the tensor frames of a large message are kept. It is called with the size
            of each message that is larger than a header may be, or that has not arrived completely. If it returns
            False, the tensor frames are dropped.
        max_messages: the maximum number of messages that one call returns. The reader keeps the bytes of further
            messages.

    Attributes:
        is_backlogged: whether the reader keeps bytes that may contain complete messages. Call `receive` again to get
            these messages, even if no new data has arrived.
        admitted_bytes: the size of the message that is being received; 0 between messages, or if the frames are being
            dropped.
        missing_bytes: the number of bytes that are missing from the frame that is being received; 0 between frames.
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
        # Fast path: in a message of at most this size, no frame can exceed a limit.
        self._fast_path_bytes = min(max_header_bytes, max_frame_bytes)
        self._admit = admit
        self._max_messages = max_messages
        # Bytes that are not parsed yet: the beginning of a message whose lengths have not arrived completely or, if
        # `is_backlogged`, further messages.
        self._unparsed = b""
        # State of the message that is being received: the lengths of its frames, () between messages; the frames
        # received so far; the number of frames to keep; and the buffer of the current frame, None if that frame is
        # dropped.
        self._lengths: Tuple[int, ...] = ()
        self._frames: List[Any] = []
        self._kept_frames = 0
        self._buffer: Any = None
        # The index of the current frame in its message. Dropped frames count.
        self._frame_index = 0

    @property
    def is_idle(self) -> bool:
        """Whether the stream is between two messages."""
        return not (self._lengths or self._unparsed)

    def read_buffer(self) -> memoryview:
        """Return the buffer into which the caller must read the next bytes of a long frame. Then call `on_filled`.

        Use this method if `missing_bytes` is at least `LARGE_BYTES`. Otherwise read into any buffer and call `receive`.
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
        """Parse the next bytes of the stream. Return the messages that are now complete.

        Raises:
            RemoteProtocolError: the framing is invalid, so the remaining stream cannot be parsed.
        """
        if self._lengths:
            messages: List[Message] = []
            return self._parse(data, self._fill_frames(data, 0, messages), messages)
        if self._unparsed:
            data = self._unparsed + data
        elif len(data) <= self._fast_path_bytes:
            # Fast path: usually the data is exactly one message, with the same prefix as an earlier message.
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
        """Copy bytes from `data` to the frames of the current message.

        Return the position in `data` after the last used byte.
        """
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
        """Finish the current frame and start the next frame. Return True if the message has no further frame."""
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
        # Another thread may have removed the oldest entry meanwhile
        _KNOWN_LAYOUTS.pop(next(iter(_KNOWN_LAYOUTS)), None)
    layout = struct.Struct(f"{len(prefix)}x{''.join([f'{length}s' for length in lengths])}")
    _KNOWN_LAYOUTS[prefix] = layout.unpack, lengths


def allocate(nbytes: int) -> Any:
    """Return a buffer of zeros. The kernel allocates the pages of a large buffer only when they are written."""
    return bytearray(nbytes) if nbytes < _MMAP_THRESHOLD_BYTES else mmap.mmap(-1, nbytes)


class FrameWriter:
    """Queue of the bytes that are to be written to a stream.

    Attributes:
        nbytes: the number of queued bytes that have not been written.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        # The queued chunks. Each comes with the file descriptors that must be sent with its first byte.
        self._chunks: Deque[Tuple[Any, Sequence[int]]] = deque()

    def put(self, chunks: Sequence[Any], descriptors: Sequence[int] = ()) -> None:
        """Queue chunks of bytes. They are not copied, so the caller must not change them before they are written."""
        for chunk in chunks:
            if len(chunk):
                self._chunks.append((chunk, descriptors))
                self.nbytes += len(chunk)
                descriptors = ()

    def next_chunks(self) -> Tuple[List[Any], Sequence[int]]:
        """Return the chunks for the next call of sendmsg, and the file descriptors to send with them."""
        chunks: List[Any] = []
        for chunk, descriptors in self._chunks:
            if chunks and (descriptors or len(chunks) == _MAX_CHUNKS):
                break
            chunks.append(chunk)
        return chunks, self._chunks[0][1] if chunks else ()

    def on_written(self, count: int) -> None:
        """Remove the first `count` bytes from the queue, because they were written.

        The file descriptors that were queued with these bytes have been sent and are removed as well.
        """
        self.nbytes -= count
        while count:
            first, _ = self._chunks.popleft()
            if count < len(first):
                self._chunks.appendleft((memoryview(first)[count:], ()))
            count -= min(count, len(first))

    def clear(self) -> List[int]:
        """Drop all chunks. Return the file descriptors that have not been sent, so that the caller can close them."""
        descriptors = [each for _, several in self._chunks for each in several]
        self.nbytes = 0
        self._chunks.clear()
        return descriptors
