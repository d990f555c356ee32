"""One client of a proxy: the connection to the client, the client's stream to the daemon, and buffered bytes."""

from __future__ import annotations

import array
import select
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from weightd_common.peer_credentials import is_operator, peer_credentials, peer_groups
from weightd_common.stream import Stream
from weightd_daemon.zmq_proxy import zmtp
from weightd_daemon.zmq_proxy.control import PeerIdentity
from weightd_protocol.framing import LARGE_BYTES, FrameWriter

if TYPE_CHECKING:
    from weightd_common.peers import Peers
    from weightd_daemon.platform.fd_closer import DescriptorCloser
    from weightd_daemon.platform.tenant_lookup import TenantLookup

# Maximum number of bytes in one read from a client. A read of the remaining bytes of a large frame may be larger.
_CHUNK_BYTES = 64 * 1024

# Maximum size in bytes of a message whose frames are copied into one buffer before the message is sent. For larger
# messages, sendmsg(2) with several frames takes less time.
_MAX_JOINED_BYTES = 16 * 1024

# Socket options for TCP, with which the kernel detects within a minute that the host of a client has crashed or is
# unreachable.
_TCP_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),
)

# Maximum and minimum size in bytes of one kernel buffer of a connection: its send buffer or its receive buffer. And the
# approximate maximum for all send buffers of one user's connections together, or for all receive buffers. The kernel
# doubles the sizes for its bookkeeping.
_MAX_BUFFER_BYTES = 256 * 1024
_MIN_BUFFER_BYTES = 8 * 1024
_MAX_USER_BUFFER_BYTES = 32 * 1024 * 1024


# Space for the maximum number of descriptors that a client can send at once (253). If a read had less space, the kernel
# would close the descriptors that do not fit before the read returns, and the client can make such a close block
# (SO_LINGER).
_ANCILLARY_BYTES = socket.CMSG_SPACE(253 * array.array("i").itemsize)


class DescriptorsSent(Exception):
    """A client has sent file descriptors, which are not part of any message."""


class ClientSocket:
    """One of the two sockets of a client: the connection to the client, or the client's stream to the daemon.

    Args:
        client: the client to which the socket belongs.
        fd: the descriptor of the socket.
        read_once: reads from the socket once and relays the complete messages; returns False if more data can be
            relayed without waiting.

    Attributes:
        pause_reasons: bits for the reasons why the proxy does not read from the socket; 0 while it reads.
        is_open: whether the socket is open.
    """

    __slots__ = ("client", "fd", "is_open", "pause_reasons", "read_once")

    # Bits of `pause_reasons`. WAITS_FOR_TURN: the socket is in the queue of `ReadTurns`. WAITS_FOR_OTHER_SOCKET: the
    # client's other socket cannot take the data that was read. WAITS_FOR_CRYPTO: the crypto thread encrypts or decrypts
    # data that was read. DISCONNECTING: the client is being disconnected.
    WAITS_FOR_TURN, WAITS_FOR_OTHER_SOCKET, WAITS_FOR_CRYPTO, DISCONNECTING = 1, 2, 4, 8

    def __init__(self, client: ProxyClient, fd: int, read_once: Callable[[ProxyClient], bool]) -> None:
        self.client = client
        self.fd = fd
        self.read_once = read_once
        self.pause_reasons = 0
        self.is_open = True

    @property
    def is_backlogged(self) -> bool:
        """Whether some data that was read from the socket has not been parsed yet."""
        client = self.client
        if self is client.client_socket:
            return client.protocol.is_backlogged
        return client.daemon_stream is not None and client.daemon_stream.frame_reader.is_backlogged

    def has_peer_closed(self) -> bool:
        """Return whether the other end of the socket has been closed."""
        poll = select.poll()
        poll.register(self.fd, 0)
        return bool(poll.poll(0))


