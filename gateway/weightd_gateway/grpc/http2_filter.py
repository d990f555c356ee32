"""Relay between gRPC clients and gRPC's library, which listens on a Unix socket that only the gateway's user can reach.

The library stores data of a client before the client is authenticated; a flood of CONTINUATION frames can take
gigabytes. Therefore the relay applies the limits of `http2_frames` before it forwards data. The relay also terminates
TLS and identifies the peer of each connection, because the library sees only connections from the relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

from weightd_common.peers import UNKNOWN, Peer
from weightd_common.rate_limits import RateLimitedLog, TokenBuckets
from weightd_gateway.connection_limiter import GatewayConnectionLimiter
from weightd_gateway.grpc.http2_frames import DATA, FrameCounter, FrameHeads, LimitExceeded, goaway_frame
from weightd_gateway.listening import common_name
from weightd_gateway.tls_handshakes import Handshakes

_log = logging.getLogger("weightd.gateway.grpc")

# Prefix of the names that gRPC's library reports for abstract Unix sockets.
_ABSTRACT_PREFIX = "unix-abstract:"

# Seconds for which a connection stays open after a violation, so that the client can receive the reason.
_CLOSE_TIMEOUT_S = 1.0

# Seconds between two log lines about violations of one peer.
_LOG_INTERVAL_S = 10.0

# Maximum calls per second of one peer, and maximum of a burst. Each response message to the peer allows one more call,
# so only calls without a response count: cancelled or rejected calls, which cost the gateway time, too.
CALLS_PER_S = 1000.0
CALLS_BURST = 1000.0

# The relay counts received data in steps of `_STEP_BYTES` bytes, and checks the limits before each step. Data beyond
# the limits is held back, and checked again after `_RETRY_INTERVAL_S` seconds.
_STEP_BYTES = 8192
_RETRY_INTERVAL_S = 0.01


class Http2Filter:
    """The relay with the connections of all gRPC clients.

    Args:
        path: the path of the Unix socket on which gRPC's library listens.
        admission: the connection limiter.
        timeout_s: seconds within which a client must complete the TLS handshake and the HTTP/2 preface.
        handshakes: the TLS handshakes in progress.
    """

    def __init__(
        self, path: Path, admission: GatewayConnectionLimiter, timeout_s: float, handshakes: Handshakes
    ) -> None:
        self._path = str(path)
        self._admission = admission
        self._handshakes = handshakes
        self._timeout_s = timeout_s
        # The names of the abstract sockets contain a random part, so that no other process can bind them first.
        self._prefix = f"weightd-{secrets.token_hex(8)}-"
        self._ids = itertools.count(1)
        self._by_name: dict[str, _Client] = {}
        self._clients: set[_Client] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._drained: asyncio.Future[None] | None = None
        self._violation_log = RateLimitedLog(_LOG_INTERVAL_S)
        self._call_buckets = TokenBuckets(CALLS_PER_S, CALLS_BURST)

    def peer_of(self, library_name: str) -> Peer:
        """Return the peer of a connection, given the library's name of the connection."""
        client = self._by_name.get(library_name.removeprefix(_ABSTRACT_PREFIX))
        return UNKNOWN if client is None else client.peer

    @contextmanager
    def receiving(self, called: str) -> Generator[None, None, None]:
        """Within the block, allow the connection that gRPC's library names `called` to send long messages."""
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
        """Return whether the calls of a connection have sent too many bytes of messages without getting a response."""
        client = self._by_name.get(called.removeprefix(_ABSTRACT_PREFIX))
        return client is not None and client.is_full

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The peers of all connections to gRPC's library, by the library's names of the connections."""
        return {name: client.peer for name, client in self._by_name.items()}

    def on_connection(self, connection: socket.socket, peer: Peer, tls: ssl.SSLContext | None) -> None:
        """Relay a connection that the connection limiter has admitted."""
        task = asyncio.get_running_loop().create_task(self._accept(connection, peer, tls))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self, seconds: float) -> None:
        """Wait at most `seconds` until the library has closed all connections and clients have received all data."""
        for client in [*self._clients]:
            if not client.is_connected:
                client.abort()
        self._drained = asyncio.get_running_loop().create_future()
        if self._clients:
            await asyncio.wait([self._drained], timeout=seconds)

    def abort(self) -> None:
        """Close all connections immediately."""
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

    # --- methods for `_Client` ---------------------------------------------------------------------------------

    def on_connect(self, client: _Client) -> asyncio.TimerHandle:
        """Add a connection; return the timer that closes the connection unless the preface arrives in time."""
        self._clients.add(client)
        return asyncio.get_running_loop().call_later(self._timeout_s, client.abort)

    def connect_library(self, client: _Client) -> None:
        """Connect a client that has sent the preface to gRPC's library."""
        name = f"{self._prefix}{next(self._ids)}"
        library = socket.socket(socket.AF_UNIX)
        library.setblocking(False)
        try:
            library.bind(f"\0{name}")
            # The connect does not block: with a Unix socket it succeeds immediately, or fails if the library's backlog
            # is full.
            library.connect(self._path)
        except OSError as error:
            _log.warning("cannot pass a connection to the gRPC library: %s", error.strerror)
            library.close()
            client.abort()
            return
        self._by_name[name] = client
        task = asyncio.get_running_loop().create_task(self._attach_library(library, client, name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attach_library(self, library: socket.socket, client: _Client, name: str) -> None:
        loop = asyncio.get_running_loop()
        on_closed = partial(self._by_name.pop, name, None)
        await loop.connect_accepted_socket(lambda: _Library(client, library, on_closed), library)

    def on_violation(self, client: _Client, reason: str) -> None:
        """Log that a client has violated a limit, and reduce the rate at which its peer may open connections."""
        now = time.monotonic()
        self._admission.penalize(client.peer, now)
        suppressed_count = self._violation_log.record(client.peer.key, now)
        # A client without a preface, such as a port scanner, speaks another protocol and is not logged.
        if suppressed_count is not None and client.has_preface:
            more = f" ({suppressed_count} more since the last such line)" if suppressed_count else ""
            _log.warning("gRPC connection of %s closed: %s%s", client.peer.key, reason, more)

    def may_call(self, peer: Peer, now: float) -> bool:
        """Return whether a peer may start another call."""
        return peer.is_operator or self._call_buckets.has_one(peer.key, now)

    def count_calls(self, peer: Peer, number: int, now: float) -> None:
        """Count `number` started calls against the rate limit of a peer.

        A negative number allows the peer further calls, because it has received response messages.
        """
        if number and not peer.is_operator:
            self._call_buckets.charge(peer.key, number, now)

    def on_disconnect(self, client: _Client) -> None:
        """Remove a connection."""
        self._clients.discard(client)
        self._admission.remove_connection(client.peer)
        if self._drained is not None and not self._clients and not self._drained.done():
            self._drained.set_result(None)


class _Client(asyncio.Protocol):
    """The connection between a gRPC client and the relay."""

    def __init__(self, http2_filter: Http2Filter, peer: Peer) -> None:
        self.peer = peer
        self._filter = http2_filter
        self._frames = FrameCounter(time.monotonic())
        self._sent_heads = FrameHeads()
        self._transport: asyncio.Transport | None = None
        self._library: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._early_data = bytearray()
        # Received data that is held back until the peer may start calls again and the connection is no longer full.
        self._held = b""
        self._retry_timer: asyncio.TimerHandle | None = None
        # Number of this connection's calls whose method expects a long message.
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
        """Remove the connection from the filter. Repeated calls have no effect."""
        if not self._is_released:
            self._is_released = True
            self._filter.on_disconnect(self)

    @property
    def has_preface(self) -> bool:
        """Whether the client has sent the HTTP/2 preface."""
        return self._frames.has_preface

    @property
    def is_connected(self) -> bool:
        """Whether the connection to gRPC's library is or was established."""
        return self._library is not None

    @property
    def is_full(self) -> bool:
        """Whether received data is held back until a call gets a response or expects a long message."""
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
            # A full connection needs no timer: `expect` and `on_library_data` retry when the connection is no longer
            # full.
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
        """Count the frames in `data` until a limit is reached; return the number of bytes that may be forwarded now."""
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
        """Add `number` to the count of calls that expect a long message, and check the held data again."""
        self._expecting += number
        self._frames.forget()
        if self._held:
            self._retry_held()

    def _retry_held(self) -> None:
        """Check held data against the limits again, and forward the data that the limits allow."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        self.data_received(b"")
        if not self._held:
            self._resume_reading()

    def eof_received(self) -> bool:
        # False makes asyncio close the connection. HTTP/2 does not use half-closed connections.
        return False

    def pause_writing(self) -> None:
        if self._library is not None:
            self._library.pause_reading()

    def resume_writing(self) -> None:
        if self._library is not None:
            self._library.resume_reading()

    def abort(self) -> None:
        """Close the connection immediately."""
        if self._transport is not None:
            self._transport.abort()

    # --- methods for `_Library` --------------------------------------------------------------------------------

    def on_library_connected(self, library: asyncio.Transport) -> None:
        """Forward the data received so far to gRPC's library, and all later data."""
        if self._transport is None or self._transport.is_closing() or self._is_refused:
            library.abort()
            return
        self._library = library
        library.write(bytes(self._early_data))
        self._early_data = bytearray()
        self._resume_reading()

    def on_library_data(self, data: bytes) -> None:
        """Forward data of gRPC's library to the client."""
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
        """Close the client's connection once all data is sent, because gRPC's library has closed its connection."""
        if self._transport is not None:
            self._transport.close()

    def set_library_full(self, *, is_full: bool) -> None:
        """Pause reading from the client while the write buffer to gRPC's library is full."""
        if is_full:
            self._pause_reading()
        else:
            self._resume_reading()

    # --- helpers -----------------------------------------------------------------------------------------------

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
        """Close the connection, and send the reason in a GOAWAY frame if possible."""
        self._is_refused = True
        self._drop_held()
        self._early_data = bytearray()
        self._filter.on_violation(self, reason)
        if self._library is not None:
            self._library.abort()
        transport = cast(asyncio.Transport, self._transport)
        transport.pause_reading()
        # A GOAWAY before the server's first frame would make the client reconnect immediately; after an incomplete
        # frame it would be invalid; behind unsent data it might not arrive. In these cases, close without a reason.
        if self._library is None or not self._sent_heads.is_at_boundary or transport.get_write_buffer_size():
            transport.abort()
            return
        transport.write(goaway_frame(reason))
        transport.close()
        self._deadline = asyncio.get_running_loop().call_later(_CLOSE_TIMEOUT_S, transport.abort)


class _Library(asyncio.Protocol):
    """The connection between the relay and gRPC's library for one client."""

    def __init__(self, client: _Client, connection: socket.socket, on_closed: Callable[[], object]) -> None:
        self._client = client
        self._socket = connection
        self._on_closed = on_closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client.on_library_connected(cast(asyncio.Transport, transport))

    def connection_lost(self, exc: BaseException | None) -> None:
        if exc is not None:
            self._read_rest()
        self._on_closed()
        self._client.on_library_closed()

    def _read_rest(self) -> None:
        """Forward the data that the library sent before it closed the connection.

        asyncio stops reading when a write fails, and closes the socket when `connection_lost` has returned.
        """
        with contextlib.suppress(OSError):
            while data := self._socket.recv(_STEP_BYTES):
                self.data_received(data)

    def data_received(self, data: bytes) -> None:
        self._client.on_library_data(data)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._client.set_library_full(is_full=True)

    def resume_writing(self) -> None:
        self._client.set_library_full(is_full=False)
