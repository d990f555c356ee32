"""The child processes that run: watched, signalled and reaped; and helpers that do one thing and reply on a pipe."""

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
    """The children that run, by name.

    Args:
        loop: calls when one has exited.

    Attributes:
        processes: all of them.
    """

    def __init__(self, loop: EventLoop) -> None:
        self.processes: dict[str, ChildProcess] = {}
        self._loop = loop
        self._exit_classifier = ExitClassifier(_count_oom_kills)

    def add(self, name: str, process: ChildProcess, on_exit: Callable[[], object]) -> None:
        """Watch a child: `on_exit` is called once it has exited, and has to `reap` it."""
        self.processes[name] = process
        self._loop.add(process.pidfd, on_exit)

    def reap(self, name: str) -> ExitCause:
        """Wait for a child that has exited; return how it has ended."""
        process = self.processes.pop(name)
        self._loop.remove(process.pidfd)
        return self._exit_classifier.classify(name, processes.reap(process), processes.log_tail(process))

    def find(self, pid: int) -> str | None:
        """Return the name of the child with this pid; None if there is none."""
        return next((name for name, process in self.processes.items() if process.pid == pid), None)

    def is_alive(self, name: str) -> bool:
        """Return whether a child has not begun to exit: asked of the kernel, before its death is told."""
        return name in self.processes and processes.is_alive(self.processes[name])

    def kill(self, name: str, *, abort: bool = False) -> None:
        """Kill a child; its exit is told as any other, and that of one that was ending already as what it was."""
        if name in self.processes:
            if self.is_alive(name):
                self._exit_classifier.record_signal(name)
            processes.kill(self.processes[name], signal.SIGABRT if abort else signal.SIGKILL)

    def kill_unwanted(self, name: str, process: ChildProcess) -> None:
        """Kill a process that nobody wants, and reap it once it has exited."""
        processes.kill(process)
        name = f"{name} ({process.pid})"
        self.add(name, process, functools.partial(self.reap, name))

    def kill_all(self) -> None:
        """Kill every child."""
        for process in self.processes.values():
            processes.kill(process)


def _count_oom_kills() -> int:
    limit = cgroup.memory()
    return limit.oom_kills or 0 if limit is not None else 0


# No answer is longer, nor fills a pipe.
_MAX_RESULT_BYTES = 65536

OneshotResult = Mapping[str, Any]
"""What a helper has answered; nothing where it has not."""


def run_oneshot(
    process_table: ProcessTable,
    name: str,
    argv: Sequence[str],
    log: Path,
    on_result: Callable[[OneshotResult, ExitCause], None],
    *,
    stdin_data: bytes = b"",
) -> None:
    """Start a helper, whose stdout is the pipe; `on_result` what it has answered, and how it has ended, once it has.

    Args:
        process_table: watches the helper.
        name: of the helper.
        argv: its command, which every user of the host may read.
        log: where its stderr goes.
        on_result: is called once the helper has ended.
        stdin_data: what the helper reads from stdin.

    Raises:
        OSError: it cannot be started.
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
    # Nothing, and no end of it: it has left somebody behind who still could say something.
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
