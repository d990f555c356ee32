"""A thread for what takes long: large frames are encrypted and decrypted there, while the gate's loop goes on."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from weightd.daemon.gate.turns import Turns

_Call = tuple[Callable[[], Any], Callable[[Any], object]]


class Separate:
    """Makes calls one after another in a thread, those of different users in turn.

    Attributes:
        descriptor: readable when `collect` has something to do.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: Turns[_Call] = Turns()
        self._results: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._changed = threading.Condition()

    def start(self) -> None:
        """Start the thread, which ends with the process."""
        threading.Thread(target=self._run, daemon=True).start()

    def run(self, user: str, call: Callable[[], Any], done: Callable[[Any], object]) -> None:
        """Call `call` in the thread for a user, and `done` with its result in `collect`; with None for no memory."""
        with self._changed:
            self._calls.wait(user, (call, done))
            self._changed.notify()

    def collect(self) -> None:
        """Hand over the results that are there."""
        os.eventfd_read(self.descriptor)
        while self._results:
            done, result = self._results.popleft()
            done(result)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._calls:
                    self._changed.wait()
                call, done = self._calls.take()
            try:
                result = call()
            except MemoryError:
                result = None
            self._results.append((done, result))
            # What was given to the call is not to be kept until the next one comes.
            del call, done, result
            os.eventfd_write(self.descriptor, 1)
