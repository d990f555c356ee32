"""Reload of the configuration file, requested by SIGHUP (see `Daemon.on_signals`) or by a client.

A reload has three steps: `Reloader.request` (or `on_hangup`) queues it, a helper process reads and validates the file
(`config_file.py`), and `ConfigInForce.apply` compares the result with the configuration in force and applies the
difference. An invalid file changes nothing. A change of the model repository starts the same steps. But then the helper
process does not read the file again: it reads the repository together with the text that is in force.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from typing import NamedTuple

from weightd_common.terminal import Terminal
from weightd_daemon.config.load import ConfigError
from weightd_daemon.config_file import ConfigFile, ConfigReader, ReadConfig
from weightd_daemon.config_in_force import ConfigInForce
from weightd_daemon.counters import DaemonCounters
from weightd_daemon.handover.systemd import ManagedService
from weightd_daemon.models.registry import ConfigDiff
from weightd_daemon.platform import audit, event_loop
from weightd_daemon.platform.event_loop import EventLoop, Timer
from weightd_daemon.repository import RepositoryWatcher
from weightd_daemon.shutdown import Shutdown
from weightd_protocol.errors import InvalidArgument, RequestError, ResourceExhausted, Unavailable

_log = logging.getLogger("weightd")

# Maximum number of queued reloads. One read of the file serves all of them.
_MAX_RELOADS = 16

# Seconds after which the helper process is killed. Without a limit, a file system that does not answer would block all
# reloads.
_READ_TIMEOUT_S = 60.0
_NEVER = float("inf")

OnReloaded = Callable[[ConfigDiff | RequestError], object]


class _Kind(enum.Enum):
    """Purpose of a read of the configuration; it decides which changes the daemon applies."""

    RELOAD = "reload"
    DRY_RUN = "dry run"  # only report the changes
    REPOSITORY = "repository"  # apply the changes of the repository, but not of the configuration file


class _Waiter(NamedTuple):
    """A queued reload; `on_done` is called with the changes, or with the error."""

    on_done: OnReloaded
    kind: _Kind


class Reloader:
    """Queue of reloads. It reads the configuration file once for all queued reloads, and reports the result to each.

    Args:
        file: the configuration file; None if weightd was started without one.
        reader: reads the file in a helper process.
        in_force: applies the new configuration.
        loop: starts the read at the end of the current turn.
        counters: count the successful and the failed reloads.
        shutdown: knows whether the daemon has begun to shut down; then no reload starts.
        service: notifies the service manager of reloads by SIGHUP; None without a service manager.
        terminal: knows whether the terminal of this process has closed.

    Attributes:
        repository_timer: reads the repository again after its changes could not be put in force.
        timer: kills a helper process that takes too long; the caller adds the timer to the loop.
    """

    def __init__(  # noqa: PLR0913
        self,
        file: ConfigFile | None,
        reader: ConfigReader,
        in_force: ConfigInForce,
        loop: EventLoop,
        counters: DaemonCounters,
        *,
        shutdown: Shutdown,
        service: ManagedService | None,
        terminal: Terminal,
    ) -> None:
        self._file = file
        self._reader = reader
        self._in_force = in_force
        self._loop = loop
        self._counters = counters
        self._shutdown = shutdown
        self._service = service
        self._terminal = terminal
        self.timer = Timer(lambda _: reader.abort())
        self.repository_timer = Timer(lambda _: self._on_repository_changed())
        self._watcher: RepositoryWatcher | None = None
        # The reloads that the current read serves, and the reloads that wait for the next read.
        self._active: list[_Waiter] = []
        self._pending: list[_Waiter] = []

    @property
    def is_possible_by_hangup(self) -> bool:
        """Whether SIGHUP requests a reload.

        SIGHUP shuts the daemon down if there is no configuration file or the terminal has closed.
        """
        return self._file is not None and not self._terminal.has_closed()

    def on_hangup(self) -> None:
        """Reload because of a SIGHUP; report the result to the log, the audit log and the service manager."""
        service = self._service if self._service is not None and self._service.begin_reload() else None

        def on_done(outcome: ConfigDiff | RequestError) -> None:
            entry = audit.AuditEntry("reload", audit.OPERATOR)
            if isinstance(outcome, RequestError):
                _log.error("reload failed, nothing changed: %s", outcome)
                audit.write(entry, audit.FAILED, str(outcome))
            else:
                audit.write(entry, audit.OK)
            if service is not None:
                service.end_reload()

        try:
            self.request(on_done)
        except RequestError as error:
            on_done(error)

    def watch_repository(self) -> None:
        """Search the repository of the configuration in force for changes from now on."""
        config, watcher = self._in_force.config, self._watcher
        if self._file is not None:
            self._file.repository_note = "\n".join(config.repository_problems.values())
        if config.repository == (None if watcher is None else watcher.config):
            return
        if watcher is not None:
            watcher.stop()
        self._watcher = None
        if config.repository is not None:
            self._watcher = RepositoryWatcher(config.repository, self._loop, self._on_repository_changed)
            self._watcher.start()

    def _on_repository_changed(self) -> None:
        def on_done(outcome: ConfigDiff | RequestError) -> None:
            repository = self._in_force.config.repository
            if isinstance(outcome, RequestError) and repository is not None:
                _log.error("repository: the changes are not in force: %s", outcome)
                # The watcher reports a change only once.
                self.repository_timer.set(event_loop.now() + repository.poll)

        if not self._shutdown.has_begun and all(each.kind is not _Kind.REPOSITORY for each in self._pending):
            self._pending.append(_Waiter(on_done, _Kind.REPOSITORY))
            self._loop.call_soon(self._start_read)

    def request(self, on_done: OnReloaded, is_dry_run: bool = False) -> None:
        """Queue a reload; call `on_done` when the new configuration is in force or has been rejected.

        A dry run calls `on_done` with the changes, but does not apply them.

        Raises:
            InvalidArgument: weightd was started without a configuration file. `on_done` is not called.
            Unavailable: weightd is shutting down. `on_done` is not called.
            ResourceExhausted: too many reloads are queued. `on_done` is not called.
        """
        if self._file is None:
            raise InvalidArgument("weightd was started without a configuration file: there is nothing to reload")
        if self._shutdown.has_begun:
            raise Unavailable("weightd is stopping")
        if sum(each.kind is not _Kind.REPOSITORY for each in self._pending) == _MAX_RELOADS:
            raise ResourceExhausted(f"{_MAX_RELOADS} reloads are queued already")
        self._pending.append(_Waiter(on_done, _Kind.DRY_RUN if is_dry_run else _Kind.RELOAD))
        if len(self._pending) == 1:
            self._loop.call_soon(self._start_read)

    def abort(self) -> None:
        """Kill the helper process, if it is running."""
        self._reader.abort()

    def _start_read(self) -> None:
        """Start to read the file for all queued reloads. A reload that is requested later needs another read."""
        if self._file is None or self._active or not self._pending:
            return
        # A changed repository is read with the text in force, and never with a file that no reload has put in force.
        self._active = [each for each in self._pending if each.kind is not _Kind.REPOSITORY] or self._pending
        self._pending = [each for each in self._pending if each not in self._active]
        text = self._file.text_in_force if self._active[0].kind is _Kind.REPOSITORY else None
        try:
            self._reader.start(self._file.path, self._file.listen_addresses, self._on_read, text)
        except OSError as error:
            text = f"{self._file.path}: cannot start the process that reads the file: {error.strerror}"
            self._on_read(ReadConfig(problems=(text,)))
        else:
            self.timer.set(event_loop.now() + _READ_TIMEOUT_S)

    def _on_read(self, result: ReadConfig) -> None:
        self.timer.set(_NEVER)
        waiting, self._active = self._active, []
        for kind in (_Kind.DRY_RUN, _Kind.RELOAD, _Kind.REPOSITORY):
            on_done = [each.on_done for each in waiting if each.kind is kind]
            if on_done:
                outcome = self._outcome(result, kind)
                for each in on_done:
                    each(outcome)
        self._start_read()

    def _outcome(self, result: ReadConfig, kind: _Kind) -> ConfigDiff | RequestError:
        try:
            diff = self._apply(result, kind)
        except RequestError as error:
            self._counters.refused_reloads += kind is _Kind.RELOAD
            return error
        self._counters.reloads += kind is _Kind.RELOAD
        return diff

    def _apply(self, result: ReadConfig, kind: _Kind) -> ConfigDiff:
        """Put the result of a read in force.

        Raises:
            InvalidArgument: the file is invalid; nothing has changed.
            Unavailable: weightd is shutting down, or a model is being updated; nothing has changed.
        """
        file = self._file
        if file is None or self._shutdown.has_begun:
            raise Unavailable("weightd is stopping")
        try:
            config = file.accept(result)
            if kind is _Kind.DRY_RUN:
                return self._in_force.compare(file.path, config, result.model_problems)
            diff = self._in_force.apply(
                file.path, config, result.model_problems, event_loop.now(), retries=kind is _Kind.RELOAD
            )
        except ConfigError as error:
            if kind is _Kind.RELOAD:
                file.note = f"not reloaded: {error}"
            raise InvalidArgument(str(error)) from None
        if kind is _Kind.RELOAD:
            file.note = ""
        file.text_in_force = result.text
        self.watch_repository()
        if self._service is not None:
            file.mark_in_force()
        if kind is _Kind.RELOAD:
            _log.info("reloaded %s: %s", file.path, diff)
        elif any(diff):
            _log.info("repository: %s", diff)
        return diff
