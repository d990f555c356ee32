"""Table of the running child processes, and one-shot helper processes that return a result through a pipe."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from weightd_daemon.platform import cgroup, processes
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.exit_cause import ExitCause, ExitClassifier
from weightd_daemon.platform.processes import ChildProcess


class ProcessTable:
    """Watches, signals and reaps the running child processes.

    Args:
        loop: reports the exits of children.

    Attributes:
        processes: the running children, by name.
    """

    def __init__(self, loop: EventLoop) -> None:
        self.processes: dict[str, ChildProcess] = {}
        self._loop = loop
        self._exit_classifier = ExitClassifier(_count_oom_kills)

    def add(self, name: str, process: ChildProcess, on_exit: Callable[[], object]) -> None:
        """Watch a child. `on_exit` is called after the child has exited, and must call `reap`."""
        self.processes[name] = process
        self._loop.add(process.pidfd, on_exit)

    def reap(self, name: str) -> ExitCause:
        """Reap a child that has exited; return the cause of its exit."""
        process = self.processes.pop(name)
        self._loop.remove(process.pidfd)
        return self._exit_classifier.classify(name, processes.reap(process), processes.log_tail(process))

    def find(self, pid: int) -> str | None:
        """Return the name of the child with this pid, or None."""
        return next((name for name, process in self.processes.items() if process.pid == pid), None)

    def open_statm(self, name: str) -> int:
        """Return a descriptor of /proc/PID/statm of a child. Check afterwards that the child is alive.

        Raises:
            KeyError: there is no such child.
            OSError: the file cannot be opened.
        """
        return os.open(f"/proc/{self.processes[name].pid}/statm", os.O_RDONLY | os.O_CLOEXEC)

    def is_alive(self, name: str) -> bool:
        """Return whether a child is alive. The result is False as soon as the child begins to exit."""
        return name in self.processes and processes.is_alive(self.processes[name])

    def kill(self, name: str, *, abort: bool = False) -> None:
        """Kill a child by SIGKILL or, with `abort`, by SIGABRT.

        `reap` attributes the exit to the daemon, unless the child had begun to exit before.
        """
        if name in self.processes:
            if self.is_alive(name):
                self._exit_classifier.record_signal(name)
            processes.kill(self.processes[name], signal.SIGABRT if abort else signal.SIGKILL)

    def kill_unwanted(self, name: str, process: ChildProcess) -> None:
        """Kill a process that has no event handler, and reap it after its exit."""
        processes.kill(process)
        name = f"{name} ({process.pid})"
        self.add(name, process, functools.partial(self.reap, name))

    def kill_all(self) -> None:
        """Kill all children."""
        for process in self.processes.values():
            processes.kill(process)


def _count_oom_kills() -> int:
    limit = cgroup.memory()
    return limit.oom_kills or 0 if limit is not None else 0


# Maximum size of a helper's result in bytes. Every result is shorter. The capacity of a pipe is at least this size, so
# that a helper never blocks when it writes its result.
_MAX_RESULT_BYTES = 65536

OneshotResult = Mapping[str, Any]
"""The JSON object that a helper process has written to stdout; empty if the helper has written none."""


def run_oneshot(
    process_table: ProcessTable,
    name: str,
    argv: Sequence[str],
    log: Path,
    on_result: Callable[[OneshotResult, ExitCause], None],
    *,
    stdin_data: bytes = b"",
) -> None:
    """Start a helper process whose stdout is a pipe. After its exit, pass its result to `on_result`.

    Args:
        process_table: watches the helper.
        name: the name of the helper.
        argv: the command line, which every user of the host can read.
        log: the file for the stderr of the helper.
        on_result: called after the exit of the helper, with its result and its exit cause.
        stdin_data: the stdin of the helper.

    Raises:
        OSError: the helper cannot be started.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        process = processes.start(argv, log, stdout=writer, stdin_data=stdin_data)
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    process_table.add(name, process, functools.partial(_on_exit, process_table, name, reader, on_result))


def _on_exit(
    process_table: ProcessTable, name: str, reader: int, on_result: Callable[[OneshotResult, ExitCause], None]
) -> None:
    exit_cause = process_table.reap(name)
    result: OneshotResult = {}
    # The read raises BlockingIOError if the helper has written no result, and a process that the helper has started
    # still holds the writing end of the pipe.
    with contextlib.suppress(BlockingIOError):
        result = _parse_result(os.read(reader, _MAX_RESULT_BYTES))
    os.close(reader)
    on_result(result, exit_cause)


def _parse_result(content: bytes) -> OneshotResult:
    try:
        result = cast("object", json.loads(content))
    except ValueError:
        return {}
    return cast("OneshotResult", result) if isinstance(result, dict) else {}
