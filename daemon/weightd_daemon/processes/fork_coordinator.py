"""Fork coordination: requests forks, adopts the children, kills fork servers and templates that do not reply."""

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

# Seconds until the next check for overdue replies if this check has killed a process. The requests to this process stay
# overdue until its exit is reported.
_RECHECK_INTERVAL_S = 1.0

_NEVER = float("inf")


class ForkRequest(NamedTuple):
    """A request to a process to fork a child.

    Attributes:
        process_spec: the specification of the child.
        parent: the name of the process that forks the child.
        deadline: the time by which `parent` must have replied, in monotonic seconds.
        on_failure: called with `process_spec` and the reason if the child is not forked.
    """

    process_spec: ProcessSpec
    parent: str
    deadline: float
    on_failure: Callable[[ProcessSpec, str], object]


class PendingForks:
    """The fork requests to which no reply has arrived yet, by the name of the child."""

    def __init__(self) -> None:
        self._pending: dict[str, ForkRequest] = {}
        # The name of the process that will still reply to a cancelled request, by the name of the child.
        self._cancelled: dict[str, str] = {}

    def add(self, request: ForkRequest) -> None:
        """Add a request that is about to be sent."""
        self._pending[request.process_spec.name] = request

    def parents(self) -> list[str]:
        """Return the names of the processes that have not replied to a request. Cancelled requests do not count."""
        return list(dict.fromkeys(each.parent for each in self._pending.values()))

    def is_awaited(self, parent: str) -> bool:
        """Return whether a process still has to reply to a fork request, even to a cancelled one."""
        return parent in self._cancelled.values() or parent in self.parents()

    def complete(self, name: str, parent: str) -> ForkRequest | None:
        """Remove the request to which `parent` has replied, and return it; None if the request was cancelled.

        Raises:
            LookupError: `parent` was not asked to fork a child with this name.
        """
        request = self._pending.get(name)
        if request is not None and request.parent == parent:
            return self._pending.pop(name)
        if self._cancelled.get(name) != parent:
            raise LookupError(name)
        del self._cancelled[name]
        return None

    def cancel(self, name: str) -> bool:
        """Cancel the fork request for a child; return whether there was a request."""
        request = self._pending.pop(name, None)
        if request is not None:
            self._cancelled[name] = request.parent
        return request is not None

    def drop_parent(self, parent: str) -> list[ForkRequest]:
        """Remove all requests to a process that has exited; return the requests that were not cancelled."""
        self._cancelled = {name: each for name, each in self._cancelled.items() if each != parent}
        dropped = [each for each in self._pending.values() if each.parent == parent]
        for each in dropped:
            del self._pending[each.process_spec.name]
        return dropped

    def overdue_parents(self, now: float) -> list[str]:
        """Return the name of every process whose reply is overdue."""
        return list(dict.fromkeys(each.parent for each in self._pending.values() if each.deadline <= now))

    @property
    def next_deadline(self) -> float:
        """The earliest deadline of a request, in monotonic seconds; infinity without requests."""
        return min((each.deadline for each in self._pending.values()), default=_NEVER)


class ForkCoordinator:
    """Asks fork servers and templates to fork children, and adopts the children.

    Args:
        pending_forks: the fork requests without a reply.
        launcher: adopts the forked children. The parent of a forked child is not the process that forked it, but the
            parent of that process: the daemon or the shim.
        loop: runs the timer for overdue replies.
        process_table: kills processes whose replies are overdue.
        send_order: sends an order to the process with this name.
        on_child_forked: called with the spec of a child, the name of the process that forked it, and the adopted child.
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
        """Ask a process to fork a child."""
        self._pending_forks.add(request)
        self._timer.set_no_later_than(request.deadline)
        process_spec = request.process_spec
        self._send_order(request.parent, Fork(process_spec.name, tuple(process_spec.arguments), str(process_spec.log)))

    def on_fork_reply(self, parent: str, forked: Forked) -> None:
        """Handle a reply to a fork request: adopt the child, or report why the fork failed.

        If the request was cancelled, the child is killed.

        Raises:
            RemoteProtocolError: the process was not asked to fork this child.
        """
        try:
            request = self._pending_forks.complete(forked.name, parent)
        except LookupError:
            raise RemoteProtocolError(f"forked: expected a requested process, got {forked.name}") from None
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
        """Report all fork requests to a process as failed, because the process has exited."""
        for wanted in self._pending_forks.drop_parent(parent):
            wanted.on_failure(wanted.process_spec, f"{parent} exited before it forked this process")

    def check_overdue(self, now: float) -> None:
        """Kill the processes whose replies are overdue. At their exit, `on_parent_exit` reports the failed requests."""
        late = self._pending_forks.overdue_parents(now)
        for parent in late:
            _log.warning("%s has not forked a process in time; killing it", parent)
            self._process_table.kill(parent)
        self._timer.set(now + _RECHECK_INTERVAL_S if late else self._pending_forks.next_deadline)
