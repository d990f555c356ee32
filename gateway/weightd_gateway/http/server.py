"""The HTTP frontend: its listening sockets and connections, from start to stop."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from weightd_common.peers import Peer, Peers
from weightd_gateway import listening, tls_handshakes
from weightd_gateway.config import addresses
from weightd_gateway.config.schema import GatewayConfig
from weightd_gateway.connection_limiter import GatewayConnectionLimiter
from weightd_gateway.context import Gateway
from weightd_gateway.fairness import FairRunner
from weightd_gateway.http.app import HttpApi
from weightd_gateway.http.connection import (
    RECEIVE_BYTES,
    SWEEP_S,
    ConnectionParts,
    ConnectionPhase,
    HttpConnection,
    HttpConnections,
)
from weightd_gateway.http.messages import JSON
from weightd_gateway.listening import GatewayAcceptor
from weightd_gateway.tensors import to_json

# Number of file descriptors that are not available for connections of callers: the gateway needs them for connections
# to the daemon, shared-memory regions and Python's own files.
_RESERVED_FDS = 128

# Seconds for which the server receives and drops data after it has rejected a request, so that the client can read the
# error.
_LINGERING_S = 5.0


class HttpServer:
    """The HTTP frontend.

    Args:
        gateway: the state that all frontends share.

    Attributes:
        connections: the open connections.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.connections = _make_connections(gateway.config)
        self._api = HttpApi(gateway, _allowed_hosts(gateway.config))
        self._peers = Peers()
        # This object limits only the rate of new connections. `HttpConnections` limits the number of connections,
        # because it can close idle ones.
        self._admission = GatewayConnectionLimiter(sys.maxsize, gateway.config.max_connection_rate)
        self._acceptors: list[GatewayAcceptor] = []
        self._handshakes: set[asyncio.Task[None]] = set()
        self._paths: list[Path] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Sequence[str]:
        """Start listening and return the addresses for the log.

        Raises:
            OSError: an address cannot be bound.
        """
        config, loop = self._gateway.config, asyncio.get_running_loop()
        self._tasks.append(asyncio.create_task(self._sweep()))
        fair_runner = FairRunner(loop.call_soon, time.thread_time)
        parts = ConnectionParts(self._api.reply_to, self.connections, fair_runner, memoryview(bytearray(RECEIVE_BYTES)))
        context = listening.tls_context(config)
        urls: list[str] = []
        for listener in self._bind_listeners():
            tls = None if listener.family == socket.AF_UNIX else context
            admit = partial(self._on_connection, parts=parts, tls=tls)
            self._acceptors.append(
                GatewayAcceptor(listener, self._admission, self._peers, admit, None if tls else _refusal_response)
            )
            urls.append(f"{'https' if tls else 'http'} {addresses.address_of(listener)}")
        return urls

    async def stop(self, grace_s: float) -> None:
        """Stop accepting requests; return when the requests in flight have ended, or after `grace_s` seconds."""
        for accepting in self._acceptors:
            accepting.close()
        for task in [*self._handshakes]:
            task.cancel()
        for each in self.connections:
            each.finish()
        await self._wait_replied(grace_s)
        for each in self.connections:
            each.abort()
        # The requests of aborted connections are cancelled in the next pass of the event loop, so wait for this pass
        # first. They end in the pass after it.
        await asyncio.sleep(0)
        await self._wait_replied(None)
        for task in self._tasks:
            task.cancel()
        self._peers.close()
        for path in self._paths:
            path.unlink(missing_ok=True)

    async def _wait_replied(self, timeout_s: float | None) -> None:
        waiters = [each.run.end_waiter() for each in self.connections if each.run is not None]
        if waiters:
            await asyncio.wait(waiters, timeout=timeout_s)

    def _on_connection(
        self, connection: socket.socket, peer: Peer, *, parts: ConnectionParts, tls: ssl.SSLContext | None
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(connection, peer, parts, tls))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _connect(
        self, connection: socket.socket, peer: Peer, parts: ConnectionParts, tls: ssl.SSLContext | None
    ) -> None:
        self._admission.remove_connection(peer)
        protocol_factory = partial(HttpConnection, parts, peer)
        try:
            if tls is None:
                await asyncio.get_running_loop().connect_accepted_socket(protocol_factory, connection)
            else:
                patience = self._gateway.config.receive_timeout
                await self._gateway.handshakes.complete(connection, peer, tls, patience, protocol_factory)
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
            connection.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.connections.sweep()

    def _bind_listeners(self) -> list[socket.socket]:
        if self._gateway.sockets:
            return [*self._gateway.sockets]
        listen_addresses = self._gateway.config.http_addresses
        self._paths += [Path(address.path) for address in listen_addresses if address.path]
        return [listening.bind(address, "http") for address in listen_addresses]


def _refusal_response(reason: str) -> bytes:
    """Return the response to a client whose connection is refused before it has sent a request."""
    body = to_json({"error": reason}).encode()
    head = f"HTTP/1.1 429 Too Many Requests\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Retry-After: 1\r\nConnection: close\r\n\r\n".encode() + body


def _allowed_hosts(config: GatewayConfig) -> frozenset[str]:
    """Return the allowed values of the Host header: the configured names and the addresses of the listeners."""
    own_hosts = {str(address).rpartition(":")[0] for address in config.http_addresses if address.host}
    return frozenset(each.lower() for each in {*config.hosts, *own_hosts})


def _make_connections(config: GatewayConfig) -> HttpConnections:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    reserved_fds = _RESERVED_FDS + (tls_handshakes.MAX_HANDSHAKES if config.tls_cert else 0)
    max_connections = max(1, min(config.max_connections, descriptors - reserved_fds))
    phase_timeouts = dict.fromkeys(
        (ConnectionPhase.HEADER, ConnectionPhase.BODY, ConnectionPhase.READING), config.receive_timeout
    )
    return HttpConnections(
        max_connections,
        {**phase_timeouts, ConnectionPhase.IDLE: config.idle_timeout, ConnectionPhase.LINGERING: _LINGERING_S},
        time.monotonic,
    )
