"""The daemon's memory as the kernel counts it: what is done about it, and when."""

from __future__ import annotations

from typing import Any, cast

import pytest

from weightd.daemon.clients import upkeep
from weightd.daemon.clients.peers import Connection
from weightd.daemon.clients.room import Room
from weightd.daemon.clients.upkeep import INTERVAL_S, Upkeep
from weightd.daemon.host import memory

MIB = 2**20
MOST = 100 * MIB
ALLOWED = MOST + 64 * MIB


class Host:
    """Memory, and what the kernel says of descriptors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = 30 * MIB
        self.freed = 0
        self.trims = 0
        self.orphans = 0
        self.sending: set[int] = set()
        self.connections: dict[int, Connection] = {}
        self.clients: dict[int, frozenset[bytes]] = {}
        self.shut: list[int] = []
        monkeypatch.setattr(memory, "private_bytes", lambda: self.used + self.freed)
        monkeypatch.setattr(memory, "trim", self._trim)
        monkeypatch.setattr(upkeep, "waiting_bytes", self.sending.__contains__)
        monkeypatch.setattr("weightd.daemon.clients.connections.shut_down", self.shut.append)
        self.room = Room(MOST, lambda _: "somebody")
        self.upkeep = Upkeep(self.room, cast(Any, self), cast(Any, self))

    def _trim(self) -> None:
        self.trims += 1
        self.freed = 0

    def forget_written(self) -> None:
        pass

    def orphaned(self) -> int:
        return self.orphans

    def clients_of(self, connection: Connection) -> frozenset[bytes]:
        return self.clients.get(connection.descriptor, frozenset())

    def connect(self, descriptor: int, heard: float | None, *clients: bytes) -> None:
        self.connections[descriptor] = Connection(descriptor, "somebody", 0.0, heard)
        self.clients[descriptor] = frozenset(clients)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_it_looks_only_while_there_is_something_to_see(host: Host) -> None:
    assert host.upkeep.timer.due == float("inf")
    host.upkeep.seen(10.0)
    now = 10.0
    while host.upkeep.timer.due < float("inf"):
        assert host.upkeep.timer.due == pytest.approx(now + INTERVAL_S)
        now = host.upkeep.timer.due
        host.upkeep.tick(now)
    assert 12.0 <= now < 12.5
    host.connect(5, 20.0)
    host.upkeep.seen(20.0)
    for _ in range(100):
        host.upkeep.tick(host.upkeep.timer.due)
    assert host.upkeep.timer.due == pytest.approx(20.0 + 101 * INTERVAL_S)


def test_what_was_freed_is_given_back_once_large_traffic_has_paused(host: Host) -> None:
    host.freed = 300 * MIB
    host.room.most = 2**40
    host.room.take(b"a", 2 * MIB)
    for now in (5.0, 7.0):
        host.upkeep.seen(now)
        host.upkeep.tick(now)
    assert host.trims == 0  # it is needed
    host.room.give(b"a", 2 * MIB)
    host.upkeep.tick(7.5)
    assert host.trims == 0  # it will be needed again
    host.orphans = 1
    host.upkeep.tick(9.0)
    assert host.trims == 0  # more is to come
    host.orphans = 0
    host.room.take(b"a", 1000)
    for now in (10.0, 11.0):  # small traffic goes on
        host.upkeep.seen(now)
        host.upkeep.tick(now)
        assert host.trims == 1
    # What the library gives up later leaves something to be given back, too.
    host.used -= 20 * MIB
    host.upkeep.tick(20.0)
    assert host.trims == 2
    # So does large traffic, though as much is used after it as before.
    host.room.take(b"a", 2 * MIB)
    host.upkeep.tick(30.0)
    host.room.give(b"a", 2 * MIB)
    for now in (30.1, 32.0, 33.0, 34.0):
        host.upkeep.tick(now)
    assert host.trims == 3


def test_what_is_counted_ends_nobody(host: Host) -> None:
    host.connect(5, 0.0)
    host.used += ALLOWED
    host.upkeep.tick(0.0)
    host.room.take(b"a", 50 * MIB)
    host.orphans = 50 * MIB
    host.used += 100 * MIB
    host.freed = 500 * MIB
    host.upkeep.tick(0.0)
    assert (host.shut, host.freed) == ([], 0)  # what can be given back is no reason


@pytest.mark.parametrize(
    ("sending", "waiting", "order"),
    [
        ({6}, b"", [6, 8, 5, 7]),  # who is sending; who never spoke; who has not been heard for longest
        (set[int](), b"", [8, 5, 6, 7]),
        ({5, 7}, b"5", [7, 5, 8, 6]),
        (set[int](), b"5", [8, 6, 7, 5]),  # who waits for an answer comes last
    ],
)
def test_of_what_nobody_has_counted_the_likeliest_is_ended_first(
    host: Host, sending: set[int], waiting: bytes, order: list[int]
) -> None:
    for descriptor, heard in ((5, 1.0), (6, 2.0), (7, 3.0)):
        host.connect(descriptor, heard, b"%d" % descriptor)
    host.connect(8, None)
    host.sending |= sending
    if waiting:
        host.room.take(waiting, 1)
    host.used += ALLOWED + 2
    host.upkeep.tick(4.0)
    host.upkeep.tick(4.4)  # its memory may yet come back
    assert host.shut == order[:1]
    for now in range(5, 11):
        host.upkeep.tick(now)
    assert host.shut == order
    assert len(host.connections) == 4


def test_who_sends_beside_a_request_under_way_is_not_taken_for_who_ends_no_message(host: Host) -> None:
    host.connect(5, 3.9, b"5")
    host.connect(6, None)
    host.sending.add(5)
    host.room.take(b"5", 1)
    host.used += ALLOWED + 2
    host.upkeep.tick(4.0)
    assert host.shut == [6]
