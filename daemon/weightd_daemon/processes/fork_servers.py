"""Fork servers: processes that have imported an engine and fork children. There is one per interpreter and engine.

A fork server starts when a model that uses its interpreter and engine begins to load, and stops `IDLE_S` after the last
such model was unloaded: it takes as much memory as a process of the engine. If it exits earlier, it is restarted at
once. If it exits repeatedly soon after its start, it is restarted only after a delay, when the next child is to be
started; until then, children are spawned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.restarts import RestartBackoff
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import Timer
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.platform.resource_limits import with_limit_hint
from weightd_daemon.processes import spec
from weightd_daemon.processes.spec import ProcessSpec, WorkerProgram

_log = logging.getLogger("weightd")

# Seconds after its start within which a fork server must reply to its first request. On a loaded machine, an
# interpreter needs seconds to import an engine.
START_TIMEOUT_S = 60.0

# Seconds within which a process that has loaded its engine must reply to a fork request. The kernel copies the page
# tables of this process, which takes time if the process is large.
FORK_TIMEOUT_S = 10.0

# Seconds for which a fork server runs on while no loaded model needs it. Its next start delays a load, because the fork
# server imports the engine first.
IDLE_S = 60.0

_NEVER = float("inf")

ServerKey = tuple[str, str]
"""The interpreter and the engine of a fork server."""


@dataclass
class ForkServer:
    """The fork server for one interpreter and engine, over all its restarts.

    Attributes:
        python: the path of the interpreter.
        engine: the engine that the fork server imports.
        name: the name of the running process; "" while no process runs.
        started_at: the start time of the running process, in monotonic seconds.
        has_forked: whether the running process has forked a child; until then, it may still be importing the engine.
        fork_count: the number of children forked since the daemon started, over all restarts.
        reason: why no process runs, as a text for the operator; "" while a process runs.
        restart_backoff: computes the delay of the next restart.
        stop_at: when the fork server is stopped, in monotonic seconds; infinity while a model needs it.
    """

    python: str
    engine: str
    name: str = ""
    started_at: float = 0.0
    has_forked: bool = False
    fork_count: int = 0
    reason: str = ""
    restart_backoff: RestartBackoff = field(default_factory=RestartBackoff)
    stop_at: float = _NEVER


class ForkServers:
    """The fork servers for the loaded models.

    Args:
        directory: the directory for the logs of the fork servers.
        address: the daemon's address, to which children connect.
        start_process: starts a fork server; raises OSError on failure.
        kill_process: kills the fork server with this name.

    Attributes:
        timer: stops fork servers when it is due.
    """

    def __init__(
        self,
        directory: Path,
        address: str,
        start_process: Callable[[ProcessSpec], object],
        kill_process: Callable[[str], object],
    ) -> None:
        self._directory = directory
        self._address = address
        self._start_process = start_process
        self._kill_process = kill_process
        self._servers: dict[ServerKey, ForkServer] = {}
        self._serial = 0
        self.timer = Timer(self._stop_idle)

    @property
    def servers(self) -> Mapping[ServerKey, ForkServer]:
        """The fork servers that the models need, running or not."""
        return self._servers

    def reconcile(self, models: Iterable[ModelConfig], now: float) -> None:
        """Start the fork servers that loaded models need, and stop every other one once it was idle for `IDLE_S`.

        Args:
            models: the configurations of all models that are loaded or loading.
            now: monotonic seconds.
        """
        needed = {(each.python, each.engine) for each in models if each.can_fork}
        for kind in sorted(needed - self._servers.keys()):
            self._add(kind)
        for kind, server in self._servers.items():
            server.stop_at = _NEVER if kind in needed else min(server.stop_at, now + IDLE_S)
        self.timer.set(min((each.stop_at for each in self._servers.values()), default=_NEVER))

    def find(self, program: WorkerProgram) -> ForkServer:
        """Return the fork server for a program's interpreter and engine; start it first if it does not run.

        A fork server that has exited repeatedly is restarted only when its restart is due.
        """
        kind = program.python, program.engine
        server = self._servers.get(kind)
        if server is None:
            return self._add(kind)
        if not server.name and server.restart_backoff.due_at <= event_loop.now():
            self._start(server)
        return server

    def kill_all(self) -> None:
        """Kill all fork servers."""
        for server in self._servers.values():
            if server.name:
                self._kill_process(server.name)
        self._servers.clear()

    def is_fork_server(self, name: str) -> bool:
        """Return whether the process with this name is a running fork server."""
        return self._find_by_name(name) is not None

    def fork_deadline(self, name: str, *, has_channel: bool) -> float:
        """Return the deadline for the reply to a fork request that is sent now, in monotonic seconds.

        Args:
            name: the name of the fork server.
            has_channel: whether the fork server has connected its channel, which it does after all imports.
        """
        server = self._find_by_name(name)
        deadline = event_loop.now() + FORK_TIMEOUT_S
        return (
            deadline
            if server is None or has_channel or server.has_forked
            else max(deadline, server.started_at + START_TIMEOUT_S)
        )

    def on_child_forked(self, name: str) -> None:
        """Count a child that a fork server has forked."""
        server = self._find_by_name(name)
        if server is not None:
            server.fork_count += 1
            server.has_forked = True

    def on_exit(self, name: str, exit_cause: ExitCause) -> None:
        """Handle the exit of a fork server. Restart it at once, unless it repeatedly exits soon after its start."""
        server = self._find_by_name(name)
        if server is None:
            return
        now = event_loop.now()
        server.restart_backoff.on_death(now - server.started_at, now)
        server.name, server.reason = "", f"its fork server exited: {exit_cause}"
        _log.warning("the fork server of %s under %s exited: %s", server.engine, server.python, exit_cause)
        if server.restart_backoff.delay_s == 0.0 and server.stop_at == _NEVER:
            self._start(server)

    def _find_by_name(self, name: str) -> ForkServer | None:
        return next((each for each in self._servers.values() if name and each.name == name), None)

    def _stop_idle(self, now: float) -> None:
        for kind, server in list(self._servers.items()):
            if server.stop_at <= now:
                del self._servers[kind]
                if server.name:
                    self._kill_process(server.name)

    def _add(self, kind: ServerKey) -> ForkServer:
        server = self._servers[kind] = ForkServer(*kind)
        self._start(server)
        return server

    def _start(self, server: ForkServer) -> None:
        self._serial += 1
        name = f"forkserver.{self._serial}"
        log = self._directory / f"{name}.log"
        try:
            self._start_process(spec.fork_server_spec(server.python, server.engine, name, self._address, log))
        except OSError as error:
            now = event_loop.now()
            server.restart_backoff.on_death(0.0, now)
            server.reason = with_limit_hint(f"its fork server cannot be started: {error.strerror or error}")
        else:
            server.name, server.started_at, server.has_forked, server.reason = name, event_loop.now(), False, ""
