"""Connections of a client to a daemon: the interface, and the implementation for unix sockets.

A connection never blocks; it offers descriptors to wait for. It is created connected. Once it is lost, only a new
connection helps.
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

# A generator that creates something in steps. It yields a descriptor that becomes readable when the next step can be
# taken, or None if the caller can only try again after a while.
ConnectSteps = Generator[Optional[int], None, C]


class ConnectionLost(Unavailable):
    """The daemon has closed the connection, and nothing of the message was sent."""


class DaemonConnection(abc.ABC):
    """A connection to a daemon, until it is lost or closed.

    One thread at a time may call `receive`, `close` and `is_idle`; another thread may call `send` and `flush`
    meanwhile.

    Attributes:
        transport: the kind of connection, "unix" or "zmq".
        address: the address of the daemon, for error texts.
        descriptors: file descriptors that become readable when data may be received, data was sent, or the connection
            is lost.
        accepts_descriptors: whether messages may carry file descriptors.
        is_level_triggered: whether there is a single descriptor, of a socket, that stays readable while data can be
            received and is writable when unsent data can be sent. If not, call `is_idle` before each wait.
        closed: whether `close` was called.
        is_broken: whether the connection is lost, even if `receive` has not reported that yet.
        unsent_count: the amount of data that waits until the daemon reads.
        sent_count: the amount of data sent so far that was not sent at once, in the unit of `unsent_count`.
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
    """Send the frames of a message, and descriptors; return whether all of it was sent.

    `flush` sends the rest, and the messages that follow. Large frames are not copied.

    Raises:
        OSError: the connection is lost.
    """

    @abc.abstractmethod
    def cork(self) -> None:
        """Allow the connection to hold back messages until `uncork`, because more follow at once."""

    @abc.abstractmethod
    def uncork(self) -> None:
        """Send held-back messages as far as possible now. `receive` reports a lost connection."""

    @abc.abstractmethod
    def get_sent_target(self) -> int:
        """Return the `sent_count` at which a message will be sent that was not sent at once."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Send unsent data as far as possible now."""

    @abc.abstractmethod
    def receive(self) -> List[Message]:
        """Return the messages that have arrived, an empty list if there are no messages.

        Raises:
            Unavailable: the connection is lost, and all messages that arrived before were returned.
            RemoteProtocolError: the peer violated the protocol.
        """

    def is_idle(self) -> bool:
        """Return whether a descriptor will become readable when there is more to receive or to send."""
        return True

    def mark_broken(self) -> None:
        """Mark the connection as lost. `receive` reports the loss once it has returned all messages that arrived."""
        self.is_broken = True

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connection and drop unsent data. Further calls have no effect."""

    def lost_error(self) -> Unavailable:
        """Return the error for a lost connection."""
        return Unavailable(self._lost_text())

    def not_sent_error(self) -> ConnectionLost:
        """Return the error for a connection that was lost before anything of a message was sent."""
        return ConnectionLost(self._lost_text())

    def _lost_text(self) -> str:
        return f"lost the connection to {self.address}: the daemon exited or closed the connection"


class NotConnected(DaemonConnection):
    """Placeholder before the first connection. It behaves like a lost connection."""

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
        """Raise the error of a lost connection."""
        raise self.lost_error()

    def close(self) -> None:
        """Do nothing."""


class UnixConnection(DaemonConnection):
    """Connection over a unix socket. `unix_connect_steps` creates it. A small message takes one system call."""

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
        """See `DaemonConnection.flush`. `receive` reports a lost connection after all messages that have arrived."""
        with contextlib.suppress(OSError):
            self._stream.flush()
        before, self.unsent_count = self.unsent_count, self._stream.unsent
        self.sent_count += before - self.unsent_count

    def receive(self) -> List[Message]:
        """See `DaemonConnection.receive`. An oversized message lacks frames and is rejected later for that reason."""
        try:
            return self._stream.receive()
        except OSError:
            raise self.lost_error() from None
        except RemoteProtocolError as error:
            raise RemoteProtocolError(
                f"the peer at {self.address} does not speak weightd's protocol: {error}"
            ) from None

    def is_idle(self) -> bool:
        """See `DaemonConnection.is_idle`. Messages that arrived together are returned before the next wait."""
        return not self._stream.has_more

    def mark_broken(self) -> None:
        """See `DaemonConnection.mark_broken`. A thread that polls the socket wakes up."""
        super().mark_broken()
        with contextlib.suppress(OSError):
            self._stream.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See `DaemonConnection.close`. Closes the connection also for copies of the descriptor in forked processes."""
        if not self.closed:
            self.closed = True
            self.mark_broken()
            self._stream.close()


def unix_connect_steps(path: str) -> ConnectSteps[DaemonConnection]:
    """Connect to the unix socket at `path`.

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
