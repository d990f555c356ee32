"""Launchers: what starts holders, workers and fork servers; here those that are children of this process."""

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
    """Starts holders and workers, and knows those that a daemon before this one has had started."""

    def start(self, process_spec: ProcessSpec) -> ChildProcess:
        """Start a child in a session of its own; it learns its parent's pid by `--parent`, all else from stdin.

        Raises:
            OSError: it cannot be started.
        """
        raise NotImplementedError

    def surviving_processes(self) -> list[SurvivingProcess]:
        """Return every child that outlives the daemon."""
        raise NotImplementedError

    def kill_orphans(self) -> None:
        """End what was forked for a daemon before this one, which ended before it adopted that."""

    def kill_orphans_of(self, parent: int, known_pids: Collection[int]) -> None:
        """End what a child that has ended had forked without telling; that has the child's session still.

        Args:
            parent: the pid of the child, which has not been waited for.
            known_pids: the pids of all that run; not all of them need have a session of their own yet.

        Raises:
            OSError: that cannot be done.
        """
        raise NotImplementedError

    def adopt(self, name: str, pid: int, log: Path) -> ChildProcess:
        """Have a child watched that another child has forked: its parent is that of the other.

        Raises:
            OSError: there is no such child, or no descriptors are left.
        """
        raise NotImplementedError

    def watch(self, survivor: SurvivingProcess) -> ChildProcess:
        """Have such a child watched.

        Raises:
            OSError: it is gone, or no descriptors are left.
        """
        raise NotImplementedError


class DirectLauncher:
    """A `Launcher` that starts them itself."""

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
        raise ProcessLookupError(f"process {survivor.pid} is gone with the daemon that had started it")
