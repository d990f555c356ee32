"""Ended connections whose peers have not read everything that was sent to them.

The kernel keeps what a peer has not read, at the expense of the sender's control group, until the peer has read it or
closes its end: that the sender closes its own end frees nothing. So the daemon keeps its end, and counts the connection
as open, until then.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
from collections import Counter, deque
from collections.abc import Callable

from weightd.daemon.host import clock
from weightd.daemon.host.loop import Loop
from weightd.daemon.host.timers import Timer

_INTERVAL_S = 0.1

# In each interval: to look at one takes about a microsecond.
_MOST_LOOKED_AT = 64

_COUNT = struct.Struct("@i")


class Departed:
    """Ended connections by the user at the other end.

    Args:
        loop: calls the timer.
        close: called with the owner of a connection and the connection when everything has been read.
    """

    def __init__(self, loop: Loop, close: Callable[[str, socket.socket], object]) -> None:
        self._close = close
        self._there: deque[tuple[str, socket.socket, Callable[[], object]]] = deque()
        self._count = Counter[str]()
        self._timer = Timer(self._look)
        loop.add_timer(self._timer)

    def of(self, owner: str) -> int:
        """Return how many connections of a user are kept."""
        return self._count[owner]

    def end(self, owner: str, connection: socket.socket, on_end: Callable[[], object]) -> None:
        """Tell the peer that the connection ends, close it as soon as everything has been read, and call `on_end`."""
        if not unread(connection):
            self._close(owner, connection)
            on_end()
            return
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        self._there.append((owner, connection, on_end))
        self._count[owner] += 1
        self._timer.due_by(clock.now() + _INTERVAL_S)

    def close(self) -> None:
        """Close all connections, whatever was read."""
        while self._there:
            self._drop(*self._there.popleft())

    def _look(self, now: float) -> None:
        for _ in range(min(len(self._there), _MOST_LOOKED_AT)):
            each = self._there.popleft()
            if unread(each[1]):
                self._there.append(each)
            else:
                self._drop(*each)
        if self._there:
            self._timer.set(now + _INTERVAL_S)

    def _drop(self, owner: str, connection: socket.socket, on_end: Callable[[], object]) -> None:
        self._count[owner] -= 1
        if not self._count[owner]:
            del self._count[owner]
        self._close(owner, connection)
        on_end()


def unread(connection: socket.socket) -> int:
    """Return how many bytes of memory the kernel keeps for what the peer of a Unix socket has not read."""
    try:
        count: int
        (count,) = _COUNT.unpack(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(_COUNT.size)))
    except OSError:
        return 0
    return count
