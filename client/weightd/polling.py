"""Waits for descriptors: `select.poll`, also in programs in which eventlet has replaced it, and a `Waker` of a wait.

`eventlet.monkey_patch` removes `select.poll`, before or after this module is imported, and replaces `select.select` by
a function that lets other green threads run while it waits.
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
    """Return an object with the methods of `select.poll` that waits until one of `descriptors` can be read."""
    poller: Any = select.poll() if hasattr(select, "poll") else SelectPoller()
    for descriptor in descriptors:
        poller.register(descriptor, READ)
    return poller


class SelectPoller:
    """The methods of `select.poll` that the client calls, by `select.select`."""

    def __init__(self) -> None:
        self._events: Dict[int, int] = {}

    def register(self, descriptor: int, events: int) -> None:
        """Wait for these events of a descriptor from now on: `READ`, `WRITE` or both."""
        self._events[descriptor] = events

    modify = register

    def poll(self, milliseconds: float) -> List[Tuple[int, int]]:
        """Wait for so long at most; return the descriptors that are ready, each with an event."""
        readable = [each for each, events in self._events.items() if events & READ]
        writable = [each for each, events in self._events.items() if events & WRITE]
        if milliseconds > 0:
            to_read, to_write, _ = select.select(readable, writable, [], milliseconds / 1000)
        else:
            # eventlet's `select` switches to other green threads even if it does not wait, and refuses a descriptor
            # that one of them waits for.
            ready = zmq.zmq_poll(
                [*((each, zmq.POLLIN) for each in readable), *((each, zmq.POLLOUT) for each in writable)], 0
            )
            to_read = [each for each, event in ready if event & zmq.POLLIN]
            to_write = [each for each, event in ready if event & zmq.POLLOUT]
        return [*((each, READ) for each in to_read), *((each, WRITE) for each in to_write)]


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
