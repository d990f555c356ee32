"""The memory budget shared by all clients."""

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


def test_largest_client_belongs_to_the_largest_user() -> None:
    budget = MemoryBudget(100, user)
    budget.reserve(b"b1", 50)
    budget.reserve(b"a1", 30)
    budget.reserve(b"a2", 29)
    assert budget.largest_client(b"c1", 10) == b"a1"
    assert budget.largest_client(b"c1", 60) == b"c1"
    assert budget.largest_client(b"b1", 10) == b"b1"
    assert budget.largest_client(b"a2", 10) == b"a2"


def test_single_reservation_may_exceed_the_budget() -> None:
    budget = MemoryBudget(100, user)
    assert budget.can_reserve(1000)
    budget.reserve(b"a1", 1000)
    assert not budget.can_reserve(1)
    budget.release(b"a1", 1000)
    budget.reserve(b"a1", 60)
    assert budget.can_reserve(40)
    assert not budget.can_reserve(41)


class BudgetMachine(RuleBasedStateMachine):
    """Reservations and releases in any order; releasing too much has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = MemoryBudget(100, user)
        self.held: dict[bytes, int] = {}

    @rule(client=CLIENTS, nbytes=BYTES)
    def reserve(self, client: bytes, nbytes: int) -> None:
        self.budget.reserve(client, nbytes)
        self.held[client] = self.held.get(client, 0) + nbytes

    @rule(client=CLIENTS, nbytes=BYTES)
    def release(self, client: bytes, nbytes: int) -> None:
        self.budget.release(client, nbytes)
        self.held[client] = max(0, self.held.get(client, 0) - nbytes)

    @rule(client=CLIENTS)
    def release_all(self, client: bytes) -> None:
        self.budget.release_all(client)
        self.held[client] = 0

    @invariant()
    def used_bytes_match_reservations(self) -> None:
        assert self.budget.used_bytes == sum(self.held.values())
        assert all(self.budget.used_by(client) == held for client, held in self.held.items())


TestBudgetMachine = BudgetMachine.TestCase
TestBudgetMachine.settings = settings(max_examples=examples(20), stateful_step_count=20)


def test_trims_the_heap_once_after_large_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[None] = []
    monkeypatch.setattr(memory, "trim_heap", lambda: trims.append(None))
    clock = iter([2.0, 3.0])
    budget = MemoryBudget(2**40, lambda _: "user", lambda: trimmer.on_large_message(next(clock)))
    trimmer = HeapTrimmer(budget)
    budget.reserve(b"c", LARGE_BYTES - 1)
    assert trimmer.timer.due_at == float("inf")
    budget.reserve(b"c", LARGE_BYTES)
    budget.release(b"c", 2 * LARGE_BYTES - 1)
    budget.reserve(b"c", LARGE_BYTES)
    assert trimmer.timer.due_at == 3.0 + TRIM_DELAY_S
    trimmer.on_timer(4.0)
    assert (trims, trimmer.timer.due_at) == ([], 4.0 + TRIM_DELAY_S)
    budget.release(b"c", LARGE_BYTES)
    trimmer.on_timer(5.0)
    assert (trims, trimmer.timer.due_at) == ([None], float("inf"))
