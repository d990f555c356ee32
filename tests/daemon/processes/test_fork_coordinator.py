"""Forks requested from parents that reply, lie, exit and hang in any order."""

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


class ForkMachine(RuleBasedStateMachine):
    """Each requested child is started, reported as failed or cancelled: exactly one of the three, once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.requested: dict[str, ForkRequest] = {}
        self.orders: list[tuple[str, Fork]] = []
        self.started: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self.killed: set[int] = set()
        self.cancelled: set[str] = set()
        # The parents that still owe a reply, by child, even if the child was cancelled.
        self.unanswered: dict[str, str] = {}
        self.pids = 100
        self.killed_parents: list[str] = []
        self.watchable = True
        launcher: Any = SimpleNamespace(adopt=self.adopt)
        self.timers = Timers()
        self.killed_at = 0.0
        loop: Any = SimpleNamespace(add_timer=self.timers.add)
        table: Any = SimpleNamespace(kill=self.kill, kill_unwanted=lambda _, process: self.killed.add(process.pid))
        self.pending_forks = PendingForks()
        self.coordinator = ForkCoordinator(self.pending_forks, launcher, loop, table, self.order, self.on_started)

    def order(self, parent: str, fork: Fork) -> None:
        self.orders.append((parent, fork))

    def adopt(self, name: str, pid: int, log: Path) -> ChildProcess:
        if not self.watchable:
            raise OSError(errno.EMFILE, "no descriptors are left")
        return ChildProcess(pid, -1, log, lambda: 0)

    def on_started(self, launch: ProcessSpec, parent: str, process: ChildProcess) -> None:
        assert self.requested[launch.name].parent == parent
        assert process.log == launch.log
        assert launch.name not in self.started
        self.started[launch.name] = process.pid

    def on_failed(self, launch: ProcessSpec, why: str) -> None:
        assert launch.name not in self.failed
        self.failed[launch.name] = why

    def kill(self, parent: str) -> None:
        self.killed_parents.append(parent)

    @property
    def pending(self) -> list[str]:
        return [name for name in self.requested if name not in {*self.started, *self.failed, *self.cancelled}]

    @rule(parent=PARENTS)
    def request_fork(self, parent: str) -> None:
        name = f"m.1.w{len(self.requested)}"
        launch = ProcessSpec(name, ["python"], ["--name", name], Path(f"/logs/{name}"), {})
        self.requested[name] = ForkRequest(launch, parent, self.now + PATIENCE_S, self.on_failed)
        self.coordinator.fork(self.requested[name])
        self.unanswered[name] = parent
        assert self.orders[-1] == (parent, Fork(name, ("--name", name), f"/logs/{name}"))

    @precondition(lambda self: self.requested)
    @rule(data=st.data(), parent=PARENTS, watchable=st.booleans(), error=st.sampled_from(["", "", "two threads"]))
    def reply(self, data: st.DataObject, parent: str, watchable: bool, error: str) -> None:
        name = data.draw(st.sampled_from([*self.requested, "unknown"]))
        counts = name in self.pending and self.requested[name].parent == parent
        self.pids += 1
        pid, self.watchable = 0 if error else self.pids, watchable
        forked = Forked(name, pid, error)
        if not counts and self.unanswered.get(name) != parent:
            with pytest.raises(RemoteProtocolError, match=name):
                self.coordinator.on_fork_reply(parent, forked)
            return
        self.coordinator.on_fork_reply(parent, forked)
        del self.unanswered[name]
        if not counts:
            # The process was forked all the same and must be killed.
            assert (pid in self.killed) == bool(pid and watchable)
        elif error or not watchable:
            assert self.failed[name] == error or "descriptors" in self.failed[name]
        else:
            assert self.started[name] == pid

    @precondition(lambda self: self.requested)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.requested)))
        assert self.pending_forks.cancel(name) == (name in self.pending)
        self.cancelled |= {name} - {*self.started, *self.failed}

    @rule(parent=PARENTS)
    def parent_exits(self, parent: str) -> None:
        children = {name for name in self.pending if self.requested[name].parent == parent}
        before = {*self.failed}
        self.unanswered = {name: each for name, each in self.unanswered.items() if each != parent}
        self.coordinator.on_parent_exit(parent)
        assert self.failed.keys() - before == children
        assert all(parent in self.failed[name] for name in children)

    @rule(seconds=st.sampled_from([0.5, PATIENCE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = {self.requested[name].parent for name in self.pending if self.requested[name].deadline <= self.now}
        self.killed_parents.clear()
        self.timers.run_due(self.now)
        # A killed parent has one second in which its exit must be reported.
        assert set(self.killed_parents) == late or self.now < self.killed_at + 1.0
        if self.killed_parents:
            self.killed_at = self.now

    @invariant()
    def pending_parents_are_known(self) -> None:
        assert set(self.pending_forks.parents()) == {self.requested[name].parent for name in self.pending}
        for parent in {*self.unanswered.values(), *self.pending_forks.parents(), "unknown"}:
            assert self.pending_forks.is_awaited(parent) == (parent in self.unanswered.values())


TestForkMachine = ForkMachine.TestCase
TestForkMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_kills_child_of_a_cancelled_fork() -> None:
    machine = ForkMachine()
    launch = ProcessSpec("m.1.w0", ["python"], [], Path("/logs/m.1.w0"), {})
    machine.coordinator.fork(ForkRequest(launch, "m.1.holder", PATIENCE_S, machine.on_failed))
    assert machine.pending_forks.cancel(launch.name)
    machine.coordinator.on_fork_reply("m.1.holder", Forked(launch.name, 101, ""))
    assert (machine.killed, machine.started, machine.failed) == ({101}, {}, {})
