"""Polling of file descriptors that also works under eventlet, and a `Waker` that interrupts a waiting thread.

`eventlet.monkey_patch` removes `select.poll`, possibly after this module was imported. It replaces `select.select` by a
function that runs other green threads while it waits.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from time import monotonic
from typing import Any, Dict, List, Sequence, Tuple

import zmq

READ, WRITE = int(select.POLLIN), int(select.POLLOUT)


def new_poller(descriptors: Sequence[int]) -> Any:
    """Return a poller that watches `descriptors` for reading: `select.poll`, or `SelectPoller` if that is missing."""
    poller: Any = select.poll() if hasattr(select, "poll") else SelectPoller()
    for descriptor in descriptors:
        poller.register(descriptor, READ)
    return poller


class SelectPoller:
    """The methods of `select.poll` that the client needs, implemented with `select.select`."""

    def __init__(self) -> None:
        self._events: Dict[int, int] = {}

    def register(self, descriptor: int, events: int) -> None:
        """Set the events for which a descriptor is polled: `READ`, `WRITE` or both. Earlier events are replaced."""
        self._events[descriptor] = events

    modify = register

    def poll(self, milliseconds: float) -> List[Tuple[int, int]]:
        """Wait at most `milliseconds`. Return the descriptors that are ready, each with `READ` or `WRITE`."""
        readable = [each for each, events in self._events.items() if events & READ]
        writable = [each for each, events in self._events.items() if events & WRITE]
        if milliseconds > 0:
            to_read, to_write, _ = select.select(readable, writable, [], milliseconds / 1000)
        else:
            # Do not use eventlet's `select` here. It switches to other green threads even with a timeout of 0, and it
            # rejects a descriptor that another green thread is waiting for.
            ready = zmq.zmq_poll(
                [*((each, zmq.POLLIN) for each in readable), *((each, zmq.POLLOUT) for each in writable)], 0
            )
            to_read = [each for each, event in ready if event & zmq.POLLIN]
            to_write = [each for each, event in ready if event & zmq.POLLOUT]
        return [*((each, READ) for each in to_read), *((each, WRITE) for each in to_write)]


class Waker:
    """Wakes a thread that is in `wait`. If no thread waits when `set` is called, the next `wait` returns at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._closed = True
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_event = (self._read, READ)
        self._closed = False

    def set(self) -> None:
        """End the current `wait`. If no thread waits, the next `wait` returns at once."""
        # Without the lock, `set` could write to the descriptor after `close`, when its number may be in use for another
        # file.
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._write, b"\0")

    def make_poller(self, descriptors: Sequence[int], *, to_write: bool = False) -> Any:
        """Return a poller to pass to `wait`.

        It polls all descriptors for reading and, if `to_write`, the first for writing.
        """
        poller = new_poller((*descriptors, self._read))
        if to_write:
            poller.modify(descriptors[0], READ | WRITE)
        return poller

    def wait(self, poller: Any, deadline: float) -> Sequence[Tuple[int, int]]:
        """Wait until a descriptor of the poller is ready or `set` is called.

        Return the descriptors that are ready, each with its events; none at the deadline.
        """
        timeout_ms = (deadline - monotonic()) * 1000
        # One call with the whole remaining time suffices, because without an event `poll` never returns before its
        # timeout. A negative timeout would make it wait forever.
        ready: Sequence[Tuple[int, int]] = poller.poll(timeout_ms) if timeout_ms > 0 else ()
        if not ready:
            # If the process was suspended past the timeout, Python reports no descriptor even if some are ready. Poll
            # once more, without waiting.
            ready = poller.poll(0)
        if self._wake_event in ready:
            self._clear()
        return ready

    def close(self) -> None:
        """Close the pipe. Repeated calls have no effect."""
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
