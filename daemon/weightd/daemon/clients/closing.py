"""Descriptors of who knows what are closed where nobody waits for it.

A close is told to the file system of the file, and waits until that has heard it. One that a user has written may never
hear it; and the last one of memory waits until the kernel has freed all of it, which takes half a second for a GiB.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque

from weightd.daemon.host.shortage import explained
from weightd.shared.seldom import Seldom

_log = logging.getLogger("weightd")

# So many are waited for. Past it no connection is asked for any.
_MOST_WAITING = 64

_WARNINGS_S = 60.0


class Closing:
    """Closes descriptors in a thread of its own, which is there while there is something to close.

    Attributes:
        is_at_it: whether it has something to close.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[int] = deque()
        self.is_at_it = False
        self._warnings = Seldom(_WARNINGS_S)

    @property
    def is_behind(self) -> bool:
        """Whether so many wait that there should be no more for now."""
        if len(self._waiting) < _MOST_WAITING:
            return False
        # There may be no thread yet, and nothing else that would start one.
        self._begin()
        return True

    def close(self, descriptor: int) -> None:
        """Close it, some time."""
        with self._lock:
            self._waiting.append(descriptor)
        self._begin()

    def _begin(self) -> None:
        with self._lock:
            if self.is_at_it:
                return
            self.is_at_it = True
        try:
            threading.Thread(target=self._close_all, name="closing", daemon=True).start()
        except RuntimeError as error:
            # The descriptors wait for the next call.
            self.is_at_it = False
            if self._warnings.tell("", time.monotonic()) is not None:
                _log.warning("descriptors of clients are not closed yet: %s", explained(str(error)))

    def _close_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self.is_at_it = False
                    return
                descriptor = self._waiting[0]
            os.close(descriptor)
            with self._lock:
                self._waiting.popleft()
