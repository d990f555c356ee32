"""One bound for what all clients together make the daemon keep."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from testkit.examples import examples
from weightd.daemon.clients.room import Room

CLIENTS = st.sampled_from([b"a1", b"a2", b"b1", b"c1"])
BYTES = st.integers(0, 100)


def user(client: bytes) -> str:
    return client[:1].decode()


def test_whose_turn_it_is_has_most_of_the_user_that_has_most() -> None:
    room = Room(100, user)
    room.take(b"b1", 50)
    room.take(b"a1", 30)
    room.take(b"a2", 29)
    assert room.largest(b"c1", 10) == b"a1"
    assert room.largest(b"c1", 60) == b"c1"
    assert room.largest(b"b1", 10) == b"b1"
    assert room.largest(b"a2", 10) == b"a2"


def test_what_is_alone_may_be_more() -> None:
    room = Room(100, user)
    assert room.fits(1000)
    room.take(b"a1", 1000)
    assert not room.fits(1)
    room.give(b"a1", 1000)
    room.take(b"a1", 60)
    assert room.fits(40)
    assert not room.fits(41)


class World(RuleBasedStateMachine):
    """What is given back late, or twice, is never more than there is."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Room(100, user)
        self.held: dict[bytes, int] = {}

    @rule(client=CLIENTS, nbytes=BYTES)
    def take(self, client: bytes, nbytes: int) -> None:
        self.room.take(client, nbytes)
        self.held[client] = self.held.get(client, 0) + nbytes

    @rule(client=CLIENTS, nbytes=BYTES)
    def give(self, client: bytes, nbytes: int) -> None:
        self.room.give(client, nbytes)
        self.held[client] = max(0, self.held.get(client, 0) - nbytes)

    @rule(client=CLIENTS)
    def forget(self, client: bytes) -> None:
        self.room.forget(client)
        self.held[client] = 0

    @invariant()
    def the_books_balance(self) -> None:
        assert self.room.held == sum(self.held.values())
        assert all(self.room.of(client) == held for client, held in self.held.items())


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=examples(20), stateful_step_count=20)
