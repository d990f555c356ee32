"""Daemon, clients and workers in any order, with deaths between any two operations. See `world` for the invariants."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from testkit.examples import examples
from weightd_daemon.channels.states import ChannelEvent

from .world import LATE, LIFETIME_S, NBYTES, REFUSED, RUNNABLE, TENANTS, Client, Process, Worker, World

_NEVER = -1
_FUSES = st.sampled_from([_NEVER] * 6 + [*range(24)])
_INTERRUPTS = st.one_of(st.none(), st.tuples(st.integers(0, 12), st.integers(0, 99), st.integers(1, 8)))
_END_EVENTS = [ChannelEvent.REVOKE, ChannelEvent.RIGHTS_CHANGE, ChannelEvent.END_GENERATION]
_ENDS = st.sampled_from(_END_EVENTS)
_KIND_NAMES = [RUNNABLE, REFUSED, LATE]
_KINDS = st.sampled_from(_KIND_NAMES)
_WHICH = st.integers(0, 99)
_GENERATIONS = (7, 8)
_CORRUPT_VALUES = [float("nan"), float("inf"), -float("inf"), 1e300, 2**63, 2**62]
_CORRUPT = st.sampled_from(_CORRUPT_VALUES)


class ChannelMachine(RuleBasedStateMachine):
    """A world in which hypothesis chooses the next process, and when it dies."""

    world_type: type[World] = World

    def __init__(self) -> None:
        super().__init__()
        self.world = self.world_type()

    @initialize(
        workers=st.integers(1, 3), greedy=st.booleans(), limit=st.sampled_from([2, 5, 100]), count=st.integers(0, 3)
    )
    def begin(self, workers: int, greedy: bool, limit: int, count: int) -> None:
        for number in range(workers):
            self.world.add_worker(_GENERATIONS[number // 2])
        for number, tenant in enumerate(TENANTS):
            self.world.clients[f"client {number}"] = self.world.client_type(
                self.world, f"client {number}", tenant, greedy and not number
            )
            self.grant(number, limit)
        self.read_all()
        for number in range(count):
            self.submit(number, 1 + number, _KIND_NAMES[number])

    # --- clients ----------------------------------------------------------------------------------------------------

    def client(self, which: int) -> Client | None:
        clients = [*self.world.clients.values()]
        return clients[which % len(clients)] if clients else None

    def read_all(self) -> None:
        for client in self.world.clients.values():
            while client.inbox:
                client.read_connection()

    @rule(which=_WHICH, count=st.integers(1, 7), kind=_KINDS)
    def submit(self, which: int, count: int, kind: str) -> None:
        if (client := self.client(which)) is not None:
            for _ in range(count):
                client.submit(kind)

    @rule(which=_WHICH, count=st.integers(1, 4))
    def read_connection(self, which: int, count: int) -> None:
        if (client := self.client(which)) is not None:
            for _ in range(count):
                client.read_connection()

    @rule(which=_WHICH)
    def read_channels(self, which: int) -> None:
        if (client := self.client(which)) is not None:
            client.read_channels()

    @rule(which=_WHICH, is_noticed=st.booleans())
    def kill_client(self, which: int, is_noticed: bool) -> None:
        if len(self.world.clients) > 1 and (client := self.client(which)) is not None:
            self.world.kill(client)
        if is_noticed:
            self.world.notice_gone()

    @rule(which=_WHICH)
    def time_out(self, which: int) -> None:
        if (client := self.client(which)) is not None:
            client.time_out()

    @rule(which=_WHICH)
    def send_empty(self, which: int) -> None:
        if (client := self.client(which)) is not None:
            client.send_empty()

    # --- workers ----------------------------------------------------------------------------------------------------

    def worker(self, which: int) -> Worker | None:
        workers = [*self.world.workers.values()]
        return workers[which % len(workers)] if workers else None

    @rule(which=_WHICH, steps=st.integers(1, 20), fuse=_FUSES, interrupt=_INTERRUPTS)
    def run_worker(self, which: int, steps: int, fuse: int, interrupt: tuple[int, int, int] | None) -> None:
        if (worker := self.worker(which)) is None:
            return
        if interrupt is not None:
            count, other, other_steps = interrupt
            worker.interrupt = count, lambda: self.interrupt(worker, other, other_steps)
        worker.armed(fuse, lambda: worker.run_steps(steps))

    def interrupt(self, running: Process, which: int, steps: int) -> None:
        """Run another process in the middle of an operation."""
        others = [each for each in self.world.workers.values() if each is not running]
        if which % 2 and others:
            for _ in range(steps):
                others[which % len(others)].step()
        elif running is not self.world.daemon:
            self.use_daemon(which, steps)
        if which % 3 == 0:
            self.submit(which, 1, RUNNABLE)

    @rule(which=_WHICH)
    def kill_worker(self, which: int) -> None:
        if (worker := self.worker(which)) is not None:
            self.world.kill(worker)

    @rule(which=_WHICH, index=st.integers(1, 99), value=_CORRUPT)
    def corrupt(self, which: int, index: int, value: float) -> None:
        if (worker := self.worker(which)) is not None:
            self.world.corrupt(worker, index, value)

    @rule()
    def inspect_rows(self) -> None:
        self.world.inspect_rows()
        self.world.daemon.run_actions()

    @rule(fuse=_FUSES, interrupt=_INTERRUPTS)
    def look_at_queues(self, fuse: int, interrupt: tuple[int, int, int] | None) -> None:
        self._as_daemon(fuse, interrupt, self.world.daemon.look_at_queues)

    @rule(generation=st.sampled_from(_GENERATIONS))
    def add_worker(self, generation: int) -> None:
        self.world.add_worker(generation)

    # --- the daemon -------------------------------------------------------------------------------------------------

    def use_daemon(self, which: int, count: int) -> None:
        world = self.world
        for _ in range(count):
            if (worker := self.worker(which)) is not None and worker.daemon is world.daemon:
                world.daemon.receive(worker)
            if (client := self.client(which)) is not None:
                world.daemon.serve(client)
            world.daemon.run_relayed()
        if which % 3 == 0 and world.dead_workers:
            worker = world.dead_workers.pop()
            if worker.daemon is world.daemon:
                world.daemon.reap(worker)

    @rule(which=_WHICH, count=st.integers(1, 5), fuse=_FUSES, interrupt=_INTERRUPTS)
    def run_daemon(self, which: int, count: int, fuse: int, interrupt: tuple[int, int, int] | None) -> None:
        self._as_daemon(fuse, interrupt, lambda: self.use_daemon(which, count))

    @rule(which=_WHICH, limit=st.sampled_from([1, 4, 100]))
    def grant(self, which: int, limit: int) -> None:
        if (client := self.client(which)) is not None and client.daemon is self.world.daemon:
            generation = _GENERATIONS[which % 3 == 2]
            self.world.daemon.grant(client, client.tenant, generation, (limit, limit * NBYTES))

    def serial(self, which: int) -> int | None:
        serials = [*self.world.daemon.table.channels]
        return serials[which % len(serials)] if serials else None

    @rule(which=_WHICH, count=st.integers(0, 4), fuse=_FUSES, interrupt=_INTERRUPTS)
    def refill(self, which: int, count: int, fuse: int, interrupt: tuple[int, int, int] | None) -> None:
        if (serial := self.serial(which)) is not None:
            self._as_daemon(fuse, interrupt, lambda: self.world.daemon.refill(serial, count, count * NBYTES))

    @rule(which=_WHICH, event=_ENDS, fuse=_FUSES, interrupt=_INTERRUPTS)
    def end(self, which: int, event: ChannelEvent, fuse: int, interrupt: tuple[int, int, int] | None) -> None:
        if (serial := self.serial(which)) is not None:
            self._as_daemon(fuse, interrupt, lambda: self.world.daemon.end(serial, event))

    @rule(generation=st.sampled_from(_GENERATIONS), event=_ENDS)
    def end_generation(self, generation: int, event: ChannelEvent) -> None:
        self.world.daemon.table.end_generation(generation, event)
        self.world.daemon.run_actions()

    @rule(tenant=st.sampled_from(TENANTS), weight=st.sampled_from([0.01, 1.0, 5.0]))
    def reload(self, tenant: int, weight: float) -> None:
        self.world.daemon.table.set_weight(tenant, weight, self.world.now)

    @rule(seconds=st.sampled_from([1.0, LIFETIME_S / 2, LIFETIME_S]), is_noticed=st.booleans())
    def wait(self, seconds: float, is_noticed: bool) -> None:
        self.world.now += seconds
        if is_noticed:
            self.world.daemon.table.expire(self.world.now)
            self.world.daemon.run_actions()

    @rule()
    def restart_daemon(self) -> None:
        if self.world.restarts < 3:
            self.world.kill(self.world.daemon)

    def _as_daemon(self, fuse: int, interrupt: tuple[int, int, int] | None, action: Any) -> None:
        daemon = self.world.daemon
        if self.world.restarts >= 3:
            fuse = _NEVER
        if interrupt is not None:
            count, other, steps = interrupt
            daemon.interrupt = count, lambda: self.interrupt(daemon, other, steps)
        daemon.armed(fuse, action)

    # --- invariants -------------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.finish()


TestChannelMachine = ChannelMachine.TestCase
TestChannelMachine.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)


def play(machine_type: type[ChannelMachine], seed: int) -> None:
    """Call the rules of a machine in an order that a seed determines. This takes a thirtieth of hypothesis' time."""
    random = Random(seed)
    machine = machine_type()
    machine.begin(random.randint(1, 3), random.random() < 0.4, random.choice([2, 5, 100]), random.randint(0, 3))
    for _ in range(random.randint(3, 60)):
        [(name, _)] = random.choices(_RULES, [weight for _, weight in _RULES])
        getattr(machine, name)(**_arguments(random, name))
        machine.holds()
    machine.teardown()


