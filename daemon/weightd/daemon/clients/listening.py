"""Where clients connect: who may, and how long the library waits for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import zmq

from weightd.daemon.host import sockets
from weightd.protocol import limits

# Owner and group may connect: who is in the group is the operator's decision.
_UMASK = 0o117

# Requests of one client that wait to be read, whatever their size; one that sends faster waits in its own socket.
_RCVHWM = 64

# Who has not said by then what it speaks is hung up by the library.
HANDSHAKE_MS = 5000

_OPTIONS: Mapping[int, int] = {
    zmq.RCVHWM: _RCVHWM,
    zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
    # The kernel finds out within a minute that the host of a TCP client is gone. On a unix socket it knows at once.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}


def listen(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    descriptors: Sequence[int] = (),
    max_frame_bytes: int = limits.MAX_FRAME_BYTES,
) -> zmq.Socket[bytes]:
    """Return a ROUTER socket to which clients can connect; see `sockets.bind`.

    Raises:
        ClaimError: the address cannot be bound.
    """
    return sockets.bind(
        context, address, umask=_UMASK, options=_OPTIONS, descriptors=descriptors, max_frame_bytes=max_frame_bytes
    )
