"""What is sent to clients, and how much of it they have not read.

The library keeps up to a thousand messages for a client that does not read, whatever their size. So their bytes are
counted until the library has written them: of large frames each, of small messages many together.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from weightd.daemon.clients.room import Room
from weightd.daemon.host.sockets import send, send_marked, send_tracked
from weightd.shared import multipart

# What may wait for one client: a frame of the largest size is always let through if it is alone.
MAX_UNREAD_BYTES = 256 * 1024 * 1024

# To ask when a message is written costs as much as to send it: of small ones it is asked once in so many bytes.
MARK_BYTES = 256 * 1024

_log = logging.getLogger("weightd.frontend")


class _Unread:
    """What is on its way to one client."""

    def __init__(self) -> None:
        self.frames: deque[tuple[zmq.MessageTracker, int]] = deque()
        self.nbytes = 0
        self.unmarked = 0
        self.warned = False


class Outbox:
    """Sends to the clients of one ROUTER socket, without ever waiting for one.

    Args:
        socket: sends.
        room: counts what they have not read.
        make_room: called with a client and the bytes that are to be sent to it; returns whether there is room.
        max_unread_bytes: that may wait for one client.

    Attributes:
        dropped: messages that could not be sent: their client was gone, or did not read.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        room: Room,
        make_room: Callable[[bytes, int], bool],
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        self.dropped = 0
        self._socket = socket
        self._room = room
        self._make_room = make_room
        self._max_unread_bytes = max_unread_bytes
        self._unread: dict[bytes, _Unread] = {}
        self._orphans: list[tuple[zmq.MessageTracker, int]] = []

    def send(self, client: bytes, frames: Sequence[Any]) -> bool:
        """Send a message, or drop it; return False if that is because the client has not read earlier ones."""
        nbytes = 0
        is_large = False
        for frame in frames:
            nbytes += len(frame)
            is_large = is_large or len(frame) >= multipart.ZERO_COPY_BYTES
        unread = self._unread.get(client)
        if unread is None:
            unread = self._unread[client] = _Unread()
        if is_large or unread.unmarked + nbytes > MARK_BYTES:
            if self._is_full(client, unread, nbytes):
                self.dropped += 1
                return False
            sent = self._send_counted(client, unread, frames)
        else:
            sent = send(self._socket, client, frames)
            unread.unmarked += nbytes
        if not sent:
            self.dropped += 1
            self._forget_stranger(client, unread)
            _log.debug("client %s is gone or does not read: its answer is dropped", client.hex())
        return True

    def unread(self, client: bytes) -> int:
        """Return how many bytes the client has not read, as far as they count."""
        unread = self._unread.get(client)
        return 0 if unread is None else unread.nbytes

    def forget(self, client: bytes) -> None:
        """The client has gone; the library gives up what was sent to it a moment later."""
        unread = self._unread.pop(client, None)
        if unread is not None:
            self._orphans += unread.frames

    def orphaned(self) -> int:
        """Return how many bytes are still there of what was sent to clients that have gone."""
        self._orphans = [each for each in self._orphans if not each[0].done]
        return sum(nbytes for _, nbytes in self._orphans)

    def forget_written(self) -> None:
        """See what has been written to any client since it was sent."""
        for client, unread in list(self._unread.items()):
            self._forget_written(client, unread)
            self._forget_stranger(client, unread)

    def _send_counted(self, client: bytes, unread: _Unread, frames: Sequence[Any]) -> bool:
        if any(len(frame) >= multipart.ZERO_COPY_BYTES for frame in frames):
            tracked = send_tracked(self._socket, client, frames)
        else:
            tracker = send_marked(self._socket, client, frames)
            tracked = None if tracker is None else [(tracker, unread.unmarked + sum(map(len, frames)))]
            unread.unmarked = 0
        for each in tracked or ():
            unread.frames.append(each)
            unread.nbytes += each[1]
            self._room.take(client, each[1])
        return tracked is not None

    def _is_full(self, client: bytes, unread: _Unread, nbytes: int) -> bool:
        self._forget_written(client, unread)
        if unread.nbytes and unread.nbytes + nbytes > self._max_unread_bytes:
            if not unread.warned:
                unread.warned = True
                _log.warning(
                    "client %s does not read: %d MiB wait for it, further answers are dropped",
                    client.hex(),
                    unread.nbytes // 2**20,
                )
            return True
        return not self._room.fits(nbytes) and not self._make_room(client, nbytes)

    def _forget_written(self, client: bytes, unread: _Unread) -> None:
        while unread.frames and unread.frames[0][0].done:
            nbytes = unread.frames.popleft()[1]
            unread.nbytes -= nbytes
            self._room.give(client, nbytes)

    def _forget_stranger(self, client: bytes, unread: _Unread) -> None:
        """Nobody will say that this client has gone: it has, or nothing is known of its connection."""
        if not unread.nbytes and not self._room.user(client):
            self._unread.pop(client, None)
