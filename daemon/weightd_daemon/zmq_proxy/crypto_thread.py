"""A thread for what takes long: large frames are encrypted and decrypted there, while the proxy's loop goes on."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from weightd_daemon.zmq_proxy.fair_queue import FairQueue

_Task = tuple[Callable[[], Any], Callable[[Any], object]]


class CryptoThread:
    """Makes calls one after another in a thread, those of different users in turn.

    Attributes:
        descriptor: readable when `collect` has something to do.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._tasks: FairQueue[_Task] = FairQueue()
        self._results: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._tasks_changed = threading.Condition()

    def start(self) -> None:
        """Start the thread, which ends with the process."""
        threading.Thread(target=self._run_thread, daemon=True).start()

    def submit(self, user: str, function: Callable[[], Any], on_done: Callable[[Any], object]) -> None:
        """Call `function` in the thread for a user, and `on_done` with its result in `collect`.

        With None for no memory.
        """
        with self._tasks_changed:
            self._tasks.put(user, (function, on_done))
            self._tasks_changed.notify()

    def collect(self) -> None:
        """Hand over the results that are there."""
        os.eventfd_read(self.descriptor)
        while self._results:
            done, result = self._results.popleft()
            done(result)

    def _run_thread(self) -> None:
        while True:
            with self._tasks_changed:
                while not self._tasks:
                    self._tasks_changed.wait()
                call, done = self._tasks.take()
            try:
                result = call()
            except MemoryError:
                result = None
            self._results.append((done, result))
            # What was given to the call is not to be kept until the next one comes.
            del call, done, result
            os.eventfd_write(self.descriptor, 1)
