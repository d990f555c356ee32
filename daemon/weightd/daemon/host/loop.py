"""One poll over sockets, pidfds, the signal pipe and the clock. Who is readable, or due, has its handler called."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Generator
from typing import Any

import zmq

from weightd.daemon.host.timers import Timer, Timers

_LONGEST_WAIT_S = 3600.0


class Loop:
    """Handlers by what they wait for: a ZeroMQ socket, a file descriptor or a time.

    All descriptors stand behind one epoll descriptor, and all times in one heap: a hundred children, or a thousand
    models, cost a wake-up no more than one.
    """

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._descriptors = select.epoll()
        self._timers = Timers()
        self._handlers: dict[Any, Callable[[], object]] = {self._descriptors.fileno(): self._on_descriptors}
        self._poller.register(self._descriptors.fileno(), zmq.POLLIN)

    def add(self, source: zmq.Socket[bytes] | int, handler: Callable[[], object]) -> None:
        """Call `handler` whenever `source` is readable."""
        if isinstance(source, int):
            self._descriptors.register(source, select.EPOLLIN)
        else:
            self._poller.register(source, zmq.POLLIN)
        self._handlers[source] = handler

    def remove(self, descriptor: int) -> None:
        """Stop waiting for `descriptor`; call it before that is closed."""
        self._descriptors.unregister(descriptor)
        del self._handlers[descriptor]

    def add_timer(self, timer: Timer) -> None:
        """Call the timer's handler whenever it is due."""
        self._timers.add(timer)

    def wait(self, seconds: float = _LONGEST_WAIT_S) -> None:
        """Wait at most `seconds`, and call the handler of each readable source, then of each timer that is due."""
        seconds = min(seconds, self._timers.next_due - time.monotonic())
        # Rounded up: a wait that ends a moment early would spin until its time has come.
        milliseconds = -int(-1000 * max(0.0, min(seconds, _LONGEST_WAIT_S)) // 1)
        for source, _ in self._poller.poll(milliseconds):
            self._handlers[source]()
        self._timers.run(time.monotonic())

    def _on_descriptors(self) -> None:
        for descriptor, _ in self._descriptors.poll(0):
            handler = self._handlers.get(descriptor)
            # A handler may have removed another descriptor of the same poll.
            if handler is not None:
                handler()

    def close(self) -> None:
        """Give the epoll descriptor back."""
        self._descriptors.close()


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
