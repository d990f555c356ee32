"""The proxy process of one listener: it accepts clients, identifies them, and relays their messages to the daemon.

No user may slow down another user: the limits on connections and memory apply to each user, and users take turns.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weightd_common.stream import Stream
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.acceptor import Acceptor, refuse_descriptors
from weightd_daemon.platform.connection_limiter import raise_descriptor_limit
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.zmq_proxy import client as clients
from weightd_daemon.zmq_proxy import control, sandbox, zmtp
from weightd_daemon.zmq_proxy.client import ProxyClient
from weightd_daemon.zmq_proxy.control import ProxyConfig, new_control_stream
from weightd_daemon.zmq_proxy.daemon_link import DaemonLink
from weightd_daemon.zmq_proxy.relay import LINGER_S, Relay
from weightd_daemon.zmq_proxy.sandbox import mapped_bytes, raise_oom_score
from weightd_daemon.zmq_proxy.turns import CryptoThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightd_common.peers import Peers
    from weightd_daemon.platform.fd_closer import DescriptorCloser

# Number of bytes that are added to the limit of the address space, because the C allocator reserves address space for
# each thread without using it.
_ADDRESS_SPACE_MARGIN_BYTES = 256 * 1024 * 1024

_NEVER = float("inf")


def run(control_socket: socket.socket, listener: socket.socket, config: ProxyConfig) -> None:
    """Serve clients in this process until the daemon closes its end of the control link."""
    sandbox.set_process_name(f"zmq-proxy {config.name}")
    raise_descriptor_limit()
    raise_oom_score()
    initial_bytes = mapped_bytes()
    listener.setblocking(False)
    crypto_thread = CryptoThread() if config.secret_key else None
    fd_closer = None if refuse_descriptors(listener) else _new_fd_closer()
    zmq_proxy = ZmqProxy(listener, new_control_stream(control_socket), config, crypto_thread, fd_closer)
    sandbox.drop_privileges()
    if crypto_thread is not None:
        crypto_thread.start()
    # Allow twice `max_memory_bytes`: the proxy maps the buffer of a frame as soon as the client announces the frame's
    # length, and only then checks whether all buffers together exceed `max_memory_bytes`.
    sandbox.limit_growth(
        initial_bytes + 2 * config.max_memory_bytes + _ADDRESS_SPACE_MARGIN_BYTES,
        may_start_threads=fd_closer is not None,
    )
    zmq_proxy.run()
    zmq_proxy.close()


class ZmqProxy:
    """Accepts clients on a listening socket, and relays their messages to the daemon.

    Args:
        listener: the listening socket.
        control_stream: the control link to the daemon.
        config: the configuration from the daemon.
        crypto_thread: encrypts and decrypts large frames; None without CURVE.
        fd_closer: closes descriptors that clients send; None if the kernel refuses them.
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
        self._config = config
        self._limits = zmtp.ZmtpLimits(config.max_frame_bytes, config.max_memory_bytes)
        self._allowed_keys = _key_set(config.allowed_keys)
        self._new_mechanism = self._mechanism_factory()
        self._stops_at = _NEVER
        self._loop = EventLoop()
        self._link = DaemonLink(control_stream, self._loop)
        peers = _new_peers() if listener.family != socket.AF_UNIX else None
        self._relay = Relay(self._loop, config, self._link, peers, crypto_thread)
        self._clients = self._relay.clients
        self._acceptor = Acceptor(listener, self._loop, self._on_connection, self._link.log_error)
        self._loop.add(control_stream.fileno(), self._on_control_readable)
        if crypto_thread is not None:
            self._loop.add(crypto_thread.descriptor, crypto_thread.collect)

    def run(self) -> None:
        """Relay messages until the daemon closes the link; then relay its last replies for at most `LINGER_S`."""
        self._loop.run()
        while not self._relay.is_idle and event_loop.now() < self._stops_at:
            self._loop.run_once(self._stops_at - event_loop.now())

    def close(self) -> None:
        """Close all connections."""
        self._clients.close()
        self._loop.close()

    def _on_connection(self, connection: socket.socket) -> bool:
        """Refuse a new connection, or begin the handshake with the client; return False if it was refused."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            try:
                name, is_operator = self._clients.identify_user(connection)
            except OSError:
                return True  # the client has disconnected
            now = event_loop.now()
            refusal = None if is_operator else self._clients.refusal_reason(name, now)
            if refusal is not None:
                self._link.log_refusal(name, refusal)
                return False
            protocol = zmtp.ZmtpConnection(self._new_mechanism(), self._limits)
            client = ProxyClient(connection, name, protocol, now, self._relay.read_client, self._fd_closer)
            try:
                clients.configure_socket(connection, self._clients.connection_count(name) + 1)
                client.send(client.protocol.replies)
            except OSError:
                return True  # the client has disconnected
            client.protocol.replies = []
            stack.pop_all()
        self._relay.add(client)
        return True

    def _mechanism_factory(self) -> Callable[[], zmtp.Mechanism]:
        if not self._config.secret_key:
            return zmtp.NullMechanism
        from weightd_daemon.zmq_proxy.curve import (  # noqa: PLC0415 - PyNaCl is only needed for CURVE
            CurveMechanism,
            decode_secret_key,
        )

        return functools.partial(
            CurveMechanism, decode_secret_key(self._config.secret_key), lambda key: key in self._allowed_keys
        )

    def _on_control_readable(self) -> None:
        try:
            for message in self._link.stream.receive():
                keys, tenants = control.parse_allowed_peers(message.frames[0])
                self._allowed_keys = _key_set(keys)
                self._clients.update_tenants(tenants)
        except ConnectionError:
            # Relay no more requests. The last replies of the daemon are still relayed.
            self._link.close()
            self._acceptor.stop()
            self._relay.stop_reading()
            self._stops_at = event_loop.now() + LINGER_S
            self._loop.stop()


def _new_peers() -> Peers:
    from weightd_common.peers import Peers  # noqa: PLC0415 - only needed over TCP

    return Peers()


class _AllKeys:
    """A set that contains every key."""

    def __contains__(self, key: object) -> bool:
        return True


def _key_set(keys: Sequence[str] | None) -> frozenset[str] | _AllKeys:
    return _AllKeys() if keys is None else frozenset(keys)


def _new_fd_closer() -> DescriptorCloser:
    """Return a thread pool that closes clients' descriptors, which Linux before 6.16 cannot refuse."""
    from weightd_daemon.platform.fd_closer import INTERRUPT, DescriptorCloser  # noqa: PLC0415 - not every proxy needs it

    signal.signal(INTERRUPT, _ignore_signal)
    return DescriptorCloser(functools.partial(print, file=sys.stderr))


def _ignore_signal(number: int, frame: object) -> None:
    """Do nothing: the purpose of the signal is to interrupt a blocked system call."""
