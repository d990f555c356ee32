"""One epoll over sockets, pidfds, the signal pipe and the clock. Who is ready, or due, has its handler called."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import time
from collections.abc import Callable, Generator

import zmq

from weightd.daemon.host.timers import Timer, Timers

_LONGEST_WAIT_S = 3600.0

# Plain integers: pyzmq's own are slower.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT

# Whatever else is told, a hangup or an error, the one who reads finds out.
_READABLE = ~_OUT


class Loop:
    """Handlers by what they wait for: a file descriptor, a ZeroMQ socket or a time.

    All descriptors stand in one epoll, and all times in one heap: a hundred children, a thousand connections or a
    thousand models cost a wake-up no more than one. A descriptor's handler is called again and again until nothing is
    left to read, or room to write; so it need not do everything at once.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._timers = Timers()
        self._readers: dict[int, Callable[[], object]] = {}
        self._writers: dict[int, Callable[[], object]] = {}
        # What is waited for, by descriptor.
        self._masks: dict[int, int] = {}
        # Since the present poll: its number may have gone to another file already, to which no event belongs.
        self._removed: set[int] = set()
        # The descriptor of a ZeroMQ socket tells once that something came, to whoever uses the socket next: that may
        # not be this loop. So these are asked before it waits, and of those that are seldom used the ones that were.
        self._sockets: dict[zmq.Socket[bytes], Callable[[], object]] = {}
        self._used: dict[zmq.Socket[bytes], Callable[[], object]] = {}
        self._paused: dict[zmq.Socket[bytes], Callable[[], object]] = {}

    def add(self, source: zmq.Socket[bytes] | int, handler: Callable[[], object]) -> None:
        """Call `handler` whenever `source` is readable, or its peer has gone."""
        if isinstance(source, int):
            self._epoll.register(source, _IN)
            self._masks[source] = _IN
            self._readers[source] = handler
        else:
            self._sockets[source] = handler
            self.add(int(source.FD), functools.partial(_call_if_readable, source, handler))

    def add_seldom(self, source: zmq.Socket[bytes], handler: Callable[[], object]) -> Callable[[], None]:
        """Call `handler` whenever a socket is readable that is seldom used, and that costs nothing meanwhile.

        To ask a socket takes longer than to wait for all others. Whoever has used it outside of the handler calls what
        is returned.
        """

        def use() -> None:
            self._used[source] = handler

        def look() -> None:
            use()
            _call_if_readable(source, handler)

        self.add(int(source.FD), look)
        use()
        return use

    def remove(self, descriptor: int) -> None:
        """Stop waiting for `descriptor`, in both directions; call it before that is closed."""
        self._epoll.unregister(descriptor)
        del self._masks[descriptor], self._readers[descriptor]
        self._writers.pop(descriptor, None)
        self._removed.add(descriptor)

    def watch_writes(self, descriptor: int, handler: Callable[[], object]) -> None:
        """Call `handler` whenever `descriptor`, which was added, can be written to."""
        self._writers[descriptor] = handler
        self._want(descriptor, self._masks[descriptor] | _OUT)

    def unwatch_writes(self, descriptor: int) -> None:
        """Do not call that handler any more; it is no matter whether there was one."""
        if self._writers.pop(descriptor, None) is not None:
            self._want(descriptor, self._masks[descriptor] & ~_OUT)

    def pause(self, source: zmq.Socket[bytes] | int) -> None:
        """Do not tell that `source` is readable, only that its peer has gone, until `resume`."""
        if not isinstance(source, int):
            self._paused[source] = self._sockets.pop(source)
            source = int(source.FD)
        self._want(source, self._masks[source] & ~_IN)

    def resume(self, source: zmq.Socket[bytes] | int) -> None:
        """Tell again that `source` is readable."""
        if not isinstance(source, int):
            self._sockets[source] = self._paused.pop(source)
            source = int(source.FD)
        self._want(source, self._masks[source] | _IN)

    def add_timer(self, timer: Timer) -> None:
        """Call the timer's handler whenever it is due."""
        self._timers.add(timer)

    def wait(self, seconds: float = _LONGEST_WAIT_S) -> None:
        """Wait at most `seconds`, and call the handler of each source that is ready, then of each timer that is due."""
        ready = [handler for socket, handler in self._sockets.items() if _is_readable(socket)]
        if self._used:
            self._used = {socket: handler for socket, handler in self._used.items() if _is_readable(socket)}
            ready += self._used.values()
        seconds = 0.0 if ready else min(seconds, _LONGEST_WAIT_S, self._timers.next_due - time.monotonic())
        self._removed.clear()
        # The kernel's clock has milliseconds, and Python rounds up: a wait never ends early.
        for descriptor, events in self._epoll.poll(max(0.0, seconds)):
            if events & _READABLE and descriptor not in self._removed:
                self._readers[descriptor]()
            if events & _OUT and descriptor in self._writers and descriptor not in self._removed:
                self._writers[descriptor]()
        for handler in ready:
            handler()
        self._timers.run(time.monotonic())

    def close(self) -> None:
        """Give the epoll descriptor back."""
        self._epoll.close()

    def _want(self, descriptor: int, mask: int) -> None:
        if mask != self._masks[descriptor]:
            self._masks[descriptor] = mask
            self._epoll.modify(descriptor, mask)


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


def _call_if_readable(socket: zmq.Socket[bytes], handler: Callable[[], object]) -> None:
    """The descriptor of a ZeroMQ socket tells that something has happened to it, whatever it is."""
    if _is_readable(socket):
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
