"""Waits for descriptors, and ends the wait of another thread."""

from __future__ import annotations

import contextlib
import os
import threading
from time import monotonic
from typing import Any, Sequence

from weightd.polling import READ, WRITE, new_poller


class Waker:
    """Ends one wait for each time that it is set, or spares it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._closed = True
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_event = (self._read, READ)
        self._closed = False

    def set(self) -> None:
        """End the wait that there is, or the next one."""
        # The number of a closed descriptor may be anybody's soon.
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._write, b"\0")

    def make_poller(self, descriptors: Sequence[int], *, to_write: bool = False) -> Any:
        """Return what `wait` takes: waits until one can be read from or, if so, the first one be written to."""
        poller = new_poller((*descriptors, self._read))
        if to_write:
            poller.modify(descriptors[0], READ | WRITE)
        return poller

    def wait(self, poller: Any, deadline: float) -> bool:
        """Wait; return whether that had an end by the deadline."""
        timeout_ms = (deadline - monotonic()) * 1000
        # It waits for milliseconds, and not less than it is told. A negative number would be for ever.
        ready: Sequence[Any] = poller.poll(timeout_ms) if timeout_ms > 0 else ()
        if not ready:
            # Python reports nothing if the time-out ended while the process was stopped, whatever is ready.
            ready = poller.poll(0)
        if not ready:
            return False
        if self._wake_event in ready:
            self._clear()
        return True

    def close(self) -> None:
        """Give the descriptors back. The second time does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._read)
                os.close(self._write)

    def _clear(self) -> None:
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._read, 4096)

    def __del__(self) -> None:
        self.close()
