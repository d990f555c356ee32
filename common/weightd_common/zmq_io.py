"""Sends and receives multipart ZeroMQ messages frame by frame, and parses the events of a socket monitor.

For small messages, pyzmq's `send_multipart` and `recv_multipart` take about twice as long as the functions of this
module: `send_multipart` inspects each frame twice, and `recv_multipart` asks the socket after each frame whether there
is another one, although the frame's attribute `more` says so. pyzmq's `zmq.utils.monitor` imports asyncio, which costs
memory in each worker and time at each start.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Callable, List, NamedTuple, Sequence

import zmq
import zmq.backend

from weightd_protocol import limits

if TYPE_CHECKING:
    Socket = zmq.Socket[bytes]

# Minimum size in bytes of a frame that is sent or received without copying it. For smaller frames, a copy costs less
# than keeping track of the memory.
ZERO_COPY_BYTES = 64 * 1024

# Maximum number of frames that `receive_first_frames` reads: two header frames, the tensors, and one more frame, which
# is either the peer's id or shows that the message has too many frames.
_MAX_FRAMES = limits.MAX_TENSORS + 3

# Plain integers instead of pyzmq's flag objects, because combining these with `|` takes a microsecond.
NOBLOCK = int(zmq.NOBLOCK)
_SNDMORE = int(zmq.SNDMORE)

# Format of the first frame of a monitor event, see zmq_socket_monitor(3). The second frame is the peer's address.
_EVENT = struct.Struct("=HI")

# The function that a socket's method `send` calls internally. Calling it directly saves two calls for each frame.
_send: Callable[..., object] = zmq.backend.Socket.send


def send(socket: Socket, frames: Sequence[Any], flags: int = 0, copy_below_bytes: float = ZERO_COPY_BYTES) -> None:
    """Send a message. If `zmq.ZMQError` is raised, nothing was sent.

    Frames of at least `copy_below_bytes` bytes are not copied: pyzmq keeps them alive until libzmq has written them,
    and the caller must not modify them before. Frames that were received by `receive` are never copied.
    """
    more = flags | _SNDMORE
    for frame in frames[:-1]:
        _send(socket, frame, more, len(frame) < copy_below_bytes)
    _send(socket, frames[-1], flags, len(frames[-1]) < copy_below_bytes)


def receive(socket: Socket, flags: int = 0) -> List[zmq.Frame]:
    """Return the frames of the next message. If a message has too many frames, the last frames are dropped.

    Raises:
        zmq.ZMQError: no message is available.
    """
    frames = receive_first_frames(socket, flags)
    while frames[-1].more and skip_frames(socket, _MAX_FRAMES):
        pass
    return frames


def receive_first_frames(socket: Socket, flags: int = 0) -> List[zmq.Frame]:
    """Return the first frames of the next message: at most one more than allowed, so that the caller can reject it.

    If the attribute `more` of the last frame is true, the message has further frames. Call `skip_frames` until these
    frames are dropped, before you read the next message.

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
    """Return the content of `frame`: a small frame as bytes, which is fastest, a large frame itself, without a copy."""
    return frame.bytes if len(frame) < ZERO_COPY_BYTES else frame


class SocketEvent(NamedTuple):
    """A socket monitor event, such as a new connection.

    Attributes:
        number: the kind of the event: one of the zmq.EVENT_ constants.
        value: a file descriptor or an error number, depending on the kind.
    """

    number: int
    value: int


def receive_event(monitor: Socket, flags: int = 0) -> SocketEvent:
    """Return the next event of a socket monitor, such as the start or the end of a connection.

    Raises:
        zmq.Again: no event is available, and `flags` contains zmq.NOBLOCK.
    """
    event, _ = monitor.recv_multipart(flags)
    return SocketEvent(*_EVENT.unpack(event))
