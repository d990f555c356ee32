"""Children of this process, which end with it."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from weightd.daemon.children.launch import Launch
from weightd.daemon.children.launchers.keeper import process
from weightd.daemon.children.launchers.launcher import Kept
from weightd.daemon.host import processes
from weightd.daemon.host.processes import Process


class Direct:
    """A `Launcher` that starts them itself."""

    def start(self, launch: Launch) -> Process:  # noqa: D102
        return processes.start(launch.of(os.getpid()).command, launch.log, launch.environment, order=launch.order)

    def adopt(self, name: str, pid: int, log: Path) -> Process:  # noqa: D102
        return processes.adopt(pid, log)

    def kept(self) -> list[Kept]:  # noqa: D102
        return []

    def end_strays(self) -> None:  # noqa: D102
        pass

    def end_strays_of(self, parent: int, known: Collection[int]) -> None:  # noqa: D102
        process.end_all(process.strays({parent, *known}, parent))

    def watch(self, kept: Kept) -> Process:  # noqa: D102
        raise ProcessLookupError(f"process {kept.pid} is gone with the daemon that had started it")
