"""Polling of file descriptors with `select.poll`, also under eventlet, and a `Waker` that ends a wait.

`eventlet.monkey_patch` removes `select.poll`, before or after this module is imported, and replaces `select.select` by
a function that runs other green threads while it waits.
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
    """Return a `select.poll` object, or an equivalent one, registered to read from `descriptors`."""
    poller: Any = select.poll() if hasattr(select, "poll") else SelectPoller()
    for descriptor in descriptors:
        poller.register(descriptor, READ)
    return poller


class SelectPoller:
    """The methods of `select.poll` that the client needs, implemented with `select.select`."""

    def __init__(self) -> None:
        self._events: Dict[int, int] = {}

    def register(self, descriptor: int, events: int) -> None:
        """Register or replace the events of a descriptor: `READ`, `WRITE` or both."""
        self._events[descriptor] = events

    modify = register

    def poll(self, milliseconds: float) -> List[Tuple[int, int]]:
        """Wait at most `milliseconds`, and return the ready descriptors with one event each."""
        readable = [each for each, events in self._events.items() if events & READ]
        writable = [each for each, events in self._events.items() if events & WRITE]
        if milliseconds > 0:
            to_read, to_write, _ = select.select(readable, writable, [], milliseconds / 1000)
        else:
            # eventlet's `select` switches to other green threads even if it does not wait, and rejects a descriptor
            # that another green thread waits for.
            ready = zmq.zmq_poll(
                [*((each, zmq.POLLIN) for each in readable), *((each, zmq.POLLOUT) for each in writable)], 0
            )
            to_read = [each for each, event in ready if event & zmq.POLLIN]
            to_write = [each for each, event in ready if event & zmq.POLLOUT]
        return [*((each, READ) for each in to_read), *((each, WRITE) for each in to_write)]


class Waker:
    """Wakes a thread from `wait`. Each `set` ends the current wait or, if no thread waits, the next one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._closed = True
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_event = (self._read, READ)
        self._closed = False

    def set(self) -> None:
        """End the current wait, or the next one."""
        # The lock prevents a write to a closed descriptor, whose number may have been reused.
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._write, b"\0")

    def make_poller(self, descriptors: Sequence[int], *, to_write: bool = False) -> Any:
        """Return a poller for `wait`: all descriptors for reading and, if `to_write`, the first for writing."""
        poller = new_poller((*descriptors, self._read))
        if to_write:
            poller.modify(descriptors[0], READ | WRITE)
        return poller

    def wait(self, poller: Any, deadline: float) -> bool:
        """Wait until the poller is ready; return False if the deadline passed first."""
        timeout_ms = (deadline - monotonic()) * 1000
        # `poll` never waits for less than its timeout. A negative timeout would wait forever.
        ready: Sequence[Any] = poller.poll(timeout_ms) if timeout_ms > 0 else ()
        if not ready:
            # If the process was stopped until the timeout had expired, Python returns nothing even if descriptors are
            # ready.
            ready = poller.poll(0)
        if not ready:
            return False
        if self._wake_event in ready:
            self._clear()
        return True

    def close(self) -> None:
        """Close the pipe. Further calls have no effect."""
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
