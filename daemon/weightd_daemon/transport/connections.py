"""All clients: their connections, and the replies to them, without ever waiting for one."""

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

# What may wait for one client: an answer of whatever size is let through if nothing else waits.
MAX_UNREAD_BYTES = 256 * 1024 * 1024

# The last answers of a daemon that stops get this long to be read.
_LINGER_TIMEOUT_S = 1.0

_log = logging.getLogger("weightd.api")


@dataclass(frozen=True)
class ConnectionCallbacks:
    """What connections call.

    Attributes:
        free_memory: with a client and the bytes that it wants kept; returns whether there is room.
        limit_account_of: with who has come; returns whose limits hold for the connection.
        assign_tenant: with who has come: says on whose account it goes, and returns why it is hung up at once.
        on_message: with each message, also with those of which not everything was kept.
        on_disconnecting: with who is hung up because of an error, before that.
        on_disconnected: with who has gone.
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
        loop: calls when something can be read, or written.
        memory_budget: counts what is kept for them.
        admission: limits the connections of each user of the Unix socket.
        callbacks: what is done with what they say.
        log: of what clients do.

    Attributes:
        reader: reads their messages.
        dropped_messages: messages that could not be sent: their client was gone, or did not read.
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
        self._by_key: dict[bytes, ClientConnection] = {}
        self._keys = itertools.count(1)
        self._limiter: ConnectionLimiter[ClientConnection] = ConnectionLimiter()
        self._is_full = False
        # Those to whom something is kept back; None where nothing is.
        self._corked: set[ClientConnection] | None = None

    def __iter__(self) -> Iterator[ClientConnection]:
        return iter(self._by_key.values())

    def get(self, key: bytes) -> ClientConnection | None:
        """Return a client by its key; None where it has gone."""
        return self._by_key.get(key)

    # --- connections ----------------------------------------------------------------------------------------------

    def listen(self, listener: socket.socket) -> None:
        """Adopt all connections to a Unix socket that does not block, as far as their users may have them."""
        self._unix_listener.listen(listener)

    def adopt(self, connection: socket.socket, identity: ClientIdentity) -> None:
        """Let somebody in; the socket is this object's from now on."""
        key = next(self._keys).to_bytes(8, "big")
        incoming = FrameReader(
            max_frame_bytes=min(self._memory_budget.max_bytes, limits.MAX_FRAME_BYTES),
            admit=functools.partial(self._admit_message, key),
            max_messages=MAX_MESSAGES_PER_TURN,
        )
        stream = Stream(connection, incoming, accepts_descriptors=identity.is_direct)
        client = self._by_key[key] = ClientConnection(
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
        """Who is who may have changed."""
        for each in self:
            self._callbacks.assign_tenant(each)
        self._limiter = ConnectionLimiter()
        for each in self:
            if not each.is_closing:
                self._limiter.add(each, each.limit_account, each.tenant_name)

    def disconnect(self, connection: ClientConnection, reason: str) -> None:
        """End a connection; what its client has asked ends with it, in a moment."""
        if not connection.is_closing:
            self.reader.forget(connection)
            near = connection.origin.peer
            self._log.log(_log, logging.WARNING, connection.user, "disconnecting a client of %s: %s", near, reason)
            connection.shut_down()
            self._limiter.remove(connection)
            # It is told of its end, and of nothing that it has said.
            self._loop.remove(connection.stream.fileno())
            self._loop.add(connection.stream.fileno(), functools.partial(self._on_disconnected, connection))

    def close(self) -> None:
        """Let all go; those who are reading what was said to them last get a moment for that."""
        self._uncork()
        deadline = event_loop.now() + _LINGER_TIMEOUT_S
        while any(each.unread_bytes for each in self) and event_loop.now() < deadline:
            self._loop.run_once(deadline - event_loop.now())
        for each in self:
            self._loop.remove(each.stream.fileno())
            self._close_socket(each)
        self._by_key.clear()
        self._unix_listener.close()

    def _admit_message(self, key: bytes, nbytes: int) -> bool:
        # By the key: a connection that refers to itself would not be freed at once.
        return self.reader.admit_message(self._by_key[key], nbytes)

    def _disconnect_with_error(self, connection: ClientConnection, error: RequestError) -> None:
        """Tell a client why its connection ends, and end it."""
        self._callbacks.on_disconnecting(connection, error)
        self.disconnect(connection, str(error))

    def _evict_excess(self) -> None:
        """Disconnect clients where too many are connected: children, logs and stores need descriptors, too."""
        limit = max_client_descriptors()
        if len(self._by_key) > limit and not self._is_full:
            self._is_full = True
            text = "expected at most %d connections of clients (LimitNOFILE), got %d: disconnecting some"
            self._log.log(_log, logging.ERROR, "", text, limit, len(self._by_key))
        for each in self._limiter.evict_excess(limit, "LimitNOFILE"):
            self.disconnect(each.connection, each.reason)

    def _on_disconnected(self, connection: ClientConnection) -> None:
        # Messages that were read before are not handled any more.
        connection.is_closing = True
        self.reader.forget(connection)
        del self._by_key[connection.key]
        self._loop.remove(connection.stream.fileno())
        self._close_socket(connection)
        self._memory_budget.release_all(connection.key)
        self._limiter.remove(connection)
        count = len(self._by_key)
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
        """Send a message, or drop it; return False if that is because the client has not read earlier ones."""
        connection = self._by_key.get(key)
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
            # It is told of its end as of any other's.
            self.dropped_messages += 1
            return True
        self._send_later(connection)
        return True

    def cork(self) -> None:
        """Keep small messages back until the end of this turn, so that each client gets its own with one call."""
        if self._corked is None:
            self._corked = set()
            self._loop.call_soon(self._uncork)

    def _uncork(self) -> None:
        corked, self._corked = self._corked or (), None
        for connection in corked:
            if connection.key not in self._by_key:
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
            text = "%s does not read: %d MiB wait for it, further answers are dropped"
            args = connection.origin.peer, connection.unread_bytes // 2**20
            self._log.log(_log, logging.WARNING, connection.user, text, *args)
        return False

    def _flush(self, connection: ClientConnection) -> None:
        try:
            if connection.stream.flush():
                self._loop.unwatch_writes(connection.stream.fileno())
        except ConnectionError:
            # Its end is told to who reads.
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
