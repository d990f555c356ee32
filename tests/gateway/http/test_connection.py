"""Connections: how long each may be silent, and who goes where there is no room for more."""

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


class World:
    """A crowd, and the time."""

    def __init__(self, most: int = 100) -> None:
        self.now = 0.0
        self.crowd = HttpConnections(most, LIMITS, lambda: self.now)

    def runs_until(self, now: float) -> None:
        """Let time pass, with a sweep each second."""
        while self.now < now:
            self.now = min(now, self.now + SWEEP_S)
            self.crowd.sweep()

    def comes(self, peer: Peer = A) -> HttpConnection:
        """Return a connection that has just been made, without a socket."""
        connection = HttpConnection(ConnectionParts(mock.Mock(), self.crowd, mock.Mock(), memoryview(b"")), peer)
        transport = mock.Mock(**{"get_extra_info.return_value": None})
        TRANSPORTS[connection] = transport
        connection.connection_made(transport)
        return connection


TRANSPORTS: WeakKeyDictionary[HttpConnection, mock.Mock] = WeakKeyDictionary()


def gone(connection: HttpConnection) -> bool:
    return bool(TRANSPORTS[connection].abort.called)


@pytest.mark.parametrize(("phase", "limit"), [*LIMITS.items()])
def test_who_is_waited_for_too_long_goes(phase: ConnectionPhase, limit: float) -> None:
    world = World()
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


def test_an_answer_may_take_as_long_as_it_takes() -> None:
    world = World()
    busy = world.comes()
    busy.set_phase(ConnectionPhase.ANSWER)
    world.now = 1e9
    world.crowd.sweep()
    assert not gone(busy)


def test_the_time_in_which_the_gateway_was_stopped_does_not_count() -> None:
    """What callers have sent meanwhile waits in their sockets."""
    world = World()
    slow = world.comes()
    slow.set_phase(ConnectionPhase.HEADER)
    for _ in range(2):
        world.runs_until(world.now + 4.0)
        world.now += 3600.0
        world.crowd.sweep()
        assert not gone(slow)
    world.runs_until(world.now + 3.0)
    assert gone(slow)


def test_where_there_is_one_too_many_who_has_asked_nothing_for_longest_goes() -> None:
    world = World(3)
    first, second, third = (world.comes() for _ in range(3))
    first.set_phase(ConnectionPhase.ANSWER)
    first.set_phase(ConnectionPhase.IDLE)
    world.comes()
    assert [gone(each) for each in (first, second, third)] == [False, True, False]


def test_who_has_sent_a_part_of_a_header_has_asked_nothing() -> None:
    world = World(2)
    slow, other = world.comes(), world.comes()
    slow.set_phase(ConnectionPhase.HEADER)
    world.comes()
    assert [gone(each) for each in (slow, other)] == [True, False]


def test_where_all_are_busy_who_comes_goes() -> None:
    world = World(2)
    busy = [world.comes(), world.comes()]
    for each in busy:
        each.set_phase(ConnectionPhase.ANSWER)
    last = world.comes()
    assert gone(last)
    assert not any(map(gone, busy))
    assert len(world.crowd) == 2


def test_else_who_has_not_read_an_answer_for_longest_goes() -> None:
    world = World(3)
    slow, slower, busy = (world.comes() for _ in range(3))
    busy.set_phase(ConnectionPhase.ANSWER)
    slower.set_phase(ConnectionPhase.READING)
    world.now = 1.0
    slow.set_phase(ConnectionPhase.READING)
    assert gone(world.comes()), "an answer takes a moment to be read"
    world.now = 1.1
    last = world.comes()
    assert [gone(each) for each in (slow, slower, busy, last)] == [False, True, False, False]


def test_as_many_go_as_come_at_once() -> None:
    world = World(2)
    came = [world.comes() for _ in range(6)]
    assert [gone(each) for each in came] == [True] * 4 + [False] * 2
    assert len(world.crowd) == 2


def test_many_peers_with_one_connection_each_push_out_nobody_who_asks_over_two() -> None:
    world = World(64)
    own = [world.comes(B) for _ in range(2)]
    for number in range(300):
        # One is between two requests, the other one has a request under way.
        own[0].set_phase(ConnectionPhase.ANSWER)
        own[0].set_phase(ConnectionPhase.IDLE)
        own[1].set_phase(ConnectionPhase.ANSWER)
        other = world.comes(Peer(f"host 10.1.0.{number}"))
        other.set_phase(ConnectionPhase.HEADER if number % 2 else ConnectionPhase.IDLE)
    assert not any(map(gone, own))
    # Nor where the others ask, too: then the new connection ends.
    for each in [*world.crowd._all]:  # pyright: ignore[reportPrivateUsage]
        each.set_phase(ConnectionPhase.ANSWER)
    assert gone(world.comes(Peer("host 10.2.0.1")))
    assert not any(map(gone, own))


def test_a_peer_with_many_connections_closes_none_of_another_one() -> None:
    world = World(3)
    quiet = world.comes(B)
    many = [world.comes(A) for _ in range(5)]
    assert [gone(each) for each in many] == [True] * 3 + [False] * 2
    assert not gone(quiet)
    # Where all of that peer are busy, the new one of it goes.
    for each in many[3:]:
        each.set_phase(ConnectionPhase.ANSWER)
    last = world.comes(A)
    assert gone(last)
    assert not gone(quiet)


def receive(connection: HttpConnection, sent: bytes) -> None:
    """Hand over bytes as the event loop does, which closes a connection whose buffer is empty."""
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
def test_the_buffer_is_never_empty(sizes: tuple[int, ...], ahead: int) -> None:
    """A body ends where the next request follows at once, before the application has run."""
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
