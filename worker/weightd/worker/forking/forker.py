"""Processes on demand: each is told of before it does anything, and then begins as a new one does."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from typing import Callable, NamedTuple, NoReturn, Optional, Sequence

from weightd.protocol.codec import clip
from weightd.protocol.messages.children import Fork, Forked
from weightd.worker import exits
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


Become = Callable[[Sequence[str], Optional[Made]], int]
"""Lives the life of a child with these arguments, and with what is made already; returns its exit status."""

Tell = Callable[[Forked], bool]
"""Tells the daemon; returns whether it can have heard."""


class Forker:
    """Forks this process.

    Args:
        beginning: of this process.
        become: what the new ones do.
    """

    def __init__(self, beginning: Beginning, become: Become) -> None:
        self._beginning = beginning
        self._become = become

    def refusal(self) -> str:
        """Return why this process cannot be forked now, "" if it can."""
        return refusal()

    def settle(self) -> None:
        """Make what is in memory fit to be shared: to be called when all is there that others are to have.

        A collection of garbage writes to each object that it looks at, and free memory would be shared until used.
        """
        gc.collect()
        if not unsupported():
            libc().give_back_free_memory()
        gc.freeze()

    def fork(self, order: Fork, tell: Tell, made: Optional[Made] = None) -> None:
        """Make the process, and tell of it, or why there is none. In that process this does not return."""
        reason = self.refusal()
        if not reason:
            try:
                self._fork(order, tell, made)
            except OSError as error:
                reason = f"cannot fork: {error.strerror}"
        if reason:
            tell(Forked(order.name, 0, clip(reason)))

    def _fork(self, order: Fork, tell: Tell, made: Optional[Made]) -> None:
        reading, writing = os.pipe()
        try:
            _write_out()
            pid = clone()
            if not pid:
                self._live(order, made, reading, writing)
            # It waits for a byte. Without it, because this process ends or nobody hears of it, it leaves.
            if tell(Forked(order.name, pid)):
                with contextlib.suppress(BrokenPipeError):
                    os.write(writing, b"\0")
        finally:
            os.close(reading)
            os.close(writing)

    def _live(self, order: Fork, made: Optional[Made], reading: int, writing: int) -> NoReturn:
        def life() -> int:
            os.close(writing)
            if not os.read(reading, 1):
                return exits.OK
            self._beginning.again(order.log)
            return self._become(order.arguments, made)

        exits.end(life)


def _write_out() -> None:
    """What is buffered would be written by each process that has the buffer."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
