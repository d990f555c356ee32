"""Who is connected: what the library's monitor tells of connections, matched with the messages that come over them."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from weightd.daemon.gate import kernel
from weightd.daemon.gate.link import PeerIdentity
from weightd.shared import monitor


class Connection:
    """One that was accepted and has not ended.

    Args:
        descriptor: the library's.
        identity: of the other end.
        since: when it was accepted.

    Attributes:
        route: the routing id of its messages; empty before the first.
        heard: when its last whole message was read; None before the first.
        leaving: it was shut down, and its end has not been told yet.
    """

    __slots__ = ("descriptor", "heard", "identity", "leaving", "route", "since")

    def __init__(self, descriptor: int, identity: PeerIdentity, since: float) -> None:
        self.descriptor = descriptor
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
        kernel.shut_down(self.descriptor)


class Peers:
    """Knows the connections of a ROUTER socket.

    The monitor knows a connection by its file descriptor, and so does each message that came over it. The library
    reports what happens in order: when a message can be read, the end of an earlier connection that had the same
    descriptor has been reported.

    Args:
        socket: bound or not yet; its monitor is this object's.
        clock: monotonic seconds.

    Attributes:
        monitor: readable when `ended` may have something to tell.
        connections: by descriptor, the oldest first.
        silent: those of them that have not been heard, likewise.
    """

    def __init__(self, socket: zmq.Socket[bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._socket = socket
        self._clock = clock
        self.connections: dict[int, Connection] = {}
        self.silent: dict[int, Connection] = {}
        self._by_route: dict[bytes, Connection] = {}
        self._ended: list[Connection] = []

    @property
    def any_named(self) -> bool:
        """Whether a client that is connected has chosen its own routing id: the library's begin with a zero byte."""
        return any(not route.startswith(b"\0") for route in self._by_route)

    def close(self) -> None:
        """Close the monitor."""
        self._socket.disable_monitor()
        self.monitor.close()

    def is_there(self, connection: Connection) -> bool:
        """Return whether the connection has not ended, as far as was told."""
        return self.connections.get(connection.descriptor) is connection

    def known(self, route: bytes) -> Connection | None:
        """Return the connection over which messages with this routing id come, where that needs no look at the monitor.

        An id that the library has given belongs to one connection; who has a name of its own may be back with it.
        """
        return self._by_route.get(route) if route.startswith(b"\0") else None

    def sender(self, identity: zmq.Frame) -> Connection | None:
        """Return the connection over which a message came, by its first frame.

        None where it has ended by now, and where nothing is known of it: who speaks a ZMTP before 3.
        """
        route = identity.bytes
        try:
            descriptor = int(identity.get(zmq.SRCFD))
        except zmq.ZMQError:
            return None
        self._take_events()
        connection = self.connections.get(descriptor)
        if connection is None or connection.route not in (b"", route):
            return None
        if not connection.route:
            connection.route = route
            self.silent.pop(descriptor, None)
        self._by_route[route] = connection
        return connection

    def ended(self) -> list[Connection]:
        """Return those that have ended since this was asked last."""
        self._take_events()
        ended, self._ended = self._ended, []
        return ended

    @property
    def pending(self) -> bool:
        """Whether `ended` has something to tell that the monitor does not show any more."""
        return bool(self._ended)

    def _take_events(self) -> None:
        while True:
            try:
                event = monitor.receive(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            descriptor = event.value
            if event.number == zmq.EVENT_ACCEPTED:
                came = Connection(descriptor, kernel.identity(descriptor), self._clock())
                self.connections[descriptor] = self.silent[descriptor] = came
                continue
            self.silent.pop(descriptor, None)
            gone = self.connections.pop(descriptor, None)
            if gone is not None:
                if self._by_route.get(gone.route) is gone:
                    del self._by_route[gone.route]
                self._ended.append(gone)
