"""Connections of callers: how long each may be silent, and which goes first where there is no room for more."""

from __future__ import annotations

import asyncio
import enum
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from weightd_common.peers import Peer
from weightd_gateway.fair_runner import FairRunner, ParseChunk
from weightd_gateway.http.responses import HttpError, HttpReply
from weightd_gateway.listening import common_name
from weightd_gateway.logs import log_failure

SWEEP_S = 1.0
"""How often `HttpConnections.sweep` has to be called."""

# A sweep that comes so late shows that the process did not run.
_OVERSLEPT_S = 0.5

# Where there is no room for others, an answer has to be read within this.
_SLOW_S = 1.0

# The part of all connections that a peer keeps whatever other peers do.
_RESERVED_DIVISOR = 32

_BODY_TIMEOUT = "the body of the request has not come in time (receive_timeout)"


class ConnectionPhase(enum.Enum):
    """What is waited for."""

    IDLE = "a request"
    HEADER = "the rest of its header"
    BODY = "its body"
    ANSWER = "the answer"
    READING = "the caller, to read that"


class HttpConnections:
    """All connections.

    Args:
        max_connections: of them.
        phase_timeouts: seconds that a phase may take; of one that is not named any.
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
        # Those that ask nothing, in the order in which they have begun with that; who has sent a part of a header, too.
        self._idle: dict[HttpConnection, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def on_connect(self, connection: HttpConnection) -> None:
        """Add a connection; where that is one too many, end one.

        The peer that has the most loses one, if it has more than a thirty-second of all; otherwise peers are not
        compared, so that many peers with one connection each push out nobody who has two. Of the connections in
        question, that which has asked nothing for longest ends, or else that which has not read an answer for longest,
        or else the new one.
        """
        self._all[connection] = self._idle[connection] = None
        self._count_by_peer[connection.peer.key] += 1
        if len(self._all) > self._max_connections:
            key, count = max(self._count_by_peer.items(), key=lambda each: each[1])
            largest = key if count > max(1, self._max_connections // _RESERVED_DIVISOR) else None
            # Many may come before the loop tells of the one that goes.
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
        """Something else is waited for."""
        if phase is ConnectionPhase.IDLE:
            if connection in self._all:
                self._idle[connection] = None
        elif phase is not ConnectionPhase.HEADER:
            self._idle.pop(connection, None)

    def sweep(self) -> None:
        """Let those go that have been waited for too long, without the time in which this process was stopped."""
        now = self.clock()
        overdue_s, self._next_sweep = now - self._next_sweep, now + SWEEP_S
        if overdue_s > _OVERSLEPT_S:
            for each in self._all:
                each.phase_started_at = min(each.phase_started_at + overdue_s, now)
        for each in [*self._all]:
            limit = self._phase_timeouts.get(each.phase)
            if limit is not None and now > each.phase_started_at + limit:
                each.on_timeout()


class HttpConnection(RequestHandler):
    """One connection, which knows what is waited for.

    Args:
        connections: all of them.
        fair_runner: of the peers.
        peer: the other end.
        manager: of aiohttp.
        options: for aiohttp.

    Attributes:
        peer: as above.
        phase: what is waited for.
        phase_started_at: when that began.
        uid: the number of the user at the other end, which the kernel tells of a unix socket; None of any other.
        common_name: that of the certificate of the other end, which TLS has verified; None where there is none.
    """

    def __init__(
        self, connections: HttpConnections, fair_runner: FairRunner, peer: Peer, manager: web.Server, **options: Any
    ) -> None:
        super().__init__(manager, **options)
        self._request_maker: Any = self._request_factory
        self._request_factory = self._make_request
        self._http_connections = connections
        self._fair_runner = fair_runner
        self.peer = peer
        self.phase = ConnectionPhase.IDLE
        self.phase_started_at = connections.clock()
        self.uid = peer.uid
        self.common_name: str | None = None
        self._body: Any = None
        # What has been received and not been parsed yet.
        self._unparsed = bytearray()
        self._uncut = b""
        self._is_queued = False
        self._is_reading_held = False
        self._is_resuming = False
        self._chunk_size = ParseChunk()

    def connection_made(self, transport: Any) -> None:  # noqa: D102
        self.common_name = common_name(transport)
        super().connection_made(transport)
        self._http_connections.on_connect(self)

    def connection_lost(self, exc: BaseException | None) -> None:  # noqa: D102
        self._http_connections.on_disconnect(self)
        self._unparsed = bytearray()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:  # noqa: D102
        if not data:
            # aiohttp goes on with what it has kept, after a pause.
            super().data_received(data)
        elif self.phase is ConnectionPhase.IDLE:
            self.set_phase(ConnectionPhase.HEADER)
        if data and not self._unparsed and not self._is_queued and len(data) <= self._chunk_size.size_bytes:
            # What is not cut is not copied either.
            self._uncut = data
            self._queue_parse()
            if self._uncut:
                self._unparsed += self._uncut
                self._uncut = b""
        else:
            self._unparsed += data
            if self._unparsed and not self._is_queued:
                self._queue_parse()
        if self._unparsed:
            self._hold_reading()

    def _make_request(self, message: Any, payload: Any, *rest: Any) -> web.BaseRequest:
        """Make a request that aiohttp has taken out of its queue, perhaps before its body is complete."""
        if not payload.is_eof():
            # aiohttp calls this before it counts the request.
            payload.on_eof(partial(asyncio.get_running_loop().call_soon, self._on_body_complete))
        request: web.BaseRequest = self._request_maker(message, payload, *rest)
        return request

    def _on_body_complete(self) -> None:
        """Free the place of a request in the parser, which holds no more than aiohttp's queue.

        aiohttp frees it when it takes the request out of the queue. The parser takes the place when the body is
        complete, which may be later: it would keep that place until the connection ends.
        """
        if self.transport is None or self._parser is None:
            return
        self._parser.message_consumed()
        if not self._is_paused():
            super().data_received(b"")

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Go on with the body of a request, in the next pass of the loop.

        aiohttp wants this for each chunk that is taken out of a full buffer, and would fill the buffer again meanwhile.
        """
        if not resume_parser:
            super().resume_reading(resume_parser)
        elif not self._is_resuming:
            self._is_resuming = True
            asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        self._is_resuming = False
        if self.transport is not None:
            super().resume_reading()

    def _queue_parse(self) -> None:
        self._is_queued = True
        self._fair_runner.run(self.peer.key, self._parse)

    def _parse(self) -> None:
        """Parse a piece of what has been received; the rest follows when it is the peer's turn again."""
        self._is_queued = False
        if self.transport is None or self._is_paused():
            return
        if self._uncut:
            chunk, self._uncut = self._uncut, b""
        else:
            size = self._chunk_size.size_bytes
            chunk = bytes(memoryview(self._unparsed)[:size])
            del self._unparsed[:size]
        started_at = time.thread_time()
        super().data_received(chunk)
        self._chunk_size.on_parsed(len(chunk), time.thread_time() - started_at)
        if self._unparsed:
            if not self._is_queued:
                self._queue_parse()
        elif self._is_reading_held:
            self._is_reading_held = False
            self._resume_transport()

    def _resume_transport(self) -> None:
        if self.transport is not None and not self._is_paused():
            self.transport.resume_reading()

    def _is_paused(self) -> bool:
        """Return whether aiohttp takes nothing more: the buffer of a body or the queue of requests is full."""
        return self._reading_paused or self._buffer_paused

    def _resume_reading_for_buffer(self) -> None:
        """Go on once aiohttp's queue of requests has room: first with what has been received before."""
        super()._resume_reading_for_buffer()
        if self._unparsed:
            self._hold_reading()
            if not self._is_queued:
                self._queue_parse()

    def _hold_reading(self) -> None:
        """Read nothing more until what has been received has been parsed, although aiohttp may have resumed."""
        if self.transport is not None:
            self._is_reading_held = True
            self.transport.pause_reading()

    def set_phase(self, phase: ConnectionPhase) -> None:
        """Something else is waited for from now on."""
        self._http_connections.on_phase(self, phase)
        self.phase = phase
        self.phase_started_at = self._http_connections.clock()

    def begin_body(self, body: Any) -> None:
        """The body of a request is read: an aiohttp.StreamReader."""
        self._body = body
        self.set_phase(ConnectionPhase.BODY)

    def on_timeout(self) -> None:
        """What is waited for has not come in time."""
        if self.phase is ConnectionPhase.BODY and self._body is not None:
            self._body.set_exception(HttpError(408, _BODY_TIMEOUT))
            self.set_phase(ConnectionPhase.ANSWER)
        else:
            self.abort()

    def abort(self) -> None:
        """End it at once."""
        if self.transport is not None:
            self.transport.abort()

    async def finish_response(self, request: web.BaseRequest, resp: Any, start_time: float | None) -> tuple[Any, bool]:
        """Send an answer; then the next request is waited for."""
        self.set_phase(ConnectionPhase.READING)
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            if isinstance(resp, HttpReply):
                resp.release()
            if self._body is not None and isinstance(self._body.exception(), HttpError):
                # aiohttp would wait for the rest of it, and tell the log of that error.
                self.force_close()
            self.set_phase(ConnectionPhase.IDLE)
            if self._messages:
                # A request that the client has sent ahead is answered when it is the peer's turn.
                turn = asyncio.get_running_loop().create_future()
                self._fair_runner.pipelined.run(self.peer.key, partial(_resolve, turn))
                await turn

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> Any:
        """Answer what aiohttp could not read, or what nobody has thought of."""
        if status >= 500:
            log_failure(self.logger, f"a request fails: {request.method} {request.path}", exc)
        reply = HttpError(status, message or "the gateway fails; its log says why").reply()
        reply.keep_alive = False
        return reply


def _resolve(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
