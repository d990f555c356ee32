"""The processes of a household: each desk is told what becomes of them, whichever of its models ran there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from weightd.daemon.children.launch import Program
from weightd.daemon.config.model import ModelConfig
from weightd.daemon.generations.actions import Action, Dismiss, Enlist, Forget, Pin, Spawn
from weightd.daemon.generations.life import Life
from weightd.daemon.host.ends import End, Lost
from weightd.daemon.models import units
from weightd.daemon.models.crew import Crew
from weightd.daemon.models.deployment import Deployment
from weightd.daemon.requests.desk import Desk
from weightd.daemon.requests.turns import Turns
from weightd.protocol.messages.children import Broken, ChildMessage, Failed, Hello, Pong, Result, Skipped


class House(Protocol):
    """Whose processes they are.

    Attributes:
        turns: of the process of each generation, by its label.
    """

    turns: dict[str, Turns]

    @property
    def desks(self) -> Sequence[Desk]:
        """Where the requests of each member are."""
        raise NotImplementedError

    def want_snapshots(self, now: float) -> None:
        """A process is to be started."""

    def snapshots_lost(self) -> None:
        """The files of snapshots have vanished."""

    def program(self, config: ModelConfig, device: str) -> Program:
        """Return what the process runs there."""
        raise NotImplementedError


class HouseCrew(Crew):
    """The processes of a household: each desk is told what becomes of them.

    Args:
        household: whose processes they are.
        more: as those of `Crew`.
    """

    def __init__(self, household: House, *more: Any) -> None:
        super().__init__(*more)
        self._household = household

    def heard(self, child: str, message: ChildMessage, frames: Sequence[Any], now: float) -> None:
        """A child has sent `message`."""
        owner = self._owners.get(child)
        if owner is None:
            return
        generation = owner[1]
        match message:
            case Result():
                if self._is_sound(generation):
                    self._running(generation).result(child, message, frames, now)
            case Skipped():
                self._running(generation).skipped(child, message.request, now)
            case Pong():
                for desk in self._household.desks:
                    desk.guard.watchdog.pong(child, now)
            case _:
                self._heard_of(child, *owner, message, now)
                self._changed(owner[0], now)

    def _heard_of(
        self, child: str, deployment: Deployment, generation: Life, message: ChildMessage, now: float
    ) -> None:
        match message:
            case Failed():
                self._running(generation).job_failed(child, message, now)
                if message.leaving:
                    self._lose(child)
                    generation.leaving(child, now)
            case Broken():
                self._running(generation).broke(child, message.cause, now)
                self._lose(child)
                generation.broken(child, message, now)
            case Hello():
                generation.hello(child, message, now)
            case _:
                units.heard(child, deployment, generation, self._desk, message, now)

    def exited(self, child: str, end: End, now: float) -> None:
        """A child has exited: whose job it had may be to blame, the others' are not."""
        owner = self._owners.pop(child, None)
        if owner is None:
            return
        deployment, generation = owner
        if end.lost is Lost.SNAPSHOT:
            self._household.snapshots_lost()
        if not self._is_sound(generation):
            self._lose(child)
        useful = any(desk.has_answered(child) for desk in self._household.desks)
        for desk in self._household.desks:
            desk.died(child, end, now)
        generation.exited(child, end, now, useful=useful)
        self._changed(deployment, now)

    def perform(self, deployment: Deployment, generation: Life, action: Action, now: float) -> None:
        """Do what a generation wants."""
        match action:
            case Pin():
                self._household.want_snapshots(now)
            case Spawn(name, role, _):
                self._owners[name] = deployment, generation
                program = self._household.program(self._config, generation.children[name].device)
                self._children.spawn(self._owner, generation, program, name, role)
            case Enlist(name):
                self._enlist_all(name, generation, now)
            case Dismiss(name):
                self._dismiss_all(name, generation)
            case Forget():
                self._household.turns.pop(generation.label, None)
                super().perform(deployment, generation, action, now)
            case _:
                super().perform(deployment, generation, action, now)

    def drop(self, process: str, why: str, now: float) -> None:
        """End a process that is of no use any more."""
        self._lose(process)
        owner = self._owners.get(process)
        if owner is not None:
            owner[1].hung(process, why, now)
            self._changed(owner[0], now)

    def watch(self, serving: Iterable[tuple[Deployment, Life]], now: float) -> None:
        """End who computes for too long, and who does not answer a ping."""
        del serving
        for desk in self._household.desks:
            for process, why in list(desk.overdue(now)):
                self.drop(process, why, now)
            if now >= desk.guard.watchdog.next_event:
                for process in list(desk.silent(now)):
                    self.drop(process, "it has not answered a ping", now)

    def _enlist_all(self, name: str, generation: Life, now: float) -> None:
        turns = self._household.turns[generation.label] = Turns()
        for process in generation.seats.get(name, ()):
            for index, desk in enumerate(self._household.desks):
                desk.enlist_member(process, turns, index, now, device=generation.device)

    def _dismiss_all(self, seat: str, generation: Life) -> None:
        for process in [each for each in generation.children if each.startswith(f"{seat}.")]:
            for desk in self._household.desks:
                desk.dismiss(process)
            if not generation.access.is_valid:
                # It will not answer what it has, and is not to blame.
                self._lose(process)

    def _lose(self, process: str) -> None:
        for desk in self._household.desks:
            desk.release(process)

    def _running(self, generation: Life) -> Desk:
        """The desk whose job the process runs; that of the first member where it runs none."""
        turns = self._household.turns.get(generation.label)
        running = None if turns is None else turns.running
        for desk in self._household.desks:
            if running is not None and any(desk.scheduler.seats.of(each) is running for each in generation.children):
                return desk
        return self._household.desks[0]
