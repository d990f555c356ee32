"""TLS handshakes of HTTP and gRPC: fair between peers, and limited to a share of the event loop's time.

The limit protects other clients: a client can replay one ClientHello without effort, but the gateway must sign each
reply.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import cast

from weightd_common.peers import Peer
from weightd_common.rate_limits import RateLimitedLog, RoundRobinQueue
from weightd_gateway.fairness import FairLimit, FairShareQueue

_log = logging.getLogger("weightd.gateway")

Work = Callable[[], None]

LOOP_SHARE = 0.25
"""Maximum fraction of the event loop's time that handshakes may take."""

MAX_HANDSHAKES = 1024
"""Maximum number of connections with an incomplete handshake. `FairLimit` limits the share of each peer."""

MAX_STARTED = 64
"""Maximum number of handshakes that have started. Each takes about 300 KB; further handshakes wait in a queue."""

STARTED_TIMEOUT_S = 10.0
"""Seconds within which a handshake must complete after it has started."""

# Seconds between two log lines about refused handshakes of one peer.
_LOG_INTERVAL_S = 10.0


class FairThrottle:
    """Runs one piece of work after another, with pauses that limit the work to a share of the time. Pure: no I/O.

    The peer that has used the least time is next.

    Args:
        share: maximum fraction of the time that the work may take.
        call_later: schedules a function after a number of seconds.
        clock: returns the time in seconds.
    """

    def __init__(self, share: float, call_later: Callable[[float, Work], object], clock: Callable[[], float]) -> None:
        self._pause_factor = 1.0 / share - 1.0
        self._call_later = call_later
        self._clock = clock
        self._waiting: FairShareQueue[Work] = FairShareQueue()
        self._is_pausing = False

    def run(self, key: str, work: Work) -> None:
        """Run a peer's work now, or queue it during the pause that follows other work; then the peers take turns."""
        self._waiting.put(key, work)
        if not self._is_pausing:
            self._run_next()

    def _run_next(self) -> None:
        self._is_pausing = False
        if not self._waiting:
            return
        self._is_pausing = True
        key, work = self._waiting.get()
        begun = self._clock()
        try:
            work()
        finally:
            seconds = self._clock() - begun
            self._waiting.charge(key, seconds)
            self._call_later(self._pause_factor * seconds, self._run_next)


class HandshakeLimiter:
    """Limits the number of concurrent handshakes, and queues further handshakes. Pure: no I/O.

    Args:
        limit: maximum number of concurrent handshakes. `FairLimit` limits the share of each peer.
    """

    def __init__(self, limit: int) -> None:
        self._limit = FairLimit(limit)
        self._waiting: RoundRobinQueue[Work] = RoundRobinQueue()

    def take(self, key: str | None, begin: Work) -> None:
        """Call `begin` once the handshake may start: now, or after the `release` of another handshake."""
        if key not in self._waiting and self._limit.take(key):
            begin()
        else:
            self._waiting.put(key, begin)

    def release(self, key: str | None, begin: Work) -> None:
        """Remove a handshake that has ended or is still queued; start queued handshakes within the limit."""
        if self._waiting.remove(key, begin):
            return
        self._limit.release(key)
        for each in self._waiting:
            if self._limit.take(each):
                self._waiting.take_of(each)()


