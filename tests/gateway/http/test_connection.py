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
from weightd_gateway.http.messages import CONNECTION, Message, Receive, Scope, Send

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

    def comes(self, peer: Peer = A) -> HttpConnection:
        """Return a new connection without a socket."""
        connection = HttpConnection(ConnectionParts(mock.Mock(), self.crowd, mock.Mock(), memoryview(b"")), peer)
        transport = mock.Mock(**{"get_extra_info.return_value": None})
        TRANSPORTS[connection] = transport
        connection.connection_made(transport)
        return connection


TRANSPORTS: WeakKeyDictionary[HttpConnection, mock.Mock] = WeakKeyDictionary()


def gone(connection: HttpConnection) -> bool:
    return bool(TRANSPORTS[connection].abort.called)


@pytest.mark.parametrize(("phase", "limit"), [*LIMITS.items()])
def test_closes_connection_after_timeout(phase: ConnectionPhase, limit: float) -> None:
    world = ConnectionSim()
    slow, other = world.comes(), world.comes()
    world.runs_until(1.0)
    slow.set_phase(phase)
    other.set_phase(ConnectionPhase.ANSWER)
    world.runs_until(1.0 + limit)
    assert not gone(slow)
    world.now += 0.1
    world.crowd.sweep()
    assert gone(slow)
    assert not gone(other)


def test_answer_has_no_timeout() -> None:
    world = ConnectionSim()
    busy = world.comes()
    busy.set_phase(ConnectionPhase.ANSWER)
    world.now = 1e9
    world.crowd.sweep()
    assert not gone(busy)


def test_time_while_stopped_does_not_count() -> None:
    """Bytes that callers send in this time wait in their sockets."""
    world = ConnectionSim()
    slow = world.comes()
    slow.set_phase(ConnectionPhase.HEADER)
    for _ in range(2):
        world.runs_until(world.now + 4.0)
        world.now += 3600.0
        world.crowd.sweep()
        assert not gone(slow)
    world.runs_until(world.now + 3.0)
    assert gone(slow)


def test_closes_longest_idle_connection() -> None:
    world = ConnectionSim(3)
    first, second, third = (world.comes() for _ in range(3))
    first.set_phase(ConnectionPhase.ANSWER)
    first.set_phase(ConnectionPhase.IDLE)
    world.comes()
    assert [gone(each) for each in (first, second, third)] == [False, True, False]


def test_partial_header_counts_as_idle() -> None:
    world = ConnectionSim(2)
    slow, other = world.comes(), world.comes()
    slow.set_phase(ConnectionPhase.HEADER)
    world.comes()
    assert [gone(each) for each in (slow, other)] == [True, False]


def test_closes_new_connection_if_all_are_busy() -> None:
    world = ConnectionSim(2)
    busy = [world.comes(), world.comes()]
    for each in busy:
        each.set_phase(ConnectionPhase.ANSWER)
    last = world.comes()
    assert gone(last)
    assert not any(map(gone, busy))
    assert len(world.crowd) == 2


def test_closes_slowest_reader() -> None:
    world = ConnectionSim(3)
    slow, slower, busy = (world.comes() for _ in range(3))
    busy.set_phase(ConnectionPhase.ANSWER)
    slower.set_phase(ConnectionPhase.READING)
    world.now = 1.0
    slow.set_phase(ConnectionPhase.READING)
    assert gone(world.comes()), "an answer takes a moment to be read"
    world.now = 1.1
    last = world.comes()
    assert [gone(each) for each in (slow, slower, busy, last)] == [False, True, False, False]


def test_closes_as_many_as_open() -> None:
    world = ConnectionSim(2)
    came = [world.comes() for _ in range(6)]
    assert [gone(each) for each in came] == [True] * 4 + [False] * 2
    assert len(world.crowd) == 2


def test_many_peers_do_not_close_active_connections() -> None:
    world = ConnectionSim(64)
    own = [world.comes(B) for _ in range(2)]
    for number in range(300):
        # One connection is idle between two requests, the other one has a running request.
        own[0].set_phase(ConnectionPhase.ANSWER)
        own[0].set_phase(ConnectionPhase.IDLE)
        own[1].set_phase(ConnectionPhase.ANSWER)
        other = world.comes(Peer(f"host 10.1.0.{number}"))
        other.set_phase(ConnectionPhase.HEADER if number % 2 else ConnectionPhase.IDLE)
    assert not any(map(gone, own))
    # If the other peers send requests, too, the new connection closes.
    for each in [*world.crowd._all]:  # pyright: ignore[reportPrivateUsage]
        each.set_phase(ConnectionPhase.ANSWER)
    assert gone(world.comes(Peer("host 10.2.0.1")))
    assert not any(map(gone, own))


def test_peer_closes_only_its_own_connections() -> None:
    world = ConnectionSim(3)
    quiet = world.comes(B)
    many = [world.comes(A) for _ in range(5)]
    assert [gone(each) for each in many] == [True] * 3 + [False] * 2
    assert not gone(quiet)
    # If all connections of that peer are busy, its new connection closes.
    for each in many[3:]:
        each.set_phase(ConnectionPhase.ANSWER)
    last = world.comes(A)
    assert gone(last)
    assert not gone(quiet)


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

    async def app(scope: Scope, take: Receive, send: Send) -> None:
        parts = [memoryview(bytearray(size)) for size in sizes]
        for part in parts:
            await scope["extensions"][CONNECTION].receive_into(part)
        bodies.append(b"".join(parts))
        start: Message = {"type": "http.response.start", "status": 200, "headers": []}
        await send(start)
        await send({"type": "http.response.body"})

    async def story() -> None:
        runner = mock.Mock()
        runner.run = runner.pipelined.run = run_now
        crowd = HttpConnections(1, LIMITS, lambda: 0.0)
        connection = HttpConnection(ConnectionParts(app, crowd, runner, memoryview(bytearray(RECEIVE_BYTES))), A)
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

    asyncio.run(story())
