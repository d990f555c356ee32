"""Reads what clients send, in portions: no message keeps the loop from its other work, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import zmq

from weightd.protocol.framing import MAX_FRAMES
from weightd.shared import multipart

# Plain integers: pyzmq's own are slower.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)

# Frames that nobody wants are read for a few milliseconds at a time.
_PORTION = 4096


class Reader:
    """Reads the messages of a ROUTER socket.

    The library gives a message as a whole, and no other before its end: of one with too many frames the first are
    returned, to be refused, and the rest is dropped by and by.

    Args:
        socket: bound, or about to be.

    Attributes:
        has_rest: the message that was read last has more frames than there may be.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.has_rest = False
        self._socket = socket
        self._receive = socket.recv
        self._ask = cast(Callable[[int], int], socket.getsockopt)

    @property
    def is_ready(self) -> bool:
        """Whether there is something to read: where the library has told that once, it does not again."""
        return self._ask(_EVENTS) & _POLLIN != 0

    def read(self) -> tuple[bytes, list[zmq.Frame]] | None:
        """Return the routing id and the frames of the next message; None where there is none now."""
        if self.has_rest:
            self.has_rest = multipart.skip(self._socket, _PORTION)
            return None
        receive = self._receive
        try:
            route = receive(multipart.NOBLOCK)
        except zmq.Again:
            return None
        frames = [receive(0, False)]
        while frames[-1].more:
            if len(frames) == MAX_FRAMES:
                self.has_rest = True
                break
            frames.append(receive(0, False))
        return route, frames
