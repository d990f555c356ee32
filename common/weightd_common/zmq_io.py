"""Multipart ZeroMQ messages, sent and received frame by frame, and the events of a socket monitor.

pyzmq's `send_multipart` inspects each frame twice, and `recv_multipart` asks the socket after each frame whether there
is another, although a received frame knows that. For small messages both take about twice as long as these functions.
`zmq.utils.monitor` imports asyncio, which costs memory in each worker and time at each start.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Callable, List, NamedTuple, Sequence

import zmq
import zmq.backend

from weightd_protocol import limits

if TYPE_CHECKING:
    Socket = zmq.Socket[bytes]

# Below this, copying a frame costs less than tracking it.
ZERO_COPY_BYTES = 64 * 1024

# The id of a peer, the header frames, the tensors, and one more to detect that there are too many.
_MAX_FRAMES = limits.MAX_TENSORS + 3

# Plain integers, because `|` on pyzmq's flags takes a microsecond.
NOBLOCK = int(zmq.NOBLOCK)
_SNDMORE = int(zmq.SNDMORE)

# The first of the two frames of a monitor event; the second is the address. See zmq_socket_monitor(3).
_EVENT = struct.Struct("=HI")

# The function that a socket's `send` calls in the end, without two additional calls for each frame.
_send: Callable[..., object] = zmq.backend.Socket.send


def send(socket: Socket, frames: Sequence[Any], flags: int = 0, copy_below_bytes: float = ZERO_COPY_BYTES) -> None:
    """Send a message. If `zmq.ZMQError` is raised, nothing was sent.

    Frames of at least `copy_below_bytes` bytes are not copied: they are kept alive until they are written, and must not
    be modified before. Received frames are never copied.
    """
    more = flags | _SNDMORE
    for frame in frames[:-1]:
        _send(socket, frame, more, len(frame) < copy_below_bytes)
    _send(socket, frames[-1], flags, len(frames[-1]) < copy_below_bytes)


def receive(socket: Socket, flags: int = 0) -> List[zmq.Frame]:
    """Return the frames of the next message. If there are too many, the last ones are dropped.

    Raises:
        zmq.ZMQError: no message is available.
    """
    frames = receive_first_frames(socket, flags)
    while frames[-1].more and skip_frames(socket, _MAX_FRAMES):
        pass
    return frames


def receive_first_frames(socket: Socket, flags: int = 0) -> List[zmq.Frame]:
    """Return the first frames of the next message, at most one more than is allowed, so that the caller can reject it.

    If the last frame has its `more` flag set, call `skip_frames` before reading anything else.

    Raises:
        zmq.ZMQError: no message is available.
    """
    frame = socket.recv(flags, copy=False)
    frames = [frame]
    while frame.more and len(frames) < _MAX_FRAMES:
        frame = socket.recv(copy=False)
        frames.append(frame)
    return frames


def skip_frames(socket: Socket, max_frames: int) -> bool:
    """Read and drop at most `max_frames` further frames of the current message. Return whether there are more."""
    return all(socket.recv(copy=False).more for _ in range(max_frames))


def frame_content(frame: zmq.Frame) -> Any:
    """Return the content of `frame`: as bytes if it is small, which is cheapest, otherwise without a copy."""
    return frame.bytes if len(frame) < ZERO_COPY_BYTES else frame


class SocketEvent(NamedTuple):
    """A socket monitor event: one of the zmq.EVENT_ numbers, and a file descriptor or an error number."""

    number: int
    value: int


def receive_event(monitor: Socket, flags: int = 0) -> SocketEvent:
    """Return the next event of a socket monitor: the start or end of a connection.

    Raises:
        zmq.Again: with zmq.NOBLOCK, no event is available.
    """
    event, _ = monitor.recv_multipart(flags)
    return SocketEvent(*_EVENT.unpack(event))
