"""Non-blocking reader of client messages, with fair shares of the daemon's event loop for tenants.

A message takes tens of microseconds of the event loop's time, so a client that sends enough messages could use all of
this time. Therefore, while several users send messages, their connections wait in `TenantReadQueue`.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weightd_common import memfd
from weightd_common.rate_limits import RoundRobinQueue
from weightd_daemon.config.tenants import MIN_WEIGHT, TenantConfig
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import EventLoop, Timer
from weightd_daemon.platform.fd_closer import MAX_PENDING, DescriptorCloser, has_descriptors
from weightd_daemon.platform.log_setup import log_resource_error
from weightd_daemon.scheduling.fair_share import MULTI_TENANT_HOLD_S, FairClock
from weightd_daemon.tenants.tenant import Tenant
from weightd_daemon.transport.connection import ClientConnection
from weightd_daemon.transport.memory_budget import MemoryBudget
from weightd_protocol.errors import InvalidArgument, RemoteProtocolError
from weightd_protocol.framing import Message

# Maximum number of messages of one client that are handled before other clients are served.
MAX_MESSAGES_PER_TURN = 16

# Maximum seconds for which one connection is served before another tenant is served.
_TIME_SLICE_S = 1e-4

# Maximum number of clients that have sent a descriptor, but not yet the complete message that refers to it.
_MAX_AWAITING_MESSAGE = 64

# Maximum bytes of one read, except within a large frame.
_READ_CHUNK_BYTES = 64 * 1024

# While many descriptors of a user are not closed yet, further ones stay unread. They are read as soon as the number has
# fallen; the reader checks this in intervals. A connection that would have to wait longer than the maximum is closed.
_CLOSING_CHECK_INTERVAL_S = 0.02
_MAX_CLOSING_WAIT_S = 5.0

_UNCLOSED_DESCRIPTORS_TEXT = f"{MAX_PENDING} descriptors of this user are not closed yet; closing this connection"


@dataclass(frozen=True)
class ReaderCallbacks:
    """Callbacks of `MessageReader`.

    Attributes:
        free_memory: called with the key of a client and the number of bytes to reserve for this client; frees memory,
            and returns whether the bytes can be reserved now.
        on_message: called with each message, even if not all of its frames were kept.
        disconnect: called with a connection to close, and the reason for the log.
        disconnect_invalid: called with a connection to close because its client violated the protocol, and the error to
            send to the client.
        on_closed: called with a connection that its client has closed.
    """

    free_memory: Callable[[bytes, int], bool]
    on_message: Callable[[ClientConnection, Message], object]
    disconnect: Callable[[ClientConnection, str], object]
    disconnect_invalid: Callable[[ClientConnection, InvalidArgument], object]
    on_closed: Callable[[ClientConnection], object]


class MessageReader:
    """Reads messages from connections, and passes each message on to a callback.

    Args:
        loop: reports readable connections.
        memory_budget: counts the bytes of messages that were received in part.
        callbacks: receives messages and events.

    Attributes:
        fd_closer: closes the unused descriptors that clients have sent.
    """

    def __init__(self, loop: EventLoop, memory_budget: MemoryBudget, callbacks: ReaderCallbacks) -> None:
        self.fd_closer = DescriptorCloser(log_resource_error)
        self._loop = loop
        self._memory_budget = memory_budget
        self._callbacks = callbacks
        self._on_message = callbacks.on_message
        self._awaiting_message: set[ClientConnection] = set()
        self._backlogged: dict[ClientConnection, None] = {}
        self._read_queue = TenantReadQueue()
        # The connections in the read queue, and the one that is being served.
        self._queued: set[ClientConnection] = set()
        # By connection that waits until descriptors of its user are closed: when it has waited too long.
        self._closing_deadlines: dict[ClientConnection, float] = {}
        self._closing_timer = Timer(self._check_closing)
        loop.add_timer(self._closing_timer)

    def on_readable(self, connection: ClientConnection) -> None:
        """Read from a connection at once, or queue the connection while several users send messages."""
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
        """Reserve memory for the rest of a message; return False to drop all of the message but its header."""
        key, memory_budget = connection.key, self._memory_budget
        memory_budget.release(key, connection.incoming_bytes)
        connection.incoming_bytes = 0
        if connection.tenant is None:
            # Each message of a client without a tenant is rejected. The reply needs only the header of the message.
            return False
        if nbytes > memory_budget.max_bytes or (
            not memory_budget.can_reserve(nbytes) and not self._callbacks.free_memory(key, nbytes)
        ):
            return False
        memory_budget.reserve(key, nbytes)
        connection.incoming_bytes = nbytes
        return True

    def reject_descriptors(self, connection: ClientConnection) -> None:
        """Close the descriptors that a client has sent, and to which no message refers."""
        while connection.stream.descriptors:
            self.fd_closer.close(connection.limit_account, connection.stream.descriptors.popleft())
        if self.fd_closer.is_backlogged(connection.limit_account):
            self._callbacks.disconnect(connection, _UNCLOSED_DESCRIPTORS_TEXT)

    def forget(self, connection: ClientConnection) -> None:
        """Stop reading from a connection, and drop its messages that were read but not handled."""
        self._backlogged.pop(connection, None)
        self._closing_deadlines.pop(connection, None)
        connection.backlog = ()
        if connection in self._queued:
            self._queued.discard(connection)
            self._read_queue.remove(connection)

    def _serve_backlogged(self) -> None:
        """Continue with the connections that have more messages than one turn of the event loop handles."""
        backlogged, self._backlogged = self._backlogged, {}
        for connection in backlogged:
            if not connection.is_closing:
                self.on_readable(connection)

    def _serve_queue(self) -> None:
        """Serve the next connection in the queue for one time slice."""
        if not self._read_queue:
            return
        started_at = event_loop.now()
        tenant, connection = self._read_queue.take()
        is_done = self._handle_messages(connection, started_at + _TIME_SLICE_S)
        if connection in self._queued:
            if is_done:
                self._queued.discard(connection)
                if connection not in self._closing_deadlines:
                    self._loop.resume_reading(connection.stream.fileno())
            else:
                self._read_queue.put(connection)
        self._read_queue.on_served(tenant, event_loop.now() - started_at)
        if self._read_queue:
            self._loop.call_soon(self._serve_queue)

    def _handle_messages(self, connection: ClientConnection, deadline: float = math.inf) -> bool:
        """Handle the backlog of a connection, or read once if it is empty; return whether no message is left."""
        messages = connection.backlog
        if messages:
            connection.backlog = ()
        else:
            messages = self._read_messages(connection)
        is_timed = deadline < math.inf
        remaining = iter(messages)
        for message in remaining:
            connection.has_sent_message = True
            self._on_message(connection, message)
            if connection.is_closing:
                # The callback has closed the connection, so drop the messages that are left.
                return True
            if is_timed and event_loop.now() >= deadline:
                connection.backlog = [*remaining]
                if connection.backlog:
                    return False
        if connection.stream.descriptors:
            self._wait_for_message(connection)
        return not connection.stream.frame_reader.is_backlogged

    def _read_messages(self, connection: ClientConnection) -> Sequence[Message]:
        stream = connection.stream
        incoming = stream.frame_reader
        # A read within a large frame is too long to be checked for descriptors, so it waits as if it contained some.
        if (
            self.fd_closer.pending
            and connection.identity.is_direct
            and not incoming.is_backlogged
            and self.fd_closer.is_backlogged(connection.limit_account)
            and (incoming.missing_bytes > _READ_CHUNK_BYTES or has_descriptors(stream.connection, _READ_CHUNK_BYTES))
        ):
            self._wait_for_closing(connection)
            return ()
        try:
            messages = incoming.receive(b"") if incoming.is_backlogged else stream.receive()
        except ConnectionError:
            self._callbacks.on_closed(connection)
            return ()
        except RemoteProtocolError as error:
            # After an error in the framing, the start of the next message cannot be found, so the client is
            # disconnected.
            self._callbacks.disconnect_invalid(connection, InvalidArgument(str(error)))
            return ()
        if stream.descriptors and not self._may_keep_descriptors(connection):
            return ()
        if connection.incoming_bytes and not incoming.admitted_bytes:
            self._memory_budget.release(connection.key, connection.incoming_bytes)
            connection.incoming_bytes = 0
        return messages

    def _wait_for_closing(self, connection: ClientConnection) -> None:
        """Read nothing from a connection until enough descriptors of its user are closed."""
        self._loop.pause_reading(connection.stream.fileno())
        now = event_loop.now()
        self._closing_deadlines.setdefault(connection, now + _MAX_CLOSING_WAIT_S)
        self._closing_timer.set_no_later_than(now + _CLOSING_CHECK_INTERVAL_S)

    def _check_closing(self, now: float) -> None:
        """Read again where enough descriptors of the user are closed; close connections that have waited too long."""
        is_backlogged = functools.cache(self.fd_closer.is_backlogged)
        for connection, deadline in [*self._closing_deadlines.items()]:
            if connection.is_closing:
                continue
            if not is_backlogged(connection.limit_account):
                del self._closing_deadlines[connection]
                self._loop.resume_reading(connection.stream.fileno())
            elif now >= deadline:
                self._callbacks.disconnect_invalid(connection, InvalidArgument(_UNCLOSED_DESCRIPTORS_TEXT))
        if self._closing_deadlines:
            self._closing_timer.set_no_later_than(now + _CLOSING_CHECK_INTERVAL_S)

    def _wait_for_message(self, connection: ClientConnection) -> None:
        """Keep a client's descriptors until their message is complete; reject them if no message has begun.

        If too many connections have such descriptors, the daemon chooses the user that has the most of these
        connections, and disconnects the newest one.
        """
        if connection.stream.frame_reader.is_idle:
            self.reject_descriptors(connection)
            return
        self._awaiting_message = {each for each in self._awaiting_message if each.stream.descriptors} | {connection}
        if len(self._awaiting_message) > _MAX_AWAITING_MESSAGE:
            users = Counter(each.user for each in self._awaiting_message)
            largest = max(self._awaiting_message, key=lambda each: (users[each.user], each.connected_at))
            self._awaiting_message.discard(largest)
            self._callbacks.disconnect(largest, "its user has sent the most descriptors without their messages")

    def _may_keep_descriptors(self, connection: ClientConnection) -> bool:
        """Return whether all descriptors of a client are memfds; disconnect the client otherwise."""
        if all(map(memfd.is_memory, connection.stream.descriptors)):
            return True
        text = "descriptors: expected a memfd, got a descriptor of something else"
        self._callbacks.disconnect_invalid(connection, InvalidArgument(text))
        return False


# The clients without a tenant share one queue, with the lowest weight that a tenant can have.
_NO_TENANT_QUEUE = Tenant("(no tenant)", TenantConfig(weight=MIN_WEIGHT))


class TenantReadQueue:
    """Queue of connections with unread messages, which decides whose messages the daemon reads next.

    The next tenant is the one that has used the least time of the event loop, relative to its weight. A `FairClock`
    measures this time, as it does the time of a device. The users of one tenant take turns. Without tenants, all users
    take turns.
    """

    def __init__(self) -> None:
        self._clock = FairClock()
        # The queued connections of each tenant, by user.
        self._queues: dict[Tenant, RoundRobinQueue[ClientConnection]] = {}
        # The tenant and user under which each connection was queued. They are recorded because a reload may change the
        # tenant and user of a queued connection.
        self._positions: dict[ClientConnection, tuple[Tenant, str]] = {}
        self._last_sender: tuple[Tenant, str] | None = None
        self._contended_until = -float("inf")

    def is_contended(self, connection: ClientConnection) -> bool:
        """Record that a user sends; return whether another user has sent within the last `MULTI_TENANT_HOLD_S` seconds.

        While only one user sends, this method does not read the system's clock, which saves time per message.
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
        """Add a connection with unread messages."""
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
        """Remove the next connection; return its tenant and the connection. The caller may add the connection again."""
        tenant = min(self._queues, key=self._clock.sort_key)
        connection = self._queues[tenant].take()
        del self._positions[connection]
        return tenant, connection

    def on_served(self, tenant: Tenant, seconds: float) -> None:
        """Charge a tenant for the time that its connection took.

        Before this call, the caller has to add the connection again if it has more messages.
        """
        self._clock.start_batch({tenant: 1.0}, 0.0).settle(seconds)
        queue = self._queues.get(tenant)
        # `remove` has deleted the tenant's queue already if the last connection in it was closed meanwhile.
        if queue is not None and not queue:
            del self._queues[tenant]
            self._clock.remove_active(tenant)

    def remove(self, connection: ClientConnection) -> None:
        """Remove a closed connection, if it is in the queue."""
        if connection not in self._positions:
            return
        tenant, user = self._positions.pop(connection)
        queue = self._queues[tenant]
        queue.remove(user, connection)
        if not queue:
            del self._queues[tenant]
            self._clock.remove_active(tenant)
