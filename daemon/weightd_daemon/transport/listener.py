"""The daemon's Unix socket: which connections it accepts, and when an ended one no longer counts.

The kernel keeps what a peer has not read, at the expense of the sender's control group, until the peer has read it or
closes its end: that the sender closes its own end frees nothing. So the daemon keeps its end of an ended connection,
and counts the connection as open, until then.
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

# So many connections of a user have buffers of the size that the kernel gives them (net.core.wmem_default), and those
# beyond it have buffers for so many bytes: what a client does not read there is kept at the daemon's expense.
_MAX_DEFAULT_BUFFERS = 64
_SMALL_BUFFER_BYTES = 8192

# Of refused connections of a user whose client has not read why. Others are told nothing.
_MAX_UNREAD_REFUSALS = 64

# Connections to the Unix socket that wait to be accepted. A user may fill this queue with connections that are refused:
# others wait behind them, for a fraction of a second with so many.
_LISTEN_BACKLOG = 128

_POLL_INTERVAL_S = 0.1

# In each interval: to look at one takes about a microsecond.
_MAX_POLLED = 64

_INT_FORMAT = struct.Struct("@i")

_log = logging.getLogger("weightd.api")


class UnixListener:
    """Accepts connections to the Unix socket, and counts those of each user.

    Args:
        loop: calls when somebody connects.
        admission: limits the connections of each user.
        limit_account_of: returns whose limits hold for a connection.
        on_connection: called with a connection that was accepted, and who has connected. It has to call `add`, and
            `shut_down` when the connection ends.
        log: of what clients do.
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
        # With a `DescriptorCloser` of its own: a close of a connection can always be interrupted.
        self._unread_connections = UnreadConnections(loop, DescriptorCloser(log_resource_error).close_socket)

    def listen(self, listener: socket.socket) -> None:
        """Accept the connections to a Unix socket that does not block."""
        listener.listen(_LISTEN_BACKLOG)
        Acceptor(listener, self._loop, self._on_connection, _log.error)

    def add(self, connection: socket.socket, limit_account: str) -> None:
        """Count an open connection of a user; beyond some it has small buffers."""
        if self._admission.add_connection(limit_account) > _MAX_DEFAULT_BUFFERS:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SMALL_BUFFER_BYTES)

    def shut_down(self, connection: socket.socket, limit_account: str) -> None:
        """End a connection that `add` has counted, and close it as soon as its client has read everything."""
        self._unread_connections.shut_down(
            limit_account, connection, functools.partial(self._admission.remove_connection, limit_account)
        )

    def close(self) -> None:
        """Close the connections that `shut_down` has ended, whatever was read."""
        self._unread_connections.close()

    def _on_connection(self, connection: socket.socket) -> bool:
        """Adopt a new connection to the Unix socket, or refuse it before anything else is done for it."""
        identity = unix_identity(connection)
        limit_account = self._limit_account_of(identity)
        reason = (
            None if identity.credential.is_operator else self._admission.refusal_reason(limit_account, event_loop.now())
        )
        if reason is None:
            self._on_accepted(connection, identity)
            return True
        if self._unread_connections.count_of(limit_account) < _MAX_UNREAD_REFUSALS:
            # The kernel keeps the text until the client reads it.
            with contextlib.suppress(OSError):
                connection.setblocking(False)
                connection.send(_refusal_message(reason))
        self._unread_connections.shut_down(limit_account, connection, lambda: None)
        self._log.log(
            _log, logging.WARNING, limit_account, "new connection of %s refused: %s", identity.origin.principal, reason
        )
        return False


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
        self._timer.set_no_later_than(event_loop.now() + _POLL_INTERVAL_S)

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


@functools.lru_cache
def _refusal_message(reason: str) -> bytes:
    """Return the message to a client whose connection is refused."""
    frames = encode(Error("", ResourceExhausted.code, f"{reason}: this connection ends"))
    return b"".join([message_prefix(frames), *frames])
