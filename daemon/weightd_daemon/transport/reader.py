"""Reads the messages of clients without ever waiting for one, and lets tenants take turns.

A message costs the daemon's one loop some tens of microseconds, and a client that sends enough of them, of whatever
kind, would have all of its time. So where several users send messages, their connections wait in `TenantReadQueue`.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from weightd_common import memfd
from weightd_common.rate_limits import RoundRobinQueue
from weightd_daemon.config.tenants import MIN_WEIGHT, TenantConfig
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.fd_closer import MAX_PENDING, DescriptorCloser, has_descriptors
from weightd_daemon.platform.log_setup import log_resource_error
from weightd_daemon.scheduling.fair_share import MULTI_TENANT_HOLD_S, FairClock
from weightd_daemon.tenants.tenant import Tenant
from weightd_daemon.transport.connection import ClientConnection
from weightd_daemon.transport.memory_budget import MemoryBudget
from weightd_protocol.errors import InvalidArgument, RemoteProtocolError
from weightd_protocol.framing import Message

# Of one client, before others have their turn.
MAX_MESSAGES_PER_TURN = 16

# Of one tenant, before that of another has its turn.
_TIME_SLICE_S = 1e-4

# So many clients may have sent a descriptor and not yet all of the message with which it goes.
_MAX_AWAITING_MESSAGE = 64

# A read takes at most so many bytes, unless a large frame is under way.
_READ_CHUNK_BYTES = 64 * 1024

_UNCLOSED_DESCRIPTORS_TEXT = (
    f"{MAX_PENDING} descriptors that this user has sent are not closed yet: its connections end"
)


@dataclass(frozen=True)
class ReaderCallbacks:
    """What the reader calls.

    Attributes:
        free_memory: with the key of a client and the bytes that it wants kept; returns whether there is room.
        on_message: with each message, also with those of which not everything was kept.
        disconnect: with a connection that has to end, and why.
        disconnect_invalid: likewise; the client has violated the protocol, and is told.
        on_closed: with a connection whose client has closed it.
    """

    free_memory: Callable[[bytes, int], bool]
    on_message: Callable[[ClientConnection, Message], object]
    disconnect: Callable[[ClientConnection, str], object]
    disconnect_invalid: Callable[[ClientConnection, InvalidArgument], object]
    on_closed: Callable[[ClientConnection], object]


class MessageReader:
    """Reads from connections and calls back with each message.

    Args:
        loop: calls when something can be read.
        memory_budget: counts what is kept for messages that have not come whole.
        callbacks: what it calls.

    Attributes:
        fd_closer: takes descriptors that nobody wants.
    """

    def __init__(self, loop: EventLoop, memory_budget: MemoryBudget, callbacks: ReaderCallbacks) -> None:
        self.fd_closer = DescriptorCloser(log_resource_error)
        self._loop = loop
        self._memory_budget = memory_budget
        self._callbacks = callbacks
        self._awaiting_message: set[ClientConnection] = set()
        self._backlogged: dict[ClientConnection, None] = {}
        self._read_queue = TenantReadQueue()
        # The connections that wait for their turn, and the one whose turn it is.
        self._queued: set[ClientConnection] = set()

    def on_readable(self, connection: ClientConnection) -> None:
        """Something has come, or the client has gone."""
        if self._read_queue.is_contended(connection):
            if connection not in self._queued:
                self._queued.add(connection)
                self._loop.pause_reading(connection.stream.fileno())
                self._read_queue.put(connection)
            self._loop.call_soon(self._serve_queue)
        elif not self._handle_messages(connection):
            self._backlogged[connection] = None
            self._loop.call_soon(self._serve_backlogged)

    def admit_message(self, connection: ClientConnection, nbytes: int) -> bool:
        """A message begins that does not come at once: it takes room from now on."""
        key, memory_budget = connection.key, self._memory_budget
        memory_budget.release(key, connection.incoming_bytes)
        connection.incoming_bytes = 0
        if connection.tenant is None:
            # It is refused, whatever it says.
            return False
        if nbytes > memory_budget.max_bytes or (
            not memory_budget.can_reserve(nbytes) and not self._callbacks.free_memory(key, nbytes)
        ):
            return False
        memory_budget.reserve(key, nbytes)
        connection.incoming_bytes = nbytes
        return True

    def reject_descriptors(self, connection: ClientConnection) -> None:
        """Have those closed that a client has sent, and nobody wants."""
        while connection.stream.descriptors:
            self.fd_closer.close(connection.limit_account, connection.stream.descriptors.popleft())
        if self.fd_closer.is_backlogged(connection.limit_account):
            self._callbacks.disconnect(connection, _UNCLOSED_DESCRIPTORS_TEXT)

    def forget(self, connection: ClientConnection) -> None:
        """Read nothing more from a connection, and drop what was read and not handled."""
        self._backlogged.pop(connection, None)
        connection.backlog.clear()
        if connection in self._queued:
            self._queued.discard(connection)
            self._read_queue.remove(connection)

    def _serve_backlogged(self) -> None:
        """Go on with those who have sent more at once than was handled, after all others had their turn."""
        backlogged, self._backlogged = self._backlogged, {}
        for connection in backlogged:
            if not connection.is_closing:
                self.on_readable(connection)

    def _serve_queue(self) -> None:
        """Handle what one connection has sent, for a moment, where several users speak."""
        if not self._read_queue:
            return
        started_at = event_loop.now()
        tenant, connection = self._read_queue.take()
        is_done = self._handle_messages(connection, started_at + _TIME_SLICE_S)
        if connection in self._queued:
            if is_done:
                self._queued.discard(connection)
                self._loop.resume_reading(connection.stream.fileno())
            else:
                self._read_queue.put(connection)
        self._read_queue.on_served(tenant, event_loop.now() - started_at)
        if self._read_queue:
            self._loop.call_soon(self._serve_queue)

    def _handle_messages(self, connection: ClientConnection, deadline: float = math.inf) -> bool:
        """Handle what was read, or read once, so that others have their turn; return whether that is all for now."""
        messages = connection.backlog or self._read_messages(connection)
        while messages:
            connection.has_sent_message = True
            self._callbacks.on_message(connection, messages.popleft())
            if connection.is_closing:
                # That was its last.
                messages.clear()
                return True
            if messages and deadline < math.inf and event_loop.now() >= deadline:
                connection.backlog = messages
                return False
        if connection.stream.descriptors:
            self._wait_for_message(connection)
        return not connection.stream.frame_reader.is_backlogged

    def _read_messages(self, connection: ClientConnection) -> deque[Message]:
        stream = connection.stream
        incoming = stream.frame_reader
        # Of a large frame so much is read at once that it cannot be looked at before.
        if (
            connection.identity.is_direct
            and self.fd_closer.pending
            and self.fd_closer.is_backlogged(connection.limit_account)
            and (incoming.missing_bytes > _READ_CHUNK_BYTES or has_descriptors(stream.connection, _READ_CHUNK_BYTES))
        ):
            self._callbacks.disconnect_invalid(connection, InvalidArgument(_UNCLOSED_DESCRIPTORS_TEXT))
            return deque()
        try:
            messages = incoming.receive(b"") if incoming.is_backlogged else stream.receive()
        except ConnectionError:
            self._callbacks.on_closed(connection)
            return deque()
        except RemoteProtocolError as error:
            # Nobody can tell where its next message would begin.
            self._callbacks.disconnect_invalid(connection, InvalidArgument(str(error)))
            return deque()
        if stream.descriptors and not self._may_keep_descriptors(connection):
            return deque()
        if connection.incoming_bytes and not incoming.admitted_bytes:
            self._memory_budget.release(connection.key, connection.incoming_bytes)
            connection.incoming_bytes = 0
        return deque(messages)

    def _wait_for_message(self, connection: ClientConnection) -> None:
        """A client's descriptors are there: they are refused where no message is that they may go with."""
        if connection.stream.frame_reader.is_idle:
            self.reject_descriptors(connection)
            return
        self._awaiting_message = {each for each in self._awaiting_message if each.stream.descriptors} | {connection}
        if len(self._awaiting_message) > _MAX_AWAITING_MESSAGE:
            users = Counter(each.user for each in self._awaiting_message)
            largest = max(self._awaiting_message, key=lambda each: (users[each.user], each.connected_at))
            self._awaiting_message.discard(largest)
            self._callbacks.disconnect(
                largest, "its user has sent most descriptors without the messages that these go with"
            )

    def _may_keep_descriptors(self, connection: ClientConnection) -> bool:
        """Return whether the client has sent descriptors of memory alone; hang it up otherwise."""
        if all(map(memfd.is_memory, connection.stream.descriptors)):
            return True
        text = "descriptors: expected a memfd, got a descriptor of something else"
        self._callbacks.disconnect_invalid(connection, InvalidArgument(text))
        return False


