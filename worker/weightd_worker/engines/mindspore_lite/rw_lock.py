"""Who runs beside whom: many at once, or one alone."""

from __future__ import annotations

import contextlib
import threading
from typing import Generator


class ReadersWriterLock:
    """One who is to be alone waits for those that run; who comes meanwhile waits at the door, as he does."""

    def __init__(self) -> None:
        self._entry_lock = threading.Lock()
        self._reader_left = threading.Condition()
        self._reader_count = 0

    @contextlib.contextmanager
    def shared(self) -> Generator[None, None, None]:
        """Run beside others for a block."""
        with self._entry_lock, self._reader_left:
            self._reader_count += 1
        try:
            yield
        finally:
            with self._reader_left:
                self._reader_count -= 1
                self._reader_left.notify()

    @contextlib.contextmanager
    def exclusive(self) -> Generator[None, None, None]:
        """Run alone for a block: the door is shut, so there is at most one who waits for others to leave."""
        with self._entry_lock:
            with self._reader_left:
                self._reader_left.wait_for(lambda: not self._reader_count)
            yield
