"""Listening sockets of all protocols: TCP and Unix sockets, TLS, and the admission of connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightd_common.peers import Peer, Peers
from weightd_common.rate_limits import RateLimitedLog
from weightd_common.safe_open import open_regular
from weightd_gateway.config.addresses import ListenAddress
from weightd_gateway.config.schema import GatewayConfig
from weightd_gateway.connection_limiter import GatewayConnectionLimiter

_log = logging.getLogger("weightd.gateway")

# Maximum number of new connections that the kernel queues for a listening socket while the event loop is busy.
BACKLOG = 1024

# Maximum seconds of one call that accepts connections, so that a flood of connections does not block the event loop.
_ACCEPT_SLICE_S = 1e-4

# Seconds for which a listener pauses after the process has run out of file descriptors or memory for connections.
_ACCEPT_BACKOFF_S = 0.1
_EXHAUSTED_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

# Size of a connection's socket buffer in each direction; the kernel doubles the size for its own overhead. By default
# the kernel would buffer several megabytes for each connection.
BUFFER_BYTES = 208 * 1024

# Seconds between two log lines about refused connections of one peer.
_LOG_INTERVAL_S = 10.0

# Mode of a Unix socket: its owner and group may connect, if they can enter its directory.
_MODE = 0o660

OnConnection = Callable[[socket.socket, Peer], None]


class GatewayAcceptor:
    """Accepts connections at one listening socket, and refuses connections beyond the limits of their peer.

    asyncio's own servers accept up to a whole backlog of connections in one pass, which blocks all other work.

    Args:
        listener: the bound socket; `close` closes it.
        admission: the connection limiter of the protocol.
        peers: finds the peer of a connection.
        on_connection: called with each admitted connection. It must call `admission.remove_connection` once the
            connection has ended.
        refusal_response: returns the bytes to send before a refused connection is closed, given the reason; None: send
            nothing.
    """

    def __init__(
        self,
        listener: socket.socket,
        admission: GatewayConnectionLimiter,
        peers: Peers,
        on_connection: OnConnection,
        refusal_response: Callable[[str], bytes] | None = None,
    ) -> None:
        self._listener = listener
        self._admission = admission
        self._peers = peers
        self._on_connection = on_connection
        self._refusal_response = refusal_response
        self._refusal_log = RateLimitedLog(_LOG_INTERVAL_S)
        self._loop = asyncio.get_running_loop()
        self._pause_timer: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        # Connections that the listener accepts inherit these options.
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            listener.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        listener.listen(BACKLOG)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no further connection."""
        if self._listener.fileno() < 0:
            return
        if self._pause_timer is not None:
            self._pause_timer.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _accept(self) -> None:
        until = time.monotonic() + _ACCEPT_SLICE_S
        now = until - _ACCEPT_SLICE_S
        while now < until:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED_ERRNOS:
                    raise
                self._pause_accepting(error)
                return
            self._admit(connection, now)
            now = time.monotonic()

    def _admit(self, connection: socket.socket, now: float) -> None:
        connection.setblocking(False)
        peer = self._peers.identify(connection)
        if not peer.is_known:
            connection.close()
            return
        reason = self._admission.admit(peer, now)
        if reason is None:
            self._on_connection(connection, peer)
            return
        with connection, contextlib.suppress(OSError):
            if self._refusal_response is not None:
                connection.send(self._refusal_response(reason))
        suppressed_count = self._refusal_log.record(peer.key, now)
        if suppressed_count is not None:
            more = f" ({suppressed_count} more since the last such line)" if suppressed_count else ""
            _log.warning("new connection refused: %s%s", reason, more)

    def _pause_accepting(self, error: OSError) -> None:
        """Pause the listener; otherwise the pending connection would wake up the event loop continuously."""
        _log.warning("cannot accept connections: %s; retrying in %g s", error.strerror, _ACCEPT_BACKOFF_S)
        self._loop.remove_reader(self._listener.fileno())
        self._pause_timer = self._loop.call_later(_ACCEPT_BACKOFF_S, self._resume_accepting)

    def _resume_accepting(self) -> None:
        self._pause_timer = None
        self._loop.add_reader(self._listener.fileno(), self._accept)


def bind(address: ListenAddress, protocol: str) -> socket.socket:
    """Return a socket that is bound to an address.

    Raises:
        OSError: the address cannot be bound; the text names the address and the protocol.
    """
    try:
        return _bind_unix(Path(address.path)) if address.path else _bind_tcp(address)
    except OSError as error:
        raise OSError(error.errno, f"{protocol}: {address}: {error.strerror or error}") from None


def _bind_tcp(listen_address: ListenAddress) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        listen_address.host, listen_address.port, type=socket.SOCK_STREAM
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _bind_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and _is_stale(path):
            path.unlink()
        listener.bind(str(path))
        path.chmod(_MODE)
    except OSError:
        listener.close()
        raise
    return listener


def _is_stale(path: Path) -> bool:
    """Return whether no process listens at the path: a killed gateway leaves its socket file behind."""
    with socket.socket(socket.AF_UNIX) as asking:
        return asking.connect_ex(str(path)) != 0


def tls_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """Return the TLS context of the configuration; None if no certificate is configured.

    Raises:
        OSError: a file cannot be read or loaded.
    """
    if not config.tls_cert:
        return None
    try:
        # The ssl module would block on a named pipe, so each path must be a regular file.
        for path in filter(None, (config.client_ca, config.tls_cert, config.tls_key)):
            open_regular(path).close()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=config.client_ca or None)
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:
        raise OSError(error.errno, f"tls_cert, tls_key or client_ca: {error}") from None
    if config.client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def common_name(transport: asyncio.BaseTransport) -> str | None:
    """Return the common name of the client certificate that TLS has verified; None without one."""
    certificate: dict[str, Any] = transport.get_extra_info("peercert") or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return str(names[0]) if names else None
