"""The configuration file of a daemon: read at the start, read again by a helper process, kept for the next daemon.

A service manager holds what was last in force for the next daemon. So a file that has become wrong, or names
directories that cannot be had, does not end a service that is restarted, nor what it holds in memory: the next daemon
goes on with what was in force, and says so until a reload succeeds. Where nobody holds it, as at the first start, a
wrong file ends the start.

The parser takes seconds or more for some files, a file system that does not answer takes for ever, and the daemon's
loop must go on meanwhile. So a helper process reads the file for a reload, checks it, and looks at the files that it
names; the daemon ends a helper that takes too long. Arguments of the helper: PARENT PATH LISTENING, the last as a list
in JSON. It answers on stdout with a pickled `ReadConfig`.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from weightd_common import process_start
from weightd_common.process_attributes import raise_score
from weightd_common.process_start import die_with_parent
from weightd_common.service_manager import CLIENTS, ServiceManager
from weightd_daemon.config.check import find_problems
from weightd_daemon.config.load import Config, ConfigError, load_text, read_text
from weightd_daemon.handover.instance_lock import check_directories
from weightd_daemon.platform import processes
from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.platform.listen import listen_addresses
from weightd_daemon.processes.process_table import ProcessTable

_log = logging.getLogger("weightd")

CONFIG = "config"
"""Name of the descriptor that is kept for the next daemon (FDSTORE=1): what was configured."""

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "import weightd_daemon.config_file as this; this.main()"
)

_PROCESS_NAME = "configuration"

# More problems of one file nobody reads, and the loop has to pass them on.
_MAX_PROBLEMS = 100


class ReadConfig(NamedTuple):
    """A configuration file, and what is wrong with it.

    Attributes:
        text: of the file.
        config: what it says; None if something is wrong with it.
        problems: what is wrong with it, by itself.
        model_problems: by model, what is wrong with the files that it names.
    """

    text: str = ""
    config: Config | None = None
    problems: tuple[str, ...] = ()
    model_problems: Mapping[str, Sequence[str]] = {}


def read_file(path: Path, listen_addresses: Sequence[str] = ()) -> ReadConfig:
    """Read and check a configuration file, and what it names."""
    try:
        text = read_text(path)
        config = load_text(text, path, listen_addresses)
    except ConfigError as error:
        more = len(error.problems) - _MAX_PROBLEMS
        answer = error.problems[:_MAX_PROBLEMS]
        return ReadConfig(problems=(*answer, f"{path}: {more} more problems") if more > 0 else answer)
    members = {name for group in config.groups.values() for name in group.models}
    model_problems = find_problems(config.models, members, runs_interpreters=False)
    return ReadConfig(
        text, config, (), {name: [f"{path}: {each}" for each in of_one] for name, of_one in model_problems.items()}
    )


class ConfigReader:
    """Reads one configuration file at a time.

    Args:
        process_table: watches the helper.
    """

    def __init__(self, process_table: ProcessTable) -> None:
        self._process_table = process_table
        self._has_timed_out = False

    def start(self, path: Path, listen_addresses: Sequence[str], on_result: Callable[[ReadConfig], object]) -> None:
        """Begin to read; `on_result` is called with the result.

        Raises:
            OSError: no process can be started.
        """
        self._has_timed_out = False
        python = [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(sys.path)]
        argv = [*python, str(os.getpid()), str(path), json.dumps(list(listen_addresses))]
        # In memory: the directories of the daemon may be what is missing.
        result_fd = os.memfd_create("weightd-read", os.MFD_CLOEXEC)
        log_fd = os.memfd_create("weightd-read-log", os.MFD_CLOEXEC)
        try:
            process = processes.start(argv, Path(f"/proc/self/fd/{log_fd}"), stdout=result_fd)
        except OSError:
            os.close(result_fd)
            os.close(log_fd)
            raise
        self._process_table.add(
            _PROCESS_NAME, process, functools.partial(self._on_exit, path, result_fd, log_fd, on_result)
        )

    def abort(self) -> None:
        """End a helper that takes too long; the result says so."""
        self._has_timed_out = True
        self._process_table.kill(_PROCESS_NAME)

    def _on_exit(self, path: Path, result_fd: int, log_fd: int, on_result: Callable[[ReadConfig], object]) -> None:
        exit_cause = self._process_table.reap(_PROCESS_NAME)
        content = os.pread(result_fd, os.fstat(result_fd).st_size, 0)
        os.close(result_fd)
        os.close(log_fd)
        if exit_cause.status == 0:
            # Written by this program, for this process.
            result: ReadConfig = pickle.loads(content)  # noqa: S301
        else:
            why = "reading and checking it took too long" if self._has_timed_out else f"cannot be read: {exit_cause}"
            result = ReadConfig(problems=(f"{path}: {why}",))
        on_result(result)


def main() -> None:
    """Be the process."""
    process_start.reset_signals(signal.SIGINT)
    die_with_parent(int(sys.argv[1]))
    raise_score("worker")
    result = read_file(Path(sys.argv[2]), json.loads(sys.argv[3]))
    with os.fdopen(os.dup(1), "wb") as out:
        pickle.dump(result, out)


class ConfigFile:
    """Reads the file at `path`.

    Args:
        path: of the file, absolute.
        manager: holds what is in force; its sockets are where clients connect.

    Attributes:
        path: as given.
        listen_addresses: addresses where the service manager listens for clients.
        note: why what is in force is not what the file says; "" if it is.
    """

    def __init__(self, path: Path, manager: ServiceManager) -> None:
        self.path = path
        self.note = ""
        self._manager = manager
        self.listen_addresses = listen_addresses(manager.inherited.get(CLIENTS, []))
        self._descriptors = manager.inherited.get(CONFIG, [])
        self._text = ""

    def load_initial(self) -> Config:
        """Return the configuration to start with: the file's, or what was in force before if that cannot be.

        Raises:
            ConfigError: the file is wrong, and nothing was in force before that still can be.
            PathInUse: the same of its directories.
        """
        try:
            config = self.read()
            if self._descriptors:
                check_directories(config.daemon)
            return config
        except (ConfigError, PathInUse) as error:
            before = self._load_previous()
            if before is None:
                raise
            self.note = f"{error}\nwhat was in force before is served"
            for problem in str(error).splitlines():
                _log.error("%s", problem)
            _log.error("%s is not in force: going on with what was in force before", self.path)
            return before

    def read(self) -> Config:
        """Return what the file says now.

        Raises:
            ConfigError: it is wrong.
        """
        text = read_text(self.path)
        config = load_text(text, self.path, self.listen_addresses)
        self._text = text
        return config

    def accept(self, result: ReadConfig) -> Config:
        """Return what was read of the file.

        Raises:
            ConfigError: it is wrong.
        """
        if result.config is None:
            raise ConfigError(*result.problems)
        self._text = result.text
        return result.config

    def mark_in_force(self) -> None:
        """What was read last is what is served: the next daemon may fall back on it."""
        content = self._text.encode()
        try:
            if not self._descriptors:
                self._descriptors = [os.memfd_create("weightd-config", os.MFD_CLOEXEC)]
                self._manager.store_descriptor(CONFIG, self._descriptors[0])
            os.pwrite(self._descriptors[0], content, 0)
            os.ftruncate(self._descriptors[0], len(content))
        except OSError as error:
            _log.warning("the configuration is not held for the next daemon: %s", error.strerror)

    def _load_previous(self) -> Config | None:
        for descriptor in self._descriptors[:1]:
            text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode("utf-8", "replace")
            try:
                config = load_text(text, self.path, self.listen_addresses)
            except ConfigError:  # of a version of weightd that knew other keys
                return None
            self._text = text
            return config
        return None
