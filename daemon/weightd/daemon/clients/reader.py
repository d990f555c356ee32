"""Reads what clients send, in portions: no message keeps the loop from its other work, whatever it is made of."""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from weightd.daemon.host.sockets import BATCH, Received
from weightd.shared import multipart

# Frames that nobody wants are read for a few milliseconds at a time.
_PORTION = 4096


class Reader:
    """Reads the messages of a ROUTER socket.

    The library gives a message as a whole, and no other before its end: of one with too many frames the first are
    returned, to be refused, and the rest is dropped by and by.

    Args:
        socket: bound.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._has_rest = False

    @property
    def has_rest(self) -> bool:
        """Whether the message that was read last has more frames than it may, which are still to be dropped."""
        return self._has_rest

    def read(self) -> Iterator[Received]:
        """Yield the messages that wait, at most a batch. Large tensor frames are not copied.

        What does not come at once comes with the next call: the socket stays readable.
        """
        if self._has_rest:
            self._has_rest = multipart.skip(self._socket, _PORTION)
            return
        for _ in range(BATCH):
            try:
                identity, *frames = whole = multipart.begin(self._socket, multipart.NOBLOCK)
            except zmq.Again:
                return
            self._has_rest = whole[-1].more
            yield Received(identity.bytes, [multipart.content(frame) for frame in frames], identity)
            # The second is cheaper than the exception of a read that finds nothing.
            if self._has_rest or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
