"""ZeroMQ messages of several frames, sent and received frame by frame, and the events of a socket monitor.

pyzmq's `send_multipart` looks at each frame twice, and `recv_multipart` asks the socket after each whether there is
another, which a received frame knows by itself. For small messages both take about twice as long as what is here.
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

# A peer's id, the header, the tensors, and one more: enough to see that there are too many.
_MAX_FRAMES = limits.MAX_TENSORS + 3

# Plain integers: `|` of pyzmq's own flags takes a microsecond.
NOBLOCK = int(zmq.NOBLOCK)
_SNDMORE = int(zmq.SNDMORE)

# The first of the two frames of a monitor's event; the second is the address. See zmq_socket_monitor(3).
_EVENT = struct.Struct("=HI")

# What a socket's own `send` does in the end, without two more calls for each frame.
_send: Callable[..., object] = zmq.backend.Socket.send


def send(socket: Socket, frames: Sequence[Any], flags: int = 0, copy_below_bytes: float = ZERO_COPY_BYTES) -> None:
    """Send a message: all of it or, where it raises `zmq.ZMQError`, nothing.

    Frames of `copy_below_bytes` bytes and more are not copied: they are kept alive until they are written, and must not
    be changed before. Received frames are never copied.
    """
    more = flags | _SNDMORE
    for frame in frames[:-1]:
        _send(socket, frame, more, len(frame) < copy_below_bytes)
    _send(socket, frames[-1], flags, len(frames[-1]) < copy_below_bytes)


def receive(socket: Socket, flags: int = 0) -> List[zmq.Frame]:
    """Return the frames of the next message, as they were received. What has too many loses the last ones.

    Raises:
        zmq.ZMQError: there is none.
    """
    frames = receive_first_frames(socket, flags)
    while frames[-1].more and skip_frames(socket, _MAX_FRAMES):
        pass
    return frames


def receive_first_frames(socket: Socket, flags: int = 0) -> List[zmq.Frame]:
    """Return the first frames of the next message, one more than it may have: it is refused for that, not kept.

    If the last of them has `more` to come, `skip_frames` that before anything else is read.

    Raises:
        zmq.ZMQError: there is none.
    """
    frame = socket.recv(flags, copy=False)
    frames = [frame]
    while frame.more and len(frames) < _MAX_FRAMES:
        frame = socket.recv(copy=False)
        frames.append(frame)
    return frames


def skip_frames(socket: Socket, max_frames: int) -> bool:
    """Read so many further frames of a message that has begun, or all that it has; return whether it has more."""
    return all(socket.recv(copy=False).more for _ in range(max_frames))


def frame_content(frame: zmq.Frame) -> Any:
    """Return what is in `frame`: a small one as bytes, which are the cheapest to have; a large one uncopied."""
    return frame.bytes if len(frame) < ZERO_COPY_BYTES else frame


class SocketEvent(NamedTuple):
    """An event of a socket monitor: one of the zmq.EVENT_ numbers, and a file descriptor or an error number."""

    number: int
    value: int


def receive_event(monitor: Socket, flags: int = 0) -> SocketEvent:
    """Return the next event of a socket monitor: when a connection begins or ends.

    Raises:
        zmq.Again: there is none now, with zmq.NOBLOCK.
    """
    event, _ = monitor.recv_multipart(flags)
    return SocketEvent(*_EVENT.unpack(event))
