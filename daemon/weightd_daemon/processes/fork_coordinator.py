"""Children that are forked: asked for, adopted once they are there, and given up where they do not come."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.processes import ChildProcess
from weightd_daemon.platform.timers import Timer
from weightd_daemon.processes.launchers.launcher import Launcher
from weightd_daemon.processes.pending_forks import ForkRequest, PendingForks
from weightd_daemon.processes.spec import ProcessSpec
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.worker import Fork, Forked

_log = logging.getLogger("weightd")

# What has been ended for being late is looked at again after this.
_RECHECK_INTERVAL_S = 1.0


class ForkCoordinator:
    """Between those who want children and the processes of which they are forked.

    Args:
        launcher: adopts what is forked: that is a child of the one which has started what it is forked of.
        loop: tells the time.
        send_order: sends an order to a process.
        on_child_forked: is given a child that is there, and of which process.
        on_unwanted: is given one that nobody wants any more.
        on_timeout: is given the name of a process that has not answered in time.
    """

    def __init__(
        self,
        launcher: Launcher,
        loop: EventLoop,
        send_order: Callable[[str, Fork], None],
        on_child_forked: Callable[[ProcessSpec, str, ChildProcess], None],
        on_unwanted: Callable[[str, ChildProcess], None],
        on_timeout: Callable[[str], None],
    ) -> None:
        self._pending_forks = PendingForks()
        self._launcher = launcher
        self._send_order = send_order
        self._on_child_forked = on_child_forked
        self._on_unwanted = on_unwanted
        self._on_timeout = on_timeout
        self._timer = Timer(self.check_overdue)
        loop.add_timer(self._timer)

    def fork(self, request: ForkRequest) -> None:
        """Have a child forked."""
        self._pending_forks.add(request)
        self._timer.set_no_later_than(request.deadline)
        process_spec = request.process_spec
        self._send_order(request.parent, Fork(process_spec.name, tuple(process_spec.arguments), str(process_spec.log)))

    def parents(self) -> list[str]:
        """Return every process that has been asked and has not answered."""
        return self._pending_forks.parents()

    def is_awaited(self, parent: str) -> bool:
        """Whether a process has not answered all that it was asked, wanted or not: it may have forked that."""
        return self._pending_forks.is_awaited(parent)

    def cancel(self, name: str) -> bool:
        """A child is wanted no more; return whether it was being forked."""
        return self._pending_forks.cancel(name)

    def on_fork_reply(self, parent: str, forked: Forked) -> None:
        """A process says what has come of it.

        Raises:
            RemoteProtocolError: nobody has asked it.
        """
        try:
            request = self._pending_forks.complete(forked.name, parent)
        except LookupError:
            raise RemoteProtocolError(f"forked: expected one that was asked for, got {forked.name}") from None
        try:
            if not forked.pid:
                raise OSError(0, forked.error)
            log = Path(os.devnull) if request is None else request.process_spec.log
            process = self._launcher.adopt(forked.name, forked.pid, log)
        except OSError as error:
            if request is not None:
                request.on_failure(request.process_spec, str(error.strerror or error))
        else:
            if request is None:
                self._on_unwanted(forked.name, process)
            else:
                self._on_child_forked(request.process_spec, parent, process)

    def on_parent_exit(self, parent: str) -> None:
        """A process has ended."""
        for wanted in self._pending_forks.drop_parent(parent):
            wanted.on_failure(wanted.process_spec, f"{parent} was lost before it had forked it")

    def check_overdue(self, now: float) -> None:
        """End whoever has not answered in time: that end is told, and what it was asked for with it."""
        late = self._pending_forks.overdue_parents(now)
        for parent in late:
            _log.warning("%s did not fork in time: killing it", parent)
            self._on_timeout(parent)
        self._timer.set(now + _RECHECK_INTERVAL_S if late else self._pending_forks.next_deadline)
