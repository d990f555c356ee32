"""Which clients are connected: a ROUTER socket does not tell when one comes or goes, its monitor does."""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from weightd.daemon.sockets import Received
from weightd.protocol import monitor


class Peers:
    """Matches the connections that end to the clients that used them.

    The monitor knows a connection by its file descriptor, and so does each message that came over it. The library
    reports what happens in order: when a message can be read, the end of an earlier connection that had the same
    descriptor has been reported.

    Args:
        socket: bound; its monitor is this object's.

    Attributes:
        monitor: readable when `disconnected` has something to tell.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._connections: dict[int, None] = {}
        self._by_descriptor: dict[int, set[bytes]] = {}
        self._descriptors: dict[bytes, int] = {}
        self._gone: list[bytes] = []

    @property
    def connections(self) -> int:
        """How many there are, of clients and of strangers."""
        return len(self._connections)

    def latest(self, count: int) -> list[int]:
        """Return the descriptors of the connections that came last."""
        return list(self._connections)[-count:] if count > 0 else []

    @property
    def pending(self) -> bool:
        """Whether `disconnected` has something to tell that the monitor does not show any more."""
        return bool(self._gone)

    def seen(self, received: Received) -> None:
        """A message has come from a client."""
        try:
            descriptor = int(received.identity.get(zmq.SRCFD))
        except zmq.ZMQError:
            return  # a peer that speaks an older protocol: nothing is known of its connection
        known = self._descriptors.get(received.peer)
        if known == descriptor:
            return
        self._take_events()
        if received.peer in self._gone:
            self._gone.remove(received.peer)  # it chose its own name, and is back under it
        if known is not None:
            self._by_descriptor.get(known, set()).discard(received.peer)
        self._descriptors[received.peer] = descriptor
        self._by_descriptor.setdefault(descriptor, set()).add(received.peer)

    def disconnected(self) -> Iterator[bytes]:
        """Yield each client that has gone since this was asked last."""
        self._take_events()
        gone, self._gone = self._gone, []
        yield from gone

    def _take_events(self) -> None:
        while True:
            try:
                event = monitor.receive(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            descriptor = event.value
            if event.number == zmq.EVENT_ACCEPTED:
                self._connections[descriptor] = None
                continue
            self._connections.pop(descriptor, None)
            for client in self._by_descriptor.pop(descriptor, set()):
                del self._descriptors[client]
                self._gone.append(client)
