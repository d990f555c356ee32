"""Who is connected: what the library's monitor tells of connections, matched with the messages that come over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import zmq

from weightd.daemon.gate import kernel
from weightd.daemon.gate.handshakes import Handshakes, mark
from weightd.daemon.gate.kernel import Handle
from weightd.daemon.gate.link import PeerIdentity
from weightd.daemon.host import clock
from weightd.shared import monitor


class Connection:
    """One that was accepted and has not ended.

    Args:
        number: of how many were accepted up to it.
        handle: of the library's socket.
        identity: of the other end.
        since: when it was accepted.

    Attributes:
        descriptor: the library's.
        route: the routing id of its messages; empty before the first.
        heard: when its last whole message was read; None before the first.
        leaving: it was shut down, and its end has not been told yet.
    """

    __slots__ = ("descriptor", "handle", "heard", "identity", "leaving", "number", "route", "since")

    def __init__(self, number: int, handle: Handle, identity: PeerIdentity, since: float) -> None:
        self.number = number
        self.handle = handle
        self.descriptor = handle.descriptor
        self.identity = identity
        self.since = since
        self.route = b""
        self.heard: float | None = None
        self.leaving = False

    @property
    def user(self) -> str:
        """On whose account it goes: a user, over TCP a host."""
        return self.identity.host if self.identity.uid is None else f"uid {self.identity.uid}"

    @property
    def has_spoken(self) -> bool:
        """Whether a whole message of it was read."""
        return self.heard is not None

    def hang_up(self) -> None:
        """Shut it down: its end is told later."""
        self.leaving = True
        kernel.shut_down(self.handle)


class Peers:
    """Knows the connections of a ROUTER socket.

    The library's monitor knows a connection by its file descriptor, and so does each message that came over it. But a
    message may be read after its connection has ended, and the next one has the same number then. So a connection that
    shakes hands is marked with how many were accepted by then, the monitor having been read: what it has on its
    descriptor at that moment is this connection, or it has ended and can send nothing. A message belongs to what is now
    on its descriptor if that was accepted up to its mark, else its connection has ended.

    Args:
        socket: not bound yet; its monitor is this object's.
        keys: of CURVE that are let in, see `Terms`.
        clock: monotonic seconds.

    Attributes:
        sources: sockets; one of them is readable when `ended` may have something to do.
        connections: by descriptor, the oldest first.
        silent: those of them that have not been heard, likewise.
        given: those who have no routing id of their own, by the one that the library has given them: no other can have
            that. Who has chosen one may have gone, and be back with it.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        keys: Iterable[str] | None = None,
        clock: Callable[[], float] = clock.now,
    ) -> None:
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._handshakes = Handshakes(socket, keys)
        self.sources = (self._monitor, self._handshakes.socket)
        self._socket = socket
        self._clock = clock
        self._accepted = 0
        self.connections: dict[int, Connection] = {}
        self.silent: dict[int, Connection] = {}
        self.given: dict[bytes, Connection] = {}
        self._named: dict[bytes, Connection] = {}

    def admit(self, keys: Iterable[str] | None) -> None:
        """From now on clients with these keys are let in. Who is there stays: what he may, the daemon says."""
        self._handshakes.know(keys)

    @property
    def any_named(self) -> bool:
        """Whether a client that is connected has chosen its own routing id."""
        return bool(self._named)

    def close(self) -> None:
        """Learn nothing any more."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._handshakes.close()

    def is_there(self, connection: Connection) -> bool:
        """Return whether the connection has not ended, as far as was told."""
        return self.connections.get(connection.descriptor) is connection

    def sender(self, route: bytes, frame: zmq.Frame) -> Connection | None:
        """Return the connection over which a message came, by its routing id and a frame; None where it has ended."""
        try:
            descriptor, (accepted, key) = int(frame.get(zmq.SRCFD)), mark(frame)
        except zmq.ZMQError:
            return None  # the library knows nothing of one that had gone when it was accepted
        connection = self.connections.get(descriptor)
        if connection is None or connection.number > accepted:
            return None
        if not connection.route:
            connection.route = route
            connection.identity = connection.identity._replace(key=key)
            self.silent.pop(descriptor, None)
        self._with(route)[route] = connection
        return connection

    def ended(self) -> list[Connection]:
        """Let in who has come; return those that have ended since this was asked last."""
        # What the monitor tells is read after the request, and before it is answered: see above.
        waiting = self._handshakes.read()
        ended = self._read_monitor()
        self._handshakes.admit(waiting, self._accepted)
        return ended

    def _read_monitor(self) -> list[Connection]:
        ended: list[Connection] = []
        while True:
            try:
                event = monitor.receive(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return ended
            descriptor = event.value
            if event.number == zmq.EVENT_ACCEPTED:
                self._accepted += 1
                # If this is another one by now, then the end of the one that was accepted is told already, and read
                # below.
                handle = kernel.handle(descriptor)
                came = Connection(self._accepted, handle, kernel.identity(handle), self._clock())
                self.connections[descriptor] = self.silent[descriptor] = came
                continue
            self.silent.pop(descriptor, None)
            gone = self.connections.pop(descriptor, None)
            if gone is not None:
                known = self._with(gone.route)
                if known.get(gone.route) is gone:
                    del known[gone.route]
                ended.append(gone)

    def _with(self, route: bytes) -> dict[bytes, Connection]:
        """Return those who have such routing ids: the library's begin with a zero byte."""
        return self.given if route.startswith(b"\0") else self._named
