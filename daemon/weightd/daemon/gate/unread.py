"""What has been sent to one client, and how much of it the library has not written yet.

The library keeps up to a thousand messages for a client that does not read, whatever their size. So their bytes are
counted: of large frames each, of small messages many together.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

from weightd.shared import multipart

# To ask when a message is written costs as much as to send it: of small ones it is asked once in so many bytes.
MARK_BYTES = 256 * 1024


class Unread:
    """Sends messages to one client, and counts.

    Args:
        socket: a ROUTER socket.
        route: the client's.

    Attributes:
        nbytes: that have not been written, as far as they count.
    """

    __slots__ = ("_route", "_socket", "_tracked", "_unmarked", "nbytes")

    def __init__(self, socket: zmq.Socket[bytes], route: bytes) -> None:
        self.nbytes = 0
        self._socket = socket
        self._route = route
        self._tracked: deque[tuple[zmq.MessageTracker, int]] = deque()
        self._unmarked = 0

    def send(self, frames: Sequence[Any]) -> bool:
        """Send a message; return False where the client has to read first: a thousand wait.

        If it has gone, that is told in a moment, and this returns True.
        """
        nbytes = sum(map(len, frames))
        unmarked = self._unmarked + nbytes
        try:
            if nbytes < multipart.ZERO_COPY_BYTES and unmarked <= MARK_BYTES:
                multipart.send(self._socket, (self._route, *frames), multipart.NOBLOCK)
                self._unmarked = unmarked
            else:
                self._send_counted((self._route, *frames), unmarked)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            return error.errno == errno.EHOSTUNREACH
        return True

    def _send_counted(self, message: Sequence[Any], unmarked: int) -> None:
        if max(map(len, message)) >= multipart.ZERO_COPY_BYTES:
            tracked = multipart.send_tracked(self._socket, message, multipart.NOBLOCK)
        else:
            tracked = [(multipart.send_marked(self._socket, message, multipart.NOBLOCK), unmarked)]
            self._unmarked = 0
        self._tracked += tracked
        self.nbytes += sum(count for _, count in tracked)

    def forget_written(self) -> None:
        """See what has been written since it was sent."""
        while self._tracked and self._tracked[0][0].done:
            self.nbytes -= self._tracked.popleft()[1]
