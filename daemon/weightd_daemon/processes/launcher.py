"""Launchers: start holders, workers and fork servers as children of the daemon (`DirectLauncher`) or of a shim."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from weightd_daemon.platform import processes
from weightd_daemon.platform.processes import ChildProcess
from weightd_daemon.processes.shim import process
from weightd_daemon.processes.spec import ProcessSpec, SurvivingProcess


class Launcher(Protocol):
    """Starts processes, adopts forked processes, and lists the processes that an earlier daemon has started."""

    def start(self, process_spec: ProcessSpec) -> ChildProcess:
        """Start a child in a new session.

        The child gets the pid of its parent by the option `--parent`, and all other arguments by stdin.

        Raises:
            OSError: the child cannot be started.
        """
        raise NotImplementedError

    def surviving_processes(self) -> list[SurvivingProcess]:
        """Return all children that outlive the daemon and have not been reaped, whichever daemon has started them."""
        raise NotImplementedError

    def kill_orphans(self) -> None:
        """Kill the processes that were forked for an earlier daemon and that no daemon has adopted."""

    def kill_orphans_of(self, parent: int, known_pids: Collection[int]) -> None:
        """Kill the processes that an exited child had forked but not reported. The child's session identifies them.

        Args:
            parent: the pid of the exited child, which has not been reaped yet.
            known_pids: the pids of all adopted processes. They are not killed, although some may still be in the
                session of the exited child, which has forked them.

        Raises:
            OSError: the processes cannot be found or killed.
        """
        raise NotImplementedError

    def adopt(self, name: str, pid: int, log: Path) -> ChildProcess:
        """Watch a child that another child has forked. Both children have the same parent process.

        Raises:
            OSError: there is no such child, or no descriptors are left.
        """
        raise NotImplementedError

    def watch(self, survivor: SurvivingProcess) -> ChildProcess:
        """Watch a child that an earlier daemon has started.

        Raises:
            OSError: the child is gone, or no descriptors are left.
        """
        raise NotImplementedError


class DirectLauncher:
    """A launcher that starts processes as children of the daemon itself. The processes die with the daemon."""

    def start(self, process_spec: ProcessSpec) -> ChildProcess:  # noqa: D102
        return processes.start(
            process_spec.with_parent(os.getpid()).command,
            process_spec.log,
            process_spec.environment,
            stdin_data=process_spec.stdin_data,
        )

    def adopt(self, name: str, pid: int, log: Path) -> ChildProcess:  # noqa: D102
        return processes.adopt(pid, log)

    def surviving_processes(self) -> list[SurvivingProcess]:  # noqa: D102
        return []

    def kill_orphans(self) -> None:  # noqa: D102
        pass

    def kill_orphans_of(self, parent: int, known_pids: Collection[int]) -> None:  # noqa: D102
        process.kill_all(process.find_orphans({parent, *known_pids}, parent))

    def watch(self, survivor: SurvivingProcess) -> ChildProcess:  # noqa: D102
        raise ProcessLookupError(f"process {survivor.pid} exited with the daemon that started it")
