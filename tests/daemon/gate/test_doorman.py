from __future__ import annotations

import logging
import os
import resource
import socket
from collections.abc import Iterator
from typing import cast

import pytest

from weightd.daemon.gate import doorman
from weightd.daemon.gate.doorman import PATIENCE_S, Doorman, max_connections
from weightd.daemon.gate.kernel import handle
from weightd.daemon.gate.link import PeerIdentity
from weightd.daemon.gate.peers import Connection, Peers
from weightd.daemon.host.crowding import allow_descriptors


class FakePeers:
    """Connections that are the ends of pairs of sockets."""

    def __init__(self) -> None:
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.connections: dict[int, Connection] = {}
        self.silent: dict[int, Connection] = {}
        self.any_named = False
        self.now = 0.0
        self.lines: list[tuple[int, str]] = []

    def log(self, level: int, text: str) -> None:
        self.lines.append((level, text))

    def come(self, count: int = 1, user: str = "a", *, heard: bool = True) -> None:
        for _ in range(count):
            self.pairs.append(socket.socketpair())
            self.now += 1.0
            descriptor = self.pairs[-1][0].fileno()
            connection = Connection(len(self.pairs), handle(descriptor), PeerIdentity(None, None, user), self.now)
            connection.heard = self.now if heard else None
            self.connections[descriptor] = connection
            if not heard:
                self.silent[descriptor] = connection

    def shut(self) -> list[bool]:
        """Of each, whether it was shut down: its other end reads the end at once."""
        return [_ended(theirs) for _, theirs in self.pairs]


def _ended(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.fixture
def peers() -> Iterator[FakePeers]:
    made = FakePeers()
    yield made
    for pair in made.pairs:
        for end in pair:
            end.close()


@pytest.fixture(autouse=True)
def _at_most_ten(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(doorman, "max_connections", lambda bound=0: min(10, bound or 10))


@pytest.fixture
def keeper(peers: FakePeers) -> Doorman:
    return Doorman(cast(Peers, peers), 0, b"another has the same", peers.log)


def test_a_listener_may_have_a_bound_of_its_own(peers: FakePeers) -> None:
    peers.come(10)
    Doorman(cast(Peers, peers), 3, b"", peers.log).look()
    assert sum(peers.shut()) == 7


def test_who_comes_beyond_the_bound_is_turned_away_and_who_was_there_stays(peers: FakePeers, keeper: Doorman) -> None:
    peers.come(10)
    keeper.look()
    assert peers.shut() == [False] * 10
    peers.come(2)
    for _ in range(2):  # their end is told later
        keeper.look()
        assert peers.shut() == [False] * 10 + [True] * 2


def test_who_has_the_most_makes_room_for_others(peers: FakePeers, keeper: Doorman) -> None:
    peers.come(9, "greedy")
    peers.come(1, "other")
    for user in ("third", "other", "other"):
        peers.come(1, user)
        keeper.look()
    assert peers.shut() == [False] * 6 + [True] * 3 + [False] * 4
    # With equal shares it is the turn of who came first to have them: no share grows at another's cost.
    peers.come(3, "other")
    keeper.look()
    there = [each for each in peers.connections.values() if not each.leaving]
    assert sorted(each.user for each in there).count("other") <= 5
    assert "third" in {each.user for each in there}


def test_the_silent_make_room_first_the_oldest_before_all(peers: FakePeers, keeper: Doorman) -> None:
    peers.come(4)
    peers.come(4, heard=False)
    peers.come(4)
    keeper.look()
    assert peers.shut() == [False] * 4 + [True] * 2 + [False] * 6


def test_who_is_not_heard_is_hung_up_and_told_why_where_ids_are_chosen(peers: FakePeers, keeper: Doorman) -> None:
    peers.come(2, heard=False)
    peers.come()
    keeper.look()
    assert keeper.timer.due == 1.0 + PATIENCE_S
    # Where nobody has chosen an id, who says nothing may stay.
    now = keeper.timer.due
    for _ in range(3):
        keeper.tick(now)
        assert (peers.shut(), keeper.timer.due) == ([False] * 3, now + PATIENCE_S)
        now = keeper.timer.due
    peers.any_named = True
    [_, second] = peers.silent.values()
    second.since = now
    keeper.tick(now)
    told = peers.pairs[0][1].recv(4096)
    assert peers.shut() == [True, False, False]
    assert told == b"\0\x14another has the same"  # a frame of ZMTP
    assert keeper.timer.due == now + PATIENCE_S
    keeper.tick(keeper.timer.due)
    assert (second.leaving, keeper.timer.due) == (True, float("inf"))


def test_a_descriptor_that_is_something_else_by_now_is_left_alone(peers: FakePeers, keeper: Doorman) -> None:
    peers.come(11)
    reused = os.open("/dev/null", os.O_RDONLY)
    os.dup2(reused, peers.pairs[-1][0].fileno())
    os.close(reused)
    keeper.look()
    assert os.read(peers.pairs[-1][0].fileno(), 1) == b""


def test_it_is_told_once_and_again_when_there_is_room(peers: FakePeers, keeper: Doorman) -> None:
    peers.come(11)
    for _ in range(3):
        keeper.look()
    assert [level for level, _ in peers.lines] == [logging.ERROR]
    for descriptor in list(peers.connections)[8:]:
        del peers.connections[descriptor]
    for _ in range(3):
        keeper.look()
    assert [text for _, text in peers.lines] == [
        "10 clients are connected: some of the user who has the most are turned away",
        "8 clients are connected: others are let in again",
    ]


@pytest.mark.parametrize(
    ("limit", "most"), [(256, 1), (1024, 256), (4096, 1024), (8192, 2048), (20_000, 7_952), (1_048_576, 522_240)]
)
def test_enough_descriptors_are_kept_for_everything_else(
    monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    def getrlimit(_: int) -> tuple[int, int]:
        return limit, limit

    monkeypatch.setattr(resource, "getrlimit", getrlimit)
    assert max_connections() == most


def test_all_descriptors_are_taken_that_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] - 1, before[1]))
        allow_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
