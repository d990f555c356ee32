"""What a socket monitor tells: when a connection of a ZeroMQ socket begins or ends (zmq_socket_monitor(3)).

`zmq.utils.monitor` can read that, too, but brings asyncio along: memory in each worker, and time at each start.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import zmq

if TYPE_CHECKING:
    Socket = zmq.Socket[bytes]

# The first of two frames; the second is the address.
_EVENT = struct.Struct("=HI")


class SocketEvent(NamedTuple):
    """One of the zmq.EVENT_ numbers, and what belongs to it: a file descriptor, or an error number."""

    number: int
    value: int


def receive(monitor: Socket, flags: int = 0) -> SocketEvent:
    """Return the next event.

    Raises:
        zmq.Again: there is none now, with zmq.NOBLOCK.
    """
    event, _ = monitor.recv_multipart(flags)
    return SocketEvent(*_EVENT.unpack(event))
