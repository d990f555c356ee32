"""Connections of a client to a daemon: the common interface, and the implementation for Unix sockets.

A connection never blocks. Callers wait for events by polling its file descriptors. A connection object exists only for
an established connection. An object whose connection is lost cannot connect again; create a new one instead.
"""

from __future__ import annotations

import abc
import contextlib
import socket
from typing import Any, Callable, ClassVar, Generator, List, Optional, Sequence, TypeVar

from weightd.address import connect_unix, new_unix_socket
from weightd_common.stream import Stream, enlarge_send_buffer
from weightd_protocol import limits
from weightd_protocol.errors import RemoteProtocolError, Unavailable
from weightd_protocol.framing import FrameReader, Message

C = TypeVar("C")

# A generator that creates an object of type C in steps. Each step yields a descriptor that becomes readable when the
# generator can continue, or None if the caller has to continue after a short pause.
ConnectSteps = Generator[Optional[int], None, C]


class ConnectionLost(Unavailable):
    """The daemon closed the connection before any part of the message was sent."""


class DaemonConnection(abc.ABC):
    """Base class of the connections to a daemon, over a Unix socket or ZeroMQ.

    One thread at a time may call `receive`, `close` and `is_idle`. Another thread may call `send` and `flush` at the
    same time.

    Attributes:
        transport: the kind of connection, "unix" or "zmq".
        address: the address of the daemon, for error texts.
        descriptors: file descriptors to poll for reading. One of them becomes readable when data has arrived, when
            unsent data can be sent, or when the connection is lost.
        accepts_descriptors: whether messages may carry file descriptors.
        is_level_triggered: True if `descriptors` is one socket that stays readable as long as received data is unread,
            and that is writable when unsent data can be sent. If False, call `is_idle` before each wait.
        closed: whether `close` has been called.
        is_broken: whether the connection is lost. It may be lost before `receive` reports the loss.
        unsent_count: the amount of data that is queued until the daemon reads: bytes on a Unix socket, messages with
            ZeroMQ.
        sent_count: the total amount of data that was queued first and sent later, in the unit of `unsent_count`.
    """

    transport: ClassVar[str]
    is_level_triggered: ClassVar[bool]
    accepts_descriptors: ClassVar[bool] = False

    def __init__(self, address: str) -> None:
        self.address = address
        self.descriptors: Sequence[int] = ()
        self.closed = False
        self.is_broken = False
        self.unsent_count: int = 0
        self.sent_count: int = 0

    send: Callable[..., bool]
    """Send the frames of a message, with file descriptors. Return whether all of the message was sent.

    If the socket accepts only a part, the connection queues the remaining data and all later messages; `flush` sends
    them. Large frames are not copied.

    Raises:
        OSError: the connection is lost.
    """

    @abc.abstractmethod
    def cork(self) -> None:
        """Let the connection hold back messages until `uncork`, because the caller is about to send more messages."""

    @abc.abstractmethod
    def uncork(self) -> None:
        """Send the held-back messages as far as the socket accepts them. `receive` reports a lost connection."""

    @abc.abstractmethod
    def get_sent_target(self) -> int:
        """Return the value that `sent_count` will have when all data that is queued now has been sent."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Send queued data as far as the socket accepts it."""

    @abc.abstractmethod
    def receive(self) -> List[Message]:
        """Return the messages that have arrived; an empty list if no message has arrived.

        Raises:
            Unavailable: the connection is lost. The messages that arrived before the loss have all been returned.
            RemoteProtocolError: the daemon violated the protocol.
        """

    def is_idle(self) -> bool:
        """Return True if no event is pending, so that polling the descriptors will report the next event."""
        return True

    def expect_descriptors(self, is_expected: bool) -> None:  # noqa: B027 - only some connections can receive them
        """Keep the file descriptors that the daemon sends, or let the kernel close them, which is the default."""

    def take_descriptor(self) -> Optional[int]:
        """Return the next file descriptor that the daemon has sent, or None. The caller must close the descriptor."""
        return None

    def mark_broken(self) -> None:
        """Mark the connection as lost. `receive` returns all messages that have arrived, and then reports the loss."""
        self.is_broken = True

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connection and drop unsent data. Repeated calls have no effect."""

    def lost_error(self) -> Unavailable:
        """Return the error for a lost connection."""
        return Unavailable(self._lost_text())

    def not_sent_error(self) -> ConnectionLost:
        """Return the error for a connection that was lost before any part of a message was sent."""
        return ConnectionLost(self._lost_text())

    def _lost_text(self) -> str:
        return f"lost the connection to {self.address}: the daemon exited or closed the connection"


class NotConnected(DaemonConnection):
    """Stands in for a connection before the client has connected. It behaves like a lost connection."""

    transport = ""
    is_level_triggered = False

    def __init__(self) -> None:
        super().__init__("")
        self.closed = self.is_broken = True

    def send(self, frames: List[Any], descriptors: Sequence[int] = ()) -> bool:
        """Raise `ConnectionResetError`."""
        raise ConnectionResetError

    def cork(self) -> None:
        """Do nothing."""

    def uncork(self) -> None:
        """Do nothing."""

    def get_sent_target(self) -> int:
        """Return 0."""
        return 0

    def flush(self) -> None:
        """Do nothing."""

    def receive(self) -> List[Message]:
        """Raise `Unavailable`: there is no connection."""
        raise self.lost_error()

    def close(self) -> None:
        """Do nothing."""


class UnixConnection(DaemonConnection):
    """Connection over a Unix socket, created by `unix_connect_steps`. It sends a small message in one system call."""

    transport = "unix"
    is_level_triggered = True
    accepts_descriptors = True

    def __init__(self, connection: socket.socket, path: str) -> None:
        super().__init__(path)
        enlarge_send_buffer(connection)
        self._stream = Stream(connection, FrameReader(max_header_bytes=limits.MAX_STATUS_BYTES))
        self.send = self._stream.send
        self.descriptors = (connection.fileno(),)

    def cork(self) -> None:
        """See `DaemonConnection.cork`."""
        self._stream.cork()

    def uncork(self) -> None:
        """See `DaemonConnection.uncork`."""
        with contextlib.suppress(OSError):
            self._stream.uncork()
        self.unsent_count = self._stream.unsent

    def get_sent_target(self) -> int:
        """See `DaemonConnection.get_sent_target`."""
        self.unsent_count = self._stream.unsent
        return self.sent_count + self.unsent_count

    def flush(self) -> None:
        """See `DaemonConnection.flush`. A lost connection raises no error here: `receive` reports the loss."""
        with contextlib.suppress(OSError):
            self._stream.flush()
        before, self.unsent_count = self.unsent_count, self._stream.unsent
        self.sent_count += before - self.unsent_count

    def receive(self) -> List[Message]:
        """See `DaemonConnection.receive`. The stream drops frames of a message that is too large.

        The decoder then rejects this message, because frames are missing.
        """
        try:
            return self._stream.receive()
        except OSError:
            raise self.lost_error() from None
        except RemoteProtocolError as error:
            raise RemoteProtocolError(
                f"the peer at {self.address} does not speak weightd's protocol: {error}"
            ) from None

    def is_idle(self) -> bool:
        """See `DaemonConnection.is_idle`. If the last read filled its buffer, more data may be waiting."""
        return not self._stream.has_more

    def expect_descriptors(self, is_expected: bool) -> None:
        """See `DaemonConnection.expect_descriptors`. Reading takes longer while descriptors are expected."""
        self._stream.accepts_descriptors = is_expected

    def take_descriptor(self) -> Optional[int]:
        """See `DaemonConnection.take_descriptor`."""
        descriptors = self._stream.descriptors
        return descriptors.popleft() if descriptors else None

    def mark_broken(self) -> None:
        """See `DaemonConnection.mark_broken`. Shuts the socket down, which wakes a thread that polls it."""
        super().mark_broken()
        with contextlib.suppress(OSError):
            self._stream.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See `DaemonConnection.close`. The connection ends even if a forked process has a copy of the descriptor."""
        if not self.closed:
            self.closed = True
            self.mark_broken()
            self._stream.close()


def unix_connect_steps(path: str) -> ConnectSteps[DaemonConnection]:
    """Connect to the daemon's Unix socket at `path`, and return the connection.

    Raises:
        RequestError: as `address.connect_unix`.
    """
    connection = new_unix_socket()
    try:
        while not connect_unix(connection, path):
            yield None
    except BaseException:
        connection.close()
        raise
    return UnixConnection(connection, path)
