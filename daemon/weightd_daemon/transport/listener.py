"""The daemon's Unix socket: accepts connections, and counts each until its client has read all data.

The kernel charges unread data to the control group of the sender until the peer has read the data or closed its end,
even if the sender has closed its own end. So when a connection is shut down, the daemon keeps its own end open, and
counts the connection against the limits of its user, until the client has read the data or closed its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import socket
import struct
import termios
from collections import Counter, deque
from collections.abc import Callable

from weightd_daemon.platform import event_loop
from weightd_daemon.platform.acceptor import Acceptor
from weightd_daemon.platform.client_log import ClientLog
from weightd_daemon.platform.connection_limiter import ConnectionAdmission
from weightd_daemon.platform.event_loop import EventLoop, Timer
from weightd_daemon.platform.fd_closer import DescriptorCloser
from weightd_daemon.platform.log_setup import log_resource_error
from weightd_daemon.transport.connection import ClientIdentity, unix_identity
from weightd_protocol.codec import encode
from weightd_protocol.errors import ResourceExhausted
from weightd_protocol.framing import message_prefix
from weightd_protocol.messages.inference import Error

# Number of connections of a user that get send buffers of the kernel's default size (net.core.wmem_default). Further
# connections get buffers of `_SMALL_BUFFER_BYTES`, because the kernel charges unread data to the daemon's memory.
_MAX_DEFAULT_BUFFERS = 64
_SMALL_BUFFER_BYTES = 8192

# Maximum number of refused connections of a user that have an unread error message. Connections that are refused beyond
# this number get no message.
_MAX_UNREAD_REFUSALS = 64

# Length of the kernel's queue of connections to accept. A user whose connections are refused may fill the queue; at
# this length, other users wait behind these connections for only a fraction of a second.
_LISTEN_BACKLOG = 128

_POLL_INTERVAL_S = 0.1

# Maximum number of connections that one poll checks for unread data. Each check takes about a microsecond.
_MAX_POLLED = 64

_INT_FORMAT = struct.Struct("@i")

_log = logging.getLogger("weightd.api")


class UnixListener:
    """Accepts connections to the Unix socket, and counts the connections of each user.

    Args:
        loop: reports new connections.
        admission: limits the connections of each user.
        limit_account_of: returns the account whose limits apply to a connection.
        on_connection: called with an accepted connection and the identity of its client. The callback must call `add`,
            and `shut_down` when the connection ends.
        log: logs the events of clients.
    """

    def __init__(
        self,
        loop: EventLoop,
        admission: ConnectionAdmission,
        limit_account_of: Callable[[ClientIdentity], str],
        on_connection: Callable[[socket.socket, ClientIdentity], object],
        log: ClientLog,
    ) -> None:
        self._loop = loop
        self._admission = admission
        self._limit_account_of = limit_account_of
        self._on_accepted = on_connection
        self._log = log
        # The close of a file may block, but the close of a connection can always be interrupted. So connections have a
        # separate closer, in which they never wait for files.
        self._unread_connections = UnreadConnections(loop, DescriptorCloser(log_resource_error).close_socket)

    def listen(self, listener: socket.socket) -> None:
        """Accept the connections to a non-blocking Unix socket."""
        listener.listen(_LISTEN_BACKLOG)
        Acceptor(listener, self._loop, self._on_connection, _log.error)

    def add(self, connection: socket.socket, limit_account: str) -> None:
        """Count an open connection of a user; give it a small send buffer if the user has many connections."""
        if self._admission.add_connection(limit_account) > _MAX_DEFAULT_BUFFERS:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SMALL_BUFFER_BYTES)

    def shut_down(self, connection: socket.socket, limit_account: str) -> None:
        """Shut down a connection that `add` has counted, and close it when its client has read everything."""
        self._unread_connections.shut_down(
            limit_account, connection, functools.partial(self._admission.remove_connection, limit_account)
        )

    def close(self) -> None:
        """Close the connections that were shut down, even if their clients have not read everything."""
        self._unread_connections.close()

    def _on_connection(self, connection: socket.socket) -> bool:
        """Pass on a new connection, or refuse it at once with little work; return whether it was passed on."""
        identity = unix_identity(connection)
        limit_account = self._limit_account_of(identity)
        reason = (
            None if identity.credential.is_operator else self._admission.refusal_reason(limit_account, event_loop.now())
        )
        if reason is None:
            self._on_accepted(connection, identity)
            return True
        if self._unread_connections.count_of(limit_account) < _MAX_UNREAD_REFUSALS:
            # The connection is shut down below, but the kernel keeps this message until the client reads it.
            with contextlib.suppress(OSError):
                connection.setblocking(False)
                connection.send(_refusal_message(reason))
        self._unread_connections.shut_down(limit_account, connection, lambda: None)
        self._log.log(
            _log, logging.WARNING, limit_account, "new connection of %s refused: %s", identity.origin.principal, reason
        )
        return False


class UnreadConnections:
    """Connections that were shut down, but whose clients have not read everything that the daemon has sent.

    These connections still count against the account whose connection limits apply to the client: a user, or all users
    without a tenant together.

    Args:
        loop: runs the timer that checks the connections for unread data.
        close: called with the account and the connection when everything has been read.
    """

    def __init__(self, loop: EventLoop, close: Callable[[str, socket.socket], object]) -> None:
        self._close = close
        self._connections: deque[tuple[str, socket.socket, Callable[[], object]]] = deque()
        self._count_by_account = Counter[str]()
        self._timer = Timer(self._poll)
        loop.add_timer(self._timer)

    def count_of(self, limit_account: str) -> int:
        """Return the number of connections of an account that were shut down but are not closed yet."""
        return self._count_by_account[limit_account]

    def shut_down(self, limit_account: str, connection: socket.socket, on_closed: Callable[[], object]) -> None:
        """Shut a connection down; close it and call `on_closed` when its client has read everything."""
        if not unread_bytes(connection):
            self._close(limit_account, connection)
            on_closed()
            return
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        self._connections.append((limit_account, connection, on_closed))
        self._count_by_account[limit_account] += 1
        self._timer.set_no_later_than(event_loop.now() + _POLL_INTERVAL_S)

    def close(self) -> None:
        """Close all connections at once."""
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
    """Return how many bytes of kernel memory the unread data of a Unix socket takes; 0 if the socket has failed."""
    try:
        count: int
        (count,) = _INT_FORMAT.unpack(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(_INT_FORMAT.size)))
    except OSError:
        return 0
    return count


@functools.lru_cache
def _refusal_message(reason: str) -> bytes:
    """Return the encoded error message for a refused connection."""
    frames = encode(Error("", ResourceExhausted.code, f"{reason}; closing this connection"))
    return b"".join([message_prefix(frames), *frames])
