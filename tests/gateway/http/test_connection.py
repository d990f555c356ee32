"""Tests of connection limits: how long a connection may be silent, and which connection closes when too many are
open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest import mock
from weakref import WeakKeyDictionary

import pytest

from weightd_common.peers import Peer
from weightd_gateway.http.connection import (
    RECEIVE_BYTES,
    SWEEP_S,
    ConnectionParts,
    ConnectionPhase,
    HttpConnection,
    HttpConnections,
)
from weightd_gateway.http.messages import HttpReply, HttpRequest

A, B = Peer("uid 1"), Peer("host 10.0.0.2")

LIMITS = {ConnectionPhase.IDLE: 100.0, ConnectionPhase.HEADER: 10.0, ConnectionPhase.BODY: 10.0}


class ConnectionSim:
    """A set of connections and a clock."""

    def __init__(self, most: int = 100) -> None:
        self.now = 0.0
        self.crowd = HttpConnections(most, LIMITS, lambda: self.now)

    def runs_until(self, now: float) -> None:
        """Advance the clock, with a sweep each second."""
        while self.now < now:
            self.now = min(now, self.now + SWEEP_S)
            self.crowd.sweep()

    def connect(self, peer: Peer = A) -> HttpConnection:
        """Return a new connection without a socket."""
        connection = HttpConnection(ConnectionParts(mock.Mock(), self.crowd, mock.Mock(), memoryview(b"")), peer)
        transport = mock.Mock(**{"get_extra_info.return_value": None})
        TRANSPORTS[connection] = transport
        connection.connection_made(transport)
        return connection


TRANSPORTS: WeakKeyDictionary[HttpConnection, mock.Mock] = WeakKeyDictionary()


def is_closed(connection: HttpConnection) -> bool:
    return bool(TRANSPORTS[connection].abort.called)


@pytest.mark.parametrize(("phase", "limit"), [*LIMITS.items()])
def test_closes_connection_after_timeout(phase: ConnectionPhase, limit: float) -> None:
    sim = ConnectionSim()
    slow, other = sim.connect(), sim.connect()
    sim.runs_until(1.0)
    slow.set_phase(phase)
    other.set_phase(ConnectionPhase.ANSWER)
    sim.runs_until(1.0 + limit)
    assert not is_closed(slow)
    sim.now += 0.1
    sim.crowd.sweep()
    assert is_closed(slow)
    assert not is_closed(other)


def test_answer_has_no_timeout() -> None:
    sim = ConnectionSim()
    busy = sim.connect()
    busy.set_phase(ConnectionPhase.ANSWER)
    sim.now = 1e9
    sim.crowd.sweep()
    assert not is_closed(busy)


def test_time_while_stopped_does_not_count() -> None:
    """Bytes that callers send in this time wait in their sockets."""
    sim = ConnectionSim()
    slow = sim.connect()
    slow.set_phase(ConnectionPhase.HEADER)
    for _ in range(2):
        sim.runs_until(sim.now + 4.0)
        sim.now += 3600.0
        sim.crowd.sweep()
        assert not is_closed(slow)
    sim.runs_until(sim.now + 3.0)
    assert is_closed(slow)


def test_closes_longest_idle_connection() -> None:
    sim = ConnectionSim(3)
    first, second, third = (sim.connect() for _ in range(3))
    first.set_phase(ConnectionPhase.ANSWER)
    first.set_phase(ConnectionPhase.IDLE)
    sim.connect()
    assert [is_closed(each) for each in (first, second, third)] == [False, True, False]


def test_partial_header_counts_as_idle() -> None:
    sim = ConnectionSim(2)
    slow, other = sim.connect(), sim.connect()
    slow.set_phase(ConnectionPhase.HEADER)
    sim.connect()
    assert [is_closed(each) for each in (slow, other)] == [True, False]


def test_closes_new_connection_if_all_are_busy() -> None:
    sim = ConnectionSim(2)
    busy = [sim.connect(), sim.connect()]
    for each in busy:
        each.set_phase(ConnectionPhase.ANSWER)
    last = sim.connect()
    assert is_closed(last)
    assert not any(map(is_closed, busy))
    assert len(sim.crowd) == 2


def test_closes_slowest_reader() -> None:
    sim = ConnectionSim(3)
    slow, slower, busy = (sim.connect() for _ in range(3))
    busy.set_phase(ConnectionPhase.ANSWER)
    slower.set_phase(ConnectionPhase.READING)
    sim.now = 1.0
    slow.set_phase(ConnectionPhase.READING)
    assert is_closed(sim.connect()), "an answer takes a moment to be read"
    sim.now = 1.1
    last = sim.connect()
    assert [is_closed(each) for each in (slow, slower, busy, last)] == [False, True, False, False]


def test_closes_as_many_as_open() -> None:
    sim = ConnectionSim(2)
    came = [sim.connect() for _ in range(6)]
    assert [is_closed(each) for each in came] == [True] * 4 + [False] * 2
    assert len(sim.crowd) == 2


def test_many_peers_do_not_close_active_connections() -> None:
    sim = ConnectionSim(64)
    own = [sim.connect(B) for _ in range(2)]
    for number in range(300):
        # One connection is idle between two requests, the other one has a running request.
        own[0].set_phase(ConnectionPhase.ANSWER)
        own[0].set_phase(ConnectionPhase.IDLE)
        own[1].set_phase(ConnectionPhase.ANSWER)
        other = sim.connect(Peer(f"host 10.1.0.{number}"))
        other.set_phase(ConnectionPhase.HEADER if number % 2 else ConnectionPhase.IDLE)
    assert not any(map(is_closed, own))
    # If the other peers send requests, too, the new connection closes.
    for each in [*sim.crowd._all]:  # pyright: ignore[reportPrivateUsage]
        each.set_phase(ConnectionPhase.ANSWER)
    assert is_closed(sim.connect(Peer("host 10.2.0.1")))
    assert not any(map(is_closed, own))


def test_peer_closes_only_its_own_connections() -> None:
    sim = ConnectionSim(3)
    quiet = sim.connect(B)
    many = [sim.connect(A) for _ in range(5)]
    assert [is_closed(each) for each in many] == [True] * 3 + [False] * 2
    assert not is_closed(quiet)
    # If all connections of that peer are busy, its new connection closes.
    for each in many[3:]:
        each.set_phase(ConnectionPhase.ANSWER)
    last = sim.connect(A)
    assert is_closed(last)
    assert not is_closed(quiet)


def receive(connection: HttpConnection, sent: bytes) -> None:
    """Deliver bytes as the event loop does; a connection with an empty buffer would be closed."""
    while sent:
        buffer = connection.get_buffer(-1)
        assert len(buffer)
        size = min(len(buffer), len(sent))
        buffer[:size] = sent[:size]
        connection.buffer_updated(size)
        sent = sent[size:]


def run_now(key: str, work: Callable[[], None]) -> None:
    work()


@pytest.mark.parametrize("sizes", [(8,), (3, 5), (0, 8, 0)], ids=str)
@pytest.mark.parametrize("ahead", [0, 3, 8])
def test_buffer_is_never_empty(sizes: tuple[int, ...], ahead: int) -> None:
    """The next request may follow a body before the application has run."""
    bodies: list[bytes] = []

    async def reply_to(request: HttpRequest) -> HttpReply:
        parts = [memoryview(bytearray(size)) for size in sizes]
        for part in parts:
            await request.read_into(part)
        bodies.append(b"".join(parts))
        return HttpReply([])

    async def scenario() -> None:
        runner = mock.Mock()
        runner.run = runner.pipelined.run = run_now
        crowd = HttpConnections(1, LIMITS, lambda: 0.0)
        connection = HttpConnection(ConnectionParts(reply_to, crowd, runner, memoryview(bytearray(RECEIVE_BYTES))), A)
        transport = mock.Mock(**{"get_extra_info.return_value": None, "is_closing.return_value": False})
        connection.connection_made(transport)
        head = b"PUT / HTTP/1.1\r\nContent-Length: 8\r\n\r\n"
        receive(connection, head + b"12345678"[:ahead])
        await asyncio.sleep(0)
        receive(connection, b"12345678"[ahead:] + head + b"abcdefgh")
        for _ in range(10):
            await asyncio.sleep(0)
        assert bodies == [b"12345678", b"abcdefgh"]
        assert (connection.phase, bytes(connection.unparsed)) == (ConnectionPhase.IDLE, b"")
        transport.abort.assert_not_called()

    asyncio.run(scenario())
