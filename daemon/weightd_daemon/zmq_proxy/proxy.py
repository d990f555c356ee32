"""The proxy's one loop: messages of clients to the daemon, each client's over its own stream, and answers to clients.

Nothing that one user does is to be felt by another: each has its own limits of connections and of memory, and takes
turns with the others. A client whose messages the daemon does not read, or which does not read its answers, waits
alone: nothing more is read of what is for the other side.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weightd_common.rate_limits import RateLimitedLog
from weightd_common.stream import Stream
from weightd_daemon.platform import clock
from weightd_daemon.platform.acceptor import Acceptor
from weightd_daemon.platform.connection_admission import ConnectionAdmission, UserConnectionLimits
from weightd_daemon.platform.connection_limit import EVERYONE, NO_TENANT, ConnectionLimiter, max_client_descriptors
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.tenant_lookup import TenantCredentials, TenantLookup
from weightd_daemon.platform.timers import Timer
from weightd_daemon.zmq_proxy import client as clients
from weightd_daemon.zmq_proxy import control, memory, zmtp
from weightd_daemon.zmq_proxy.client import ClientSocket, ProxyClient
from weightd_daemon.zmq_proxy.control import ERROR, WARNING
from weightd_daemon.zmq_proxy.fair_queue import FairQueue
from weightd_protocol.framing import FrameReader
from weightd_protocol.limits import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightd_common.peers import Peers
    from weightd_daemon.platform.fd_closer import DescriptorCloser
    from weightd_daemon.zmq_proxy.control import ProxyConfig
    from weightd_daemon.zmq_proxy.crypto_thread import CryptoThread

# A client has to complete its handshake in this time, and a user may have so many that have not.
HANDSHAKE_TIMEOUT_S = 5.0
MAX_USER_HANDSHAKES = 256

# When the daemon ends, and when it closes a stream: the last answers get so long to be read.
LINGER_S = 1.0

# A connection to which everything was sent is closed after this time: over TCP what the client has not read by then may
# be lost, if the client goes on sending.
_CLOSE_DELAY_S = 0.1

# In one turn of the loop so many reads are done at once; what is ready beyond that waits for its turn.
_MAX_READS_PER_TURN = 2

# Reads of waiting clients go on for so long before the loop looks at everything else.
_TIME_SLICE_S = 2e-4

# Between two lines of the log about connections of one user that were hung up or refused.
_LOG_INTERVAL_S = 10.0

# After more than this was kept, and nothing for some time, memory is given back to the kernel.
_TRIM_THRESHOLD_BYTES = 1024 * 1024
_TRIM_DELAY_S = 1.0

# While the kernel lets this process send no descriptor, the proxy tries again after so long.
_RETRY_INTERVAL_S = 0.1

# Of a connection: its own, and this end of its pair.
_DESCRIPTORS_PER_CLIENT = 2

_NEVER = float("inf")


def max_connections(configured_limit: int = 0) -> int:
    """Return how many clients may be connected under the process's present limit, and this bound if it is none of 0."""
    descriptor_limit = max(1, max_client_descriptors() // _DESCRIPTORS_PER_CLIENT)
    return min(descriptor_limit, configured_limit) if configured_limit else descriptor_limit


class ProxyUser:
    """What one user has here.

    Attributes:
        clients: its connections.
        handshakes: those of them whose handshake is not complete, the oldest first.
        buffered_bytes: that are kept for them.
    """

    def __init__(self) -> None:
        self.clients: set[ProxyClient] = set()
        self.handshakes: dict[ProxyClient, None] = {}
        self.buffered_bytes = 0


class ZmqProxy:
    """Passes messages on.

    Args:
        listener: the listening socket; it does not block.
        control_stream: to the daemon.
        config: as the daemon has said.
        crypto_thread: makes calls that take long; None where clients have no keys, and nothing takes long.
        fd_closer: closes descriptors that clients send; None where they can send none.
    """

    def __init__(
        self,
        listener: socket.socket,
        control_stream: Stream,
        config: ProxyConfig,
        crypto_thread: CryptoThread | None = None,
        fd_closer: DescriptorCloser | None = None,
    ) -> None:
        self._fd_closer = fd_closer
        self._control_stream = control_stream
        self._config = config
        self._limits = zmtp.ZmtpLimits(config.max_frame_bytes, config.max_memory_bytes)
        self._crypto_thread = crypto_thread
        self._allowed_keys = _key_set(config.allowed_keys)
        self._new_mechanism = self._mechanism_factory()
        self._admission = ConnectionAdmission(
            UserConnectionLimits(config.max_user_connections, config.max_user_connection_rate)
        )
        self._peers = _new_peers() if listener.family != socket.AF_UNIX else None
        self._tenant_lookup = _make_tenant_lookup(config.tenant_members)
        self._connection_limiter: ConnectionLimiter[ProxyClient] = ConnectionLimiter()
        self._users: dict[str, ProxyUser] = {}
        self._buffered_bytes = 0
        # Clients whom the daemon knows, and those that are leaving, with the time at which they have to be gone.
        self._peer_count = 0
        self._close_deadlines: dict[ProxyClient, float] = {}
        self._handshakes: dict[ProxyClient, None] = {}
        self._read_queue: FairQueue[ClientSocket] = FairQueue()
        self._reads_this_turn = 0
        self._stops_at = _NEVER
        self._disconnect_log = RateLimitedLog(_LOG_INTERVAL_S)
        self._refusal_log = RateLimitedLog(_LOG_INTERVAL_S)
        self._loop = EventLoop()
        self._handshake_timer = Timer(self._on_handshake_timer)
        self._close_timer = Timer(self._on_close_timer)
        self._trim_timer = Timer(lambda _: memory.trim_heap())
        self._control_retry_timer = Timer(self._on_control_retry)
        for timer in (self._handshake_timer, self._close_timer, self._trim_timer, self._control_retry_timer):
            self._loop.add_timer(timer)
        self._acceptor = Acceptor(listener, self._loop, self._on_connection, lambda text: self._log(ERROR, text))
        self._loop.add(control_stream.fileno(), self._on_control_readable)
        if crypto_thread is not None:
            self._loop.add(crypto_thread.descriptor, crypto_thread.collect)

    def run(self) -> None:
        """Pass messages on until the daemon's end of the link is closed, and then what it has said last."""
        while self._stops_at == _NEVER:
            self._loop.run_once()
        while (self._peer_count or self._close_deadlines) and clock.now() < self._stops_at:
            self._loop.run_once(self._stops_at - clock.now())

    def close(self) -> None:
        """Close all connections."""
        for user in self._users.values():
            for each in user.clients:
                each.close()
        if self._peers is not None:
            self._peers.close()
        self._loop.close()

    # --- who connects -------------------------------------------------------------------------------------------

    def _on_connection(self, connection: socket.socket) -> bool:
        """Begin with a new connection, or refuse it before anything else is done for it."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            try:
                name, is_operator = self._identify_user(connection)
            except OSError:
                return True  # it has gone
            now = clock.now()
            refusal = None if is_operator else self._admission.refusal_reason(name, now)
            if refusal is not None:
                self._log_rate_limited(self._refusal_log, name, f"new connection of {name} refused: {refusal}")
                return False
            user = self._users.get(name) or ProxyUser()
            client = ProxyClient(
                connection,
                name,
                zmtp.ZmtpConnection(self._new_mechanism(), self._limits),
                now,
                self._read_client,
                self._fd_closer,
            )
            try:
                clients.configure_socket(connection, len(user.clients) + 1)
                client.send(client.protocol.replies)
            except OSError:
                return True  # likewise
            client.protocol.replies = []
            stack.pop_all()
        self._add_client(client, user, now)
        return True

    def _add_client(self, client: ProxyClient, user: ProxyUser, now: float) -> None:
        self._users[client.user] = user
        user.clients.add(client)
        user.handshakes[client] = self._handshakes[client] = None
        self._admission.add_connection(client.user)
        self._connection_limiter.add(client, client.user, self._account_of(client))
        self._loop.add(client.client_socket.fd, functools.partial(self._on_readable, client.client_socket))
        self._handshake_timer.set_no_later_than(now + HANDSHAKE_TIMEOUT_S)
        if len(user.handshakes) > MAX_USER_HANDSHAKES:
            self._disconnect(
                next(iter(user.handshakes)), f"its user has more than {MAX_USER_HANDSHAKES} handshakes under way"
            )
        self._evict_excess()

    def _evict_excess(self) -> None:
        """Hang up the connections that are too many."""
        limit = max_connections(self._config.max_connections)
        limit_name = "max_connections" if limit == self._config.max_connections else "LimitNOFILE"
        for each in self._connection_limiter.evict_excess(limit, limit_name):
            self._disconnect(each.connection, each.reason)

    def _identify_user(self, connection: socket.socket) -> tuple[str, bool]:
        """Return the user of a new connection, and whether it is an operator.

        All users of a Unix socket that belong to no tenant are one user. Over TCP a key may still show the tenant.

        Raises:
            OSError: it has gone.
        """
        user, is_operator = clients.identify_user(connection, self._peers)
        if self._tenant_lookup is None or self._peers is not None or is_operator:
            return user, is_operator
        has_tenant = clients.tenant_of(connection, "", self._tenant_lookup) not in (None, NO_TENANT)
        return user if has_tenant else NO_TENANT, False

    def _account_of(self, client: ProxyClient) -> str:
        if self._tenant_lookup is None:
            return EVERYONE
        with contextlib.suppress(OSError):  # it has gone
            return (
                clients.tenant_of(client.connection, client.protocol.mechanism.peer_key, self._tenant_lookup)
                or NO_TENANT
            )
        return NO_TENANT

    def _reassign_accounts(self) -> None:
        self._connection_limiter = ConnectionLimiter()
        all_clients = [client for user in self._users.values() for client in user.clients]
        for each in sorted(all_clients, key=lambda client: client.connected_at):
            self._connection_limiter.add(each, each.user, self._account_of(each))
        self._evict_excess()

    def _on_handshake_timer(self, now: float) -> None:
        while self._handshakes:
            first = next(iter(self._handshakes))
            if first.connected_at + HANDSHAKE_TIMEOUT_S > now:
                self._handshake_timer.set(first.connected_at + HANDSHAKE_TIMEOUT_S)
                return
            self._disconnect(first, f"its handshake is not complete after {HANDSHAKE_TIMEOUT_S:g} s")

    def _mechanism_factory(self) -> Callable[[], zmtp.Mechanism]:
        if not self._config.secret_key:
            return zmtp.NullMechanism
        from weightd_daemon.zmq_proxy.curve import (  # noqa: PLC0415 - PyNaCl is there only if it is needed
            CurveMechanism,
            decode_secret_key,
        )

        return functools.partial(
            CurveMechanism, decode_secret_key(self._config.secret_key), lambda key: key in self._allowed_keys
        )

    # --- what is ready ------------------------------------------------------------------------------------------

    def _on_readable(self, side: ClientSocket) -> None:
        """Something can be read, or the other end is closed."""
        if side.pause_reasons:
            if side.has_peer_closed():
                self._on_peer_closed(side)
            return
        if self._read_queue or self._reads_this_turn >= _MAX_READS_PER_TURN:
            self._queue_read(side)
            return
        if not self._reads_this_turn:
            self._loop.call_soon(self._on_turn_end)
        self._reads_this_turn += 1
        if not side.read_once(side.client) and side.is_open:
            self._queue_read(side)

    def _on_turn_end(self) -> None:
        self._reads_this_turn = 0

    def _queue_read(self, side: ClientSocket) -> None:
        """Let a side have its turn."""
        self._pause_reading(side, ClientSocket.WAITS_FOR_TURN)
        self._read_queue.put(side.client.user, side)
        self._loop.call_soon(self._serve_queue)

    def _serve_queue(self) -> None:
        """Read what waits, for a moment."""
        deadline = clock.now() + _TIME_SLICE_S
        while self._read_queue:
            side = self._read_queue.take()
            if side.pause_reasons != ClientSocket.WAITS_FOR_TURN or side.read_once(side.client):
                self._resume_reading(side, ClientSocket.WAITS_FOR_TURN)
            elif side.is_open:
                self._read_queue.put(side.client.user, side)
            if clock.now() >= deadline:
                break
        if self._read_queue:
            self._loop.call_soon(self._serve_queue)

    def _pause_reading(self, side: ClientSocket, reason: int) -> None:
        """Read nothing, for one more reason."""
        if side.is_open and not side.pause_reasons:
            self._loop.pause_reading(side.fd)
        side.pause_reasons |= reason

    def _resume_reading(self, side: ClientSocket, reason: int) -> None:
        """Read again if there is no other reason not to."""
        if side.pause_reasons & reason and side.is_open:
            side.pause_reasons &= ~reason
            if not side.pause_reasons:
                self._loop.resume_reading(side.fd)

    def _on_peer_closed(self, side: ClientSocket) -> None:
        client = side.client
        if side is client.client_socket:
            self._remove_client(client)
        elif client not in self._close_deadlines:
            # What the daemon has sent before is read if the client reads in time.
            self._close_gracefully(client)

    # --- clients to daemon --------------------------------------------------------------------------------------

    def _read_client(self, client: ProxyClient) -> bool:
        """Read from a client; see `ClientSocket`."""
        try:
            messages = client.receive()
        except MemoryError:
            self._disconnect(client, "there is no memory for what it sends")
            return True
        except clients.DescriptorsSent:
            self._disconnect(client, "it sends descriptors, which no message has")
            return True
        except OSError:
            self._remove_client(client)
            return True
        return self._handle_messages(client, messages)

    def _handle_messages(self, client: ProxyClient, messages: list[zmtp.MessageFrames]) -> bool:
        """Pass messages on, and do what else has come of a read."""
        protocol = client.protocol
        if client in self._handshakes:
            replies, protocol.replies = protocol.replies, []
            if replies:
                self._send_to_client(client, replies)
            if protocol.is_ready and not client.is_closed:
                self._forget_handshake(client)
                self._on_client_key(client)
        if messages and not client.is_closed:
            client.pending_requests += len(messages)
            self._forward(client, messages)
        if protocol.pending_pong is not None and not client.is_closed:
            self._send_pong(client, protocol.pending_pong)
        if protocol.error and not client.is_closed:
            self._reject(client, protocol.error)
        if client.is_closed or protocol.error:
            return True
        if protocol.pending_work is not None:
            self._pause_reading(client.client_socket, ClientSocket.WAITS_FOR_CRYPTO)
            self._run_in_crypto_thread(client, protocol.pending_work, functools.partial(self._on_decrypted, client))
        self._update_buffered_bytes(client)
        # What is behind, but may not be read now, is read by `_resume`.
        return bool(client.client_socket.pause_reasons & ~ClientSocket.WAITS_FOR_TURN) or not protocol.is_backlogged

    def _forward(self, client: ProxyClient, messages: list[zmtp.MessageFrames]) -> None:
        stream = client.daemon_stream or self._open_daemon_stream(client)
        if stream is None:
            return
        try:
            if len(messages) == 1:
                stream.send(messages[0])
            else:
                stream.cork()
                for frames in messages:
                    stream.send(frames)
                stream.uncork()
        except ConnectionError:
            return  # what the daemon has said before is read first
        if stream.unsent:
            self._pause_reading(client.client_socket, ClientSocket.WAITS_FOR_OTHER_SOCKET)
            self._loop.watch_writes(stream.fileno(), functools.partial(self._flush_to_daemon, client, stream))

    def _flush_to_daemon(self, client: ProxyClient, stream: Stream) -> None:
        """The daemon has read some of what a client has sent."""
        try:
            if not stream.flush():
                self._update_buffered_bytes(client)
                return
        except ConnectionError:
            pass  # as above
        self._loop.unwatch_writes(stream.fileno())
        self._resume_with_backlog(client.client_socket, ClientSocket.WAITS_FOR_OTHER_SOCKET)
        self._update_buffered_bytes(client)

    def _resume_with_backlog(self, side: ClientSocket, reason: int) -> None:
        """Read again if there is no other reason not to, and first of all what is here already."""
        if side.pause_reasons == reason and side.is_backlogged and side.is_open:
            side.pause_reasons = 0
            self._loop.resume_reading(side.fd)
            self._queue_read(side)
        else:
            self._resume_reading(side, reason)

    def _on_decrypted(self, client: ProxyClient, result: Any) -> None:
        """A large frame was decrypted."""
        if client.is_closed:
            return
        if result is None:
            self._disconnect(client, "there is no memory for what it sends")
            return
        messages = client.protocol.on_work_done(result)
        if client not in self._close_deadlines:
            self._handle_messages(client, messages)
            if not client.is_closed:
                self._resume_with_backlog(client.client_socket, ClientSocket.WAITS_FOR_CRYPTO)

    def _open_daemon_stream(self, client: ProxyClient) -> Stream | None:
        """A client speaks for the first time: the daemon gets one end of a pair of sockets for it."""
        try:
            identity = client.identity()
            proxy_end, daemon_end = socket.socketpair()
        except OSError as error:
            self._disconnect(client, f"no stream to the daemon: {error.strerror}")
            return None
        connection_count = len(self._users[client.user].clients)
        for each in (proxy_end, daemon_end):
            clients.set_buffer_sizes(each, connection_count)
        incoming = FrameReader(max_header_bytes=MAX_FRAME_BYTES, max_messages=zmtp.MAX_MESSAGES_PER_PARSE)
        client.daemon_stream = Stream(proxy_end, incoming)
        client.daemon_socket = ClientSocket(client, proxy_end.fileno(), self._read_daemon)
        client.has_sent_message = True
        self._peer_count += 1
        self._loop.add(proxy_end.fileno(), functools.partial(self._on_readable, client.daemon_socket))
        try:
            with daemon_end:
                self._send_control(control.encode_peer_connected(self._peer_count, identity), daemon_end.fileno())
        except OSError as error:
            # No descriptor is left for what the daemon has yet to read.
            self._disconnect(client, f"no stream to the daemon: {error.strerror}")
            return None
        return client.daemon_stream

    # --- daemon to clients --------------------------------------------------------------------------------------

    def _read_daemon(self, client: ProxyClient) -> bool:
        """Read from the daemon; see `ClientSocket`."""
        stream = client.daemon_stream
        if stream is None:
            return True
        try:
            incoming = stream.frame_reader
            messages = incoming.receive(b"") if incoming.is_backlogged else stream.receive()
        except ConnectionError:
            self._close_daemon_stream(client)
            self._close_gracefully(client)
            return True
        except (MemoryError, OSError):
            self._disconnect(client, "there is no memory for its answer")
            return True
        client.pending_requests = max(0, client.pending_requests - len(messages))
        mechanism = client.protocol.mechanism
        answer_bytes = mechanism.overhead_bytes and sum(sum(message.lengths) for message in messages)
        if answer_bytes and answer_bytes >= zmtp.CRYPTO_THREAD_BYTES and client.daemon_socket is not None:
            client.encrypting_bytes = 2 * answer_bytes
            self._pause_reading(client.daemon_socket, ClientSocket.WAITS_FOR_CRYPTO)
            frames = [message.frames for message in messages]
            self._run_in_crypto_thread(
                client, lambda: _encode_messages(mechanism, frames), functools.partial(self._on_encrypted, client)
            )
        elif messages:
            self._send_to_client(client, _encode_messages(mechanism, [message.frames for message in messages]))
        self._update_buffered_bytes(client)
        return bool(
            client.daemon_socket is None
            or client.daemon_socket.pause_reasons & ~ClientSocket.WAITS_FOR_TURN
            or not incoming.is_backlogged
        )

    def _on_encrypted(self, client: ProxyClient, chunks: list[Any] | None) -> None:
        """Large answers were encrypted."""
        if client.is_closed:
            return
        client.encrypting_bytes = 0
        if chunks is None:
            self._disconnect(client, "there is no memory for its answer")
            return
        self._send_to_client(client, chunks)
        if client.daemon_socket is not None and not client.is_closed:
            self._resume_with_backlog(client.daemon_socket, ClientSocket.WAITS_FOR_CRYPTO)
        self._shut_down_when_sent(client)

    def _send_to_client(self, client: ProxyClient, chunks: Sequence[Any]) -> None:
        """Send bytes to a client; while some are left, nothing more is fetched for it."""
        try:
            is_sent = client.send(chunks)
        except OSError:
            self._remove_client(client)
            return
        if not is_sent:
            if client.daemon_socket is not None:
                self._pause_reading(client.daemon_socket, ClientSocket.WAITS_FOR_OTHER_SOCKET)
            self._loop.watch_writes(client.client_socket.fd, functools.partial(self._flush_to_client, client))

    def _flush_to_client(self, client: ProxyClient) -> None:
        """A client has read some of what it was sent."""
        try:
            is_sent = client.flush()
        except OSError:
            self._remove_client(client)
            return
        if is_sent:
            self._loop.unwatch_writes(client.client_socket.fd)
            if client.daemon_socket is not None:
                self._resume_with_backlog(client.daemon_socket, ClientSocket.WAITS_FOR_OTHER_SOCKET)
        self._update_buffered_bytes(client)
        self._shut_down_when_sent(client)

    def _send_pong(self, client: ProxyClient, content: bytes) -> None:
        """Answer a PING, unless the client has yet to read what tells it as well that somebody is here."""
        client.protocol.pending_pong = None
        if not client.outgoing.nbytes and not client.encrypting_bytes:
            self._send_to_client(client, [zmtp.encode_pong(client.protocol.mechanism, content)])

    # --- who leaves ---------------------------------------------------------------------------------------------

    def _reject(self, client: ProxyClient, reason: str) -> None:
        """End a connection whose client does not follow the protocol, and tell it why."""
        self._log_disconnect(client, reason)
        # Nothing may be encrypted while a large answer is.
        if client.protocol.is_ready and not client.encrypting_bytes:
            frame = control.error_frame(self._config.error_prefix, f"{reason}: this connection ends")
            self._send_to_client(client, zmtp.encode_message(client.protocol.mechanism, [frame]))
        if not client.is_closed:
            self._close_daemon_stream(client)
            self._close_gracefully(client)

    def _close_gracefully(self, client: ProxyClient) -> None:
        """Take nothing more from a client, and close its connection once it has what was sent, or after a time."""
        self._pause_reading(client.client_socket, ClientSocket.DISCONNECTING)
        deadline = self._close_deadlines.setdefault(client, clock.now() + LINGER_S)
        self._close_timer.set_no_later_than(deadline)
        self._shut_down_when_sent(client)

    def _shut_down_when_sent(self, client: ProxyClient) -> None:
        """Where all was sent to a client that leaves, tell it that this is the end."""
        if (
            client in self._close_deadlines
            and client.daemon_stream is None
            and not client.outgoing.nbytes
            and not client.encrypting_bytes
        ):
            with contextlib.suppress(OSError):
                client.connection.shutdown(socket.SHUT_WR)
            close_at = clock.now() + _CLOSE_DELAY_S
            self._close_deadlines[client] = min(self._close_deadlines[client], close_at)
            self._close_timer.set_no_later_than(close_at)

    def _on_close_timer(self, now: float) -> None:
        for each in [each for each, until in self._close_deadlines.items() if until <= now]:
            self._remove_client(each)
        self._close_timer.set(min(self._close_deadlines.values(), default=_NEVER))

    def _close_daemon_stream(self, client: ProxyClient) -> None:
        """Close a client's stream: what it has asked ends in the daemon."""
        if client.daemon_stream is not None and client.daemon_socket is not None:
            self._read_queue.remove(client.user, client.daemon_socket)
            self._loop.remove(client.daemon_socket.fd)
            client.close_stream()
            self._peer_count -= 1
            self._send_control(control.encode_peer_count(self._peer_count))

    def _disconnect(self, client: ProxyClient, reason: str) -> None:
        """End a connection at once."""
        self._log_disconnect(client, reason)
        self._remove_client(client)

    def _remove_client(self, client: ProxyClient) -> None:
        if client.is_closed:
            return
        self._close_daemon_stream(client)
        self._forget_handshake(client)
        self._read_queue.remove(client.user, client.client_socket)
        self._loop.remove(client.client_socket.fd)
        client.close()
        self._close_deadlines.pop(client, None)
        self._connection_limiter.remove(client)
        self._admission.remove_connection(client.user)
        user = self._users[client.user]
        user.clients.discard(client)
        user.buffered_bytes -= client.buffered_bytes
        self._buffered_bytes -= client.buffered_bytes
        if not user.clients:
            del self._users[client.user]

    def _forget_handshake(self, client: ProxyClient) -> None:
        self._handshakes.pop(client, None)
        self._users[client.user].handshakes.pop(client, None)

    def _on_client_key(self, client: ProxyClient) -> None:
        """A client has shown its key: from now on it counts as its tenant's."""
        if client.protocol.mechanism.peer_key and self._tenant_lookup is not None:
            self._connection_limiter.remove(client)
            self._connection_limiter.add(client, client.user, self._account_of(client))
            self._evict_excess()

    # --- memory -------------------------------------------------------------------------------------------------

    def _update_buffered_bytes(self, client: ProxyClient) -> None:
        """See how much is kept for a client; where that is too much in all, hang up who has most."""
        if client.is_closed:
            return
        growth = client.count_buffered_bytes() - client.buffered_bytes
        if not growth:
            return
        client.buffered_bytes += growth
        self._users[client.user].buffered_bytes += growth
        self._buffered_bytes += growth
        if self._buffered_bytes > _TRIM_THRESHOLD_BYTES:
            self._trim_timer.set(clock.now() + _TRIM_DELAY_S)
        max_bytes = self._config.max_memory_bytes
        while self._buffered_bytes > max_bytes:
            user = max(self._users.values(), key=lambda each: each.buffered_bytes)
            largest = max(user.clients, key=lambda each: each.buffered_bytes)
            self._disconnect(
                largest,
                f"more than {max_bytes} bytes (max_memory_bytes) are kept for clients, and {user.buffered_bytes} of"
                " them for this user",
            )

    def _run_in_crypto_thread(
        self, client: ProxyClient, function: Callable[[], Any], on_done: Callable[[Any], object]
    ) -> None:
        if self._crypto_thread is not None:
            self._crypto_thread.submit(client.user, function, on_done)

    # --- the daemon ---------------------------------------------------------------------------------------------

    def _log_disconnect(self, client: ProxyClient, reason: str) -> None:
        self._log_rate_limited(self._disconnect_log, client.user, f"disconnecting a client of {client.user}: {reason}")

    def _log_rate_limited(self, rate_limited_log: RateLimitedLog, user: str, text: str) -> None:
        """Log what a user can bring about as often as it likes."""
        suppressed_count = rate_limited_log.record(user, clock.now())
        if suppressed_count is not None:
            suffix = f" ({suppressed_count} more of {user} suppressed)" if suppressed_count else ""
            self._log(WARNING, text + suffix)

    def _log(self, level: int, text: str) -> None:
        self._send_control(control.encode_log_line(level, text))

    def _send_control(self, message: bytes, *descriptors: int) -> None:
        """Send a message to the daemon.

        Raises:
            OSError: no descriptor is left for those that cannot be sent at once; the message is not sent.
        """
        if self._stops_at != _NEVER:
            return  # the link is closed
        try:
            is_sent = self._control_stream.send([message], descriptors)
        except ConnectionError:
            return  # the daemon has gone: the link tells
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            self._control_stream.queue([message], descriptors)
            is_sent = False
        if not is_sent:
            self._loop.watch_writes(self._control_stream.fileno(), self._flush_control)

    def _flush_control(self) -> None:
        try:
            if not self._control_stream.flush():
                return
        except ConnectionError:
            pass  # as above
        except OSError:
            # Processes of this user have more descriptors in flight than the kernel allows this process (unix(7),
            # ETOOMANYREFS). The link can be written to all the while.
            self._control_retry_timer.set(clock.now() + _RETRY_INTERVAL_S)
        self._loop.unwatch_writes(self._control_stream.fileno())

    def _on_control_retry(self, _: float) -> None:
        if self._stops_at == _NEVER:
            self._loop.watch_writes(self._control_stream.fileno(), self._flush_control)

    def _on_control_readable(self) -> None:
        try:
            for message in self._control_stream.receive():
                keys, tenants = control.parse_allowed_peers(message.frames[0])
                self._allowed_keys, self._tenant_lookup = _key_set(keys), _make_tenant_lookup(tenants)
                self._reassign_accounts()
        except ConnectionError:
            # What it has said last is still passed on; nothing new is taken.
            self._loop.remove(self._control_stream.fileno())
            self._acceptor.stop()
            for user in self._users.values():
                for each in user.clients:
                    self._pause_reading(each.client_socket, ClientSocket.DISCONNECTING)
            self._stops_at = clock.now() + LINGER_S


def _new_peers() -> Peers:
    from weightd_common.peers import Peers  # noqa: PLC0415 - a proxy on a Unix socket does without

    return Peers()


class _AllKeys:
    """All keys."""

    def __contains__(self, key: object) -> bool:
        return True


def _key_set(keys: Sequence[str] | None) -> frozenset[str] | _AllKeys:
    return _AllKeys() if keys is None else frozenset(keys)


def _make_tenant_lookup(tenants: Sequence[TenantCredentials] | None) -> TenantLookup | None:
    return None if tenants is None else TenantLookup(tenants)


def _encode_messages(mechanism: zmtp.Mechanism, messages: Sequence[Sequence[Any]]) -> list[Any]:
    return [frame for frames in messages for frame in zmtp.encode_message(mechanism, frames)]