class ProxyClient:
    """A client that is connected to the proxy.

    Args:
        connection: the connection to the client, which this object owns.
        user: the user, or over TCP the host, whose limits apply to the connection.
        protocol: parses the bytes of the client.
        connected_at: the time at which the client connected, in monotonic seconds.
        read_once: `ClientSocket.read_once` for the connection.
        fd_closer: closes descriptors that the client sends; None if the kernel refuses them.

    Attributes:
        client_socket: the connection to the client, as a `ClientSocket`.
        daemon_socket: the stream to the daemon, as a `ClientSocket`; None before the client's first message and after
            the stream was closed.
        daemon_stream: the stream to the daemon; None when `daemon_socket` is None.
        outgoing: the queue of bytes for the client that have not been sent yet.
        encrypting_bytes: the estimated memory, in bytes, of the replies that the crypto thread is encrypting.
        buffered_bytes: the last result of `count_buffered_bytes`.
        has_sent_message: whether the client has sent a whole message.
        pending_requests: the number of messages sent to the daemon, minus the number of the daemon's replies.
        is_closed: whether the client was disconnected.
    """

    __slots__ = (
        "buffered_bytes",
        "client_socket",
        "connected_at",
        "connection",
        "daemon_socket",
        "daemon_stream",
        "encrypting_bytes",
        "fd_closer",
        "has_sent_message",
        "is_closed",
        "outgoing",
        "pending_requests",
        "protocol",
        "user",
    )

    def __init__(
        self,
        connection: socket.socket,
        user: str,
        protocol: zmtp.ZmtpConnection,
        connected_at: float,
        read_once: Callable[[ProxyClient], bool],
        fd_closer: DescriptorCloser | None = None,
    ) -> None:
        self.connection = connection
        self.fd_closer = fd_closer
        self.user = user
        self.protocol = protocol
        self.connected_at = connected_at
        self.client_socket = ClientSocket(self, connection.fileno(), read_once)
        self.daemon_socket: ClientSocket | None = None
        self.daemon_stream: Stream | None = None
        self.outgoing = FrameWriter()
        self.encrypting_bytes = self.buffered_bytes = self.pending_requests = 0
        self.has_sent_message = self.is_closed = False

    def identity(self) -> PeerIdentity:
        """Return the client's identity, as the kernel and the handshake prove it.

        Raises:
            OSError: the client has disconnected.
        """
        key = self.protocol.mechanism.peer_key
        if self.connection.family == socket.AF_UNIX:
            pid, uid, gid = peer_credentials(self.connection)
            return PeerIdentity(uid, pid, f"uid {uid}", (gid, *peer_groups(self.connection)), key)
        return PeerIdentity(None, None, self.user, (), key)

    @property
    def is_busy(self) -> bool:
        """Whether the daemon has sent fewer replies than it has received messages of the client."""
        return self.pending_requests > 0

    def receive(self) -> list[zmtp.MessageFrames]:
        """Read from the connection once, or parse data that was read before; return the messages that are complete now.

        Raises:
            DescriptorsSent: the client has sent descriptors.
            OSError: the client has disconnected, or the memory for a frame cannot be mapped.
            MemoryError: the memory for a frame cannot be allocated.
        """
        protocol, fd_closer = self.protocol, self.fd_closer
        if protocol.is_backlogged:
            return protocol.receive(b"")
        try:
            if protocol.missing_bytes >= LARGE_BYTES:
                target = protocol.read_buffer()
                count = (
                    self.connection.recv_into(target) if fd_closer is None else self._receive_into(target, fd_closer)
                )
                if count:
                    return protocol.on_filled(count)
            else:
                data = self.connection.recv(_CHUNK_BYTES) if fd_closer is None else self._receive_message(fd_closer)
                if data:
                    return protocol.receive(data)
        except BlockingIOError:
            return []
        raise ConnectionResetError

    def _receive_message(self, fd_closer: DescriptorCloser) -> bytes:
        data, ancillary, _, _ = self.connection.recvmsg(_CHUNK_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        self._reject_descriptors(ancillary, fd_closer)
        return data

    def _receive_into(self, target: memoryview, fd_closer: DescriptorCloser) -> int:
        count, ancillary, _, _ = self.connection.recvmsg_into([target], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        self._reject_descriptors(ancillary, fd_closer)
        return count

    def _reject_descriptors(self, ancillary: Sequence[tuple[int, int, bytes]], fd_closer: DescriptorCloser) -> None:
        received_fds = array.array("i")
        for _, _, content in ancillary:
            received_fds.frombytes(content[: len(content) - len(content) % received_fds.itemsize])
        for each in received_fds:
            fd_closer.close(self.user, each)
        if received_fds:
            raise DescriptorsSent

    def send(self, chunks: Sequence[Any]) -> bool:
        """Send bytes to the client without waiting, and queue the rest for `flush`; return whether all bytes were sent.

        Raises:
            OSError: the client has disconnected.
        """
        outgoing = self.outgoing
        if outgoing.nbytes or sum(map(len, chunks)) > _MAX_JOINED_BYTES:
            is_first = not outgoing.nbytes
            outgoing.put(chunks)
            return is_first and self.flush()
        data = b"".join(chunks)
        try:
            sent = self.connection.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            outgoing.put([memoryview(data)[sent:]])
        return sent == len(data)

    def flush(self) -> bool:
        """Send queued bytes to the client without waiting; return whether the queue is empty.

        Raises:
            OSError: the client has disconnected.
        """
        outgoing = self.outgoing
        while outgoing.nbytes:
            chunks, _ = outgoing.next_chunks()
            try:
                outgoing.on_written(self.connection.sendmsg(chunks, (), socket.MSG_NOSIGNAL))
            except BlockingIOError:
                return False
        return True

    def count_buffered_bytes(self) -> int:
        """Return the number of bytes that the proxy buffers for the client, in both directions."""
        count = self.protocol.held_bytes + self.outgoing.nbytes + self.encrypting_bytes
        if self.daemon_stream is not None:
            count += self.daemon_stream.unsent + self.daemon_stream.frame_reader.admitted_bytes
        return count

    def close(self) -> None:
        """Close both sockets."""
        self.is_closed = True
        self.client_socket.is_open = False
        if self.fd_closer is None:
            self.connection.close()
        else:
            self.fd_closer.close_socket(self.user, self.connection)
        self.close_stream()

    def close_stream(self) -> None:
        """Close the stream to the daemon, if it is open."""
        if self.daemon_socket is not None:
            self.daemon_socket.is_open = False
        if self.daemon_stream is not None:
            self.daemon_stream.close()
        self.daemon_stream = self.daemon_socket = None


def identify_user(connection: socket.socket, peers: Peers | None) -> tuple[str, bool]:
    """Return the user or host of a new connection, and whether the client is an operator.

    Args:
        connection: the connection to the client.
        peers: identifies the clients of a TCP listener; None for a Unix socket.

    Raises:
        OSError: the client has disconnected.
    """
    if peers is None:
        uid = peer_credentials(connection).uid
        return f"uid {uid}", is_operator(uid)
    peer = peers.identify(connection)
    if not peer.is_known:
        raise OSError("it has disconnected")
    return peer.key, peer.is_operator


def tenant_of(connection: socket.socket, key: str, tenant_lookup: TenantLookup) -> str | None:
    """Return the name of a client's tenant; None if the client has no tenant.

    Args:
        connection: the connection to the client.
        key: the public key of the client; "" before the handshake or without a key.
        tenant_lookup: finds tenants by their credentials.

    Raises:
        OSError: the client has disconnected.
    """
    if connection.family != socket.AF_UNIX:
        return tenant_lookup.tenant_of(None, (), key)
    _, uid, gid = peer_credentials(connection)
    return tenant_lookup.tenant_of(uid, (gid, *peer_groups(connection)), key)


def kernel_buffer_bytes(connection_count: int) -> int:
    """Return the size in bytes of each kernel buffer of a connection whose user has `connection_count` connections."""
    return min(max(_MAX_USER_BUFFER_BYTES // max(connection_count, 1), _MIN_BUFFER_BYTES), _MAX_BUFFER_BYTES)


def configure_socket(connection: socket.socket, connection_count: int) -> None:
    """Set the socket options of a new connection of a user who has `connection_count` connections.

    Raises:
        OSError: the client has disconnected.
    """
    connection.setblocking(False)
    set_buffer_sizes(connection, connection_count)
    if connection.family != socket.AF_UNIX:
        for level, option, value in _TCP_OPTIONS:
            connection.setsockopt(level, option, value)


def set_buffer_sizes(connection: socket.socket, connection_count: int) -> None:
    """Set the sizes of the kernel's buffers of a socket, for a user who has `connection_count` connections."""
    nbytes = kernel_buffer_bytes(connection_count)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)
