"""Processes on demand: each is told of before it does anything, and then begins as a new one does."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
from typing import Callable, NamedTuple, NoReturn, Optional, Sequence

from weightd_protocol.codec import clip
from weightd_protocol.messages.worker import Fork, Forked
from weightd_worker import exit_codes, library_pages
from weightd_worker.engines.engine import Engine
from weightd_worker.forking.clone import cannot_fork_reason, clone
from weightd_worker.forking.process_state import ProcessState
from weightd_worker.pagesharing.libc import libc, unsupported_reason


class InheritedModel(NamedTuple):
    """What a process has of the one that it was forked from: an engine that has built the model.

    Attributes:
        engine: the engine.
        sha256: names the content that it has built.
        shared_bytes: how many of its memory are shared so.
    """

    engine: Engine
    sha256: str
    shared_bytes: int


MakeChildMain = Callable[[Sequence[str], Optional[InheritedModel]], Callable[[], int]]
"""Returns what lives the life of a child with these arguments, and with what is made already, up to its exit status.

What can be found out before the fork a process has in common with those that are forked later. Raises SystemExit where
the arguments are wrong.
"""

ReportForked = Callable[[Forked], bool]
"""Tells the daemon; returns whether it can have heard."""


class Forker:
    """Forks this process.

    Args:
        process_state: of this process.
        make_child_main: what the new ones do.
    """

    def __init__(self, process_state: ProcessState, make_child_main: MakeChildMain) -> None:
        self._process_state = process_state
        self._make_child_main = make_child_main

    def cannot_fork_reason(self) -> str:
        """Return why this process cannot be forked now, "" if it can."""
        return cannot_fork_reason()

    def freeze_memory(self) -> None:
        """Make what is in memory fit to be shared: to be called when all is there that others are to have.

        A collection of garbage writes to each object that it looks at, and free memory would be shared until used.

        Raises:
            OSError: as `ProcessState.restore`.
        """
        self._process_state.restore()
        gc.collect()
        if not unsupported_reason():
            libc().trim_heap()
        library_pages.drop_unchanged_pages()
        gc.freeze()

    def fork(self, order: Fork, report: ReportForked, inherited_model: Optional[InheritedModel] = None) -> None:
        """Make the process, and tell of it, or why there is none. In that process this does not return."""
        reason = self.cannot_fork_reason()
        if not reason:
            try:
                self._fork(order, report, self._make_child_main(order.arguments, inherited_model))
            except OSError as error:
                reason = f"cannot fork: {error.strerror}"
            except SystemExit:
                reason = f"cannot fork: wrong arguments: {' '.join(order.arguments)}"
        if reason:
            report(Forked(order.name, 0, clip(reason)))

    def _fork(self, order: Fork, report: ReportForked, child_main: Callable[[], int]) -> None:
        read_fd, write_fd = os.pipe()
        try:
            _flush_output()
            pid = clone()
            if not pid:
                self._run_child(order, child_main, read_fd, write_fd)
            # It waits for a byte. Without it, because this process ends or nobody hears of it, it leaves.
            if report(Forked(order.name, pid)):
                with contextlib.suppress(BrokenPipeError):
                    os.write(write_fd, b"\0")
        finally:
            os.close(read_fd)
            os.close(write_fd)

    def _run_child(self, order: Fork, child_main: Callable[[], int], read_fd: int, write_fd: int) -> NoReturn:
        def delayed_main() -> int:
            os.close(write_fd)
            if not os.read(read_fd, 1):
                # Its end is not its own doing: where the daemon was told of it, another one is made.
                os.kill(os.getpid(), signal.SIGKILL)
            self._process_state.initialize_child(order.log)
            return child_main()

        exit_codes.run_and_exit(delayed_main)


def _flush_output() -> None:
    """What is buffered would be written by each process that has the buffer."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
