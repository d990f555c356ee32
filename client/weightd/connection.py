"""The connection of a client to a daemon, and the one over a Unix socket: one system call for a small message.

A connection never waits: it says what to wait for. It is connected when it is made, and once it is lost nothing but
another one helps.
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

# How something is made that has to be waited for: each step gives a descriptor that will be readable when there is more
# to do, or None where all that can be done is to try again in a while.
ConnectSteps = Generator[Optional[int], None, C]


class ConnectionLost(Unavailable):
    """The daemon has hung up, and nothing of the message was sent."""


class DaemonConnection(abc.ABC):
    """One connection to a daemon, until it is lost or closed.

    One thread at a time may `receive`, `close` and ask `is_idle`; another one at the same time `send` and `flush`.

    Attributes:
        transport: what it is made of.
        address: who is at the other end, for people.
        descriptors: readable when something may be received, has been sent or is lost.
        accepts_descriptors: whether a message may have some.
        is_level_triggered: whether there is one, a socket: readable as long as something can be received, and to be
            waited for until it is writable where something is unsent. Else `is_idle` is to be asked before each wait.
        closed: whether it is of no use any more.
        is_broken: whether it will be found lost, or was.
        unsent: how much waits until the daemon reads.
        sent: how much of what did not go at once is sent by now, in what `unsent` counts.
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
    """Send the frames of a message, and descriptors; return whether all of it has gone.

    What has not, and what comes after it, goes with `flush`: `left` is told. Large frames are not copied.

    Raises:
        OSError: the connection is lost.
    """

    @abc.abstractmethod
    def cork(self) -> None:
        """Messages may be kept back until `uncork`: more come at once."""

    @abc.abstractmethod
    def uncork(self) -> None:
        """Send what was kept back, as far as it goes now; that the connection is lost is told by `receive`."""

    @abc.abstractmethod
    def get_sent_target(self) -> int:
        """A message has not gone at once: return what `sent` will be when it has."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Send what is left, as far as it goes now."""

    @abc.abstractmethod
    def receive(self) -> List[Message]:
        """Return messages that have come, none where there is none now.

        Raises:
            Unavailable: the connection is lost, and all that had come before is read.
            RemoteProtocolError: who is there breaks the protocol.
        """

    def is_idle(self) -> bool:
        """Whether a descriptor will be readable before there is more to receive, or to send."""
        return True

    def mark_broken(self) -> None:
        """Have it found lost, by `receive`, once what has come is received: nothing can be sent any more."""
        self.is_broken = True

    @abc.abstractmethod
    def close(self) -> None:
        """Hang up; what is unsent is dropped. The second time does nothing."""

    def lost_error(self) -> Unavailable:
        """Return the error of who finds it lost."""
        return Unavailable(self._lost_text())

    def not_sent_error(self) -> ConnectionLost:
        """Return the error of who finds it lost before anything of a message is sent."""
        return ConnectionLost(self._lost_text())

    def _lost_text(self) -> str:
        return f"the connection to {self.address} is lost: the daemon has ended, or has hung up"


class NotConnected(DaemonConnection):
    """Where there is no connection yet."""

    transport = ""
    is_level_triggered = False

    def __init__(self) -> None:
        super().__init__("")
        self.closed = self.is_broken = True

    def send(self, frames: List[Any], descriptors: Sequence[int] = ()) -> bool:
        """It is lost."""
        raise ConnectionResetError

    def cork(self) -> None:
        """There is nothing."""

    def uncork(self) -> None:
        """There is nothing."""

    def get_sent_target(self) -> int:
        """There is nothing."""
        return 0

    def flush(self) -> None:
        """There is nothing."""

    def receive(self) -> List[Message]:
        """It is lost."""
        raise self.lost_error()

    def close(self) -> None:
        """It is closed."""


class UnixConnection(DaemonConnection):
    """A connected socket. Made by `unix_connect_steps`."""

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
        """As `DaemonConnection.cork`."""
        self._stream.cork()

    def uncork(self) -> None:
        """As `DaemonConnection.uncork`."""
        with contextlib.suppress(OSError):
            self._stream.uncork()
        self.unsent_count = self._stream.unsent

    def get_sent_target(self) -> int:
        """As `DaemonConnection.get_sent_target`."""
        self.unsent_count = self._stream.unsent
        return self.sent_count + self.unsent_count

    def flush(self) -> None:
        """As `DaemonConnection.flush`. That it is lost is told by `receive`, after what has come."""
        with contextlib.suppress(OSError):
            self._stream.flush()
        before, self.unsent_count = self.unsent_count, self._stream.unsent
        self.sent_count += before - self.unsent_count

    def receive(self) -> List[Message]:
        """As `DaemonConnection.receive`. One that was too long to be kept lacks frames, and is refused for that."""
        try:
            return self._stream.receive()
        except OSError:
            raise self.lost_error() from None
        except RemoteProtocolError as error:
            raise RemoteProtocolError(
                f"what answers at {self.address} does not speak as weightd does: {error}"
            ) from None

    def is_idle(self) -> bool:
        """As `DaemonConnection.is_idle`, to whom that is asked: what has come together is to be answered together."""
        return not self._stream.has_more

    def mark_broken(self) -> None:
        """As `DaemonConnection.mark_broken`. Who waits for it wakes up."""
        super().mark_broken()
        with contextlib.suppress(OSError):
            self._stream.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """As `DaemonConnection.close`: also for the copies that forked processes have."""
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
