"""Reading of the configuration file: at the start, in a helper process for a reload, and from the service manager.

The service manager keeps the text of the configuration that was last in force. If the file has become invalid, or names
directories that are in use or cannot be created, a restarted service falls back to that text, keeps its loaded models,
and reports the problem until a reload succeeds. Without a kept text, as at the first start, an invalid file ends the
start.

Parsing takes seconds for some files, and reading from a file system that does not answer may never end, but the event
loop must not stop. So for a reload, a helper process reads and validates the file and checks the files that it names.
The daemon kills a helper that takes too long. Arguments of the helper: PARENT PATH LISTENING, where LISTENING is a list
in JSON. The helper writes a pickled `ReadConfig` to stdout.
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
"""Name of the descriptor that is kept for the next daemon (FDSTORE=1): the text of the configuration."""

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "import weightd_daemon.config_file as this; this.main()"
)

_PROCESS_NAME = "configuration"

# Limits the size of a helper's result, which the event loop reads and forwards.
_MAX_PROBLEMS = 100


class ReadConfig(NamedTuple):
    """Result of reading and checking a configuration file.

    Attributes:
        text: the text of the file.
        config: the configuration; None if the file is invalid.
        problems: errors in the file itself.
        model_problems: by model, errors in the files that the model names.
    """

    text: str = ""
    config: Config | None = None
    problems: tuple[str, ...] = ()
    model_problems: Mapping[str, Sequence[str]] = {}


def read_file(path: Path, listen_addresses: Sequence[str] = ()) -> ReadConfig:
    """Read and validate a configuration file, and check the files that it names."""
    try:
        text = read_text(path)
        config = load_text(text, path, listen_addresses)
    except ConfigError as error:
        more = len(error.problems) - _MAX_PROBLEMS
        answer = error.problems[:_MAX_PROBLEMS]
        return ReadConfig(problems=(*answer, f"{path}: {more} more errors") if more > 0 else answer)
    members = {name for group in config.groups.values() for name in group.models}
    model_problems = find_problems(config.models, members, runs_interpreters=False)
    return ReadConfig(
        text, config, (), {name: [f"{path}: {each}" for each in of_one] for name, of_one in model_problems.items()}
    )


class ConfigReader:
    """Reader of configuration files that runs a helper process, one file at a time.

    Args:
        process_table: watches the helper.
    """

    def __init__(self, process_table: ProcessTable) -> None:
        self._process_table = process_table
        self._has_timed_out = False

    def start(self, path: Path, listen_addresses: Sequence[str], on_result: Callable[[ReadConfig], object]) -> None:
        """Start the helper; `on_result` is called with its result.

        Raises:
            OSError: the process cannot be started.
        """
        self._has_timed_out = False
        python = [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(sys.path)]
        argv = [*python, str(os.getpid()), str(path), json.dumps(list(listen_addresses))]
        # In memory, because the daemon's directories may be missing or full.
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
        """Kill a helper that takes too long; its result reports the timeout."""
        self._has_timed_out = True
        self._process_table.kill(_PROCESS_NAME)

    def _on_exit(self, path: Path, result_fd: int, log_fd: int, on_result: Callable[[ReadConfig], object]) -> None:
        exit_cause = self._process_table.reap(_PROCESS_NAME)
        content = os.pread(result_fd, os.fstat(result_fd).st_size, 0)
        os.close(result_fd)
        os.close(log_fd)
        if exit_cause.status == 0:
            # This program has written the data for this process, so unpickling is safe.
            result: ReadConfig = pickle.loads(content)  # noqa: S301
        else:
            why = (
                "reading and checking the file took too long"
                if self._has_timed_out
                else f"cannot be read: {exit_cause}"
            )
            result = ReadConfig(problems=(f"{path}: {why}",))
        on_result(result)


def main() -> None:
    """Run the helper process."""
    process_start.reset_signals(signal.SIGINT)
    die_with_parent(int(sys.argv[1]))
    raise_score("worker")
    result = read_file(Path(sys.argv[2]), json.loads(sys.argv[3]))
    with os.fdopen(os.dup(1), "wb") as out:
        pickle.dump(result, out)


class ConfigFile:
    """The configuration file of a daemon.

    Args:
        path: the absolute path of the file.
        manager: keeps the configuration in force for the next daemon, and passes listening sockets.

    Attributes:
        path: the absolute path of the file.
        listen_addresses: addresses of the listening sockets that the service manager has passed.
        note: why the configuration in force differs from the file; "" if it does not.
    """

    def __init__(self, path: Path, manager: ServiceManager) -> None:
        self.path = path
        self.note = ""
        self._manager = manager
        self.listen_addresses = listen_addresses(manager.inherited.get(CLIENTS, []))
        self._descriptors = manager.inherited.get(CONFIG, [])
        self._text = ""

    def load_initial(self) -> Config:
        """Return the configuration to start with: the file's, or else the one that was last in force.

        Raises:
            ConfigError: the file is invalid, and no usable earlier configuration is kept.
            PathInUse: a directory is in use or cannot be created, and no usable earlier configuration is kept.
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
            self.note = f"{error}\nthe previous configuration stays in force"
            for problem in str(error).splitlines():
                _log.error("%s", problem)
            _log.error("%s is not in force: keeping the previous configuration", self.path)
            return before

    def read(self) -> Config:
        """Read the file in this process.

        Raises:
            ConfigError: the file is invalid.
        """
        text = read_text(self.path)
        config = load_text(text, self.path, self.listen_addresses)
        self._text = text
        return config

    def accept(self, result: ReadConfig) -> Config:
        """Return the configuration from a helper's result, and remember its text for `mark_in_force`.

        Raises:
            ConfigError: the file is invalid.
        """
        if result.config is None:
            raise ConfigError(*result.problems)
        self._text = result.text
        return result.config

    def mark_in_force(self) -> None:
        """Keep the text that was read last with the service manager, as the fallback for the next daemon."""
        content = self._text.encode()
        try:
            if not self._descriptors:
                self._descriptors = [os.memfd_create("weightd-config", os.MFD_CLOEXEC)]
                self._manager.store_descriptor(CONFIG, self._descriptors[0])
            os.pwrite(self._descriptors[0], content, 0)
            os.ftruncate(self._descriptors[0], len(content))
        except OSError as error:
            _log.warning("cannot keep the configuration for the next daemon: %s", error.strerror)

    def _load_previous(self) -> Config | None:
        for descriptor in self._descriptors[:1]:
            text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode("utf-8", "replace")
            try:
                config = load_text(text, self.path, self.listen_addresses)
            except ConfigError:  # the text may be from a version of weightd with other keys
                return None
            self._text = text
            return config
        return None
