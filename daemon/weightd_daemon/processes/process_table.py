"""Every child that runs: watched, signalled and reaped."""

from __future__ import annotations

import signal
from collections.abc import Callable

from weightd_daemon.platform import cgroup, processes
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.exit_cause import ExitCause, ExitClassifier
from weightd_daemon.platform.processes import ChildProcess


class ProcessTable:
    """The children that run, by name.

    Args:
        loop: calls when one has exited.

    Attributes:
        processes: all of them.
    """

    def __init__(self, loop: EventLoop) -> None:
        self.processes: dict[str, ChildProcess] = {}
        self._loop = loop
        self._exit_classifier = ExitClassifier(_count_oom_kills)

    def add(self, name: str, process: ChildProcess, on_exit: Callable[[], object]) -> None:
        """Watch a child: `on_exit` is called once it has exited, and has to `reap` it."""
        self.processes[name] = process
        self._loop.add(process.pidfd, on_exit)

    def reap(self, name: str) -> ExitCause:
        """Wait for a child that has exited; return how it has ended."""
        process = self.processes.pop(name)
        self._loop.remove(process.pidfd)
        return self._exit_classifier.classify(name, processes.reap(process), processes.log_tail(process))

    def is_alive(self, name: str) -> bool:
        """Return whether a child has not begun to exit: asked of the kernel, before its death is told."""
        return name in self.processes and processes.is_alive(self.processes[name])

    def kill(self, name: str, *, abort: bool = False) -> None:
        """Kill a child; its exit is told as any other, and that of one that was ending already as what it was."""
        if name in self.processes:
            if self.is_alive(name):
                self._exit_classifier.record_signal(name)
            processes.kill(self.processes[name], signal.SIGABRT if abort else signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill every child."""
        for process in self.processes.values():
            processes.kill(process)


def _count_oom_kills() -> int:
    limit = cgroup.memory()
    return limit.oom_kills or 0 if limit is not None else 0
