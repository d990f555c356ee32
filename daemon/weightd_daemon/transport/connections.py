"""The connections of all clients, and non-blocking replies to them."""

from __future__ import annotations

import functools
import itertools
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weightd_common.stream import Stream
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.client_log import ClientLog
from weightd_daemon.platform.connection_limiter import (
    REOPEN_FRACTION,
    ConnectionAdmission,
    ConnectionLimiter,
    max_client_descriptors,
)
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.transport.connection import ClientConnection, ClientIdentity
from weightd_daemon.transport.listener import UnixListener
from weightd_daemon.transport.memory_budget import MemoryBudget
from weightd_daemon.transport.reader import MAX_MESSAGES_PER_TURN, MessageReader, ReaderCallbacks
from weightd_protocol import limits
from weightd_protocol.errors import RequestError
from weightd_protocol.framing import FrameReader, Message

# Maximum bytes of queued replies that a client has not read. A reply of any size is queued if no other is queued.
MAX_UNREAD_BYTES = 256 * 1024 * 1024

# Seconds that a stopping daemon waits for clients to read their last replies.
_LINGER_TIMEOUT_S = 1.0

_log = logging.getLogger("weightd.api")


@dataclass(frozen=True)
class ConnectionCallbacks:
    """Callbacks of `ClientConnections`.

    Attributes:
        free_memory: called with the key of a client and the number of bytes to reserve for this client; frees memory,
            and returns whether the bytes can be reserved now.
        limit_account_of: returns the account whose connection limits apply to a client.
        assign_tenant: called with a connection; sets its tenant, and returns an error if it must be closed at once.
        on_message: called with each message, even if not all of its frames were kept.
        on_disconnecting: called with a connection and the error because of which it is closed, before it is closed.
        on_disconnected: called with a closed connection.
    """

    free_memory: Callable[[bytes, int], bool]
    limit_account_of: Callable[[ClientIdentity], str]
    assign_tenant: Callable[[ClientConnection], RequestError | None]
    on_message: Callable[[ClientConnection, Message], object]
    on_disconnecting: Callable[[ClientConnection, RequestError], object]
    on_disconnected: Callable[[ClientConnection], object]


