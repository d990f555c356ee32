from __future__ import annotations

import logging
import resource
import socket
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from weightd.daemon.clients import crowd
from weightd.daemon.clients.connection import Connection, Identity
from weightd.daemon.clients.crowd import Doorkeeper, max_regions
from weightd.daemon.host.clientlog import ClientLog
from weightd.daemon.host.crowding import Crowd, allow_descriptors, for_clients
from weightd.daemon.requests.request import Origin
from weightd.shared.stream import Stream


class Hall:
    """Clients in the order in which they came, and a crowd of at most ten."""

    def __init__(self) -> None:
        self.there: list[Connection] = []
        self.sockets: list[socket.socket] = []
        self.crowd = Doorkeeper(ClientLog())
        self._turned_away: list[Connection] = []

    def come(self, count: int = 1, user: str = "a", *, speak: bool = True) -> None:
        for _ in range(count):
            ours, theirs = socket.socketpair()
            self.sockets += [ours, theirs]
            number = len(self.there)
            came = Connection(number.to_bytes(8, "big"), Stream(ours), Identity(Origin("near", user)), float(number))
            came.has_spoken = speak
            self.there.append(came)
            # Their end is told later: who is turned away counts among those that are there.
            self._turned_away += self.crowd.came(came, len(self.there))

    def turned_away(self) -> list[int]:
        """Return who had to go since this was asked last, by number."""
        out, self._turned_away = self._turned_away, []
        return [self.there.index(each) for each in out]


@pytest.fixture
def hall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hall]:
    monkeypatch.setattr(crowd, "for_clients", lambda: 10)
    made = Hall()
    yield made
    for each in made.sockets:
        each.close()


def test_who_comes_beyond_the_bound_is_turned_away_and_who_was_there_stays(hall: Hall) -> None:
    hall.come(10)
    assert hall.turned_away() == []
    hall.come(2)
    assert hall.turned_away() == [10, 11]
    hall.crowd.leaves(hall.there[3])
    hall.come(2)
    assert hall.turned_away() == [13]


def test_who_has_the_most_makes_room_for_others(hall: Hall) -> None:
    hall.come(1, "other")
    hall.come(9, "greedy")
    for user in ("third", "other", "other"):
        hall.come(1, user)
    assert hall.turned_away() == [9, 8, 7]


def test_who_has_never_spoken_makes_room_first_the_oldest_before_all(hall: Hall) -> None:
    hall.come(4)
    hall.come(4, speak=False)
    hall.come(4)
    assert hall.turned_away() == [4, 5]


def test_the_log_tells_once_when_it_is_full_and_when_there_is_room_again(
    hall: Hall, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    hall.come(13)
    hall.crowd.went(9)
    for _ in range(2):
        hall.crowd.went(8)
    assert [each.levelname for each in caplog.records] == ["ERROR", "WARNING"]


class Guest:
    def __init__(self, user: str, since: float) -> None:
        self.user, self.since, self.has_spoken = user, since, False


# Who goes twice is counted once.
@example([("a", 0), ("a", 0), ("go", 0), ("reduce", 0)])
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "speak", "go", "reduce"]), st.integers(0, 20))))
def test_who_has_to_go_is_by_the_rule_whatever_has_happened(events: list[tuple[str, int]]) -> None:
    crowd: Crowd[Guest] = Crowd()
    there: list[Guest] = []
    for number, (event, index) in enumerate(events):
        if event in "ab":
            there.append(Guest(event, float(number)))
            crowd.add(there[-1])
        elif event == "reduce":
            count = max(0, len(there) - 1 - index % 3)
            for gone in crowd.reduce(count):
                users = [each.user for each in there]
                assert users.count(gone.user) == max(map(users.count, users))
                own = [each for each in there if each.user == gone.user]
                assert gone is next((each for each in own if not each.has_spoken), own[-1])
                there.remove(gone)
            assert len(there) == count
        elif there and event == "speak":
            there[index % len(there)].has_spoken = True
        elif there:
            gone = there.pop(index % len(there))
            for _ in range(2):
                crowd.remove(gone)


def test_as_many_descriptors_as_the_system_allows_and_some_are_left_for_others() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        allow_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
        for limit, most in ((300, 44), (1024, 512), (8000, 4000)):
            if limit <= before[1]:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
                assert for_clients() == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("limit", [64, 300, 1024, 524_288])
def test_regions_and_connections_leave_a_part_of_the_descriptors(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def getrlimit(_: int) -> tuple[int, int]:
        return limit, limit

    monkeypatch.setattr(resource, "getrlimit", getrlimit)
    assert max_regions() >= 31
    assert limit - for_clients() - max_regions() >= 31
