"""A gate's memory as the kernel counts it: what is done about it, and when."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest

from weightd.daemon.gate import kernel
from weightd.daemon.gate.kernel import Handle
from weightd.daemon.gate.link import PeerIdentity
from weightd.daemon.gate.peers import Connection
from weightd.daemon.gate.upkeep import INTERVAL_S, OWN_BYTES, Upkeep

MIB = 2**20
MOST = 100 * MIB
ALLOWED = MOST + OWN_BYTES


class Host:
    """Memory, and what the kernel says of descriptors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = 30 * MIB
        self.freed = 0
        self.trims = 0
        self.counted = 0
        self.sending: set[int] = set()
        self.looks: Counter[int] = Counter()
        self.connections: dict[int, Connection] = {}
        self.shut: list[int] = []
        monkeypatch.setattr(kernel, "waiting_bytes", self.waiting_bytes)
        monkeypatch.setattr(kernel, "shut_down", self.shut_down)
        this = cast(Any, self)
        self.upkeep = Upkeep(this, this, lambda: self.counted, MOST, lambda level, text: None)

    def shut_down(self, connection: Handle) -> None:
        self.shut.append(connection.descriptor)

    def waiting_bytes(self, descriptor: int) -> bool:
        """Whoever has a negative number among those who send is ahead of the library only now and then."""
        self.looks[descriptor] += 1
        return descriptor in self.sending or (-descriptor in self.sending and self.looks[descriptor] % 30 == 0)

    def private_bytes(self) -> int:
        return self.used + self.freed

    def trim(self) -> None:
        self.trims += 1
        self.freed = 0

    def connect(self, descriptor: int, heard: float | None) -> None:
        made = self.connections[descriptor] = Connection(1, Handle(descriptor, (0, 0)), PeerIdentity(0, 1, ""), 0.0)
        made.heard = heard


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
    host.freed, host.counted = 50 * MIB, 2 * MIB
    host.upkeep.tick(5.0)
    host.upkeep.tick(7.0)
    assert host.trims == 0  # it is needed
    host.counted = 0
    host.upkeep.tick(7.5)
    assert host.trims == 0  # it will be needed again
    for now in (8.0, 9.0, 10.0):  # small traffic goes on
        host.upkeep.seen(now)
        host.upkeep.tick(now)
        assert host.trims == 1
    # What the library gives up later leaves something to be given back, too.
    host.used -= 20 * MIB
    host.upkeep.tick(20.0)
    host.upkeep.tick(21.0)
    assert host.trims == 2


def test_what_is_counted_ends_nobody(host: Host) -> None:
    host.connect(5, 0.0)
    host.counted = 100 * MIB
    host.used += ALLOWED + host.counted
    host.freed = 500 * MIB
    host.upkeep.tick(0.0)
    assert (host.shut, host.freed) == ([], 0)  # what can be given back is no reason


@pytest.mark.parametrize(
    ("sending", "order"),
    [
        ({6}, [6, 8, 5, 7]),  # who is sending; who never spoke; who has not been heard for longest
        (set[int](), [8, 5, 6, 7]),
        ({5, 7}, [5, 7, 8, 6]),
        ({5, 6, 7, -8}, [8, 5, 6, 7]),  # who never spoke, though others send more, and were not read for a while
    ],
)
def test_of_what_nobody_has_counted_the_likeliest_is_ended_first(
    host: Host, sending: set[int], order: list[int]
) -> None:
    for descriptor, heard in ((5, 1.0), (6, 2.0), (7, 3.0), (8, None)):
        host.connect(descriptor, heard)
    host.sending |= sending
    host.used += ALLOWED + 2
    host.upkeep.tick(4.0)
    host.upkeep.tick(4.4)  # its memory may yet come back
    assert host.shut == order[:1]
    for now in range(5, 11):
        host.upkeep.tick(now)
    assert host.shut == order
