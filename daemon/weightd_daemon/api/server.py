"""All clients: who is let in, what comes from them and what goes to them, without ever waiting for one."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weightd_common import memfd
from weightd_common.stream import Stream
from weightd_daemon.api.connection import ClientConnection, ClientIdentity, unix_identity
from weightd_daemon.api.connection_limit import ClientConnectionLimiter
from weightd_daemon.api.memory_budget import MemoryBudget
from weightd_daemon.api.tenant_read_queue import TenantReadQueue
from weightd_daemon.api.unread_data import UnreadConnections
from weightd_daemon.platform import clock
from weightd_daemon.platform.acceptor import Acceptor
from weightd_daemon.platform.client_log import ClientLog
from weightd_daemon.platform.connection_admission import ConnectionAdmission
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.fd_closer import MAX_PENDING, DescriptorCloser, has_descriptors
from weightd_daemon.platform.log_setup import log_resource_error
from weightd_protocol import limits
from weightd_protocol.codec import encode
from weightd_protocol.errors import InvalidArgument, RemoteProtocolError, RequestError, ResourceExhausted
from weightd_protocol.framing import FrameReader, Message, message_prefix
from weightd_protocol.messages.inference import Error

# What may wait for one client: an answer of whatever size is let through if nothing else waits.
MAX_UNREAD_BYTES = 256 * 1024 * 1024

# Of one client, before others have their turn.
_MAX_MESSAGES_PER_TURN = 16

# Of one tenant, before that of another has its turn.
_TIME_SLICE_S = 1e-4

# So many clients may have sent a descriptor and not yet all of the message with which it goes.
_MAX_AWAITING_MESSAGE = 64

# The last answers of a daemon that stops get this long to be read.
_LINGER_TIMEOUT_S = 1.0

# So many connections of a user have buffers of the size that the kernel gives them (net.core.wmem_default), and those
# beyond it have buffers for so many bytes: what a client does not read there is kept at the daemon's expense.
_MAX_DEFAULT_BUFFERS = 64
_SMALL_BUFFER_BYTES = 8192

# Of refused connections of a user whose client has not read why. Others are told nothing.
_MAX_UNREAD_REFUSALS = 64

# Connections to the Unix socket that wait to be accepted. A user may fill this queue with connections that are refused:
# others wait behind them, for a fraction of a second with so many.
_LISTEN_BACKLOG = 128

# A read takes at most so many bytes, unless a large frame is under way.
_READ_CHUNK_BYTES = 64 * 1024

_UNCLOSED_DESCRIPTORS_TEXT = (
    f"{MAX_PENDING} descriptors that this user has sent are not closed yet: its connections end"
)

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

    Attributes:
        fd_closer: takes descriptors that nobody wants.
        dropped_messages: messages that could not be sent: their client was gone, or did not read.
        log: of what clients do.
    """

    def __init__(
        self,
        loop: EventLoop,
        memory_budget: MemoryBudget,
        admission: ConnectionAdmission,
        callbacks: ConnectionCallbacks,
        log: ClientLog | None = None,
    ) -> None:
        self.log = log or ClientLog()
        self.fd_closer = DescriptorCloser(log_resource_error)
        # With another `DescriptorCloser`: a close of a connection can always be interrupted.
        self._unread_connections = UnreadConnections(loop, DescriptorCloser(log_resource_error).close_socket)
        self.dropped_messages = 0
        self._loop = loop
        self._memory_budget = memory_budget
        self._admission = admission
        self._callbacks = callbacks
        self._by_key: dict[bytes, ClientConnection] = {}
        self._keys = itertools.count(1)
        self._connection_limiter = ClientConnectionLimiter(self.log)
        self._awaiting_message: set[ClientConnection] = set()
        self._backlogged: dict[ClientConnection, None] = {}
        self._read_queue = TenantReadQueue()
        # Those to whom something is kept back; None where nothing is.
        self._corked: set[ClientConnection] | None = None

    def __iter__(self) -> Iterator[ClientConnection]:
        return iter(self._by_key.values())

    def get(self, key: bytes) -> ClientConnection | None:
        """Return a client by its key; None where it has gone."""
        return self._by_key.get(key)

    # --- who comes and goes ---------------------------------------------------------------------------------------

    def listen(self, listener: socket.socket) -> None:
        """Let in whoever connects to a unix socket that listens and does not block."""
        listener.listen(_LISTEN_BACKLOG)
        Acceptor(listener, self._loop, self._on_connection, _log.error)

    def _on_connection(self, connection: socket.socket) -> bool:
        """Adopt a new connection to the Unix socket, or refuse it before anything else is done for it."""
        identity = unix_identity(connection)
        limit_account = self._callbacks.limit_account_of(identity)
        reason = None if identity.credential.is_operator else self._admission.refusal_reason(limit_account, clock.now())
        if reason is None:
            self.adopt(connection, identity)
            return True
        if self._unread_connections.count_of(limit_account) < _MAX_UNREAD_REFUSALS:
            # The kernel keeps the text until the client reads it.
            with contextlib.suppress(OSError):
                connection.setblocking(False)
                connection.send(_refusal_message(reason))
        self._unread_connections.shut_down(limit_account, connection, lambda: None)
        self.log.log(
            _log, logging.WARNING, limit_account, "new connection of %s refused: %s", identity.origin.principal, reason
        )
        return False

    def adopt(self, connection: socket.socket, identity: ClientIdentity) -> None:
        """Let somebody in; the socket is this object's from now on."""
        key = next(self._keys).to_bytes(8, "big")
        max_frame_bytes = min(self._memory_budget.max_bytes, limits.MAX_FRAME_BYTES)
        incoming = FrameReader(
            max_frame_bytes=max_frame_bytes,
            admit=functools.partial(self._admit_message, key),
            max_messages=_MAX_MESSAGES_PER_TURN,
        )
        stream = Stream(connection, incoming, accepts_descriptors=identity.is_direct)
        client = self._by_key[key] = ClientConnection(
            key, stream, identity, clock.now(), self._callbacks.limit_account_of(identity)
        )
        if identity.is_direct and self._admission.add_connection(client.limit_account) > _MAX_DEFAULT_BUFFERS:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SMALL_BUFFER_BYTES)
        excess = self._callbacks.assign_tenant(client)
        self._loop.add(stream.fileno(), functools.partial(self._on_readable, client))
        for each in self._connection_limiter.add_connection(client, len(self._by_key)):
            self.disconnect(each.connection, each.reason)
        if excess is not None and not client.is_closing:
            self._callbacks.on_disconnecting(client, excess)
            self.disconnect(client, str(excess))

    def reassign_tenants(self) -> None:
        """Who is who may have changed."""
        for each in self:
            self._callbacks.assign_tenant(each)
        self._connection_limiter.replace_connections(each for each in self if not each.is_closing)

    def disconnect(self, connection: ClientConnection, reason: str) -> None:
        """End a connection; what its client has asked ends with it, in a moment."""
        if not connection.is_closing:
            self._discard_pending(connection)
            near = connection.origin.peer
            self.log.log(_log, logging.WARNING, connection.user, "disconnecting a client of %s: %s", near, reason)
            connection.shut_down()
            self._connection_limiter.remove_connection(connection)
            # It is told of its end, and of nothing that it has said.
            self._loop.remove(connection.stream.fileno())
            self._loop.add(connection.stream.fileno(), functools.partial(self._on_disconnected, connection))

    def reject_descriptors(self, connection: ClientConnection) -> None:
        """Have those closed that a client has sent, and nobody wants."""
        while connection.stream.descriptors:
            self.fd_closer.close(connection.limit_account, connection.stream.descriptors.popleft())
        if self.fd_closer.is_backlogged(connection.limit_account):
            self.disconnect(connection, _UNCLOSED_DESCRIPTORS_TEXT)

    def close(self) -> None:
        """Let all go; those who are reading what was said to them last get a moment for that."""
        self._uncork()
        deadline = clock.now() + _LINGER_TIMEOUT_S
        while any(each.unread_bytes for each in self) and clock.now() < deadline:
            self._loop.run_once(deadline - clock.now())
        for each in self:
            self._loop.remove(each.stream.fileno())
            self._close_socket(each)
        self._by_key.clear()
        self._unread_connections.close()

    def _discard_pending(self, connection: ClientConnection) -> None:
        """Nothing more is heard of it."""
        connection.backlog.clear()
        if connection.is_queued:
            connection.is_queued = False
            self._read_queue.remove(connection)

    def _on_disconnected(self, connection: ClientConnection) -> None:
        self._discard_pending(connection)
        del self._by_key[connection.key]
        self._loop.remove(connection.stream.fileno())
        self._close_socket(connection)
        self._memory_budget.release_all(connection.key)
        self._connection_limiter.remove_connection(connection)
        self._connection_limiter.on_disconnected(len(self._by_key))
        self._callbacks.on_disconnected(connection)

    def _close_socket(self, connection: ClientConnection) -> None:
        stream, limit_account = connection.stream, connection.limit_account
        if not connection.identity.is_direct:
            stream.close()
            return
        while stream.descriptors:
            self.fd_closer.close(limit_account, stream.descriptors.popleft())
        self._unread_connections.shut_down(
            limit_account, stream.connection, functools.partial(self._admission.remove_connection, limit_account)
        )

    # --- from a client --------------------------------------------------------------------------------------------

    def _on_readable(self, connection: ClientConnection) -> None:
        """Something has come, or the client has gone."""
        if self._read_queue.is_contended(connection):
            if not connection.is_queued:
                connection.is_queued = True
                self._loop.pause_reading(connection.stream.fileno())
                self._read_queue.put(connection)
            self._loop.call_soon(self._serve_queue)
        elif not self._handle_messages(connection):
            self._backlogged[connection] = None
            self._loop.call_soon(self._serve_backlogged)

    def _serve_backlogged(self) -> None:
        """Go on with those who have sent more at once than was handled, after all others had their turn."""
        backlogged, self._backlogged = self._backlogged, {}
        for connection in backlogged:
            if connection.key in self._by_key and not connection.is_closing:
                self._on_readable(connection)

    def _serve_queue(self) -> None:
        """Handle what one connection has sent, for a moment, where several users speak."""
        if not self._read_queue:
            return
        started_at = clock.now()
        tenant, connection = self._read_queue.take()
        is_done = self._handle_messages(connection, started_at + _TIME_SLICE_S)
        if connection.is_queued:
            if is_done:
                connection.is_queued = False
                self._loop.resume_reading(connection.stream.fileno())
            else:
                self._read_queue.put(connection)
        self._read_queue.on_served(tenant, clock.now() - started_at)
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
            if messages and deadline < math.inf and clock.now() >= deadline:
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
            and self.fd_closer.is_backlogged(connection.limit_account)
            and (incoming.missing_bytes > _READ_CHUNK_BYTES or has_descriptors(stream.connection, _READ_CHUNK_BYTES))
        ):
            self._reject_and_disconnect(connection, _UNCLOSED_DESCRIPTORS_TEXT)
            return deque()
        try:
            messages = incoming.receive(b"") if incoming.is_backlogged else stream.receive()
        except ConnectionError:
            self._on_disconnected(connection)
            return deque()
        except RemoteProtocolError as error:
            # Nobody can tell where its next message would begin.
            self._reject_and_disconnect(connection, str(error))
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
            self.disconnect(largest, "its user has sent most descriptors without the messages that these go with")

    def _may_keep_descriptors(self, connection: ClientConnection) -> bool:
        """Return whether the client has sent descriptors of memory alone; hang it up otherwise."""
        if all(map(memfd.is_memory, connection.stream.descriptors)):
            return True
        self._reject_and_disconnect(connection, "descriptors: expected a memfd, got a descriptor of something else")
        return False

    def _reject_and_disconnect(self, connection: ClientConnection, reason: str) -> None:
        """Tell a client that its connection ends because of what it has sent, and hang it up."""
        self._callbacks.on_disconnecting(connection, InvalidArgument(reason))
        self.disconnect(connection, reason)

    def _admit_message(self, key: bytes, nbytes: int) -> bool:
        """A message begins that does not come at once: it takes room from now on."""
        connection = self._by_key[key]
        self._memory_budget.release(key, connection.incoming_bytes)
        connection.incoming_bytes = 0
        if connection.tenant is None:
            # It is refused, whatever it says.
            return False
        if nbytes > self._memory_budget.max_bytes or (
            not self._memory_budget.can_reserve(nbytes) and not self._callbacks.free_memory(key, nbytes)
        ):
            return False
        self._memory_budget.reserve(key, nbytes)
        connection.incoming_bytes = nbytes
        return True

    # --- to a client ----------------------------------------------------------------------------------------------

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
            self.log.log(_log, logging.WARNING, connection.user, text, *args)
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


@functools.lru_cache
def _refusal_message(reason: str) -> bytes:
    """Return the message to a client whose connection is refused."""
    frames = encode(Error("", ResourceExhausted.code, f"{reason}: this connection ends"))
    return b"".join([message_prefix(frames), *frames])