class Handshakes:
    """The TLS handshakes of all connections of this process.

    Args:
        max_handshakes: maximum number of connections with an incomplete handshake.
        max_started: maximum number of connections whose handshake has started, but is incomplete.
    """

    def __init__(self, max_handshakes: int = MAX_HANDSHAKES, max_started: int = MAX_STARTED) -> None:
        self._max_handshakes = max_handshakes
        self._limit = FairLimit(max_handshakes)
        self._started = HandshakeLimiter(max_started)
        self._runner = FairThrottle(LOOP_SHARE, _call_later, time.perf_counter)
        self._refusal_log = RateLimitedLog(_LOG_INTERVAL_S)

    @property
    def in_progress(self) -> int:
        """Number of connections whose handshake is not complete."""
        return self._limit.in_use

    async def complete(
        self,
        connection: socket.socket,
        peer: Peer,
        context: ssl.SSLContext,
        timeout_s: float,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
    ) -> None:
        """Complete the handshake of a connection and attach a protocol to it.

        Args:
            connection: a connected socket; it is closed if the handshake fails.
            peer: the peer of the connection.
            context: the TLS context of the server.
            timeout_s: seconds within which the handshake must start. After the start, the handshake must complete
                within the same time, but at most `STARTED_TIMEOUT_S`.
            protocol_factory: creates the protocol; called after the handshake.

        Raises:
            OSError: the handshake failed, or the peer has too many handshakes in progress.
            asyncio.TimeoutError: the handshake could not start in time because of other handshakes.
        """
        key = None if peer.is_operator else peer.key
        if not self._limit.take(key):
            connection.close()
            reason = f"{peer.key} has reached its share of {self._max_handshakes} TLS handshakes in progress"
            suppressed_count = self._refusal_log.record(peer.key, time.monotonic())
            if suppressed_count is not None:
                more = f" ({suppressed_count} more since the last such line)" if suppressed_count else ""
                _log.warning("new connection refused: %s%s", reason, more)
            raise ConnectionAbortedError(reason)
        admitted = asyncio.get_running_loop().create_future()

        def begin() -> None:
            if not admitted.done():
                admitted.set_result(None)

        self._started.take(key, begin)
        try:
            try:
                await asyncio.wait_for(admitted, timeout_s)
            except BaseException:
                connection.close()
                raise
            await self._complete(connection, peer, context, min(timeout_s, STARTED_TIMEOUT_S), protocol_factory)
        finally:
            self._started.release(key, begin)
            self._limit.release(key)

    async def _complete(
        self,
        connection: socket.socket,
        peer: Peer,
        context: ssl.SSLContext,
        timeout_s: float,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
    ) -> None:
        loop = asyncio.get_running_loop()
        raw, _ = await loop.connect_accepted_socket(_Paused, connection)
        early = _EarlyData()
        upgrade = loop.create_task(
            loop.start_tls(raw, early, context, server_side=True, ssl_handshake_timeout=timeout_s)
        )
        try:
            # Wait for the next pass of the event loop. By then the task `upgrade` has installed asyncio's TLS protocol,
            # and the protocol has not received data yet.
            await asyncio.sleep(0)
            inner = raw.get_protocol()
            raw.set_protocol(_ThrottledProtocol(raw, inner, connection, partial(self._runner.run, peer.key)))
            transport = await upgrade
        except BaseException:
            upgrade.cancel()
            raw.abort()
            raise
        if transport is None or raw.is_closing():
            raw.abort()
            raise ConnectionResetError("the client disconnected after the handshake")
        raw.set_protocol(inner)
        early.hand_over(transport, protocol_factory())


def _call_later(seconds: float, work: Work) -> object:
    return asyncio.get_running_loop().call_later(seconds, work)


class _Paused(asyncio.Protocol):
    """First protocol of a connection: reads nothing, so that asyncio's TLS protocol gets all data."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).pause_reading()


class _ThrottledProtocol(asyncio.Protocol):
    """Forwards received data to asyncio's TLS protocol at the peer's turn, and does not read further data before that.

    Args:
        raw: the transport of the socket.
        inner: asyncio's TLS protocol.
        connection: the socket.
        run_fairly: runs work at the peer's turn.
    """

    def __init__(
        self,
        raw: asyncio.Transport,
        inner: asyncio.BaseProtocol,
        connection: socket.socket,
        run_fairly: Callable[[Work], None],
    ) -> None:
        self._raw = raw
        self._inner = inner
        self._connection = connection
        self._run_fairly = run_fairly

    def data_received(self, data: bytes) -> None:
        self._raw.pause_reading()
        self._run_fairly(partial(self._pass_on, data))

    def _pass_on(self, data: bytes) -> None:
        if self._raw.is_closing():
            return
        if _has_ended(self._connection):
            self._raw.abort()
            return
        _feed(self._inner, data)
        self._raw.resume_reading()

    def eof_received(self) -> bool | None:
        return cast(asyncio.Protocol, self._inner).eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._inner.connection_lost(cast("Exception | None", exc))

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class _EarlyData(asyncio.Protocol):
    """Buffers data that arrives between the end of the handshake and `hand_over`."""

    def __init__(self) -> None:
        self._protocol: asyncio.BaseProtocol | None = None
        self._received = b""
        self._has_ended = False

    def hand_over(self, transport: asyncio.Transport, protocol: asyncio.BaseProtocol) -> None:
        """Attach the protocol of the connection and deliver the buffered data to it."""
        self._protocol = protocol
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._received:
            _feed(protocol, self._received)
        if self._has_ended and not cast(asyncio.Protocol, protocol).eof_received():
            transport.close()

    def data_received(self, data: bytes) -> None:
        self._received += data

    def eof_received(self) -> bool:
        self._has_ended = True
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        # asyncio may have scheduled this call before `hand_over` attached the protocol of the connection. Pass the call
        # on.
        if self._protocol is not None:
            self._protocol.connection_lost(cast("Exception | None", exc))


def _feed(protocol: asyncio.BaseProtocol, data: bytes) -> None:
    if not isinstance(protocol, asyncio.BufferedProtocol):
        cast(asyncio.Protocol, protocol).data_received(data)
        return
    while data:
        buffer = memoryview(protocol.get_buffer(len(data)))
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        protocol.buffer_updated(count)
        data = data[count:]


def _has_ended(connection: socket.socket) -> bool:
    """Return whether the client has closed its side of the connection, which aborts an incomplete handshake."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