_RULES = [
    ("submit", 20),
    ("run_worker", 30),
    ("read_connection", 10),
    ("read_channels", 5),
    ("run_daemon", 13),
    ("refill", 6),
    ("end", 4),
    ("grant", 4),
    ("add_worker", 2),
    ("reload", 1),
    ("wait", 1),
    ("kill_worker", 2),
    ("kill_client", 1),
    ("time_out", 1),
    ("send_empty", 0.5),
    ("corrupt", 0.2),
    ("inspect_rows", 1),
    ("look_at_queues", 2),
    ("restart_daemon", 0.5),
    ("end_generation", 0.5),
]
_PARAMETERS: dict[str, Callable[[Random], Any]] = {
    "which": lambda random: random.randrange(100),
    "count": lambda random: random.randint(1, 5),
    "steps": lambda random: random.randint(1, 20),
    "fuse": lambda random: _NEVER if random.random() < 0.85 else random.randrange(24),
    "interrupt": lambda random: (
        None if random.random() < 0.6 else (random.randrange(13), random.randrange(100), random.randint(1, 8))
    ),
    "kind": lambda random: random.choice([*_KIND_NAMES, RUNNABLE, RUNNABLE]),
    "is_noticed": lambda random: random.random() < 0.5,
    "generation": lambda random: random.choice(_GENERATIONS),
    "limit": lambda random: random.choice([1, 4, 100]),
    "event": lambda random: random.choice(_END_EVENTS),
    "index": lambda random: random.randint(1, 99),
    "value": lambda random: random.choice(_CORRUPT_VALUES),
    "tenant": lambda random: random.choice(TENANTS),
    "weight": lambda random: random.choice([0.01, 1.0, 5.0]),
    "seconds": lambda random: random.choice([1.0, LIFETIME_S / 2, LIFETIME_S]),
}


def _arguments(random: Random, name: str) -> dict[str, Any]:
    parameters = inspect.signature(getattr(ChannelMachine, name)).parameters
    return {each: _PARAMETERS[each](random) for each in parameters if each != "self"}


@pytest.mark.parametrize("first", range(0, examples(400), 100))
def test_seeded_schedules_keep_all_invariants(first: int) -> None:
    for seed in range(first, first + 100):
        play(ChannelMachine, seed)
