"""Marks each connection while it shakes hands: its messages bring the mark along.

The library asks, before it lets anybody in, whoever is bound to an address of its own (ZAP,
https://rfc.zeromq.org/spec/27). What it is told as the peer's user id comes with each message of that connection.
"""

from __future__ import annotations

import contextlib
from typing import Any, cast

import zmq

_ADDRESS = "inproc://zeromq.zap.01"

# It only asks on behalf of sockets that have one; what it is does not matter.
_DOMAIN = b"weightd"

_PROPERTY = "User-Id"

# So many at once: there is more to do.
_BATCH = 64


class Handshakes:
    """Lets everybody in who speaks ZMTP 3: others are hung up by the library.

    Args:
        router: not bound yet; no other socket of its context has one of these.

    Attributes:
        socket: readable when there is something to `read`.
    """

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = cast(Any, router).context
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)
        router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)

    def read(self) -> list[list[bytes]]:
        """Return who waits to be let in, at most a batch."""
        waiting: list[list[bytes]] = []
        with contextlib.suppress(zmq.Again):
            while len(waiting) < _BATCH:
                # The peer's route, an empty frame, version and number of the request; and what nobody needs.
                waiting.append(self.socket.recv_multipart(zmq.NOBLOCK)[:4])
        return waiting

    def admit(self, waiting: list[list[bytes]], mark: int) -> None:
        """Let them in, whoever is still there: their messages will have this mark."""
        for request in waiting:
            self.socket.send_multipart([*request, b"200", b"OK", b"%d" % mark, b""], zmq.NOBLOCK)

    def close(self) -> None:
        """Let nobody in any more."""
        self.socket.close()


def mark(frame: zmq.Frame) -> int:
    """Return the mark of the connection over which this was received."""
    return int(frame.get(_PROPERTY))
