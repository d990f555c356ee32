"""The processes of a unit: one slot of all ranks, or none."""

from __future__ import annotations

from collections.abc import Mapping

from weightd_daemon.generations.actions import AddSlot, RemoveSlot, Role, Spawn
from weightd_daemon.generations.process import GenerationProcesses, WorkerProcess
from weightd_daemon.generations.states import ChildState


class RankProcesses(GenerationProcesses):
    """The ranks of a unit, in their order, and their broker."""

    def start(self, role: Role, name: str, device: str, deadline: float) -> None:
        """Start one; it is to say HELLO by `deadline`."""
        self.add(name, role, device, deadline)
        self._emit(Spawn(name, role))

    @property
    def usable_ranks(self) -> list[WorkerProcess]:
        """Those that the unit counts on."""
        return self.usable(Role.RANK)

    @property
    def broker(self) -> WorkerProcess | None:
        """By which they find each other, where they need one."""
        return next(iter(self.usable(Role.BROKER)), None)

    @property
    def slots(self) -> Mapping[str, tuple[str, ...]]:
        """The one of all ranks, while it takes requests."""
        return {self._label: tuple(self.serving_processes)} if self.serving_processes else {}

    def add_slot(self) -> None:
        """Let all ranks together take requests."""
        self.serving_processes.update((each.name, None) for each in self.usable_ranks)
        self._emit(AddSlot(self._label))

    def remove_slot(self) -> None:
        """Nobody asks them any more."""
        if self.serving_processes:
            self.serving_processes.clear()
            self._emit(RemoveSlot(self._label))

    def kill_all(self) -> None:
        """End every one, those that were told to leave, too."""
        self.remove_slot()
        for child in self.children.values():
            if child.state is not ChildState.KILLED:
                self.kill(child)

    def on_exit(self, child: WorkerProcess) -> None:
        """One has exited and has been waited for."""
        self.remove_slot()
        super().on_exit(child)

    def _remove_slot_of(self, child: WorkerProcess) -> None:
        del child  # there is no slot of it alone
        self.remove_slot()


def rank_name(label: str, rank: int) -> str:
    """Return the name of the process."""
    return f"{label}.rank{rank}"


def broker_name(label: str) -> str:
    """Return the name of the process."""
    return f"{label}.broker"
