"""Children that are forked: asked for, adopted once they are there, and given up where they do not come."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from weightd_daemon.platform.event_loop import EventLoop, Timer
from weightd_daemon.platform.processes import ChildProcess
from weightd_daemon.processes.launcher import Launcher
from weightd_daemon.processes.process_table import ProcessTable
from weightd_daemon.processes.spec import ProcessSpec
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.worker import Fork, Forked

_log = logging.getLogger("weightd")

# What has been ended for being late is looked at again after this.
_RECHECK_INTERVAL_S = 1.0

_NEVER = float("inf")


class ForkRequest(NamedTuple):
    """A child that a process has been asked for.

    Attributes:
        process_spec: what it is to be.
        parent: of which process it is forked.
        deadline: by when that has to have answered, in monotonic seconds.
        on_failure: called with the launch, and why there is no such child, if it does not come.
    """

    process_spec: ProcessSpec
    parent: str
    deadline: float
    on_failure: Callable[[ProcessSpec, str], object]


class PendingForks:
    """The children that processes have been asked for and have not answered yet, by name."""

    def __init__(self) -> None:
        self._pending: dict[str, ForkRequest] = {}
        # Who has been asked for one that is wanted no more, by its name: the answer comes all the same.
        self._cancelled: dict[str, str] = {}

    def add(self, request: ForkRequest) -> None:
        """A process is asked for a child."""
        self._pending[request.process_spec.name] = request

    def parents(self) -> list[str]:
        """Return every process that has not answered."""
        return list(dict.fromkeys(each.parent for each in self._pending.values()))

    def is_awaited(self, parent: str) -> bool:
        """Whether a process has not answered all that it was asked, be that wanted or not."""
        return parent in self._cancelled.values() or parent in self.parents()

    def complete(self, name: str, parent: str) -> ForkRequest | None:
        """A process has answered; return what it was asked for, None if that is wanted no more.

        Raises:
            LookupError: it was not asked for that.
        """
        request = self._pending.get(name)
        if request is not None and request.parent == parent:
            return self._pending.pop(name)
        if self._cancelled.get(name) != parent:
            raise LookupError(name)
        del self._cancelled[name]
        return None

    def cancel(self, name: str) -> bool:
        """A child is wanted no more; return whether it was being forked."""
        request = self._pending.pop(name, None)
        if request is not None:
            self._cancelled[name] = request.parent
        return request is not None

    def drop_parent(self, parent: str) -> list[ForkRequest]:
        """A process has ended; return what it has not answered."""
        self._cancelled = {name: each for name, each in self._cancelled.items() if each != parent}
        dropped = [each for each in self._pending.values() if each.parent == parent]
        for each in dropped:
            del self._pending[each.process_spec.name]
        return dropped

    def overdue_parents(self, now: float) -> list[str]:
        """Return every process that should have answered by now."""
        return list(dict.fromkeys(each.parent for each in self._pending.values() if each.deadline <= now))

    @property
    def next_deadline(self) -> float:
        """Nothing is overdue before this."""
        return min((each.deadline for each in self._pending.values()), default=_NEVER)


class ForkCoordinator:
    """Asks processes to fork children, and adopts the children.

    Args:
        pending_forks: records what processes have been asked to fork.
        launcher: adopts what is forked: that is a child of the one which has started what it is forked of.
        loop: tells the time.
        process_table: watches and kills processes.
        send_order: sends an order to a process.
        on_child_forked: is given a child that is there, and of which process.
    """

    def __init__(
        self,
        pending_forks: PendingForks,
        launcher: Launcher,
        loop: EventLoop,
        process_table: ProcessTable,
        send_order: Callable[[str, Fork], None],
        on_child_forked: Callable[[ProcessSpec, str, ChildProcess], None],
    ) -> None:
        self._pending_forks = pending_forks
        self._launcher = launcher
        self._send_order = send_order
        self._on_child_forked = on_child_forked
        self._process_table = process_table
        self._timer = Timer(self.check_overdue)
        loop.add_timer(self._timer)

    def fork(self, request: ForkRequest) -> None:
        """Have a child forked."""
        self._pending_forks.add(request)
        self._timer.set_no_later_than(request.deadline)
        process_spec = request.process_spec
        self._send_order(request.parent, Fork(process_spec.name, tuple(process_spec.arguments), str(process_spec.log)))

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
                self._process_table.kill_unwanted(forked.name, process)
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
            self._process_table.kill(parent)
        self._timer.set(now + _RECHECK_INTERVAL_S if late else self._pending_forks.next_deadline)
