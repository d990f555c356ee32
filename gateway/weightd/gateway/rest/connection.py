"""Connections of callers: how long each may be silent, and which goes first where there is no room for more."""

from __future__ import annotations

import enum
import socket
import struct
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from weightd.gateway.rest.reply import Refused, Reply

SWEEP_S = 1.0
"""How often `Crowd.sweep` has to be called."""

# A sweep that comes so late shows that the process did not run.
_OVERSLEPT_S = 0.5

# Where there is no room for others, an answer has to be read within this.
_SLOW_S = 1.0

_LATE = "the body of the request has not come in time (receive_timeout)"

# struct ucred of the kernel: pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")


class Phase(enum.Enum):
    """What is waited for."""

    IDLE = "a request"
    HEADER = "the rest of its header"
    BODY = "its body"
    ANSWER = "the answer"
    READING = "the caller, to read that"


class Crowd:
    """All connections.

    Args:
        most: of them.
        limits: seconds that a phase may take; of one that is not named any.
        clock: tells the time.
    """

    def __init__(self, most: int, limits: dict[Phase, float], clock: Callable[[], float]) -> None:
        self._most = most
        self._limits = limits
        self.clock = clock
        self._next_sweep = clock() + SWEEP_S
        self._all: dict[Connection, None] = {}
        # Those that ask nothing, in the order in which they have begun with that; who has sent a part of a header, too.
        self._idle: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def comes(self, connection: Connection) -> None:
        """There is another one: where that is one too many, who has asked nothing for longest goes.

        Where all ask something, that is who has not read an answer for longest, so that such do not keep others out.
        """
        self._all[connection] = self._idle[connection] = None
        if len(self._all) > self._most:
            # Many may come before the loop tells of the one that goes.
            going = next(iter(self._idle))
            if going is connection:
                limit = self.clock() - _SLOW_S
                reading = (each for each in self._all if each.phase is Phase.READING and each.since < limit)
                going = min(reading, key=lambda each: each.since, default=connection)
            self.goes(going)
            going.abort()

    def goes(self, connection: Connection) -> None:
        """It is no more."""
        self._all.pop(connection, None)
        self._idle.pop(connection, None)

    def enters(self, connection: Connection, phase: Phase) -> None:
        """Something else is waited for."""
        if phase is Phase.IDLE:
            if connection in self._all:
                self._idle[connection] = None
        elif phase is not Phase.HEADER:
            self._idle.pop(connection, None)

    def sweep(self) -> None:
        """Let those go that have been waited for too long, without the time in which this process was stopped."""
        now = self.clock()
        late, self._next_sweep = now - self._next_sweep, now + SWEEP_S
        if late > _OVERSLEPT_S:
            for each in self._all:
                each.since = min(each.since + late, now)
        for each in [*self._all]:
            limit = self._limits.get(each.phase)
            if limit is not None and now > each.since + limit:
                each.late()


class Connection(RequestHandler):
    """One connection, which knows what is waited for.

    Args:
        crowd: all of them.
        manager: of aiohttp.
        options: for aiohttp.

    Attributes:
        phase: what is waited for.
        since: when that began.
        uid: the number of the user at the other end, which the kernel tells of a unix socket; None of any other.
        common_name: that of the certificate of the other end, which TLS has verified; None where there is none.
    """

    def __init__(self, crowd: Crowd, manager: web.Server, **options: Any) -> None:
        super().__init__(manager, **options)
        self._crowd = crowd
        self.phase = Phase.IDLE
        self.since = crowd.clock()
        self.uid: int | None = None
        self.common_name: str | None = None
        self._body: Any = None

    def connection_made(self, transport: Any) -> None:  # noqa: D102
        self.uid, self.common_name = _uid(transport), _common_name(transport)
        super().connection_made(transport)
        self._crowd.comes(self)

    def connection_lost(self, exc: BaseException | None) -> None:  # noqa: D102
        self._crowd.goes(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:  # noqa: D102
        if self.phase is Phase.IDLE:
            self.enter(Phase.HEADER)
        super().data_received(data)

    def enter(self, phase: Phase) -> None:
        """Something else is waited for from now on."""
        self._crowd.enters(self, phase)
        self.phase = phase
        self.since = self._crowd.clock()

    def reads(self, body: Any) -> None:
        """The body of a request is read: an aiohttp.StreamReader."""
        self._body = body
        self.enter(Phase.BODY)

    def late(self) -> None:
        """What is waited for has not come in time."""
        if self.phase is Phase.BODY and self._body is not None:
            self._body.set_exception(Refused(408, _LATE))
            self.enter(Phase.ANSWER)
        else:
            self.abort()

    def abort(self) -> None:
        """End it at once."""
        if self.transport is not None:
            self.transport.abort()

    async def finish_response(self, request: web.BaseRequest, resp: Any, start_time: float | None) -> tuple[Any, bool]:
        """Send an answer; then the next request is waited for."""
        self.enter(Phase.READING)
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            if isinstance(resp, Reply):
                resp.release()
            if self._body is not None and isinstance(self._body.exception(), Refused):
                # aiohttp would wait for the rest of it, and tell the log of that error.
                self.force_close()
            self.enter(Phase.IDLE)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> Any:
        """Answer what aiohttp could not read, or what nobody has thought of."""
        if status >= 500:
            self.logger.error("a request fails: %s %s", request.method, request.path, exc_info=exc)
        reply = Refused(status, message or "the gateway fails; its log says why").reply()
        reply.keep_alive = False
        return reply


def _uid(transport: Any) -> int | None:
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid


def _common_name(transport: Any) -> str | None:
    certificate: dict[str, Any] = transport.get_extra_info("peercert") or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return str(names[0]) if names else None
