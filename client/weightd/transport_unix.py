"""A connection over the daemon's unix socket. No thread, and one call of the kernel for a small message."""

from __future__ import annotations

import contextlib
import socket
from typing import List

from weightd.address import connect_unix, new_unix_socket
from weightd.connection import ConnectSteps, DaemonConnection
from weightd_common.stream import Stream, enlarge_send_buffer
from weightd_protocol import limits
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import FrameReader, Message


class UnixConnection(DaemonConnection):
    """A connected socket. Made by `connect_steps`."""

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
        """As `DaemonConnection.spoil`. Who waits for it wakes up."""
        super().mark_broken()
        with contextlib.suppress(OSError):
            self._stream.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """As `DaemonConnection.close`: also for the copies that forked processes have."""
        if not self.closed:
            self.closed = True
            self.mark_broken()
            self._stream.close()


def connect_steps(path: str) -> ConnectSteps[DaemonConnection]:
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
