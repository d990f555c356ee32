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

# Clients that connect while the loop is busy wait there.
BACKLOG = 1024

# A wake-up accepts no further connection after this time, so that a flood of connections does not hold up the loop.
_ACCEPT_SLICE_S = 1e-4

# Where the process has no descriptor for the next connection, until some have been closed.
_ACCEPT_BACKOFF_S = 0.1
_EXHAUSTED_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

# Of the kernel for what a client sends and nobody has read, and for what it does not read: by itself the kernel keeps
# several megabytes of each connection. It doubles this number, for its own needs.
BUFFER_BYTES = 208 * 1024

# Between two lines of the log about refused connections of one peer.
_LOG_INTERVAL_S = 10.0

# Of a socket in a directory that others may enter: its owner and group may connect.
_MODE = 0o660

OnConnection = Callable[[socket.socket, Peer], None]


class GatewayAcceptor:
    """Accepts connections at one listening socket and refuses those beyond the limits of their peer.

    asyncio's own servers accept as many connections in one go as the backlog has, while nobody else is served.

    Args:
        listener: listens; it is closed by `close`.
        admission: of the protocol.
        peers: identifies peers.
        on_connection: is given each connection that is admitted. It has to have `admission.leaves` called at the end.
        refusal_response: returns what a client receives whose connection is refused, from the reason; None: nothing.
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
        # Connections have the same.
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
        """Pause: else the loop would be woken again and again by the connection that cannot be accepted."""
        _log.warning("no connection can be accepted: %s; trying again in %g s", error.strerror, _ACCEPT_BACKOFF_S)
        self._loop.remove_reader(self._listener.fileno())
        self._pause_timer = self._loop.call_later(_ACCEPT_BACKOFF_S, self._resume_accepting)

    def _resume_accepting(self) -> None:
        self._pause_timer = None
        self._loop.add_reader(self._listener.fileno(), self._accept)


def bind(address: ListenAddress, protocol: str) -> socket.socket:
    """Return a socket that is bound to an address.

    Raises:
        OSError: the address cannot be had; the text names it and the protocol.
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
    """Whether nobody listens there any more: a gateway was killed."""
    with socket.socket(socket.AF_UNIX) as asking:
        return asking.connect_ex(str(path)) != 0


def tls_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """Return the TLS context of the configuration; None where it has no certificate.

    Raises:
        OSError: a file cannot be used.
    """
    if not config.tls_cert:
        return None
    try:
        # The library would wait for the other end of a pipe.
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
    """Return the common name of the certificate of the other end, which TLS has verified; None without one."""
    certificate: dict[str, Any] = transport.get_extra_info("peercert") or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return str(names[0]) if names else None
