"""HTTP/1.1 connections: phases, timeouts, and the connection to close when the connection limit is reached."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NamedTuple, cast

from httptools import HttpParserError

from weightd_common.peers import Peer
from weightd_gateway.fairness import FairRunner
from weightd_gateway.http.exchange import HttpExchange
from weightd_gateway.http.head import HeadReader
from weightd_gateway.http.messages import JSON, HttpError, HttpReply, HttpRequest
from weightd_gateway.http.request_run import RequestRun
from weightd_gateway.listening import common_name
from weightd_gateway.logs import log_failure
from weightd_gateway.tensors import to_json

_log = logging.getLogger("weightd.gateway.http")

SWEEP_S = 1.0
"""Seconds between two calls of `HttpConnections.sweep`."""

RECEIVE_BYTES = 64 * 1024
"""Maximum bytes of one receive, except into the buffer of a large body. A connection with more unparsed data stops
reading."""

# Maximum bytes of one receive directly into the buffer of a body. The limit lets other connections get their turn.
_MAX_RECEIVED_BYTES = 256 * 1024

# A sweep that is this many seconds late indicates that the process was suspended, for example by SIGSTOP.
_OVERSLEPT_S = 0.5

# Seconds for which a client must have left its response unread before its connection may be closed for a new one.
_SLOW_S = 1.0

# At the connection limit, connections of the largest peer are closed first if the peer has more connections than the
# limit divided by this number.
_RESERVED_DIVISOR = 32


class ConnectionPhase(enum.Enum):
    """The phases of a connection; the value says what the connection waits for."""

    IDLE = "a request"
    HEADER = "the rest of a request header"
    BODY = "a request body"
    ANSWER = "the reply"
    READING = "the client to read the reply"
    LINGERING = "the client to close the connection; its data is discarded"


class HttpConnections:
    """The set of open connections; enforces the connection limit and the timeouts.

    Args:
        max_connections: maximum number of connections.
        phase_timeouts: maximum seconds of each phase; phases without an entry have no limit.
        clock: returns the time in seconds.
    """

    def __init__(
        self, max_connections: int, phase_timeouts: dict[ConnectionPhase, float], clock: Callable[[], float]
    ) -> None:
        self._max_connections = max_connections
        self._phase_timeouts = phase_timeouts
        self.clock = clock
        self._next_sweep = clock() + SWEEP_S
        self._all: dict[HttpConnection, None] = {}
        # Number of connections of each peer.
        self._count_by_peer: Counter[str] = Counter()
        # Connections in the phases IDLE, HEADER and LINGERING, in the order in which they became idle.
        self._idle: dict[HttpConnection, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[HttpConnection]:
        return iter([*self._all])

    def on_connect(self, connection: HttpConnection) -> None:
        """Add a connection. If the number of connections then exceeds the limit, close one connection.

        If the peer with the most connections has more than a thirty-second of the limit, one of its connections is
        closed. Otherwise the connections of all peers are candidates, so that many peers with one connection each
        cannot displace a peer with two. Of the candidates, the connection that has been idle longest is closed; if none
        is idle, the connection whose client has left a response unread for longest; otherwise the new connection.
        """
        self._all[connection] = self._idle[connection] = None
        self._count_by_peer[connection.peer.key] += 1
        if len(self._all) > self._max_connections:
            key, count = max(self._count_by_peer.items(), key=lambda each: each[1])
            largest = key if count > max(1, self._max_connections // _RESERVED_DIVISOR) else None
            victim = next((each for each in self._idle if largest in (None, each.peer.key)), connection)
            if victim is connection:
                limit = self.clock() - _SLOW_S
                reading = (
                    each
                    for each in self._all
                    if each.phase is ConnectionPhase.READING
                    and each.phase_started_at < limit
                    and largest in (None, each.peer.key)
                )
                victim = min(reading, key=lambda each: each.phase_started_at, default=connection)
            # Remove the connection now. The event loop calls `connection_lost` only later, and until then many new
            # connections may arrive, for which the count must be correct.
            self.on_disconnect(victim)
            victim.abort()

    def on_disconnect(self, connection: HttpConnection) -> None:
        """Remove a connection."""
        if connection in self._all:
            del self._all[connection]
            self._count_by_peer[connection.peer.key] -= 1
            if not self._count_by_peer[connection.peer.key]:
                del self._count_by_peer[connection.peer.key]
        self._idle.pop(connection, None)

    def on_phase(self, connection: HttpConnection, phase: ConnectionPhase) -> None:
        """Record the new phase of a connection. In the phases IDLE and LINGERING, it may be closed for a new one."""
        if phase is ConnectionPhase.IDLE or phase is ConnectionPhase.LINGERING:
            if connection in self._all:
                self._idle[connection] = None
        elif phase is not ConnectionPhase.HEADER:
            self._idle.pop(connection, None)

    def sweep(self) -> None:
        """Close connections that exceeded a timeout. Time during which this process was suspended does not count."""
        now = self.clock()
        overdue_s, self._next_sweep = now - self._next_sweep, now + SWEEP_S
        if overdue_s > _OVERSLEPT_S:
            for each in self._all:
                each.phase_started_at = min(each.phase_started_at + overdue_s, now)
        for each in [*self._all]:
            limit = self._phase_timeouts.get(each.phase)
            if limit is not None and now > each.phase_started_at + limit:
                each.on_timeout()


class ConnectionParts(NamedTuple):
    """The objects that all connections of a server share.

    Attributes:
        reply_to: returns the response to a request.
        connections: the set of open connections.
        fair_runner: divides the time of the event loop among peers.
        buffer: receives data for all connections; each connection consumes its data immediately.
    """

    reply_to: Callable[[HttpRequest], Coroutine[Any, Any, HttpReply]]
    connections: HttpConnections
    fair_runner: FairRunner
    buffer: memoryview


class HttpConnection(asyncio.BufferedProtocol):
    """One connection: receives requests one after another and passes them to the application.

    Args:
        parts: the objects that all connections share.
        peer: the peer of the connection.

    Attributes:
        peer: as above.
        uid: the uid of the peer of a Unix socket, from the kernel; None for TCP.
        phase: the current phase.
        phase_started_at: when the phase began, by the clock of `HttpConnections`.
        common_name: the common name of the client certificate that TLS has verified; None without one.
        unparsed: received bytes that have not been consumed.
        is_writable: whether the write buffer has room.
        run: the run that handles the current request; None between requests.
    """

    def __init__(self, parts: ConnectionParts, peer: Peer) -> None:
        self._parts = parts
        self.peer = peer
        self.uid = peer.uid
        self.phase = ConnectionPhase.IDLE
        self.phase_started_at = parts.connections.clock()
        self.common_name: str | None = None
        self.unparsed = bytearray()
        self.run: RequestRun | None = None
        self._transport: asyncio.Transport | None = None
        self._heads = HeadReader()
        self._exchange: HttpExchange | None = None
        # Whether a call of `_parse` is scheduled.
        self._is_queued = False
        self._is_reading_paused = False
        self.is_writable = True
        # Ends when the write buffer has room again.
        self._writable: asyncio.Future[None]

    # --- callbacks of the event loop ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = cast(asyncio.Transport, transport)
        self.common_name = common_name(transport)
        self._parts.connections.on_connect(self)

    def connection_lost(self, exc: BaseException | None) -> None:  # noqa: D102
        self._parts.connections.on_disconnect(self)
        self._transport = None
        self.unparsed.clear()
        if self.run is not None:
            self.run.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: D102
        target = None if self._exchange is None else self._exchange.target
        return self._parts.buffer if target is None else target[:_MAX_RECEIVED_BYTES]

    def buffer_updated(self, nbytes: int) -> None:  # noqa: D102
        exchange = self._exchange
        if exchange is not None and exchange.target is not None:
            exchange.on_received(nbytes)
            return
        self.unparsed += self._parts.buffer[:nbytes]
        if exchange is not None:
            exchange.on_data()
            if self.phase is ConnectionPhase.LINGERING:
                self._linger(exchange)
        elif self.phase is ConnectionPhase.LINGERING:
            self.unparsed.clear()
        elif not self._is_queued:
            self._is_queued = True
            self._parts.fair_runner.run(self.peer.key, self._parse)
        if not self.unparsed:
            return
        if self.phase is ConnectionPhase.IDLE:
            self.set_phase(ConnectionPhase.HEADER)
        if len(self.unparsed) > RECEIVE_BYTES and self._transport is not None and not self._is_reading_paused:
            self._is_reading_paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:  # noqa: D102
        self.is_writable = False
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:  # noqa: D102
        self.is_writable = True
        if not self._writable.done():
            self._writable.set_result(None)

    # --- requests ----------------------------------------------------------------------------------------------

    def _parse(self) -> None:
        """Parse the head of a request and start its task."""
        self._is_queued = False
        if self._transport is None or self._transport.is_closing() or self._exchange is not None:
            return
        try:
            received = self._heads.read(self.unparsed)
        except HttpParserError as error:
            self._refuse(error)
            return
        if received is not None:
            exchange = self._exchange = HttpExchange(*received, self)
            self.set_phase(ConnectionPhase.ANSWER)
            self.run = RequestRun(self._answer(exchange))
            self.run.go_on()
        elif self.phase is ConnectionPhase.IDLE:
            self.set_phase(ConnectionPhase.HEADER)
        if self._is_reading_paused:
            self._resume_reading()

    async def _answer(self, exchange: HttpExchange) -> None:
        try:
            await exchange.send(await self._parts.reply_to(exchange))
        except Exception as error:  # noqa: BLE001 - an unexpected error ends only this connection
            if self._transport is not None:
                log_failure(_log, "HTTP request failed", error)
        finally:
            self.run = None
        if self._transport is None:
            return
        if not exchange.is_replied:
            self.abort()
        elif not exchange.keep_alive:
            self._exchange = None
            self._close(is_body_complete=exchange.is_body_complete)
        elif exchange.is_body_complete:
            self._go_on()
        else:
            self.set_phase(ConnectionPhase.LINGERING)
            exchange.discard_body()
            self._resume_reading()
            self._linger(exchange)

    def _linger(self, exchange: HttpExchange) -> None:
        """Continue with the next request if the unread body has been received and dropped."""
        if exchange.is_body_complete and self._exchange is exchange and self.run is None:
            self._go_on()

    def _go_on(self) -> None:
        """Wait for the next request."""
        self._exchange = None
        self.set_phase(ConnectionPhase.IDLE)
        if self.unparsed and not self._is_queued:
            # The client has already sent its next request (pipelining). It starts at the peer's turn.
            self._is_queued = True
            self._parts.fair_runner.pipelined.run(self.peer.key, self._parse)
        if self._is_reading_paused:
            self._resume_reading()

    def _refuse(self, error: HttpParserError) -> None:
        """Reply to data that is not valid HTTP, and close the connection."""
        reason = error.__context__ if isinstance(error.__context__, ValueError) else error
        body = to_json({"error": f"expected an HTTP request: {reason}"}).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: {JSON}\r\ncontent-length: {len(body)}\r\n"
        self.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self._close(is_body_complete=False)

    def _close(self, *, is_body_complete: bool) -> None:
        """Close the connection after the client has received the response.

        If the kernel's receive buffer has unread data, closing would reset the connection, and the client could lose
        the response. In this case only the sending side is closed, and the connection enters the phase LINGERING.
        """
        if self._transport is None:
            return
        if (is_body_complete and not self.unparsed) or not self._transport.can_write_eof():
            self._transport.close()
            return
        self.unparsed.clear()
        self.set_phase(ConnectionPhase.LINGERING)
        self._transport.write_eof()
        self._resume_reading()

    def _resume_reading(self) -> None:
        if self._is_reading_paused and self._transport is not None and len(self.unparsed) <= RECEIVE_BYTES:
            self._is_reading_paused = False
            self._transport.resume_reading()

    # --- methods for the exchange ------------------------------------------------------------------------------

    def write(self, content: bytes | memoryview) -> None:
        """Send bytes."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(content)

    async def drain(self) -> None:
        """Wait until the write buffer has room, because the client has read some of the sent bytes."""
        if not self.is_writable:
            self.set_phase(ConnectionPhase.READING)
            await self._writable

    def begin_body(self) -> None:
        """Enter the phase BODY, in which the timeout for the body applies."""
        if self.phase is not ConnectionPhase.BODY:
            self.set_phase(ConnectionPhase.BODY)
        self._resume_reading()

    def end_body(self) -> None:
        """Leave the phase BODY, because the body is complete."""
        if self.phase is ConnectionPhase.BODY:
            self.set_phase(ConnectionPhase.ANSWER)

    def run_fairly(self, exchange: HttpExchange) -> None:
        """Decode the next part of a chunked body at the peer's turn."""
        self._parts.fair_runner.run(self.peer.key, lambda: self._decode(exchange))

    def _decode(self, exchange: HttpExchange) -> None:
        if self._transport is None or self._exchange is not exchange:
            return
        try:
            exchange.decode()
        except HttpParserError as error:
            if self.phase is ConnectionPhase.LINGERING:
                self._exchange = None
                self._close(is_body_complete=False)
            else:
                exchange.fail_body(HttpError(400, f"invalid chunked body: {error}"))
            return
        self._resume_reading()
        if self.phase is ConnectionPhase.LINGERING:
            self._linger(exchange)

    # --- methods for the server and for `HttpConnections` ------------------------------------------------------

    def set_phase(self, phase: ConnectionPhase) -> None:
        """Enter a phase; its timeout begins now."""
        self._parts.connections.on_phase(self, phase)
        self.phase = phase
        self.phase_started_at = self._parts.connections.clock()

    def on_timeout(self) -> None:
        """Handle the timeout of the current phase: fail the read of the body, or close the connection."""
        if self.phase is ConnectionPhase.BODY and self._exchange is not None:
            self._exchange.fail_body()
            self.set_phase(ConnectionPhase.ANSWER)
        else:
            self.abort()

    def finish(self) -> None:
        """Close the connection after the current response, or now if no request is in progress."""
        if self._exchange is not None and self.run is not None:
            self._exchange.keep_alive = False
        elif self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection immediately."""
        if self._transport is not None:
            self._transport.abort()
