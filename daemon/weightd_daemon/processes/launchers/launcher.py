"""What every launcher does."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, Protocol

from weightd_daemon.platform.processes import ChildProcess
from weightd_daemon.processes.spec import ProcessSpec


class SurvivingProcess(NamedTuple):
    """A child that outlives the daemon, and has not been waited for: so its pid is its own."""

    pid: int
    name: str
    log: Path


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
