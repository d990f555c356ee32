"""Children that are being forked, in a world that answers, lies, dies and hangs in any order."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from testkit.examples import examples
from weightd_daemon.platform.event_loop import Timers
from weightd_daemon.platform.processes import ChildProcess
from weightd_daemon.processes.fork_coordinator import ForkCoordinator, ForkRequest, PendingForks
from weightd_daemon.processes.spec import ProcessSpec
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.worker import Fork, Forked

PARENTS = st.sampled_from(["forkserver.1", "forkserver.2", "m.1.holder"])
PATIENCE_S = 10.0


class World(RuleBasedStateMachine):
    """Each child that is wanted comes, or is told not to come, or is given up: one of the three, and once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.wanted: dict[str, ForkRequest] = {}
        self.orders: list[tuple[str, Fork]] = []
        self.born: dict[str, int] = {}
        self.unborn: dict[str, str] = {}
        self.surplus: set[int] = set()
        self.cancelled: set[str] = set()
        # Of whom an answer is awaited, whether or not anybody wants the child.
        self.unanswered: dict[str, str] = {}
        self.pids = 100
        self.hung: list[str] = []
        self.watchable = True
        launcher: Any = SimpleNamespace(adopt=self.adopt)
        self.timers = Timers()
        self.told_at = 0.0
        loop: Any = SimpleNamespace(add_timer=self.timers.add)
        table: Any = SimpleNamespace(kill=self.hang, kill_unwanted=lambda _, process: self.surplus.add(process.pid))
        self.pending_forks = PendingForks()
        self.nursery = ForkCoordinator(self.pending_forks, launcher, loop, table, self.order, self.is_born)

    def order(self, parent: str, fork: Fork) -> None:
        self.orders.append((parent, fork))

    def adopt(self, name: str, pid: int, log: Path) -> ChildProcess:
        if not self.watchable:
            raise OSError(errno.EMFILE, "no descriptors are left")
        return ChildProcess(pid, -1, log, lambda: 0)

    def is_born(self, launch: ProcessSpec, parent: str, process: ChildProcess) -> None:
        assert self.wanted[launch.name].parent == parent
        assert process.log == launch.log
        assert launch.name not in self.born
        self.born[launch.name] = process.pid

    def instead(self, launch: ProcessSpec, why: str) -> None:
        assert launch.name not in self.unborn
        self.unborn[launch.name] = why

    def hang(self, parent: str) -> None:
        self.hung.append(parent)

    @property
    def pending(self) -> list[str]:
        return [name for name in self.wanted if name not in {*self.born, *self.unborn, *self.cancelled}]

    @rule(parent=PARENTS)
    def one_is_wanted(self, parent: str) -> None:
        name = f"m.1.w{len(self.wanted)}"
        launch = ProcessSpec(name, ["python"], ["--name", name], Path(f"/logs/{name}"), {})
        self.wanted[name] = ForkRequest(launch, parent, self.now + PATIENCE_S, self.instead)
        self.nursery.fork(self.wanted[name])
        self.unanswered[name] = parent
        assert self.orders[-1] == (parent, Fork(name, ("--name", name), f"/logs/{name}"))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), parent=PARENTS, watchable=st.booleans(), error=st.sampled_from(["", "", "two threads"]))
    def somebody_answers(self, data: st.DataObject, parent: str, watchable: bool, error: str) -> None:
        name = data.draw(st.sampled_from([*self.wanted, "nobody"]))
        counts = name in self.pending and self.wanted[name].parent == parent
        self.pids += 1
        pid, self.watchable = 0 if error else self.pids, watchable
        forked = Forked(name, pid, error)
        if not counts and self.unanswered.get(name) != parent:
            with pytest.raises(RemoteProtocolError, match=name):
                self.nursery.on_fork_reply(parent, forked)
            return
        self.nursery.on_fork_reply(parent, forked)
        del self.unanswered[name]
        if not counts:
            # It was forked all the same: somebody has to end it.
            assert (pid in self.surplus) == bool(pid and watchable)
        elif error or not watchable:
            assert self.unborn[name] == error or "descriptors" in self.unborn[name]
        else:
            assert self.born[name] == pid

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def one_is_wanted_no_more(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.wanted)))
        assert self.pending_forks.cancel(name) == (name in self.pending)
        self.cancelled |= {name} - {*self.born, *self.unborn}

    @rule(parent=PARENTS)
    def one_dies(self, parent: str) -> None:
        its = {name for name in self.pending if self.wanted[name].parent == parent}
        before = {*self.unborn}
        self.unanswered = {name: each for name, each in self.unanswered.items() if each != parent}
        self.nursery.on_parent_exit(parent)
        assert self.unborn.keys() - before == its
        assert all(parent in self.unborn[name] for name in its)

    @rule(seconds=st.sampled_from([0.5, PATIENCE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = {self.wanted[name].parent for name in self.pending if self.wanted[name].deadline <= self.now}
        self.hung.clear()
        self.timers.run_due(self.now)
        # What has been ended is left a second for its end to be told.
        assert set(self.hung) == late or self.now < self.told_at + 1.0
        if self.hung:
            self.told_at = self.now

    @invariant()
    def it_knows_what_is_under_way(self) -> None:
        assert set(self.pending_forks.parents()) == {self.wanted[name].parent for name in self.pending}
        for parent in {*self.unanswered.values(), *self.pending_forks.parents(), "nobody"}:
            assert self.pending_forks.is_awaited(parent) == (parent in self.unanswered.values())


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_a_child_that_is_forked_when_nobody_wants_it_any_more_is_ended() -> None:
    world = World()
    launch = ProcessSpec("m.1.w0", ["python"], [], Path("/logs/m.1.w0"), {})
    world.nursery.fork(ForkRequest(launch, "m.1.holder", PATIENCE_S, world.instead))
    assert world.pending_forks.cancel(launch.name)
    world.nursery.on_fork_reply("m.1.holder", Forked(launch.name, 101, ""))
    assert (world.surplus, world.born, world.unborn) == ({101}, {}, {})
