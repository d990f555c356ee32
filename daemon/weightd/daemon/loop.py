"""One poll over sockets, pidfds and the signal pipe. Whoever is readable has its handler called."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Generator
from typing import Any

import zmq

_LONGEST_WAIT_S = 3600.0


class Loop:
    """Handlers by what they wait for: a ZeroMQ socket or a file descriptor."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], object]] = {}

    def add(self, source: Any, handler: Callable[[], object]) -> None:
        """Call `handler` whenever `source` is readable."""
        self._poller.register(source, zmq.POLLIN)
        self._handlers[source] = handler

    def remove(self, source: Any) -> None:
        """Stop waiting for `source`."""
        self._poller.unregister(source)
        del self._handlers[source]

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds`, and call the handler of each readable source."""
        # Rounded up: a wait that ends a moment early would spin until its time has come.
        milliseconds = -int(-1000 * max(0.0, min(seconds, _LONGEST_WAIT_S)) // 1)
        for source, _ in self._poller.poll(milliseconds):
            handler = self._handlers.get(source)
            # A handler may have removed another source of the same poll.
            if handler is not None:
                handler()


def _only_wake(number: int, frame: object) -> None:
    """The interpreter has written the number to the pipe: that is all a signal does."""


@contextlib.contextmanager
def signals(numbers: list[signal.Signals]) -> Generator[int, None, None]:
    """Give a descriptor from which each signal's number can be read as a byte; nothing else happens on a signal."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    # The pipe is there before the handlers and after them: a signal between the two is not lost.
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _only_wake) for number in numbers}
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(reader)
        os.close(writer)
