"""ZeroMQ messages of several frames, sent and received frame by frame.

pyzmq's `send_multipart` looks at each frame twice, and `recv_multipart` asks the socket after each whether there is
another, which a received frame knows by itself. For small messages both take about twice as long as what is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, List, Sequence, Tuple

import zmq

from weightd.protocol import limits

if TYPE_CHECKING:
    Socket = zmq.Socket[bytes]

# Below this, copying a frame costs less than tracking it.
ZERO_COPY_BYTES = 64 * 1024

# A peer's id, the header, the tensors, and one more: enough to see that there are too many.
_MAX_FRAMES = limits.MAX_TENSORS + 3

# Plain integers: `|` of pyzmq's own flags takes a microsecond.
NOBLOCK = int(zmq.NOBLOCK)
_SNDMORE = int(zmq.SNDMORE)


def send(socket: Socket, frames: Sequence[Any], flags: int = 0) -> None:
    """Send a message: all of it or, where it raises `zmq.ZMQError`, nothing.

    Large frames are not copied: they are kept alive until they are written, and must not be changed before. Received
    frames are never copied.
    """
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        socket.send(frame, flags if index == last else flags | _SNDMORE, len(frame) < ZERO_COPY_BYTES)


def send_tracked(socket: Socket, frames: Sequence[Any], flags: int = 0) -> List[Tuple[zmq.MessageTracker, int]]:
    """Send a message as `send` does; return a tracker for each large frame, with its bytes: done once it is written."""
    tracked: List[Tuple[zmq.MessageTracker, int]] = []
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        more = flags if index == last else flags | _SNDMORE
        if len(frame) < ZERO_COPY_BYTES:
            socket.send(frame, more)
        else:
            # A received frame has no tracker: its bytes are sent as those of any other object.
            tracker = socket.send(memoryview(frame), more, copy=False, track=True)
            tracked.append((tracker, len(frame)))
    return tracked


def receive(socket: Socket, flags: int = 0) -> List[zmq.Frame]:
    """Return the frames of the next message, as they were received. What has too many loses the last ones.

    Raises:
        zmq.ZMQError: there is none.
    """
    frame = socket.recv(flags, copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(copy=False)
        # One frame over the bound is enough to refuse the message; a million are not kept for that.
        if len(frames) < _MAX_FRAMES:
            frames.append(frame)
    return frames


def content(frame: zmq.Frame) -> Any:
    """Return what is in `frame`: a small one as bytes, which are the cheapest to have; a large one uncopied."""
    return frame.bytes if len(frame) < ZERO_COPY_BYTES else frame
