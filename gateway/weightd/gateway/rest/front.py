"""The front that speaks HTTP: its sockets, from start to stop."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from aiohttp import web

from weightd.gateway.config import places
from weightd.gateway.config.places import Place
from weightd.gateway.config.table import GatewayConfig
from weightd.gateway.gateway import Gateway
from weightd.gateway.rest.api import Api
from weightd.gateway.rest.connection import SWEEP_S, Connection, Crowd, Phase
from weightd.shared.regular import open_regular

# Who connects while the loop is busy waits there.
_BACKLOG = 1024

# Descriptors for all that is no caller's connection: to the daemon, regions, files of Python.
_OTHERS = 128

# Of headers, together with the request line: eight times what ordinary clients send.
_MOST_HEADER_BYTES = 8190
_MOST_HEADERS = 64

# What follows a request that was refused is read and dropped for so long, so that its sender reads why.
_LINGERING_S = 5.0

# When aiohttp would end a silent connection: that is the crowd's to do.
_NEVER_S = 1e8

# Of a socket in a directory that others may enter: its owner and group may connect.
_MODE = 0o660


class Rest:
    """Speaks HTTP.

    Args:
        gateway: what all protocols share.

    Attributes:
        crowd: the connections there are.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.crowd = _crowd(gateway.config)
        self._api = Api(gateway, _hosts(gateway.config))
        self._managers: list[web.Server] = []
        self._servers: list[asyncio.Server] = []
        self._paths: list[Path] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Sequence[str]:
        """Listen; return where, for people.

        Raises:
            OSError: an address cannot be had.
        """
        config, loop = self._gateway.config, asyncio.get_running_loop()
        # It wants to be made in the loop.
        manager = web.Server(self._api.handle, handler_cancellation=True)  # type: ignore[arg-type]
        self._managers.append(manager)
        self._tasks.append(asyncio.create_task(self._sweep()))
        told: list[str] = []
        for listener in self._listeners():
            tls = _tls(config) if config.tls_cert and listener.family != socket.AF_UNIX else None
            self._servers.append(
                await loop.create_server(partial(self._connection, manager), sock=listener, ssl=tls, backlog=_BACKLOG)
            )
            told.append(f"{'https' if tls else 'http'} {places.of_socket(listener)}")
        return told

    async def stop(self, grace: float) -> None:
        """Take nothing new, and return when what is under way has been answered, or after so many seconds."""
        for server in self._servers:
            server.close()
        for manager in self._managers:
            manager.pre_shutdown()
            await manager.shutdown(grace)
        for task in self._tasks:
            task.cancel()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _connection(self, manager: web.Server) -> Connection:
        return Connection(
            self.crowd,
            manager,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=_NEVER_S,
            access_log=None,
            max_line_size=_MOST_HEADER_BYTES,
            max_field_size=_MOST_HEADER_BYTES,
            max_headers=_MOST_HEADERS,
            lingering_time=_LINGERING_S,
            auto_decompress=False,
        )

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.crowd.sweep()

    def _listeners(self) -> list[socket.socket]:
        if self._gateway.sockets:
            return [*self._gateway.sockets]
        return [self._listener(place) for place in self._gateway.config.http_places]

    def _listener(self, place: Place) -> socket.socket:
        try:
            if not place.path:
                return _tcp(place)
            path = Path(place.path)
            listener = _unix(path)
        except OSError as error:
            raise OSError(error.errno, f"http: {place}: {error.strerror or error}") from None
        self._paths.append(path)
        return listener


def _tcp(place: Place) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
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


def _unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and _is_dead(path):
            path.unlink()
        listener.bind(str(path))
        path.chmod(_MODE)
    except OSError:
        listener.close()
        raise
    return listener


def _is_dead(path: Path) -> bool:
    """Whether nobody listens there any more: a gateway was killed."""
    with socket.socket(socket.AF_UNIX) as asking:
        return asking.connect_ex(str(path)) != 0


def _tls(config: GatewayConfig) -> ssl.SSLContext:
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


def _hosts(config: GatewayConfig) -> frozenset[str]:
    """Return what requests may be for: what is configured, and the addresses themselves."""
    own = {str(place).rpartition(":")[0] for place in config.http_places if place.host}
    return frozenset(each.lower() for each in {*config.hosts, *own})


def _crowd(config: GatewayConfig) -> Crowd:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(1, min(config.max_connections, descriptors - _OTHERS))
    limits = dict.fromkeys((Phase.HEADER, Phase.BODY, Phase.READING), config.receive_timeout)
    return Crowd(most, {**limits, Phase.IDLE: config.idle_timeout}, time.monotonic)
