"""Children that are forked: asked for, adopted once they are there, and given up where they do not come."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from weightd.daemon.children.forks import Forks, Wanted
from weightd.daemon.children.launch import Launch
from weightd.daemon.children.launchers.launcher import Launcher
from weightd.daemon.host.loop import Loop
from weightd.daemon.host.processes import Process
from weightd.daemon.host.timers import Timer
from weightd.protocol.errors import RemoteProtocolError
from weightd.protocol.messages.children import Fork, Forked

_log = logging.getLogger("weightd")

# What has been ended for being late is looked at again after this.
_AGAIN_S = 1.0


class Nursery:
    """Between those who want children and the processes of which they are forked.

    Args:
        launcher: adopts what is forked: that is a child of the one which has started what it is forked of.
        loop: tells the time.
        order: sends an order to a process.
        born: is given a child that is there, and of which process.
        surplus: is given one that nobody wants any more.
        hung: is given the name of a process that has not answered in time.
    """

    def __init__(
        self,
        launcher: Launcher,
        loop: Loop,
        order: Callable[[str, Fork], None],
        born: Callable[[Launch, str, Process], None],
        surplus: Callable[[str, Process], None],
        hung: Callable[[str], None],
    ) -> None:
        self._forks = Forks()
        self._launcher = launcher
        self._order = order
        self._born = born
        self._surplus = surplus
        self._hung = hung
        self._timer = Timer(self.look)
        loop.add_timer(self._timer)

    def fork(self, wanted: Wanted) -> None:
        """Have a child forked."""
        self._forks.ask(wanted)
        self._timer.due_by(wanted.due)
        launch = wanted.launch
        self._order(wanted.parent, Fork(launch.name, tuple(launch.arguments), str(launch.log)))

    def parents(self) -> list[str]:
        """Return every process that has been asked and has not answered."""
        return self._forks.parents()

    def awaits(self, parent: str) -> bool:
        """Whether a process has not answered all that it was asked, wanted or not: it may have forked that."""
        return self._forks.awaits(parent)

    def cancel(self, name: str) -> bool:
        """A child is wanted no more; return whether it was being forked."""
        return self._forks.cancel(name)

    def answered(self, parent: str, forked: Forked) -> None:
        """A process says what has come of it.

        Raises:
            RemoteProtocolError: nobody has asked it.
        """
        try:
            wanted = self._forks.answered(forked.name, parent)
        except LookupError:
            raise RemoteProtocolError(f"forked: expected one that was asked for, got {forked.name}") from None
        try:
            if not forked.pid:
                raise OSError(0, forked.error)
            log = Path(os.devnull) if wanted is None else wanted.launch.log
            process = self._launcher.adopt(forked.name, forked.pid, log)
        except OSError as error:
            if wanted is not None:
                wanted.instead(wanted.launch, str(error.strerror or error))
        else:
            if wanted is None:
                self._surplus(forked.name, process)
            else:
                self._born(wanted.launch, parent, process)

    def lost(self, parent: str) -> None:
        """A process has ended."""
        for wanted in self._forks.lost(parent):
            wanted.instead(wanted.launch, f"{parent} was lost before it had forked it")

    def look(self, now: float) -> None:
        """End whoever has not answered in time: that end is told, and what it was asked for with it."""
        late = self._forks.overdue(now)
        for parent in late:
            _log.warning("%s has not forked in time what it was asked for: it is ended", parent)
            self._hung(parent)
        self._timer.set(now + _AGAIN_S if late else self._forks.next_event)
