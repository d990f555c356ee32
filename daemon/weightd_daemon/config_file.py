"""Reads the configuration file at the start and for a reload, and keeps its last valid text for the next daemon.

The daemon stores the text of the configuration in force with the service manager. When the service is restarted, the
file may have become invalid, or may name directories that are in use or cannot be created. Then the new daemon uses the
stored text, keeps the loaded models, and reports the problem until a reload succeeds. If no text is stored, as at the
first start, the daemon exits with an error.

Parsing takes seconds for some files, and reading from a file system that does not answer may never end, but the event
loop must not wait. So for a reload, a helper process reads and validates the file and checks the files that it names.
The daemon kills a helper that takes too long. Arguments of the helper: PARENT PATH LISTENING, where LISTENING is a list
in JSON, and "-" if the content of the file comes from stdin. The helper writes a pickled `ReadConfig` to stdout.
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
"""Name under which the service manager stores the descriptor with the configuration's text (FDSTORE=1)."""

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "import weightd_daemon.config_file as this; this.main()"
)

_PROCESS_NAME = "configuration"

# Argument of the helper: the content of the file comes from stdin.
_TEXT_ON_STDIN = "-"

# Maximum number of errors in a helper's result. It limits the size of the result, which the event loop reads.
_MAX_PROBLEMS = 100


class ReadConfig(NamedTuple):
    """Result of reading and checking a configuration file.

    Attributes:
        text: the text of the file.
        config: the configuration; None if the file is invalid.
        problems: the errors in the file itself.
        model_problems: by name of a model, the errors in the files that the model's table names.
    """

    text: str = ""
    config: Config | None = None
    problems: tuple[str, ...] = ()
    model_problems: Mapping[str, Sequence[str]] = {}


def read_file(path: Path, listen_addresses: Sequence[str] = (), text: str | None = None) -> ReadConfig:
    """Read and validate a configuration file, and check the files that it names.

    Args:
        path: the path of the file.
        listen_addresses: see `load`.
        text: the content of the file; None to read the file.
    """
    try:
        text = read_text(path) if text is None else text
        config = load_text(text, path, listen_addresses)
    except ConfigError as error:
        more = len(error.problems) - _MAX_PROBLEMS
        answer = error.problems[:_MAX_PROBLEMS]
        return ReadConfig(problems=(*answer, f"{path}: {more} more errors") if more > 0 else answer)
    members = {name for group in config.groups.values() for name in group.models}
    # Check only the models of the file itself: an error in a model of the repository must not prevent the change of
    # other models.
    own = {name: model for name, model in config.models.items() if not model.revision}
    model_problems = find_problems(own, members, runs_interpreters=False)
    return ReadConfig(
        text, config, (), {name: [f"{path}: {each}" for each in of_one] for name, of_one in model_problems.items()}
    )


class ConfigReader:
    """Reads configuration files in a helper process, one file at a time.

    Args:
        process_table: watches the helper process.
    """

    def __init__(self, process_table: ProcessTable) -> None:
        self._process_table = process_table
        self._has_timed_out = False

    def start(
        self,
        path: Path,
        listen_addresses: Sequence[str],
        on_result: Callable[[ReadConfig], object],
        text: str | None = None,
    ) -> None:
        """Start the helper; `on_result` is called with its result.

        `text` is the content of the file; None: the helper reads the file.

        Raises:
            OSError: the helper process cannot be started.
        """
        self._has_timed_out = False
        python = [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(sys.path)]
        argv = [*python, str(os.getpid()), str(path), json.dumps(list(listen_addresses))]
        argv += [] if text is None else [_TEXT_ON_STDIN]
        # The helper writes its result to memory, because the daemon's directories may be missing or full.
        result_fd = os.memfd_create("weightd-read", os.MFD_CLOEXEC)
        log_fd = os.memfd_create("weightd-read-log", os.MFD_CLOEXEC)
        try:
            process = processes.start(
                argv, Path(f"/proc/self/fd/{log_fd}"), stdout=result_fd, stdin_data=(text or "").encode()
            )
        except OSError:
            os.close(result_fd)
            os.close(log_fd)
            raise
        self._process_table.add(
            _PROCESS_NAME, process, functools.partial(self._on_exit, path, result_fd, log_fd, on_result)
        )

    def abort(self) -> None:
        """Kill a helper process that takes too long. Its result contains an error about the time-out."""
        self._has_timed_out = True
        self._process_table.kill(_PROCESS_NAME)

    def _on_exit(self, path: Path, result_fd: int, log_fd: int, on_result: Callable[[ReadConfig], object]) -> None:
        exit_cause = self._process_table.reap(_PROCESS_NAME)
        content = os.pread(result_fd, os.fstat(result_fd).st_size, 0)
        os.close(result_fd)
        os.close(log_fd)
        if exit_cause.status == 0:
            # Unpickling is safe, because the helper process, which runs the daemon's code, has written the data.
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
    text = sys.stdin.buffer.read().decode() if sys.argv[4:] == [_TEXT_ON_STDIN] else None
    result = read_file(Path(sys.argv[2]), json.loads(sys.argv[3]), text)
    with os.fdopen(os.dup(1), "wb") as out:
        pickle.dump(result, out)


class ConfigFile:
    """The configuration file of a daemon; the service manager keeps its last valid text for the next daemon.

    Args:
        path: the absolute path of the file.
        manager: stores the text of the configuration in force, and has passed listening sockets to the daemon.

    Attributes:
        path: the absolute path of the file.
        listen_addresses: the addresses of the listening sockets that the service manager has passed.
        note: why the configuration in force differs from the file; "" if it does not.
        repository_note: the errors of models in the repository; "" without any.
        text_in_force: the content of the file when it was put in force.
    """

    def __init__(self, path: Path, manager: ServiceManager) -> None:
        self.path = path
        self.note = ""
        self._manager = manager
        self.listen_addresses = listen_addresses(manager.inherited.get(CLIENTS, []))
        self._descriptors = manager.inherited.get(CONFIG, [])
        self._text = ""
        self.text_in_force = self.repository_note = ""

    def load_initial(self) -> Config:
        """Return the configuration to start with: from the file, or from the stored text if the file cannot be used.

        Raises:
            ConfigError: the file is invalid, and no valid text is stored.
            PathInUse: a directory is in use or cannot be created, and no valid text is stored.
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
        """Read and validate the file in this process.

        Raises:
            ConfigError: the file is invalid.
        """
        text = read_text(self.path)
        config = load_text(text, self.path, self.listen_addresses)
        self._text = self.text_in_force = text
        return config

    def accept(self, result: ReadConfig) -> Config:
        """Return the configuration from a helper process's result, and remember the text for `mark_in_force`.

        Raises:
            ConfigError: the file is invalid.
        """
        if result.config is None:
            raise ConfigError(*result.problems)
        self._text = result.text
        return result.config

    def mark_in_force(self) -> None:
        """Give the text that was read last to the service manager, which keeps it for the next daemon."""
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
            except ConfigError:  # the text may come from another version of weightd, which had other keys
                return None
            self._text = self.text_in_force = text
            return config
        return None