# Those whose messages are all refused are one, and no tenant has less weight.
_NO_TENANT_QUEUE = Tenant("(no tenant)", TenantConfig(weight=MIN_WEIGHT))


class TenantReadQueue:
    """Connections from which something has come that has not been read: whose messages the daemon reads next.

    The tenant is next that has had least of the loop's time, by its weight: a clock like that of a device. The users of
    one tenant take turns, and so do all users where there are no tenants. Plain decisions, fed with the clock.
    """

    def __init__(self) -> None:
        self._clock = FairClock()
        # The connections of each tenant, by user.
        self._queues: dict[Tenant, RoundRobinQueue[ClientConnection]] = {}
        # Where each connection waits. A reload may change its tenant or user meanwhile.
        self._positions: dict[ClientConnection, tuple[Tenant, str]] = {}
        self._last_sender: tuple[Tenant, str] | None = None
        self._contended_until = -float("inf")

    def is_contended(self, connection: ClientConnection) -> bool:
        """A user speaks: return whether another one has within `MULTI_TENANT_HOLD_S`.

        While one alone does, this costs no look at a clock.
        """
        sender = (connection.tenant or _NO_TENANT_QUEUE, connection.origin.principal)
        if sender != self._last_sender:
            if self._last_sender is not None:
                self._contended_until = event_loop.now() + MULTI_TENANT_HOLD_S
            self._last_sender = sender
        elif self._contended_until < 0.0:
            return False
        if event_loop.now() < self._contended_until:
            return True
        self._contended_until = -float("inf")
        return bool(self._queues)

    def put(self, connection: ClientConnection) -> None:
        """Something has come from it."""
        tenant, user = connection.tenant or _NO_TENANT_QUEUE, connection.origin.principal
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = RoundRobinQueue()
            self._clock.add_active(tenant)
        queue.put(user, connection)
        self._positions[connection] = tenant, user

    def __bool__(self) -> bool:
        return bool(self._queues)

    def take(self) -> tuple[Tenant, ClientConnection]:
        """Return whose turn it is, and take it out; it may wait again, behind the others of its user."""
        tenant = min(self._queues, key=self._clock.sort_key)
        connection = self._queues[tenant].take()
        del self._positions[connection]
        return tenant, connection

    def on_served(self, tenant: Tenant, seconds: float) -> None:
        """The one that was taken last has had so much of the loop's time, and waits again if it has to."""
        self._clock.start_batch({tenant: 1.0}, 0.0).settle(seconds)
        queue = self._queues.get(tenant)
        # It is gone already where the others in it were hung up meanwhile.
        if queue is not None and not queue:
            del self._queues[tenant]
            self._clock.remove_active(tenant)

    def remove(self, connection: ClientConnection) -> None:
        """A connection has closed; it may be the one that was taken last, which does not wait."""
        if connection not in self._positions:
            return
        tenant, user = self._positions.pop(connection)
        queue = self._queues[tenant]
        queue.remove(user, connection)
        if not queue:
            del self._queues[tenant]
            self._clock.remove_active(tenant)
