"""Relays messages between the clients of a proxy and the daemon, over a separate stream for each client.

Each client has its own back-pressure: while one of its two sockets cannot take more data, the proxy does not read from
the other socket.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from weightd_common.stream import Stream
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import EventLoop, Timer
from weightd_daemon.zmq_proxy import client as clients
from weightd_daemon.zmq_proxy import control, zmtp
from weightd_daemon.zmq_proxy.client import ClientSocket, ProxyClient
from weightd_daemon.zmq_proxy.client_table import ClientTable
from weightd_daemon.zmq_proxy.turns import ReadTurns
from weightd_protocol.framing import FrameReader, Message
from weightd_protocol.limits import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from weightd_common.peers import Peers
    from weightd_daemon.zmq_proxy.control import ProxyConfig
    from weightd_daemon.zmq_proxy.daemon_link import DaemonLink
    from weightd_daemon.zmq_proxy.turns import CryptoThread

# Maximum number of seconds for which clients may still read their last replies after the daemon has exited or has
# closed their streams.
LINGER_S = 1.0

# Seconds between the last byte that is sent to a client and the close of its connection. Without this delay, a client
# that is still sending over TCP when its connection is closed may lose bytes that it has not read yet.
_CLOSE_DELAY_S = 0.1

_NEVER = float("inf")


class Relay:
    """Relays the messages of all clients of a proxy in both directions, and disconnects clients.

    Args:
        loop: reports readable and writable sockets.
        config: the configuration of the proxy.
        link: the control link to the daemon.
        peers: identifies the clients of a TCP listener; None for a Unix socket.
        crypto_thread: encrypts and decrypts large frames; None without CURVE.

    Attributes:
        clients: the table of all clients.
    """

    def __init__(
        self,
        loop: EventLoop,
        config: ProxyConfig,
        link: DaemonLink,
        peers: Peers | None,
        crypto_thread: CryptoThread | None,
    ) -> None:
        self.clients = ClientTable(config, loop, peers, self._disconnect)
        self._turns = ReadTurns(loop, self._on_peer_closed)
        self._loop = loop
        self._link = link
        self._error_prefix = config.error_prefix
        self._crypto_thread = crypto_thread
        # Number of clients that have a stream to the daemon.
        self._peer_count = 0
        self._close_deadlines: dict[ProxyClient, float] = {}
        self._close_timer = Timer(self._on_close_timer)
        loop.add_timer(self._close_timer)

    @property
    def is_idle(self) -> bool:
        """Whether no client has a stream to the daemon and no client is being disconnected."""
        return not self._peer_count and not self._close_deadlines

    def add(self, client: ProxyClient) -> None:
        """Add a new client, and start to read from it."""
        self._loop.add(client.client_socket.fd, functools.partial(self._turns.on_readable, client.client_socket))
        self.clients.add(client)

    def stop_reading(self) -> None:
        """Stop reading from clients. The daemon's replies are still relayed."""
        for each in self.clients:
            self._turns.pause(each.client_socket, ClientSocket.DISCONNECTING)

    def read_client(self, client: ProxyClient) -> bool:
        """Read from a client; see `ClientSocket.read_once`."""
        try:
            messages = client.receive()
        except MemoryError:
            self._disconnect(client, "no memory for its messages")
            return True
        except clients.DescriptorsSent:
            self._disconnect(client, "it sends file descriptors, which no message contains")
            return True
        except OSError:
            self._remove_client(client)
            return True
        return self._handle_messages(client, messages)

    # --- clients to daemon --------------------------------------------------------------------------------------

    def _handle_messages(self, client: ProxyClient, messages: list[zmtp.MessageFrames]) -> bool:
        """Handle all results of a read from a client; return the result for `ClientSocket.read_once`.

        The results are complete messages, replies of the handshake, a PONG, an error, and a frame to decrypt.
        """
        protocol = client.protocol
        if client in self.clients.handshakes:
            replies, protocol.replies = protocol.replies, []
            if replies:
                self._send_to_client(client, replies)
            if protocol.is_ready and not client.is_closed:
                self.clients.on_handshake_complete(client)
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
            self._turns.pause(client.client_socket, ClientSocket.WAITS_FOR_CRYPTO)
            self._run_in_crypto_thread(client, protocol.pending_work, functools.partial(self._on_decrypted, client))
        self.clients.update_buffered_bytes(client)
        # If the socket is paused for a reason other than its turn, no more data can be relayed now.
        # `ReadTurns.resume_with_backlog` parses the remaining data later.
        return bool(client.client_socket.pause_reasons & ~ClientSocket.WAITS_FOR_TURN) or not protocol.is_backlogged

    def _forward(self, client: ProxyClient, messages: list[zmtp.MessageFrames]) -> None:
        stream = client.daemon_stream or self._open_daemon_stream(client)
        if stream is None:
            return
        try:
            if len(messages) == 1:
                is_sent = stream.send(messages[0])
            else:
                stream.cork()
                for frames in messages:
                    stream.send(frames)
                is_sent = stream.uncork()
        except ConnectionError:
            return  # the daemon has closed the stream: its last replies are read before the client is disconnected
        if not is_sent:
            self._turns.pause(client.client_socket, ClientSocket.WAITS_FOR_OTHER_SOCKET)
            self._loop.watch_writes(stream.fileno(), functools.partial(self._flush_to_daemon, client, stream))

    def _flush_to_daemon(self, client: ProxyClient, stream: Stream) -> None:
        """Send more of a client's messages, because the stream to the daemon is writable again."""
        try:
            if not stream.flush():
                self.clients.update_buffered_bytes(client)
                return
        except ConnectionError:
            pass  # as in `_forward`
        self._loop.unwatch_writes(stream.fileno())
        self._turns.resume_with_backlog(client.client_socket, ClientSocket.WAITS_FOR_OTHER_SOCKET)
        self.clients.update_buffered_bytes(client)

    def _on_decrypted(self, client: ProxyClient, result: Any) -> None:
        """Relay the frame that the crypto thread has decrypted; `result` is None if there was no memory for it."""
        if client.is_closed:
            return
        if result is None:
            self._disconnect(client, "no memory for its messages")
            return
        messages = client.protocol.on_work_done(result)
        if client not in self._close_deadlines:
            self._handle_messages(client, messages)
            if not client.is_closed:
                self._turns.resume_with_backlog(client.client_socket, ClientSocket.WAITS_FOR_CRYPTO)

    def _open_daemon_stream(self, client: ProxyClient) -> Stream | None:
        """Create a client's stream to the daemon at its first message, and send the daemon's end to the daemon."""
        try:
            identity = client.identity()
            proxy_end, daemon_end = socket.socketpair()
        except OSError as error:
            self._disconnect(client, f"no stream to the daemon: {error.strerror}")
            return None
        connection_count = self.clients.connection_count(client.user)
        for each in (proxy_end, daemon_end):
            clients.set_buffer_sizes(each, connection_count)
        incoming = FrameReader(max_header_bytes=MAX_FRAME_BYTES, max_messages=zmtp.MAX_MESSAGES_PER_PARSE)
        client.daemon_stream = Stream(proxy_end, incoming)
        client.daemon_socket = ClientSocket(client, proxy_end.fileno(), self._read_daemon)
        client.has_sent_message = True
        self._peer_count += 1
        self._loop.add(proxy_end.fileno(), functools.partial(self._turns.on_readable, client.daemon_socket))
        try:
            with daemon_end:
                self._link.send(control.encode_peer_connected(self._peer_count, identity), daemon_end.fileno())
        except OSError as error:
            # The control message would have to be queued, but no descriptor is left for a copy of `daemon_end`.
            self._disconnect(client, f"no stream to the daemon: {error.strerror}")
            return None
        return client.daemon_stream

    # --- daemon to clients --------------------------------------------------------------------------------------

    def _read_daemon(self, client: ProxyClient) -> bool:
        """Read from a client's stream to the daemon; see `ClientSocket.read_once`."""
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
            self._disconnect(client, "no memory for its responses")
            return True
        client.pending_requests = max(0, client.pending_requests - len(messages))
        mechanism = client.protocol.mechanism
        answer_bytes = mechanism.overhead_bytes and sum(sum(message.lengths) for message in messages)
        if answer_bytes and answer_bytes >= zmtp.CRYPTO_THREAD_BYTES and client.daemon_socket is not None:
            client.encrypting_bytes = 2 * answer_bytes
            self._turns.pause(client.daemon_socket, ClientSocket.WAITS_FOR_CRYPTO)
            self._run_in_crypto_thread(
                client, lambda: _encode_messages(mechanism, messages), functools.partial(self._on_encrypted, client)
            )
        elif messages:
            self._send_to_client(client, _encode_messages(mechanism, messages))
        self.clients.update_buffered_bytes(client)
        return bool(
            client.daemon_socket is None
            or client.daemon_socket.pause_reasons & ~ClientSocket.WAITS_FOR_TURN
            or not incoming.is_backlogged
        )

    def _on_encrypted(self, client: ProxyClient, chunks: list[Any] | None) -> None:
        """Send the bytes that the crypto thread has encrypted; `chunks` is None if there was no memory for them."""
        if client.is_closed:
            return
        client.encrypting_bytes = 0
        if chunks is None:
            self._disconnect(client, "no memory for its responses")
            return
        self._send_to_client(client, chunks)
        if client.daemon_socket is not None and not client.is_closed:
            self._turns.resume_with_backlog(client.daemon_socket, ClientSocket.WAITS_FOR_CRYPTO)
        self._shut_down_when_sent(client)

    def _send_to_client(self, client: ProxyClient, chunks: Sequence[Any]) -> None:
        """Send bytes to a client. Until all are sent, do not read from the client's stream to the daemon."""
        try:
            is_sent = client.send(chunks)
        except OSError:
            self._remove_client(client)
            return
        if not is_sent:
            if client.daemon_socket is not None:
                self._turns.pause(client.daemon_socket, ClientSocket.WAITS_FOR_OTHER_SOCKET)
            self._loop.watch_writes(client.client_socket.fd, functools.partial(self._flush_to_client, client))

    def _flush_to_client(self, client: ProxyClient) -> None:
        """Send more bytes to a client, because the connection to the client is writable again."""
        try:
            is_sent = client.flush()
        except OSError:
            self._remove_client(client)
            return
        if is_sent:
            self._loop.unwatch_writes(client.client_socket.fd)
            if client.daemon_socket is not None:
                self._turns.resume_with_backlog(client.daemon_socket, ClientSocket.WAITS_FOR_OTHER_SOCKET)
        self.clients.update_buffered_bytes(client)
        self._shut_down_when_sent(client)

    def _send_pong(self, client: ProxyClient, content: bytes) -> None:
        """Send a PONG, unless other bytes for the client are queued: they also show that the proxy is alive."""
        client.protocol.pending_pong = None
        if not client.outgoing.nbytes and not client.encrypting_bytes:
            self._send_to_client(client, [zmtp.encode_pong(client.protocol.mechanism, content)])

    def _run_in_crypto_thread(
        self, client: ProxyClient, function: Callable[[], Any], on_done: Callable[[Any], object]
    ) -> None:
        if self._crypto_thread is not None:
            self._crypto_thread.submit(client.user, function, on_done)

    # --- disconnecting ------------------------------------------------------------------------------------------

    def _on_peer_closed(self, side: ClientSocket) -> None:
        client = side.client
        if side is client.client_socket:
            self._remove_client(client)
        elif client not in self._close_deadlines:
            # The daemon has closed the stream. The client still gets queued responses, if it reads them within
            # `LINGER_S`.
            self._close_gracefully(client)

    def _reject(self, client: ProxyClient, reason: str) -> None:
        """Send the reason to a client that has violated the protocol, and disconnect it."""
        self._link.log_disconnect(client.user, reason)
        # Send no reason while the crypto thread encrypts replies: messages have to be sent in the order of their
        # nonces.
        if client.protocol.is_ready and not client.encrypting_bytes:
            frame = control.error_frame(self._error_prefix, f"{reason}; closing this connection")
            self._send_to_client(client, zmtp.encode_message(client.protocol.mechanism, [frame]))
        if not client.is_closed:
            self._close_daemon_stream(client)
            self._close_gracefully(client)

    def _close_gracefully(self, client: ProxyClient) -> None:
        """Stop reading from a client, and close its connection after all bytes were sent, or after `LINGER_S`."""
        self._turns.pause(client.client_socket, ClientSocket.DISCONNECTING)
        deadline = self._close_deadlines.setdefault(client, event_loop.now() + LINGER_S)
        self._close_timer.set_no_later_than(deadline)
        self._shut_down_when_sent(client)

    def _shut_down_when_sent(self, client: ProxyClient) -> None:
        """Shut down the connection to a client that is being disconnected, once all bytes were sent."""
        if (
            client in self._close_deadlines
            and client.daemon_stream is None
            and not client.outgoing.nbytes
            and not client.encrypting_bytes
        ):
            with contextlib.suppress(OSError):
                client.connection.shutdown(socket.SHUT_WR)
            close_at = event_loop.now() + _CLOSE_DELAY_S
            self._close_deadlines[client] = min(self._close_deadlines[client], close_at)
            self._close_timer.set_no_later_than(close_at)

    def _on_close_timer(self, now: float) -> None:
        for each in [each for each, until in self._close_deadlines.items() if until <= now]:
            self._remove_client(each)
        self._close_timer.set(min(self._close_deadlines.values(), default=_NEVER))

    def _close_daemon_stream(self, client: ProxyClient) -> None:
        """Close a client's stream to the daemon, which then cancels the client's requests."""
        if client.daemon_stream is not None and client.daemon_socket is not None:
            self._turns.remove(client.daemon_socket)
            client.close_stream()
            self._peer_count -= 1
            self._link.send(control.encode_peer_count(self._peer_count))

    def _disconnect(self, client: ProxyClient, reason: str) -> None:
        """Log the reason, and disconnect a client without sending queued bytes."""
        self._link.log_disconnect(client.user, reason)
        self._remove_client(client)

    def _remove_client(self, client: ProxyClient) -> None:
        if client.is_closed:
            return
        self._close_daemon_stream(client)
        self._turns.remove(client.client_socket)
        client.close()
        self._close_deadlines.pop(client, None)
        self.clients.remove(client)


def _encode_messages(mechanism: zmtp.Mechanism, messages: Sequence[Message]) -> list[Any]:
    chunks: list[Any] = []
    for frames, _ in messages:
        chunks += zmtp.encode_message(mechanism, frames)
    return chunks
