"""The processes of a unit: one seat of all ranks, or none."""

from __future__ import annotations

from collections.abc import Mapping

from weightd.daemon.generations.actions import Dismiss, Enlist, Role, Spawn
from weightd.daemon.generations.child import Child, Roster
from weightd.daemon.generations.states import ChildState


class Ranks(Roster):
    """The ranks of a unit, in their order, and their broker."""

    def begin(self, role: Role, name: str, device: str, deadline: float) -> None:
        """Start one; it is to say HELLO by `deadline`."""
        self.add(name, role, device, deadline)
        self._want(Spawn(name, role))

    @property
    def ranks(self) -> list[Child]:
        """Those that the unit counts on."""
        return self.counted(Role.RANK)

    @property
    def broker(self) -> Child | None:
        """By which they find each other, where they need one."""
        return next(iter(self.counted(Role.BROKER)), None)

    @property
    def seats(self) -> Mapping[str, tuple[str, ...]]:
        """The one of all ranks, while it takes requests."""
        return {self._label: tuple(self.enlisted)} if self.enlisted else {}

    def enlist(self) -> None:
        """Let all ranks together take requests."""
        self.enlisted.update((each.name, None) for each in self.ranks)
        self._want(Enlist(self._label))

    def dismiss(self) -> None:
        """Nobody asks them any more."""
        if self.enlisted:
            self.enlisted.clear()
            self._want(Dismiss(self._label))

    def kill_all(self) -> None:
        """End every one, those that were told to leave, too."""
        self.dismiss()
        for child in self.children.values():
            if child.state is not ChildState.KILLED:
                self.kill(child)

    def exited(self, child: Child) -> None:
        """One has exited and has been waited for."""
        self.dismiss()
        super().exited(child)

    def _dismiss(self, child: Child) -> None:
        del child  # there is no seat of it alone
        self.dismiss()


def rank_name(label: str, rank: int) -> str:
    """Return the name of the process."""
    return f"{label}.rank{rank}"


def broker_name(label: str) -> str:
    """Return the name of the process."""
    return f"{label}.broker"
