"""Messages in a stream of bytes: how many frames, the length of each, then the frames. Without I/O.

A message is a list of frames, as everywhere on the wire. In a stream it is written as ::

    count     unsigned 32-bit integer, little-endian: 1 to MAX_FRAMES
    lengths   `count` of them
    frames    one after another, nothing between them

So every bound is checked before a byte of a frame is kept. What breaks the framing itself ends the stream, for nobody
can tell where the next message begins; what is only too long is read to its end, dropped, and told.
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

# A frame that is at least so long is read to where it stays, instead of being copied there.
LARGE_BYTES = 64 * 1024

# Memory of a longer frame is the kernel's, which has none to give before bytes are written: an announcement costs
# nothing. Below, that of the allocator is quicker to have again.
_MMAP_THRESHOLD_BYTES = 4 * 1024 * 1024

# The kernel takes 1,024 pieces at once.
_MAX_CHUNKS = 256

_COUNT = struct.Struct("<I")
_LENGTHS: Dict[int, struct.Struct] = {count: struct.Struct(f"<{count}I") for count in range(1, MAX_FRAMES + 1)}

# What writes the head of a message from the number of its frames and their lengths, by that number.
PREFIX_PACKERS: Dict[int, Callable[..., bytes]] = {
    count: struct.Struct(f"<{1 + count}I").pack for count in range(1, MAX_FRAMES + 1)
}

# How small messages are taken apart at once, and the lengths of their frames, by the count and lengths that they begin
# with; those that came first go first.
_KNOWN_LAYOUTS: Dict[bytes, Tuple[Callable[[bytes], Tuple[bytes, ...]], Tuple[int, ...]]] = {}
_MAX_KNOWN_LAYOUTS = 1024

# Where bytes go that nobody wants.
_DISCARD_BUFFER = memoryview(bytearray(256 * 1024))


class Message(NamedTuple):
    """A message that has come.

    Attributes:
        frames: all of them, unless the message was too long: then the first ones, as far as they were not.
        lengths: of all frames, as they were announced.
    """

    frames: Sequence[Any]
    lengths: Tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        """Whether nothing of it was dropped."""
        return len(self.frames) == len(self.lengths)


# What a named tuple's own constructor does, without a call of Python.
_new_message: Callable[[Type[Message], Tuple[Sequence[Any], Tuple[int, ...]]], Message] = cast(Any, tuple).__new__


def message_prefix(frames: Sequence[Any]) -> bytes:
    """Return what goes before the frames of a message."""
    return PREFIX_PACKERS[len(frames)](len(frames), *map(len, frames))


def _admit_all(nbytes: int) -> bool:
    return True


class FrameReader:
    """Finds the messages in a stream.

    A header frame is always given as `bytes`, another one as anything that has its bytes.

    Args:
        max_header_bytes: of a header frame; a message with a longer one is dropped from there on.
        max_frame_bytes: whoever announces more has broken the framing.
        admit: called with the bytes of a message that has begun and does not come at once; where it returns False,
            nothing but the header is kept.
        max_messages: messages that are given at once. Others that have come wait as the bytes that they are.

    Attributes:
        is_backlogged: whether some do, perhaps: `receive` gives them, of no more bytes too.
        admitted_bytes: bytes of the message under way that were admitted; 0 where none is, or it is dropped.
        missing_bytes: bytes of the frame under way that are still to come; 0 where none is.
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
        # No frame of a message that has no more in all breaks a bound.
        self._fast_path_bytes = min(max_header_bytes, max_frame_bytes)
        self._admit = admit
        self._max_messages = max_messages
        # The beginning of a message whose lengths have not all come, or more where it is behind.
        self._unparsed = b""
        # Of the message under way: its lengths, () where there is none; its frames so far; how many are to be kept; and
        # the frame under way, None where it is dropped.
        self._lengths: Tuple[int, ...] = ()
        self._frames: List[Any] = []
        self._kept_frames = 0
        self._buffer: Any = None
        # The one that is under way, counting those that are dropped.
        self._frame_index = 0

    @property
    def is_idle(self) -> bool:
        """Whether no message has begun that has not ended."""
        return not (self._lengths or self._unparsed)

    def read_buffer(self) -> memoryview:
        """Return where the next bytes are best read to, if LARGE_BYTES of a frame or more are `missing_bytes`.

        What was read there is told to `on_filled`. Else `receive` takes them.
        """
        if self._buffer is None:
            return _DISCARD_BUFFER[: self.missing_bytes]
        return memoryview(self._buffer)[-self.missing_bytes :]

    def on_filled(self, count: int) -> List[Message]:
        """So many bytes were read to `read_buffer`: return the message that they complete, if they do."""
        messages: List[Message] = []
        self.missing_bytes -= count
        if not self.missing_bytes:
            self._fill_frames(b"", 0, messages)
        return messages

    def receive(self, data: bytes) -> List[Message]:
        """Take in the bytes that come next; return the messages that they complete.

        Raises:
            RemoteProtocolError: the framing is broken, and so nothing can be read any more.
        """
        if self._lengths:
            messages: List[Message] = []
            return self._parse(data, self._fill_frames(data, 0, messages), messages)
        if self._unparsed:
            data = self._unparsed + data
        elif len(data) <= self._fast_path_bytes:
            # Most often a message comes alone and whole, and another one was like it.
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
        """Put bytes where they belong, up to the end of the message; return the position after them."""
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
        """A frame is complete: begin with the next one, or return True where that was the last."""
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
        _KNOWN_LAYOUTS.pop(next(iter(_KNOWN_LAYOUTS)), None)  # another thread may have been quicker
    layout = struct.Struct(f"{len(prefix)}x{''.join([f'{length}s' for length in lengths])}")
    _KNOWN_LAYOUTS[prefix] = layout.unpack, lengths


def allocate(nbytes: int) -> Any:
    """Return a buffer of zeros; the pages of a large one take no memory before they are written to."""
    return bytearray(nbytes) if nbytes < _MMAP_THRESHOLD_BYTES else mmap.mmap(-1, nbytes)


class FrameWriter:
    """What is to be written to a stream.

    Attributes:
        nbytes: that have not been written.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        # With the descriptors that go with the first byte.
        self._chunks: Deque[Tuple[Any, Sequence[int]]] = deque()

    def put(self, chunks: Sequence[Any], descriptors: Sequence[int] = ()) -> None:
        """Add bytes; they are not copied, and must not change before they are written."""
        for chunk in chunks:
            if len(chunk):
                self._chunks.append((chunk, descriptors))
                self.nbytes += len(chunk)
                descriptors = ()

    def next_chunks(self) -> Tuple[List[Any], Sequence[int]]:
        """Return what can be written at once, and the descriptors that go with it."""
        chunks: List[Any] = []
        for chunk, descriptors in self._chunks:
            if chunks and (descriptors or len(chunks) == _MAX_CHUNKS):
                break
            chunks.append(chunk)
        return chunks, self._chunks[0][1] if chunks else ()

    def on_written(self, count: int) -> None:
        """So many bytes have been written, and the descriptors of the first of them are sent."""
        self.nbytes -= count
        while count:
            first, _ = self._chunks.popleft()
            if count < len(first):
                self._chunks.appendleft((memoryview(first)[count:], ()))
            count -= min(count, len(first))

    def clear(self) -> List[int]:
        """Drop all; return the descriptors that were never sent."""
        descriptors = [each for _, several in self._chunks for each in several]
        self.nbytes = 0
        self._chunks.clear()
        return descriptors
