"""One bound for what all clients together make the daemon keep."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from testkit.examples import examples
from weightd_daemon.platform import memory
from weightd_daemon.transport.memory_budget import LARGE_BYTES, TRIM_DELAY_S, HeapTrimmer, MemoryBudget

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


def test_memory_is_given_back_once_after_large_messages_when_none_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[None] = []
    monkeypatch.setattr(memory, "trim_heap", lambda: trims.append(None))
    clock = iter([2.0, 3.0])
    room = MemoryBudget(2**40, lambda _: "somebody", lambda: upkeep.on_large_message(next(clock)))
    upkeep = HeapTrimmer(room)
    room.reserve(b"c", LARGE_BYTES - 1)
    assert upkeep.timer.due_at == float("inf")
    room.reserve(b"c", LARGE_BYTES)
    room.release(b"c", 2 * LARGE_BYTES - 1)
    room.reserve(b"c", LARGE_BYTES)
    assert upkeep.timer.due_at == 3.0 + TRIM_DELAY_S
    upkeep.on_timer(4.0)
    assert (trims, upkeep.timer.due_at) == ([], 4.0 + TRIM_DELAY_S)
    room.release(b"c", LARGE_BYTES)
    upkeep.on_timer(5.0)
    assert (trims, upkeep.timer.due_at) == ([None], float("inf"))
