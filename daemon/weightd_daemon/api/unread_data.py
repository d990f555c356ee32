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

from weightd_daemon.platform import clock
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.timers import Timer

_POLL_INTERVAL_S = 0.1

# In each interval: to look at one takes about a microsecond.
_MAX_POLLED = 64

_INT_FORMAT = struct.Struct("@i")


class UnreadConnections:
    """Ended connections by the user at the other end.

    Args:
        loop: calls the timer.
        close: called with the owner of a connection and the connection when everything has been read.
    """

    def __init__(self, loop: EventLoop, close: Callable[[str, socket.socket], object]) -> None:
        self._close = close
        self._connections: deque[tuple[str, socket.socket, Callable[[], object]]] = deque()
        self._count_by_account = Counter[str]()
        self._timer = Timer(self._poll)
        loop.add_timer(self._timer)

    def count_of(self, limit_account: str) -> int:
        """Return how many connections of a user are kept."""
        return self._count_by_account[limit_account]

    def shut_down(self, limit_account: str, connection: socket.socket, on_closed: Callable[[], object]) -> None:
        """Tell the peer that the connection ends, close it as soon as everything has been read.

        And call `on_closed`.
        """
        if not unread_bytes(connection):
            self._close(limit_account, connection)
            on_closed()
            return
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        self._connections.append((limit_account, connection, on_closed))
        self._count_by_account[limit_account] += 1
        self._timer.set_no_later_than(clock.now() + _POLL_INTERVAL_S)

    def close(self) -> None:
        """Close all connections, whatever was read."""
        while self._connections:
            self._close_connection(*self._connections.popleft())

    def _poll(self, now: float) -> None:
        for _ in range(min(len(self._connections), _MAX_POLLED)):
            each = self._connections.popleft()
            if unread_bytes(each[1]):
                self._connections.append(each)
            else:
                self._close_connection(*each)
        if self._connections:
            self._timer.set(now + _POLL_INTERVAL_S)

    def _close_connection(self, limit_account: str, connection: socket.socket, on_closed: Callable[[], object]) -> None:
        self._count_by_account[limit_account] -= 1
        if not self._count_by_account[limit_account]:
            del self._count_by_account[limit_account]
        self._close(limit_account, connection)
        on_closed()


def unread_bytes(connection: socket.socket) -> int:
    """Return how many bytes of memory the kernel keeps for what the peer of a Unix socket has not read."""
    try:
        count: int
        (count,) = _INT_FORMAT.unpack(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(_INT_FORMAT.size)))
    except OSError:
        return 0
    return count
