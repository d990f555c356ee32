"""Relays connections of clients to gRPC's library, which listens at a Unix socket that only this process can reach.

The library keeps what a client sends before it knows who that is: a flood of CONTINUATION frames takes gigabytes. The
relay applies the limits of `frames` first, terminates TLS, and knows the peer of each connection.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
import ssl
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from weightd_common.peers import UNKNOWN, Peer
from weightd_common.rate_limits import RateLimitedLog, TokenBuckets
from weightd_gateway.connection_limiter import GatewayConnectionLimiter
from weightd_gateway.grpc.http2_frames import DATA, FrameCounter, FrameHeads, LimitExceeded, goaway_frame
from weightd_gateway.listening import common_name
from weightd_gateway.tls_handshakes import Handshakes

_log = logging.getLogger("weightd.gateway.grpc")

# How gRPC's library writes the name of an abstract Unix socket.
_ABSTRACT_PREFIX = "unix-abstract:"

# A connection that is closed for a violation may take so long to receive the reason.
_CLOSE_TIMEOUT_S = 1.0

# Between two lines of the log about violations of one peer.
_LOG_INTERVAL_S = 10.0

# The limit of calls of one peer: so many a second, beside one for each message that it was sent. A call that is
# cancelled at once, or refused, costs the gateway time and brings no message.
CALLS_PER_S = 1000.0
CALLS_BURST = 1000.0

# So many bytes are counted before the limits are looked at; what exceeds them is tried again after so long.
_STEP_BYTES = 8192
_RETRY_INTERVAL_S = 0.01


class Http2Filter:
    """The connections of all clients.

    Args:
        path: where gRPC's library listens.
        admission: of the connections.
        timeout_s: seconds within which a client has to complete the handshake of TLS, and the preface of HTTP/2.
        handshakes: TLS handshakes under way.
    """

    def __init__(
        self, path: Path, admission: GatewayConnectionLimiter, timeout_s: float, handshakes: Handshakes
    ) -> None:
        self._path = str(path)
        self._admission = admission
        self._handshakes = handshakes
        self._timeout_s = timeout_s
        # Nobody can take a name that cannot be guessed.
        self._prefix = f"weightd-{secrets.token_hex(8)}-"
        self._ids = itertools.count(1)
        self._by_name: dict[str, _Client] = {}
        self._clients: set[_Client] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._drained: asyncio.Future[None] | None = None
        self._violation_log = RateLimitedLog(_LOG_INTERVAL_S)
        self._call_buckets = TokenBuckets(CALLS_PER_S, CALLS_BURST)

    def peer_of(self, library_name: str) -> Peer:
        """Return the peer of a connection by what gRPC's library calls it."""
        client = self._by_name.get(library_name.removeprefix(_ABSTRACT_PREFIX))
        return UNKNOWN if client is None else client.peer

    @contextmanager
    def receiving(self, called: str) -> Generator[None, None, None]:
        """Let a connection send a long message within the block; `called`: what gRPC's library calls the connection."""
        client = self._by_name.get(called.removeprefix(_ABSTRACT_PREFIX))
        if client is None:
            yield
            return
        client.expect(1)
        try:
            yield
        finally:
            client.expect(-1)

    def is_full(self, called: str) -> bool:
        """Return whether a connection has sent too many bytes of messages that no call waits for."""
        client = self._by_name.get(called.removeprefix(_ABSTRACT_PREFIX))
        return client is not None and client.is_full

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The peers of all connections that gRPC's library has."""
        return {name: client.peer for name, client in self._by_name.items()}

    def on_connection(self, connection: socket.socket, peer: Peer, tls: ssl.SSLContext | None) -> None:
        """Take over a connection that is admitted."""
        task = asyncio.get_running_loop().create_task(self._accept(connection, peer, tls))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self, seconds: float) -> None:
        """Wait until gRPC's library has closed its ends and clients have what it sent, for at most so many seconds."""
        for client in [*self._clients]:
            if not client.is_connected:
                client.abort()
        self._drained = asyncio.get_running_loop().create_future()
        if self._clients:
            await asyncio.wait([self._drained], timeout=seconds)

    def abort(self) -> None:
        """Close all connections at once."""
        for task in [*self._tasks]:
            task.cancel()
        for each in [*self._clients]:
            each.abort()

    async def _accept(self, connection: socket.socket, peer: Peer, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        client = _Client(self, peer)
        try:
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is None:
                await loop.connect_accepted_socket(lambda: client, connection)
            else:
                await self._handshakes.complete(connection, peer, tls, self._timeout_s, lambda: client)
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
            client.abort()
            client.release()
            connection.close()

    # --- for clients -------------------------------------------------------------------------------------------

    def on_connect(self, client: _Client) -> asyncio.TimerHandle:
        """Count a connection; it is closed at the end of the returned timer."""
        self._clients.add(client)
        return asyncio.get_running_loop().call_later(self._timeout_s, client.abort)

    def connect_library(self, client: _Client) -> None:
        """Connect a client that has sent the preface to gRPC's library."""
        name = f"{self._prefix}{next(self._ids)}"
        library = socket.socket(socket.AF_UNIX)
        library.setblocking(False)
        try:
            library.bind(f"\0{name}")
            # This is immediate, or fails where the backlog is full.
            library.connect(self._path)
        except OSError as error:
            _log.warning("gRPC's library does not take a connection: %s", error.strerror)
            library.close()
            client.abort()
            return
        self._by_name[name] = client
        task = asyncio.get_running_loop().create_task(self._attach_library(library, client, name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attach_library(self, library: socket.socket, client: _Client, name: str) -> None:
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: _Library(client, lambda: self._by_name.pop(name, None)), library)

    def on_violation(self, client: _Client, reason: str) -> None:
        """Log a violation, and limit new connections of its peer."""
        now = time.monotonic()
        self._admission.penalize(client.peer, now)
        suppressed_count = self._violation_log.record(client.peer.key, now)
        # Scanners of ports, which speak another protocol, fill no log.
        if suppressed_count is not None and client.has_preface:
            more = f" ({suppressed_count} more since the last such line)" if suppressed_count else ""
            _log.warning("gRPC connection of %s closed: %s%s", client.peer.key, reason, more)

    def may_call(self, peer: Peer, now: float) -> bool:
        """Return whether a peer may begin another call."""
        return peer.is_operator or self._call_buckets.has_one(peer.key, now)

    def count_calls(self, peer: Peer, number: int, now: float) -> None:
        """Count calls that a peer has begun, or, as a negative number, messages that it was sent."""
        if number and not peer.is_operator:
            self._call_buckets.charge(peer.key, number, now)

    def on_disconnect(self, client: _Client) -> None:
        """Count a connection no more."""
        self._clients.discard(client)
        self._admission.remove_connection(client.peer)
        if self._drained is not None and not self._clients and not self._drained.done():
            self._drained.set_result(None)


class _Client(asyncio.Protocol):
    """The connection of a client."""

    def __init__(self, http2_filter: Http2Filter, peer: Peer) -> None:
        self.peer = peer
        self._filter = http2_filter
        self._frames = FrameCounter(time.monotonic())
        self._sent_heads = FrameHeads()
        self._transport: asyncio.Transport | None = None
        self._library: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._early_data = bytearray()
        # Bytes that are passed on when the peer may begin calls again and the connection is no longer full.
        self._held = b""
        self._retry_timer: asyncio.TimerHandle | None = None
        # Calls that wait for a long message.
        self._expecting = 0
        self._is_connecting = False
        self._is_released = False
        self._is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        name = common_name(transport)
        if name is not None:
            self.peer = self.peer._replace(common_name=name)
        self._deadline = self._filter.on_connect(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._cancel_deadline()
        self._drop_held()
        if self._library is not None:
            self._library.abort()
        self.release()

    def release(self) -> None:
        """Count the connection no more."""
        if not self._is_released:
            self._is_released = True
            self._filter.on_disconnect(self)

    @property
    def has_preface(self) -> bool:
        """Whether the client speaks HTTP/2."""
        return self._frames.has_preface

    @property
    def is_connected(self) -> bool:
        """Whether gRPC's library has, or had, the other end."""
        return self._library is not None

    @property
    def is_full(self) -> bool:
        """Whether no more is passed on before a call of the client has been answered, or waits for a long message."""
        return self._frames.is_full

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        data, self._held = self._held + data, b""
        try:
            allowed = self._count_frames(data)
        except LimitExceeded as error:
            self._close_with_reason(str(error))
            return
        if allowed < len(data):
            data, self._held = data[:allowed], data[allowed:]
            self._pause_reading()
            # A connection that is full goes on when a call waits for a long message, has been answered, or has ended.
            if self._retry_timer is None and not self._frames.is_full:
                self._retry_timer = asyncio.get_running_loop().call_later(_RETRY_INTERVAL_S, self._retry_held)
        if self._library is not None:
            self._library.write(data)
            return
        self._early_data += data
        if self._frames.has_preface and not self._is_connecting:
            self._is_connecting = True
            self._cancel_deadline()
            self._pause_reading()
            self._filter.connect_library(self)

    def _count_frames(self, data: bytes) -> int:
        """Return how many bytes may be passed on now."""
        now = time.monotonic()
        allowed = 0
        while allowed < len(data) and self._filter.may_call(self.peer, now) and not self._frames.is_full:
            step = data[allowed : allowed + _STEP_BYTES]
            self._filter.count_calls(self.peer, self._frames.feed(step, now), now)
            if self._expecting:
                self._frames.forget()
            allowed += len(step)
        return allowed

    def expect(self, number: int) -> None:
        """Count so many calls more, or fewer, that wait for a long message."""
        self._expecting += number
        self._frames.forget()
        if self._held:
            self._retry_held()

    def _retry_held(self) -> None:
        """Try again what is held."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        self.data_received(b"")
        if not self._held:
            self._resume_reading()

    def eof_received(self) -> bool:
        # HTTP/2 has no use for a connection that is open in one direction.
        return False

    def pause_writing(self) -> None:
        if self._library is not None:
            self._library.pause_reading()

    def resume_writing(self) -> None:
        if self._library is not None:
            self._library.resume_reading()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # --- for the other end -------------------------------------------------------------------------------------

    def on_library_connected(self, library: asyncio.Transport) -> None:
        """Pass on to gRPC's library what has come until now, and what comes."""
        if self._transport is None or self._transport.is_closing() or self._is_refused:
            library.abort()
            return
        self._library = library
        library.write(bytes(self._early_data))
        self._early_data = bytearray()
        self._resume_reading()

    def on_library_data(self, data: bytes) -> None:
        """Send what gRPC's library sends."""
        if self._transport is None or self._is_refused:
            return
        messages = 0
        for kind, flags, _, stream in self._sent_heads.feed(data):
            messages += kind == DATA
            self._frames.answered(kind, flags, stream)
        self._filter.count_calls(self.peer, -messages, time.monotonic())
        self._frames.count_sent(len(data))
        self._transport.write(data)
        if self._held and self._retry_timer is None and not self._frames.is_full:
            self._retry_held()

    def on_library_closed(self) -> None:
        """Close the connection when everything has been sent: gRPC's library has closed its end."""
        if self._transport is not None:
            self._transport.close()

    def set_library_full(self, *, is_full: bool) -> None:
        """Read no more from the client until gRPC's library has taken what there is."""
        if is_full:
            self._pause_reading()
        else:
            self._resume_reading()

    # --- within ------------------------------------------------------------------------------------------------

    def _pause_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._held and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _drop_held(self) -> None:
        self._held = b""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_with_reason(self, reason: str) -> None:
        """Close the connection with the reason, as far as it can be told."""
        self._is_refused = True
        self._drop_held()
        self._early_data = bytearray()
        self._filter.on_violation(self, reason)
        if self._library is not None:
            self._library.abort()
        transport = cast(asyncio.Transport, self._transport)
        transport.pause_reading()
        # Before the first frame of a server a client takes GOAWAY for a reason to connect again at once.
        if self._library is None or not self._sent_heads.is_at_boundary or transport.get_write_buffer_size():
            transport.abort()
            return
        transport.write(goaway_frame(reason))
        transport.close()
        self._deadline = asyncio.get_running_loop().call_later(_CLOSE_TIMEOUT_S, transport.abort)


class _Library(asyncio.Protocol):
    """The connection to gRPC's library for one client."""

    def __init__(self, client: _Client, on_closed: Any) -> None:
        self._client = client
        self._on_closed = on_closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client.on_library_connected(cast(asyncio.Transport, transport))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._on_closed()
        self._client.on_library_closed()

    def data_received(self, data: bytes) -> None:
        self._client.on_library_data(data)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._client.set_library_full(is_full=True)

    def resume_writing(self) -> None:
        self._client.set_library_full(is_full=False)
