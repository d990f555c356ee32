"""What is sent to clients, and how much of it they have not read.

The library keeps up to a thousand messages for a client that does not read, whatever their size. Small ones do no
harm; of large ones the bytes are counted until the library has written them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

from weightd.daemon.sockets import send, send_tracked
from weightd.protocol import multipart

# What may wait for one client: a frame of the largest size is always let through if it is alone.
MAX_UNREAD_BYTES = 256 * 1024 * 1024

_log = logging.getLogger("weightd.frontend")


class _Unread:
    """The large frames on their way to one client."""

    def __init__(self) -> None:
        self._frames: deque[tuple[zmq.MessageTracker, int]] = deque()
        self.nbytes = 0
        self.warned = False

    def add(self, tracker: zmq.MessageTracker, nbytes: int) -> None:
        self._frames.append((tracker, nbytes))
        self.nbytes += nbytes

    def forget_written(self) -> None:
        while self._frames and self._frames[0][0].done:
            self.nbytes -= self._frames.popleft()[1]


class Outbox:
    """Sends to the clients of one ROUTER socket, without ever waiting for one.

    Attributes:
        dropped: messages that could not be sent: their client was gone, or did not read.
    """

    def __init__(self, socket: zmq.Socket[bytes], max_unread_bytes: int = MAX_UNREAD_BYTES) -> None:
        self.dropped = 0
        self._socket = socket
        self._max_unread_bytes = max_unread_bytes
        self._unread: dict[bytes, _Unread] = {}

    def send(self, client: bytes, header: bytes, frames: Sequence[Any] = ()) -> bool:
        """Send a message, or drop it; return False if that is because the client has not read earlier ones."""
        large = 0
        for frame in frames:
            if len(frame) >= multipart.ZERO_COPY_BYTES:
                large += len(frame)
        if large and self._is_full(client, large):
            self.dropped += 1
            return False
        if large:
            trackers = send_tracked(self._socket, client, [header, *frames])
            sent = trackers is not None
            for tracker, nbytes in trackers or ():
                self._unread.setdefault(client, _Unread()).add(tracker, nbytes)
        else:
            sent = send(self._socket, client, [header, *frames])
        if not sent:
            self.dropped += 1
            _log.debug("client %s is gone or does not read: its answer is dropped", client.hex())
        return True

    def _is_full(self, client: bytes, nbytes: int) -> bool:
        for each in list(self._unread):
            self._unread[each].forget_written()
            if not self._unread[each].nbytes:
                del self._unread[each]
        unread = self._unread.get(client)
        if unread is None or unread.nbytes + nbytes <= self._max_unread_bytes:
            return False
        if not unread.warned:
            unread.warned = True
            _log.warning(
                "client %s does not read: %d MiB wait for it, further answers are dropped",
                client.hex(),
                unread.nbytes // 2**20,
            )
        return True
