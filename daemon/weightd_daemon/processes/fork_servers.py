"""Fork servers: for each interpreter and engine a process that has loaded both, of which children are forked.

One is there as long as a model wants it. One that ends is followed by another, soon the first time; meanwhile children
are spawned, for that reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.restarts import RestartBackoff
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.platform.resource_limits import with_limit_hint
from weightd_daemon.processes import spec
from weightd_daemon.processes.spec import ProcessSpec, WorkerProgram

_log = logging.getLogger("weightd")

# An interpreter on a loaded machine needs seconds to import an engine.
START_TIMEOUT_S = 60.0

# What it takes to fork, however much memory has to be marked for it, and then some.
FORK_TIMEOUT_S = 10.0

ServerKey = tuple[str, str]
"""Interpreter and engine."""


@dataclass
class ForkServer:
    """A fork server, or what became of it.

    Attributes:
        python: its interpreter.
        engine: what it has loaded.
        name: of the process, "" while there is none.
        started_at: when that was started, in monotonic seconds.
        has_forked: whether that has forked anything: before, it may still be loading.
        fork_count: how many children all of its kind have made.
        reason: it is not there, for people.
    """

    python: str
    engine: str
    name: str = ""
    started_at: float = 0.0
    has_forked: bool = False
    fork_count: int = 0
    reason: str = ""
    restart_backoff: RestartBackoff = field(default_factory=RestartBackoff)


class ForkServers:
    """The fork servers that the models of the configuration want.

    Args:
        directory: for their logs.
        address: where children connect.
        start_process: starts one; raises OSError where that cannot be done.
        kill_process: ends the one of that name.
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

    @property
    def servers(self) -> Mapping[ServerKey, ForkServer]:
        """Those that are wanted."""
        return self._servers

    def reconcile(self, models: Iterable[ModelConfig]) -> None:
        """Have those that these models want, and no other."""
        wanted = {(each.python, each.engine) for each in models if each.can_fork}
        for kind in self._servers.keys() - wanted:
            server = self._servers.pop(kind)
            if server.name:
                self._kill_process(server.name)
        for kind in sorted(wanted - self._servers.keys()):
            self._start(self._servers.setdefault(kind, ForkServer(*kind)))

    def find(self, program: WorkerProgram) -> ForkServer | None:
        """Return the one for this program, started anew if that is due; None if no model wants it."""
        server = self._servers.get((program.python, program.engine))
        if server is not None and not server.name and server.restart_backoff.due_at <= event_loop.now():
            self._start(server)
        return server

    def is_fork_server(self, name: str) -> bool:
        """Whether a process is one of them."""
        return self._find_by_name(name) is not None

    def fork_deadline(self, name: str, *, has_channel: bool) -> float:
        """Return by when one that is asked now has to have answered, in monotonic seconds.

        Args:
            name: of the process.
            has_channel: whether it has connected its channel, which it does when it has loaded everything.
        """
        server = self._find_by_name(name)
        deadline = event_loop.now() + FORK_TIMEOUT_S
        return (
            deadline
            if server is None or has_channel or server.has_forked
            else max(deadline, server.started_at + START_TIMEOUT_S)
        )

    def on_child_forked(self, name: str) -> None:
        """It has made a child."""
        server = self._find_by_name(name)
        if server is not None:
            server.fork_count += 1
            server.has_forked = True

    def on_exit(self, name: str, exit_cause: ExitCause) -> None:
        """It has ended: the next one is started at once, unless the one before has also ended soon."""
        server = self._find_by_name(name)
        if server is None:
            return
        now = event_loop.now()
        server.restart_backoff.on_death(now - server.started_at, now)
        server.name, server.reason = "", f"its fork server is lost: {exit_cause}"
        _log.warning("the fork server of %s under %s exited: %s", server.engine, server.python, exit_cause)
        if server.restart_backoff.delay_s == 0.0:
            self._start(server)

    def _find_by_name(self, name: str) -> ForkServer | None:
        return next((each for each in self._servers.values() if name and each.name == name), None)

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
