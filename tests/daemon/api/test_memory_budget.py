"""One bound for what all clients together make the daemon keep."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from testkit.examples import examples
from weightd_daemon.api.memory_budget import MemoryBudget

CLIENTS = st.sampled_from([b"a1", b"a2", b"b1", b"c1"])
BYTES = st.integers(0, 100)


def user(client: bytes) -> str:
    return client[:1].decode()


def test_whose_turn_it_is_has_most_of_the_user_that_has_most() -> None:
    room = MemoryBudget(100, user)
    room.reserve(b"b1", 50)
    room.reserve(b"a1", 30)
    room.reserve(b"a2", 29)
    assert room.largest_client(b"c1", 10) == b"a1"
    assert room.largest_client(b"c1", 60) == b"c1"
    assert room.largest_client(b"b1", 10) == b"b1"
    assert room.largest_client(b"a2", 10) == b"a2"


def test_what_is_alone_may_be_more() -> None:
    room = MemoryBudget(100, user)
    assert room.can_reserve(1000)
    room.reserve(b"a1", 1000)
    assert not room.can_reserve(1)
    room.release(b"a1", 1000)
    room.reserve(b"a1", 60)
    assert room.can_reserve(40)
    assert not room.can_reserve(41)


class World(RuleBasedStateMachine):
    """What is given back late, or twice, is never more than there is."""

    def __init__(self) -> None:
        super().__init__()
        self.room = MemoryBudget(100, user)
        self.held: dict[bytes, int] = {}

    @rule(client=CLIENTS, nbytes=BYTES)
    def take(self, client: bytes, nbytes: int) -> None:
        self.room.reserve(client, nbytes)
        self.held[client] = self.held.get(client, 0) + nbytes

    @rule(client=CLIENTS, nbytes=BYTES)
    def give(self, client: bytes, nbytes: int) -> None:
        self.room.release(client, nbytes)
        self.held[client] = max(0, self.held.get(client, 0) - nbytes)

    @rule(client=CLIENTS)
    def forget(self, client: bytes) -> None:
        self.room.release_all(client)
        self.held[client] = 0

    @invariant()
    def the_books_balance(self) -> None:
        assert self.room.used_bytes == sum(self.held.values())
        assert all(self.room.used_by(client) == held for client, held in self.held.items())


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=examples(20), stateful_step_count=20)
