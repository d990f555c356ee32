"""Marks each connection while it shakes hands: its messages bring the mark along.

The library asks, before it lets anybody in, whoever is bound to an address of its own (ZAP,
https://rfc.zeromq.org/spec/27). What it is told as the peer's user id comes with each message of that connection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, cast

import zmq
from zmq.utils import z85

_ADDRESS = "inproc://zeromq.zap.01"

# It only asks on behalf of sockets that have one; what it is does not matter.
_DOMAIN = b"weightd"

_PROPERTY = "User-Id"

# Of the frames of a request.
_MECHANISM = 7

# So many at once: there is more to do.
_BATCH = 64


class Handshakes:
    """Lets everybody in who speaks ZMTP 3: others are hung up by the library.

    With CURVE the library has seen to it that a client has the key that it shows, and it is let in if that is known.

    Args:
        router: not bound yet; no other socket of its context has one of these.
        keys: see `Terms`.

    Attributes:
        socket: readable when there is something to `read`.
    """

    def __init__(self, router: zmq.Socket[bytes], keys: Iterable[str] | None = None) -> None:
        self.know(keys)
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
                waiting.append(self.socket.recv_multipart(zmq.NOBLOCK))
        return waiting

    def know(self, keys: Iterable[str] | None) -> None:
        """Let in who has one of these keys from now on; None: whatever key it has."""
        self._keys = None if keys is None else frozenset(keys)

    def admit(self, waiting: list[list[bytes]], mark: int) -> None:
        """Let them in, whoever is still there and has a key that is known: their messages will have this mark."""
        for request in waiting:
            # The peer's route, an empty frame, version and number of the request; what nobody needs; and the mechanism
            # with what it has shown.
            envelope, (mechanism, *shown) = request[:4], request[_MECHANISM:]
            key = z85.encode(shown[0]).decode() if mechanism == b"CURVE" else ""
            if key and self._keys is not None and key not in self._keys:
                self.socket.send_multipart([*envelope, b"400", b"", b"", b""], zmq.NOBLOCK)
            else:
                self.socket.send_multipart([*envelope, b"200", b"OK", f"{mark} {key}".encode(), b""], zmq.NOBLOCK)

    def close(self) -> None:
        """Let nobody in any more."""
        self.socket.close()


def mark(frame: zmq.Frame) -> tuple[int, str]:
    """Return the mark of the connection over which this was received, and the key of its client; "" for none."""
    number, _, key = str(frame.get(_PROPERTY)).partition(" ")
    return int(number), key
