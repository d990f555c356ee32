from __future__ import annotations

import logging
import os
import resource
import socket
from collections.abc import Iterator
from typing import cast

import pytest

from weightd.daemon import doorman
from weightd.daemon.doorman import Doorman, allow_descriptors, max_connections
from weightd.daemon.peers import Peers


class FakePeers:
    """Connections that are the ends of pairs of sockets."""

    def __init__(self) -> None:
        self.pairs: list[tuple[socket.socket, socket.socket]] = []

    def come(self, count: int) -> None:
        self.pairs += [socket.socketpair() for _ in range(count)]

    @property
    def connections(self) -> int:
        return len(self.pairs)

    def latest(self, count: int) -> list[int]:
        return [ours.fileno() for ours, _ in self.pairs][-count:] if count > 0 else []

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
    monkeypatch.setattr(doorman, "max_connections", lambda: 10)


def looks(keeper: Doorman, peers: FakePeers) -> None:
    keeper.look(cast(Peers, peers))


def test_who_comes_beyond_the_bound_is_turned_away_and_who_was_there_stays(peers: FakePeers) -> None:
    keeper = Doorman()
    peers.come(10)
    looks(keeper, peers)
    assert peers.shut() == [False] * 10
    peers.come(2)
    looks(keeper, peers)
    assert peers.shut() == [False] * 10 + [True] * 2


def test_a_descriptor_that_is_something_else_by_now_is_left_alone(peers: FakePeers) -> None:
    peers.come(11)
    reused = os.open("/dev/null", os.O_RDONLY)
    os.dup2(reused, peers.pairs[-1][0].fileno())
    os.close(reused)
    looks(Doorman(), peers)
    assert os.read(peers.pairs[-1][0].fileno(), 1) == b""


def test_it_is_told_once_and_again_when_there_is_room(peers: FakePeers, caplog: pytest.LogCaptureFixture) -> None:
    keeper = Doorman()
    with caplog.at_level(logging.INFO):
        peers.come(11)
        for _ in range(3):
            looks(keeper, peers)
        assert [each.levelname for each in caplog.records] == ["ERROR"]
        for pair in peers.pairs[8:]:
            for end in pair:
                end.close()
        del peers.pairs[8:]
        for _ in range(3):
            looks(keeper, peers)
    assert [each.getMessage() for each in caplog.records] == [
        "10 clients are connected: further ones are turned away",
        "8 clients are connected: others are let in again",
    ]


@pytest.mark.parametrize(
    ("limit", "most"), [(256, 1), (1024, 512), (4096, 2048), (8192, 4096), (20_000, 15_904), (1_048_576, 1_044_480)]
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
