"""Reads a configuration file in a process of its own.

The parser takes seconds or more for some files, a file system that does not answer takes for ever, and the daemon's
loop must go on meanwhile. So a helper process reads the file, checks it, and looks at the files that it names; the
daemon ends a helper that takes too long. Arguments of the helper: PARENT PATH LISTENING, the last as a list in JSON. It
answers on stdout with a pickled `ReadConfig`.
"""

from __future__ import annotations

import functools
import json
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
from weightd_daemon.config.check import find_problems
from weightd_daemon.config.load import Config, ConfigError, load_text, read_text
from weightd_daemon.platform import processes
from weightd_daemon.processes.process_table import ProcessTable

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "import weightd_daemon.handover.config_reader as this; this.main()"
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
