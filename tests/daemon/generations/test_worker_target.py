"""Tests of a generation whose number of workers changes while it serves."""

from __future__ import annotations

from weightd_daemon.generations.actions import Action, AddSlot, RemoveSlot, Role, Spawn
from weightd_daemon.generations.worker_target import has_surplus_workers, set_worker_target
from weightd_daemon.platform.exit_cause import ExitCause

from .generation_harness import HOLDER, TRIM_STORE, W1, W2, W3, W4, GenerationHarness, attach, stop


def serving(workers: int = 1, max_workers: int = 3, spares: int = 0) -> GenerationHarness:
    harness = GenerationHarness(workers, max_workers=max_workers, spares=spares).serving()
    harness.take_actions()
    return harness


def set_target(harness: GenerationHarness, workers: int, *idle: str) -> list[Action]:
    set_worker_target(harness.generation, workers, idle, harness.now)
    return harness.take_actions()


def grown(spares: int = 0) -> GenerationHarness:
    """Return a generation that has grown from 1 to 3 workers."""
    harness = serving(spares=spares)
    set_target(harness, 3)
    names = [name for name in harness.names() if not harness.generation.processes.is_ready(name)]
    harness.hello(*names)
    harness.attached(*names)
    return harness


def test_growth_starts_missing_workers() -> None:
    harness = serving()
    assert (harness.generation.is_complete, harness.generation.has_all_workers) == (True, True)
    assert set_target(harness, 2) == [Spawn(W2, Role.WORKER)]
    assert (harness.generation.is_complete, harness.generation.has_all_workers) == (False, False)
    assert harness.generation.progress == "attaching 1/2"
    assert harness.hello(W2) == [attach(W2)]
    assert harness.attached(W2) == [AddSlot(W2), TRIM_STORE]
    assert (harness.generation.is_complete, harness.generation.has_all_workers) == (True, True)


def test_target_is_limited_to_bounds() -> None:
    harness = serving(workers=2, max_workers=3)
    assert len(set_target(harness, 9)) == 1
    assert set_target(harness, 0, W1, W2) == []
    assert harness.generation.worker_target == 2


def test_idle_workers_stop_in_order_without_death_or_restart() -> None:
    harness = grown()
    assert set_target(harness, 1, W2, W1, W3) == [RemoveSlot(W2), stop(W2), RemoveSlot(W1), stop(W1)]
    assert [*harness.generation.processes.slots] == [W3]
    assert harness.exits(W2, W1, end=ExitCause(0)) == []
    assert harness.after(1000.0) == []
    assert (harness.names(), harness.generation.processes.deaths, harness.cause) == ([W3], 0, "")
    assert harness.generation.is_complete


def test_busy_workers_are_kept_until_they_are_idle() -> None:
    harness = grown()
    assert set_target(harness, 1, W3) == [RemoveSlot(W3), stop(W3)]
    assert has_surplus_workers(harness.generation)
    assert set_target(harness, 1) == []
    assert set_target(harness, 1, W1) == [RemoveSlot(W1), stop(W1)]
    assert not has_surplus_workers(harness.generation)
    assert set_target(harness, 1, W2) == []


def test_spares_are_kept() -> None:
    harness = grown(spares=1)
    assert harness.names() == [W1, W2, W3, W4]
    assert len(harness.generation.processes.serving) == 3
    idle = list(harness.generation.processes.serving)
    assert len(set_target(harness, 1, *idle)) == 4
    assert [*harness.generation.processes.serving] == idle[2:]
    assert harness.generation.has_all_workers


def test_lost_worker_is_replaced_up_to_target() -> None:
    harness = grown()
    set_target(harness, 2, W3)
    harness.exits(W3, end=ExitCause(0))
    harness.exits(W1)
    assert harness.names() == [W2, W4]
    assert harness.generation.processes.deaths == 1


def test_next_daemon_continues_with_same_number() -> None:
    harness = grown()
    set_target(harness, 2, W3)
    harness.exits(W3, end=ExitCause(0))
    harness.resumed()
    assert harness.generation.worker_target == 2
    harness.reconnected(W1, W2)
    assert (harness.names(), harness.generation.is_complete) == ([W1, W2], True)
    assert HOLDER in harness.generation.children
