"""What is being forked: of which process, and until when that may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from weightd.daemon.children.launch import Launch

_NEVER = float("inf")


class Wanted(NamedTuple):
    """A child that a process has been asked for.

    Attributes:
        launch: what it is to be.
        parent: of which process it is forked.
        due: by when that has to have answered, in monotonic seconds.
        instead: called with the launch, and why there is no such child, if it does not come.
    """

    launch: Launch
    parent: str
    due: float
    instead: Callable[[Launch, str], object]


class Forks:
    """The children that processes have been asked for and have not answered yet, by name."""

    def __init__(self) -> None:
        self._all: dict[str, Wanted] = {}
        # Who has been asked for one that is wanted no more, by its name: the answer comes all the same.
        self._cancelled: dict[str, str] = {}

    def ask(self, wanted: Wanted) -> None:
        """A process is asked for a child."""
        self._all[wanted.launch.name] = wanted

    def parents(self) -> list[str]:
        """Return every process that has not answered."""
        return list(dict.fromkeys(each.parent for each in self._all.values()))

    def awaits(self, parent: str) -> bool:
        """Whether a process has not answered all that it was asked, be that wanted or not."""
        return parent in self._cancelled.values() or parent in self.parents()

    def answered(self, name: str, parent: str) -> Wanted | None:
        """A process has answered; return what it was asked for, None if that is wanted no more.

        Raises:
            LookupError: it was not asked for that.
        """
        wanted = self._all.get(name)
        if wanted is not None and wanted.parent == parent:
            return self._all.pop(name)
        if self._cancelled.get(name) != parent:
            raise LookupError(name)
        del self._cancelled[name]
        return None

    def cancel(self, name: str) -> bool:
        """A child is wanted no more; return whether it was being forked."""
        wanted = self._all.pop(name, None)
        if wanted is not None:
            self._cancelled[name] = wanted.parent
        return wanted is not None

    def lost(self, parent: str) -> list[Wanted]:
        """A process has ended; return what it has not answered."""
        self._cancelled = {name: each for name, each in self._cancelled.items() if each != parent}
        lost = [each for each in self._all.values() if each.parent == parent]
        for each in lost:
            del self._all[each.launch.name]
        return lost

    def overdue(self, now: float) -> list[str]:
        """Return every process that should have answered by now."""
        return list(dict.fromkeys(each.parent for each in self._all.values() if each.due <= now))

    @property
    def next_event(self) -> float:
        """Nothing is overdue before this."""
        return min((each.due for each in self._all.values()), default=_NEVER)
