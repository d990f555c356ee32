"""Every place between two operations: a worker or the daemon is killed there, or another process acts there."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from weightd_common.channels.pages import (
    STAGE,
    STAGE_HANDING_OVER,
    STAGE_IDLE,
    STAGE_RUNNING,
    STAGE_TAKEN,
    STAGE_TAKING,
)
from weightd_daemon.channels.states import ChannelEvent

from .world import LATE, NBYTES, REFUSED, RUNNABLE, Client, World

_GENERATION = 7
_TURNS = 60  # enough for all processes to come to rest
_STEPS = 16  # of a worker, for one request and the sleep after it


def new_world(*kinds: str, limit: int = 100) -> World:
    """Return a world with two workers, and with a client that has sent requests on its channel."""
    world = World()
    world.add_worker(_GENERATION)
    world.add_worker(_GENERATION)
    client = world.clients["client"] = Client(world, "client", 0, is_greedy=False)
    world.daemon.grant(client, 0, _GENERATION, (limit, limit * NBYTES))
    client.read_connection()
    for kind in kinds:
        client.submit(kind)
    return world


def killed(kind: str, fuse: int) -> tuple[int, str | None, int] | None:
    """Kill the worker before an operation. Return its stage, the end of its request and how often the request has run.

    Return None if the worker lives.
    """
    world = new_world(kind)
    worker = world.workers["worker 1"]
    row = world.daemon.row_memory[world.daemon.rows[worker.name]]
    worker.armed(fuse, lambda: worker.run_steps(_STEPS))
    if worker.name in world.workers:
        return None
    stage = row.words[STAGE]
    world.finish(_TURNS)
    return stage, world.outcomes["client", 1], world.runs["client", 1]


def all_ends(kind: str) -> list[tuple[int, str | None, int]]:
    """Return the result of `killed` for each operation before which the worker can be killed, without repetitions."""
    ends = (killed(kind, fuse) for fuse in itertools.count())
    return [end for end, _ in itertools.groupby(itertools.takewhile(lambda end: end is not None, ends)) if end]


def test_a_worker_killed_with_a_runnable_request() -> None:
    assert all_ends(RUNNABLE) == [
        (STAGE_IDLE, "answer", 1),
        (STAGE_TAKING, "answer", 1),
        (STAGE_TAKEN, "answer", 1),
        (STAGE_RUNNING, "answer", 1),
        (STAGE_RUNNING, "answer", 2),  # the worker exits between the predict and the answer
        (STAGE_RUNNING, "answer", 1),
    ]


def test_a_worker_killed_with_a_refused_request() -> None:
    assert all_ends(REFUSED) == [
        (STAGE_IDLE, "answer", 1),
        (STAGE_TAKING, "answer", 1),
        (STAGE_TAKEN, "answer", 1),
        (STAGE_HANDING_OVER, "answer", 1),
    ]


def test_a_worker_killed_with_a_late_request() -> None:
    ends = all_ends(LATE)
    assert [stage for stage, _, _ in ends] == [STAGE_IDLE, STAGE_TAKING, STAGE_TAKEN, STAGE_TAKEN]
    assert {outcome for stage, outcome, _ in ends if stage != STAGE_IDLE} <= {"answer", "rejected"}


@pytest.mark.parametrize("kind", [RUNNABLE, REFUSED, LATE])
def test_another_worker_acts_between_any_two_operations(kind: str) -> None:
    for count in range(30):
        for steps in range(1, _STEPS, 4):
            world = new_world(kind, RUNNABLE)
            first, second = world.workers.values()
            first.interrupt = count, lambda second=second, steps=steps: second.run_steps(steps)
            first.armed(-1, lambda first=first: first.run_steps(_STEPS))  # type: ignore[misc]
            world.check()
            world.finish(_TURNS)


@pytest.mark.parametrize(
    "event", [ChannelEvent.REVOKE, ChannelEvent.RIGHTS_CHANGE, ChannelEvent.END_GENERATION, ChannelEvent.EXPIRE]
)
@pytest.mark.parametrize("kind", [RUNNABLE, REFUSED, LATE])
def test_a_channel_ends_between_any_two_operations(kind: str, event: ChannelEvent) -> None:
    for count, later in itertools.product(range(30), (None, 3, 9)):
        world = new_world(kind, RUNNABLE, kind)
        [serial] = world.daemon.table.channels
        worker = world.workers["worker 1"]
        worker.interrupt = count, lambda world=world, serial=serial: world.daemon.end(serial, event)
        fuse = -1 if later is None else count + later
        worker.armed(fuse, lambda worker=worker: worker.run_steps(_STEPS))  # type: ignore[misc]
        world.daemon.end(serial, event)
        world.finish(_TURNS)
        assert serial not in world.daemon.table.channels


DAEMON_ACTIONS: dict[str, Callable[[World], None]] = {
    "grant": lambda world: world.daemon.grant(world.clients["client"], 0, _GENERATION, (5, 50)),
    "refill": lambda world: world.daemon.refill(1, 3, 3 * NBYTES),
    "revoke": lambda world: world.daemon.end(1, ChannelEvent.REVOKE),
    "reclaim": lambda world: world.daemon.end(1, ChannelEvent.RIGHTS_CHANGE),
    "reap": lambda world: world.daemon.reap(world.dead_workers.pop()),
    "hand over": lambda world: world.daemon.receive(world.workers["worker 2"]),
    "weight": lambda world: world.daemon.table.set_weight(0, 5.0, world.now),
}


@pytest.mark.parametrize("action", DAEMON_ACTIONS.values(), ids=DAEMON_ACTIONS)
@pytest.mark.parametrize("fuse", range(12))
def test_the_daemon_is_killed_between_any_two_operations(action: Callable[[World], None], fuse: int) -> None:
    world = new_world(RUNNABLE, REFUSED, RUNNABLE, LATE)
    first, second = world.workers.values()
    first.armed(7, lambda: first.run_steps(_STEPS))
    second.run_steps(_STEPS)
    world.daemon.armed(fuse, lambda: action(world))
    world.finish(_TURNS)
