"""Children of this process, which end with it."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from weightd_daemon.platform import processes
from weightd_daemon.platform.processes import ChildProcess
from weightd_daemon.processes.launchers.launcher import SurvivingProcess
from weightd_daemon.processes.launchers.shim import process
from weightd_daemon.processes.spec import ProcessSpec


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
