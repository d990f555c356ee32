"""Starts processes through a shim. The next daemon of the service takes over the shim and its processes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection
from pathlib import Path

from weightd_common.service_manager import ServiceManager
from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.handover import state
from weightd_daemon.handover.instance_lock import make_private_directory
from weightd_daemon.handover.state import Handover, HandoverError
from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.platform.processes import ChildProcess
from weightd_daemon.platform.resource_limits import with_limit_hint
from weightd_daemon.processes.shim import client
from weightd_daemon.processes.shim.client import ShimClient, ShimLost
from weightd_daemon.processes.spec import ProcessSpec, SurvivingProcess

_log = logging.getLogger("weightd")

SHIM = "shim"
"""Name under which the service manager keeps the daemon's end of the shim's socket for the next daemon (FDSTORE=1)."""

# Maximum number of seconds to wait for the exit of a shim and all its children, after the daemon has shut down or
# killed the shim.
_EXIT_TIMEOUT_S = 30.0


class ShimLauncher:
    """A `Launcher` that starts holders and workers as children of a shim, so that they outlive the daemon.

    Args:
        manager: the service manager, which keeps the descriptor of the shim's socket for the next daemon.
        config: the configuration, with the paths that the shim removes when it exits.

    Attributes:
        inherited_state: the content of the previous daemon's state file; None if every model has to be loaded.

    Raises:
        PathInUse: the private directory cannot be created, or the shim cannot be started.
    """

    def __init__(self, manager: ServiceManager, config: DaemonConfig) -> None:
        self._manager = manager
        self._directory = config.private_dir
        self._extra_paths = [config.children_socket, config.channel_socket]
        self.inherited_state: Handover | None = None
        descriptors = manager.inherited.get(SHIM, [])
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        shim = self._inherit_shim(descriptors[0]) if descriptors else None
        if shim is None:
            make_private_directory(self._directory)
            shim = self._start_shim()
        self._shim = shim
        self._is_lost = False

    @property
    def pid(self) -> int:
        """The pid of the shim."""
        return self._shim.pid

    @property
    def handover_path(self) -> Path:
        """The path of the state file for the next daemon."""
        return self._directory / "handover"

    @property
    def own_entries(self) -> Collection[str]:
        """The names of the files that this launcher and the shim use in the private directory."""
        return {self.handover_path.name, client.LOG_NAME}

    def start(self, process_spec: ProcessSpec) -> ChildProcess:  # noqa: D102
        if self._is_lost:
            self._replace_shim()
        try:
            return self._shim.start(self._with_parent(process_spec))
        except ShimLost as error:
            # The children of the lost shim have died with it, as their pidfds report. New children need another shim.
            _log.error("%s; starting another shim", error)
            self._is_lost = True
            self._shim.kill()
            self._replace_shim()
        return self._shim.start(self._with_parent(process_spec))

    def adopt(self, name: str, pid: int, log: Path) -> ChildProcess:  # noqa: D102
        return self._shim.adopt(name, pid, log)

    def surviving_processes(self) -> list[SurvivingProcess]:  # noqa: D102
        return self._shim.surviving_processes()

    def kill_orphans(self) -> None:  # noqa: D102
        self._shim.kill_orphans()

    def kill_orphans_of(self, parent: int, known_pids: Collection[int]) -> None:  # noqa: D102
        self._shim.kill_orphans_of(parent)

    def watch(self, survivor: SurvivingProcess) -> ChildProcess:  # noqa: D102
        return self._shim.watch(survivor)

    def close(self) -> None:
        """Close the socket to the shim. The shim kills its children unless the service manager holds a duplicate."""
        if not self._is_lost:
            self._shim.close()

    def _with_parent(self, process_spec: ProcessSpec) -> ProcessSpec:
        return process_spec.with_parent(self.pid)

    def _inherit_shim(self, descriptor: int) -> ShimClient | None:
        try:
            shim = ShimClient(descriptor)
        except ShimLost as error:
            _log.warning("loading every model again: %s", error)
            # The shim may be running, but too slow to reply. It then exits, because the service manager closes the last
            # duplicate of the daemon's end of the socket.
            self._manager.remove_descriptor(SHIM)
            return None
        try:
            self.inherited_state = state.read(self.handover_path)
        except HandoverError as error:
            _log.warning("loading every model again: %s", error)
            self._manager.remove_descriptor(SHIM)
            # Wait for the exit of the old shim, because the old shim then removes its files. They include the sockets
            # for children, and this daemon creates its sockets at the same paths. `make_private_directory` waits only
            # for a shim that uses the directory of this daemon, but the old shim may use another directory.
            _log.info("waiting for the processes of the previous daemon to end")
            shim.stop(_EXIT_TIMEOUT_S)
            return None
        return shim

    def _start_shim(self) -> ShimClient:
        try:
            shim = client.start_shim(self._directory, *self._extra_paths)
        except OSError as error:
            raise PathInUse(with_limit_hint(f"cannot start the shim: {error}")) from None
        self._manager.store_descriptor(SHIM, shim.descriptor)
        return shim

    def _replace_shim(self) -> None:
        if not client.wait_until_exited(self._directory, _EXIT_TIMEOUT_S):
            raise ShimLost("the shim exited, but its children do not exit")
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._shim.pid, 0)
        self._shim = self._start_shim()
        self._is_lost = False
