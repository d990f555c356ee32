"""Processes on demand: each is told of before it does anything, and then begins as a new one does."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
from typing import Callable, NamedTuple, NoReturn, Optional, Sequence

from weightd.protocol.codec import clip
from weightd.protocol.messages.children import Fork, Forked
from weightd.worker import exits, libraries
from weightd.worker.engines.engine import Engine
from weightd.worker.forking.beginning import Beginning
from weightd.worker.forking.clone import clone, refusal
from weightd.worker.pagesharing.libc import libc, unsupported


class Made(NamedTuple):
    """What a process has of the one that it was forked from: an engine that has built the model.

    Attributes:
        engine: the engine.
        sha256: names the content that it has built.
        bytes: how many of its memory are shared so.
    """

    engine: Engine
    sha256: str
    bytes: int


Ready = Callable[[Sequence[str], Optional[Made]], Callable[[], int]]
"""Returns what lives the life of a child with these arguments, and with what is made already, up to its exit status.

What can be found out before the fork a process has in common with those that are forked later. Raises SystemExit where
the arguments are wrong.
"""

Tell = Callable[[Forked], bool]
"""Tells the daemon; returns whether it can have heard."""


class Forker:
    """Forks this process.

    Args:
        beginning: of this process.
        ready: what the new ones do.
    """

    def __init__(self, beginning: Beginning, ready: Ready) -> None:
        self._beginning = beginning
        self._ready = ready

    def refusal(self) -> str:
        """Return why this process cannot be forked now, "" if it can."""
        return refusal()

    def settle(self) -> None:
        """Make what is in memory fit to be shared: to be called when all is there that others are to have.

        A collection of garbage writes to each object that it looks at, and free memory would be shared until used.

        Raises:
            OSError: as `Beginning.restore`.
        """
        self._beginning.restore()
        gc.collect()
        if not unsupported():
            libc().give_back_free_memory()
        libraries.let_go()
        gc.freeze()

    def fork(self, order: Fork, tell: Tell, made: Optional[Made] = None) -> None:
        """Make the process, and tell of it, or why there is none. In that process this does not return."""
        reason = self.refusal()
        if not reason:
            try:
                self._fork(order, tell, self._ready(order.arguments, made))
            except OSError as error:
                reason = f"cannot fork: {error.strerror}"
            except SystemExit:
                reason = f"cannot fork: wrong arguments: {' '.join(order.arguments)}"
        if reason:
            tell(Forked(order.name, 0, clip(reason)))

    def _fork(self, order: Fork, tell: Tell, live: Callable[[], int]) -> None:
        reading, writing = os.pipe()
        try:
            _write_out()
            pid = clone()
            if not pid:
                self._live(order, live, reading, writing)
            # It waits for a byte. Without it, because this process ends or nobody hears of it, it leaves.
            if tell(Forked(order.name, pid)):
                with contextlib.suppress(BrokenPipeError):
                    os.write(writing, b"\0")
        finally:
            os.close(reading)
            os.close(writing)

    def _live(self, order: Fork, live: Callable[[], int], reading: int, writing: int) -> NoReturn:
        def life() -> int:
            os.close(writing)
            if not os.read(reading, 1):
                # Its end is not its own doing: where the daemon was told of it, another one is made.
                os.kill(os.getpid(), signal.SIGKILL)
            self._beginning.again(order.log)
            return live()

        exits.end(life)


def _write_out() -> None:
    """What is buffered would be written by each process that has the buffer."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
