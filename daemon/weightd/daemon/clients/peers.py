"""Which clients are connected: a ROUTER socket does not tell when one comes or goes, its monitor does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq

from weightd.daemon.clients import connections
from weightd.daemon.host.sockets import Received
from weightd.daemon.requests.request import Origin
from weightd.shared import monitor


@dataclass(eq=False, slots=True)
class Connection:
    """One that was accepted and has not ended.

    Attributes:
        user: on whose account it goes, see `connections.user`.
        since: when it was accepted.
        heard: when its last whole message was read; None before the first.
        leaving: it was shut down, and its end has not been told yet.
    """

    descriptor: int
    user: str
    since: float
    heard: float | None = None
    leaving: bool = False

    def hang_up(self) -> None:
        """Shut it down; what its clients asked ends when the library tells of it."""
        self.leaving = True
        connections.shut_down(self.descriptor)


class Peers:
    """Matches the connections that end to the clients that used them.

    The monitor knows a connection by its file descriptor, and so does each message that came over it. The library
    reports what happens in order: when a message can be read, the end of an earlier connection that had the same
    descriptor has been reported.

    Args:
        socket: bound; its monitor is this object's.
        clock: monotonic seconds.

    Attributes:
        monitor: readable when `disconnected` has something to tell.
        connections: those of clients and of strangers by descriptor, the oldest first.
        silent: those of them that have not been heard, likewise.
    """

    def __init__(self, socket: zmq.Socket[bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._clock = clock
        self.connections: dict[int, Connection] = {}
        self.silent: dict[int, Connection] = {}
        self._by_descriptor: dict[int, set[bytes]] = {}
        self._descriptors: dict[bytes, int] = {}
        self._origins: dict[bytes, Origin] = {}
        self._gone: list[bytes] = []

    def connection(self, client: bytes) -> Connection | None:
        """Return the connection of a client; None where nothing is known of it, or it is gone."""
        descriptor = self._descriptors.get(client)
        return None if descriptor is None else self.connections.get(descriptor)

    def clients_of(self, connection: Connection) -> frozenset[bytes]:
        """Return the clients that have spoken over a connection."""
        return frozenset(self._by_descriptor.get(connection.descriptor, ()))

    @property
    def any_named(self) -> bool:
        """Whether a client that is connected has chosen its own routing id: the library's begin with a zero byte."""
        return any(not client.startswith(b"\0") for client in self._descriptors)

    @property
    def pending(self) -> bool:
        """Whether `disconnected` has something to tell that the monitor does not show any more."""
        return bool(self._gone)

    def seen(self, received: Received, now: float) -> None:
        """A message has come from a client."""
        try:
            descriptor = int(received.identity.get(zmq.SRCFD))
        except zmq.ZMQError:
            return  # a peer that speaks an older protocol: nothing is known of its connection
        if not received.peer.startswith(b"\0"):
            # Who has a name of its own may be back on the descriptor that it had: only the monitor tells.
            self._take_events()
        known = self._descriptors.get(received.peer)
        if known != descriptor:
            self._met(received.peer, descriptor, known)
        connection = self.connections.get(descriptor)
        if connection is not None:
            if connection.heard is None:
                self.silent.pop(descriptor, None)
            connection.heard = now

    def origin(self, client: bytes) -> Origin:
        """Return who the client is, as the kernel knew it when its first message came."""
        return self._origins.get(client) or Origin(f"connection {client.hex()}", "an unknown address")

    def disconnected(self) -> Iterator[bytes]:
        """Yield each client that has gone since this was asked last."""
        self._take_events()
        gone, self._gone = self._gone, []
        yield from gone

    def _met(self, client: bytes, descriptor: int, known: int | None) -> None:
        self._take_events()
        if client in self._gone:
            self._gone.remove(client)  # it chose its own name, and is back under it
        if known is not None:
            self._by_descriptor.get(known, set()).discard(client)
        self._descriptors[client] = descriptor
        self._origins[client] = connections.origin(descriptor, client)
        self._by_descriptor.setdefault(descriptor, set()).add(client)

    def _take_events(self) -> None:
        while True:
            try:
                event = monitor.receive(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            descriptor = event.value
            if event.number == zmq.EVENT_ACCEPTED:
                self.silent.pop(descriptor, None)
                came = Connection(descriptor, connections.user(descriptor), self._clock())
                self.connections[descriptor] = self.silent[descriptor] = came
                continue
            self.connections.pop(descriptor, None)
            self.silent.pop(descriptor, None)
            for client in self._by_descriptor.pop(descriptor, set()):
                del self._descriptors[client], self._origins[client]
                self._gone.append(client)
