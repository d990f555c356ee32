"""The way of one client's messages through the gate, in both directions, and what of them is on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from weightd.daemon.gate.peers import Connection
from weightd.daemon.gate.unread import Unread
from weightd.protocol.framing import Incoming
from weightd.protocol.limits import MAX_FRAME_BYTES
from weightd.shared.stream import Stream

# What the daemon has for a client that does not read stays there, where it is counted for him: past this, no more is
# fetched. A message of any size is let through.
MAX_UNREAD_BYTES = 1024 * 1024


class Lane:
    """A client's connection on one side, a stream to the daemon on the other.

    Args:
        connection: of the client, which has spoken.
        stream: on which the daemon takes it for the client.
        unread: sends to the client.
    """

    __slots__ = ("_held", "connection", "stream", "unread")

    def __init__(self, connection: Connection, stream: Stream, unread: Unread) -> None:
        self.connection = connection
        self.stream = stream
        self.unread = unread
        # What the library does not take now.
        self._held: deque[Sequence[Any]] = deque()

    @property
    def nbytes(self) -> int:
        """What is kept here of what the client has not read."""
        return self.unread.nbytes + sum(sum(map(len, each)) for each in self._held)

    @property
    def unsent(self) -> int:
        """What is kept here of what the daemon has not read."""
        return self.stream.unsent

    def pass_on(self) -> bool:
        """Give the client what the daemon has for it; return False where it has to read first.

        Raises:
            ConnectionError: the daemon has closed its end; all that it had sent before was passed on.
        """
        held, unread = self._held, self.unread
        for message in self.stream.receive():
            if held or not unread.send(message.frames):
                held.append(message.frames)
        return not held and (unread.nbytes <= MAX_UNREAD_BYTES or self._has_read())

    def go_on(self) -> bool:
        """Give the client what was kept for it; return False where it has to read first."""
        held = self._held
        while held and self.unread.send(held[0]):
            held.popleft()
        return not held and self._has_read()

    def _has_read(self) -> bool:
        self.unread.forget_written()
        return self.unread.nbytes <= MAX_UNREAD_BYTES


def open_stream(connection: Any) -> Stream:
    """Return the stream of a connection to the daemon, from which anything is taken."""
    return Stream(connection, Incoming(max_header_bytes=MAX_FRAME_BYTES))
