"""Connections of HTTP/1.1: how long each may be silent, and which one is closed where there is no room for more."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

from httptools import HttpParserError

from weightd_common.peers import Peer
from weightd_gateway.fairness import FairRunner
from weightd_gateway.http.exchange import HttpExchange, RequestParser
from weightd_gateway.http.messages import JSON, MAX_COPIED_BYTES, AsgiApp, HttpError
from weightd_gateway.listening import common_name
from weightd_gateway.logs import log_failure
from weightd_gateway.tensors import to_json

_log = logging.getLogger("weightd.gateway.http")

SWEEP_S = 1.0
"""How often `HttpConnections.sweep` has to be called."""

RECEIVE_BYTES = 64 * 1024
"""Bytes that are received at once, but for a large body, and that a connection may have received ahead."""

# A body that is received to where it belongs comes in pieces of this size, so that others have their turn.
_MAX_RECEIVED_BYTES = 256 * 1024

# A sweep that comes so late shows that the process did not run.
_OVERSLEPT_S = 0.5

# Where there is no room for others, a reply has to be read within this.
_SLOW_S = 1.0

# The part of all connections that a peer keeps whatever other peers do.
_RESERVED_DIVISOR = 32


class ConnectionPhase(enum.Enum):
    """What is waited for."""

    IDLE = "a request"
    HEADER = "the rest of its header"
    BODY = "its body"
    ANSWER = "the reply"
    READING = "the client, to read that"
    LINGERING = "the end of what the client sends and nobody reads, so that it can read the reply"


# Those in which a connection may be closed for another one.
_IDLE_PHASES = frozenset({ConnectionPhase.IDLE, ConnectionPhase.LINGERING})


class HttpConnections:
    """All connections.

    Args:
        max_connections: of them.
        phase_timeouts: seconds that a phase may take; a phase without may take any time.
        clock: tells the time.
    """

    def __init__(
        self, max_connections: int, phase_timeouts: dict[ConnectionPhase, float], clock: Callable[[], float]
    ) -> None:
        self._max_connections = max_connections
        self._phase_timeouts = phase_timeouts
        self.clock = clock
        self._next_sweep = clock() + SWEEP_S
        self._all: dict[HttpConnection, None] = {}
        # How many each peer has.
        self._count_by_peer: Counter[str] = Counter()
        # Those without a request, in the order in which that began; with a part of a header, too.
        self._idle: dict[HttpConnection, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[HttpConnection]:
        return iter([*self._all])

    def on_connect(self, connection: HttpConnection) -> None:
        """Add a connection; where that is one too many, close one.

        The peer that has the most loses one, if it has more than a thirty-second of all; otherwise peers are not
        compared, so that many peers with one connection each push out nobody who has two. Of the connections in
        question, that which has sent no request for longest is closed, or else that whose client has not read a reply
        for longest, or else the new one.
        """
        self._all[connection] = self._idle[connection] = None
        self._count_by_peer[connection.peer.key] += 1
        if len(self._all) > self._max_connections:
            key, count = max(self._count_by_peer.items(), key=lambda each: each[1])
            largest = key if count > max(1, self._max_connections // _RESERVED_DIVISOR) else None
            # Many may come before the loop reports the one that is closed.
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
        """Note that a connection waits for something else."""
        if phase in _IDLE_PHASES:
            if connection in self._all:
                self._idle[connection] = None
        elif phase is not ConnectionPhase.HEADER:
            self._idle.pop(connection, None)

    def sweep(self) -> None:
        """Close those that waited for too long, without the time in which this process was stopped."""
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
    """What all connections of a server use.

    Attributes:
        app: answers requests.
        connections: all connections.
        fair_runner: divides the time of the event loop among the peers.
        buffer: what is received from any connection comes here first; nothing stays there.
    """

    app: AsgiApp
    connections: HttpConnections
    fair_runner: FairRunner
    buffer: memoryview


class HttpConnection(asyncio.BufferedProtocol):
    """One connection: receives a request, has the application answer it, and goes on with the next one.

    Args:
        parts: what all connections use.
        peer: the other end.

    Attributes:
        peer: as above.
        uid: the number of the user at the other end, which the kernel tells of a Unix socket; None of any other.
        phase: what is waited for.
        phase_started_at: when that began.
        common_name: that of the certificate of the other end, which TLS has verified; None where there is none.
        unparsed: what has been received and not been used.
        task: answers the request; None: there is none.
    """

    def __init__(self, parts: ConnectionParts, peer: Peer) -> None:
        self._parts = parts
        self.peer = peer
        self.uid = peer.uid
        self.phase = ConnectionPhase.IDLE
        self.phase_started_at = parts.connections.clock()
        self.common_name: str | None = None
        self.unparsed = bytearray()
        self.task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._parser: RequestParser | None = None
        self._exchange: HttpExchange | None = None
        # Whether `_parse` is going to be called.
        self._is_queued = False
        self._is_reading_paused = False
        # While the client has to read first.
        self._writable: asyncio.Future[None] | None = None

    # --- what the event loop calls -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = cast(asyncio.Transport, transport)
        self.common_name = common_name(transport)
        self._parts.connections.on_connect(self)

    def connection_lost(self, exc: BaseException | None) -> None:  # noqa: D102
        self._parts.connections.on_disconnect(self)
        self._transport = None
        self.unparsed.clear()
        if self.task is not None:
            self.task.cancel()

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
        if self.phase is ConnectionPhase.IDLE:
            self.set_phase(ConnectionPhase.HEADER)
        if len(self.unparsed) > RECEIVE_BYTES and self._transport is not None and not self._is_reading_paused:
            self._is_reading_paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:  # noqa: D102
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:  # noqa: D102
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # --- requests ----------------------------------------------------------------------------------------------

    def _parse(self) -> None:
        """Parse the head of a request, and begin to answer it."""
        self._is_queued = False
        if self._transport is None or self._transport.is_closing() or self._exchange is not None:
            return
        parser = self._parser = self._parser or RequestParser()
        try:
            while not parser.is_head_complete and parser.feed(self.unparsed):
                pass
        except HttpParserError as error:
            self._refuse(error)
            return
        if parser.is_head_complete:
            self._parser = None
            self._exchange = HttpExchange(parser, self)
            self.set_phase(ConnectionPhase.ANSWER)
            self.task = asyncio.get_running_loop().create_task(self._answer(self._exchange))
        elif self.phase is ConnectionPhase.IDLE:
            self.set_phase(ConnectionPhase.HEADER)
        self._resume_reading()

    async def _answer(self, exchange: HttpExchange) -> None:
        try:
            await self._parts.app(exchange.scope(), exchange.receive, exchange.send)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this connection alone
            if self._transport is not None:
                log_failure(_log, "a request fails", error)
        finally:
            self.task = None
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
        """Go on where the end of a body that nobody reads has come."""
        if exchange.is_body_complete and self._exchange is exchange and self.task is None:
            self._go_on()

    def _go_on(self) -> None:
        """Wait for the next request."""
        self._exchange = None
        self.set_phase(ConnectionPhase.IDLE)
        if self.unparsed and not self._is_queued:
            # A request that the client has sent ahead is answered when it is the peer's turn.
            self._is_queued = True
            self._parts.fair_runner.pipelined.run(self.peer.key, self._parse)
        self._resume_reading()

    def _refuse(self, error: HttpParserError) -> None:
        """Answer what is no HTTP."""
        reason = error.__context__ if isinstance(error.__context__, ValueError) else error
        body = to_json({"error": f"expected a request of HTTP: {reason}"}).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: {JSON}\r\ncontent-length: {len(body)}\r\n"
        self.write(head.encode(), b"connection: close\r\n\r\n", body)
        self._close(is_body_complete=False)

    def _close(self, *, is_body_complete: bool) -> None:
        """Close the connection once the client has all of the reply: an unread body would have it lost."""
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

    # --- what the exchange uses --------------------------------------------------------------------------------

    async def receive_into(self, view: memoryview) -> None:
        """Receive that many bytes of the body."""
        if self._exchange is None:
            raise ConnectionResetError("the client has gone")
        await self._exchange.receive_into(view)

    def write(self, *content: bytes | memoryview) -> None:
        """Send bytes."""
        if self._transport is None or self._transport.is_closing():
            return
        for each in content if sum(map(len, content)) > MAX_COPIED_BYTES else [b"".join(content)]:
            self._transport.write(each)

    async def drain(self) -> None:
        """Return when the client has read enough of what was sent."""
        if self._writable is not None:
            self.set_phase(ConnectionPhase.READING)
            await self._writable

    def begin_body(self) -> None:
        """More of the body is waited for."""
        if self.phase is not ConnectionPhase.BODY:
            self.set_phase(ConnectionPhase.BODY)
        self._resume_reading()

    def end_body(self) -> None:
        """All of the body has been received."""
        if self.phase is ConnectionPhase.BODY:
            self.set_phase(ConnectionPhase.ANSWER)

    def run_fairly(self, exchange: HttpExchange) -> None:
        """Decode a piece of a body in chunks when it is the peer's turn."""
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
                exchange.fail_body(HttpError(400, f"expected a body in chunks: {error}"))
            return
        self._resume_reading()
        if self.phase is ConnectionPhase.LINGERING:
            self._linger(exchange)

    # --- what the server and the other connections call --------------------------------------------------------

    def set_phase(self, phase: ConnectionPhase) -> None:
        """Wait for something else from now on."""
        self._parts.connections.on_phase(self, phase)
        self.phase = phase
        self.phase_started_at = self._parts.connections.clock()

    def on_timeout(self) -> None:
        """Give up: what is waited for has not come in time."""
        if self.phase is ConnectionPhase.BODY and self._exchange is not None:
            self._exchange.fail_body()
            self.set_phase(ConnectionPhase.ANSWER)
        else:
            self.abort()

    def finish(self) -> None:
        """Close the connection after the reply that is under way, or now where there is none."""
        if self._exchange is not None and self.task is not None:
            self._exchange.keep_alive = False
        elif self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()