class ClientConnections:
    """The connections of clients.

    Args:
        loop: reports readable and writable connections.
        memory_budget: counts the bytes that are kept for clients.
        admission: limits the connections of each user of the Unix socket.
        callbacks: receives messages and events.
        log: logs the events of clients.

    Attributes:
        by_key: the open connections by their keys; other objects must not change it.
        reader: reads the messages of clients.
        dropped_messages: the number of messages that were not sent because their client had disconnected or did not
            read.
    """

    def __init__(
        self,
        loop: EventLoop,
        memory_budget: MemoryBudget,
        admission: ConnectionAdmission,
        callbacks: ConnectionCallbacks,
        log: ClientLog | None = None,
    ) -> None:
        self.dropped_messages = 0
        self._log = log or ClientLog()
        self._loop = loop
        self._memory_budget = memory_budget
        self._callbacks = callbacks
        self._unix_listener = UnixListener(loop, admission, callbacks.limit_account_of, self.adopt, self._log)
        self.reader = MessageReader(
            loop,
            memory_budget,
            ReaderCallbacks(
                callbacks.free_memory,
                callbacks.on_message,
                self.disconnect,
                self._disconnect_with_error,
                self._on_disconnected,
            ),
        )
        self.by_key: dict[bytes, ClientConnection] = {}
        self._keys = itertools.count(1)
        self._limiter: ConnectionLimiter[ClientConnection] = ConnectionLimiter()
        self._is_full = False
        # The connections whose small messages are held back since `cork` was called; None if they are not held back.
        self._corked: set[ClientConnection] | None = None

    def __iter__(self) -> Iterator[ClientConnection]:
        return iter(self.by_key.values())

    def get(self, key: bytes) -> ClientConnection | None:
        """Return the connection with this key; None if it was closed."""
        return self.by_key.get(key)

    # --- connections ----------------------------------------------------------------------------------------------

    def listen(self, listener: socket.socket) -> None:
        """Adopt the connections to a non-blocking Unix socket, within the limits of their users."""
        self._unix_listener.listen(listener)

    def adopt(self, connection: socket.socket, identity: ClientIdentity) -> None:
        """Add the connection of a new client, and take ownership of its socket."""
        key = next(self._keys).to_bytes(8, "big")
        incoming = FrameReader(
            max_frame_bytes=min(self._memory_budget.max_bytes, limits.MAX_FRAME_BYTES),
            admit=functools.partial(self._admit_message, key),
            max_messages=MAX_MESSAGES_PER_TURN,
        )
        stream = Stream(connection, incoming, accepts_descriptors=identity.is_direct)
        client = self.by_key[key] = ClientConnection(
            key, stream, identity, event_loop.now(), self._callbacks.limit_account_of(identity)
        )
        if identity.is_direct:
            self._unix_listener.add(connection, client.limit_account)
        excess = self._callbacks.assign_tenant(client)
        self._loop.add(stream.fileno(), functools.partial(self.reader.on_readable, client))
        self._limiter.add(client, client.limit_account, client.tenant_name)
        self._evict_excess()
        if excess is not None and not client.is_closing:
            self._disconnect_with_error(client, excess)

    def reassign_tenants(self) -> None:
        """Assign tenants to all connections again, after the tables of tenants have changed."""
        for each in self:
            self._callbacks.assign_tenant(each)
        self._limiter = ConnectionLimiter()
        for each in self:
            if not each.is_closing:
                self._limiter.add(each, each.limit_account, each.tenant_name)

    def disconnect(self, connection: ClientConnection, reason: str) -> None:
        """Shut a connection down. Later, `on_disconnected` is called and cancels the client's requests."""
        if not connection.is_closing:
            self.reader.forget(connection)
            near = connection.origin.peer
            self._log.log(_log, logging.WARNING, connection.user, "disconnecting a client of %s: %s", near, reason)
            connection.shut_down()
            self._limiter.remove(connection)
            # Replace the callback of the event loop: further messages are not read, and only the end of the connection
            # is handled.
            self._loop.remove(connection.stream.fileno())
            self._loop.add(connection.stream.fileno(), functools.partial(self._on_disconnected, connection))

    def close(self) -> None:
        """Close all connections; first wait up to `_LINGER_TIMEOUT_S` seconds for clients to read their replies."""
        self._uncork()
        deadline = event_loop.now() + _LINGER_TIMEOUT_S
        while any(each.unread_bytes for each in self) and event_loop.now() < deadline:
            self._loop.run_once(deadline - event_loop.now())
        for each in self:
            self._loop.remove(each.stream.fileno())
            self._close_socket(each)
        self.by_key.clear()
        self._unix_listener.close()

    def _admit_message(self, key: bytes, nbytes: int) -> bool:
        # This callback has the key of the connection as its argument. With the connection itself, a reference cycle
        # would delay the release of the connection's memory.
        return self.reader.admit_message(self.by_key[key], nbytes)

    def _disconnect_with_error(self, connection: ClientConnection, error: RequestError) -> None:
        """Report an error to a client, then close its connection."""
        self._callbacks.on_disconnecting(connection, error)
        self.disconnect(connection, str(error))

    def _evict_excess(self) -> None:
        """Disconnect clients if there are too many, so that descriptors remain for processes, logs and page stores."""
        limit = max_client_descriptors()
        if len(self.by_key) > limit and not self._is_full:
            self._is_full = True
            text = "expected at most %d connections of clients (LimitNOFILE), got %d: disconnecting some"
            self._log.log(_log, logging.ERROR, "", text, limit, len(self.by_key))
        for each in self._limiter.evict_excess(limit, "LimitNOFILE"):
            self.disconnect(each.connection, each.reason)

    def _on_disconnected(self, connection: ClientConnection) -> None:
        # Do not handle any more messages of the connection, not even messages that were already read.
        connection.is_closing = True
        self.reader.forget(connection)
        del self.by_key[connection.key]
        self._loop.remove(connection.stream.fileno())
        self._close_socket(connection)
        self._memory_budget.release_all(connection.key)
        self._limiter.remove(connection)
        count = len(self.by_key)
        if self._is_full and count < REOPEN_FRACTION * max_client_descriptors():
            self._is_full = False
            self._log.log(_log, logging.WARNING, "", "%d clients are connected: accepting connections again", count)
        self._callbacks.on_disconnected(connection)

    def _close_socket(self, connection: ClientConnection) -> None:
        stream, limit_account = connection.stream, connection.limit_account
        if not connection.identity.is_direct:
            stream.close()
            return
        while stream.descriptors:
            self.reader.fd_closer.close(limit_account, stream.descriptors.popleft())
        self._unix_listener.shut_down(stream.connection, limit_account)

    # --- replies --------------------------------------------------------------------------------------------------

    def send(self, key: bytes, frames: Sequence[Any]) -> bool:
        """Send a message, or drop it; return False if it was dropped because the client does not read."""
        connection = self.by_key.get(key)
        if connection is None or connection.is_closing:
            self.dropped_messages += 1
            return True
        if connection.unread_bytes and not self._may_queue(connection, sum(map(len, frames))):
            self.dropped_messages += 1
            return False
        if self._corked is not None and connection not in self._corked:
            self._corked.add(connection)
            connection.stream.cork()
        try:
            if connection.stream.send(frames):
                return True
        except ConnectionError:
            # The client has disconnected. The event loop will report this, and the connection will be removed then.
            self.dropped_messages += 1
            return True
        self._send_later(connection)
        return True

    def send_descriptor(self, key: bytes, frames: Sequence[Any], descriptor: int) -> bool:
        """Send a message with a descriptor; return False if the client is not connected or does not read."""
        connection = self.by_key.get(key)
        if connection is None or connection.is_closing or connection.unread_bytes:
            return False
        try:
            if not connection.stream.send(frames, (descriptor,)):
                self._send_later(connection)
        except OSError:
            return False
        return True

    def cork(self) -> None:
        """Hold small messages back until the end of this turn of the loop, to send a client's messages in one call."""
        if self._corked is None:
            self._corked = set()
            self._loop.call_soon(self._uncork)

    def _uncork(self) -> None:
        corked, self._corked = self._corked or (), None
        for connection in corked:
            if connection.key not in self.by_key:
                continue
            try:
                if not connection.stream.uncork():
                    self._send_later(connection)
            except ConnectionError:
                self.dropped_messages += 1

    def _send_later(self, connection: ClientConnection) -> None:
        if not connection.unread_bytes:
            self._loop.watch_writes(connection.stream.fileno(), functools.partial(self._flush, connection))
        self._update_unread_bytes(connection)

    def _may_queue(self, connection: ClientConnection, nbytes: int) -> bool:
        if connection.unread_bytes + nbytes <= MAX_UNREAD_BYTES:
            return self._memory_budget.can_reserve(nbytes) or self._callbacks.free_memory(connection.key, nbytes)
        if not connection.is_dropping:
            connection.is_dropping = True
            text = "%s does not read: %d MiB are queued; dropping further responses"
            args = connection.origin.peer, connection.unread_bytes // 2**20
            self._log.log(_log, logging.WARNING, connection.user, text, *args)
        return False

    def _flush(self, connection: ClientConnection) -> None:
        try:
            if connection.stream.flush():
                self._loop.unwatch_writes(connection.stream.fileno())
        except ConnectionError:
            # The client has disconnected. The next read of `reader` will detect this and close the connection.
            self._loop.unwatch_writes(connection.stream.fileno())
            return
        self._update_unread_bytes(connection)

    def _update_unread_bytes(self, connection: ClientConnection) -> None:
        unread = connection.stream.unsent
        growth = unread - connection.unread_bytes
        connection.unread_bytes = unread
        if growth > 0:
            self._memory_budget.reserve(connection.key, growth)
        else:
            self._memory_budget.release(connection.key, -growth)
