"""Who runs beside whom: many at once, or one alone."""

from __future__ import annotations

import contextlib
import threading
from typing import Generator


class Turns:
    """One who is to be alone waits for those that run; who comes meanwhile waits at the door, as he does."""

    def __init__(self) -> None:
        self._door = threading.Lock()
        self._left = threading.Condition()
        self._running = 0

    @contextlib.contextmanager
    def beside(self) -> Generator[None, None, None]:
        """Run beside others for a block."""
        with self._door, self._left:
            self._running += 1
        try:
            yield
        finally:
            with self._left:
                self._running -= 1
                self._left.notify()

    @contextlib.contextmanager
    def alone(self) -> Generator[None, None, None]:
        """Run alone for a block: the door is shut, so there is at most one who waits for others to leave."""
        with self._door:
            with self._left:
                self._left.wait_for(lambda: not self._running)
            yield
