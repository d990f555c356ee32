"""Fair scheduling of a proxy's work: reads from sockets, and encryption and decryption of large frames.

Users take turns, and the sockets of one user take turns.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from weightd_common.rate_limits import RoundRobinQueue
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.zmq_proxy.client import ClientSocket

# Maximum number of sockets that are read without delay in one turn of the loop. Further readable sockets are queued.
_MAX_READS_PER_TURN = 2

# Maximum number of seconds for reads from queued sockets before the loop checks all descriptors again.
_TIME_SLICE_S = 2e-4


class ReadTurns:
    """Schedules reads from the sockets of clients: without delay while few are readable, else one user after another.

    Args:
        loop: reports readable sockets.
        on_peer_closed: called with a paused socket whose other end has been closed.
    """

    def __init__(self, loop: EventLoop, on_peer_closed: Callable[[ClientSocket], object]) -> None:
        self._loop = loop
        self._on_peer_closed = on_peer_closed
        self._queue: RoundRobinQueue[ClientSocket] = RoundRobinQueue()
        # The end of the loop's last wait, which identifies the turn in which `_reads_this_turn` sockets were read.
        self._turn_began_at = loop.now
        self._reads_this_turn = 0

    def on_readable(self, side: ClientSocket) -> None:
        """Read from a socket, or queue it. If it is paused, only check whether its other end has been closed."""
        if side.pause_reasons:
            if side.has_peer_closed():
                self._on_peer_closed(side)
            return
        if self._turn_began_at != self._loop.now:
            self._turn_began_at, self._reads_this_turn = self._loop.now, 0
        if self._queue or self._reads_this_turn >= _MAX_READS_PER_TURN:
            self._enqueue(side)
            return
        self._reads_this_turn += 1
        if not side.read_once(side.client) and side.is_open:
            self._enqueue(side)

    def pause(self, side: ClientSocket, reason: int) -> None:
        """Add a reason to pause a socket, and stop reading from it."""
        if side.is_open and not side.pause_reasons:
            self._loop.pause_reading(side.fd)
        side.pause_reasons |= reason

    def resume(self, side: ClientSocket, reason: int) -> None:
        """Remove a reason to pause a socket, and read from the socket again if it has no other reason."""
        if side.pause_reasons & reason and side.is_open:
            side.pause_reasons &= ~reason
            if not side.pause_reasons:
                self._loop.resume_reading(side.fd)

    def resume_with_backlog(self, side: ClientSocket, reason: int) -> None:
        """Like `resume`, but first parse the data that was read from the socket before."""
        if side.pause_reasons == reason and side.is_backlogged and side.is_open:
            side.pause_reasons = 0
            self._loop.resume_reading(side.fd)
            self._enqueue(side)
        else:
            self.resume(side, reason)

    def remove(self, side: ClientSocket) -> None:
        """Stop reading from a socket that will be closed."""
        self._queue.remove(side.client.user, side)
        self._loop.remove(side.fd)

    def _enqueue(self, side: ClientSocket) -> None:
        """Put a socket into the queue, and pause it until its turn."""
        self.pause(side, ClientSocket.WAITS_FOR_TURN)
        self._queue.put(side.client.user, side)
        self._loop.call_soon(self._serve_queue)

    def _serve_queue(self) -> None:
        """Read from the sockets in the queue for at most one time slice."""
        deadline = event_loop.now() + _TIME_SLICE_S
        while self._queue:
            side = self._queue.take()
            if side.pause_reasons != ClientSocket.WAITS_FOR_TURN or side.read_once(side.client):
                self.resume(side, ClientSocket.WAITS_FOR_TURN)
            elif side.is_open:
                self._queue.put(side.client.user, side)
            if event_loop.now() >= deadline:
                break
        if self._queue:
            self._loop.call_soon(self._serve_queue)


_Task = tuple[Callable[[], Any], Callable[[Any], object]]


class CryptoThread:
    """Thread that encrypts and decrypts large frames. It runs one task at a time; users take turns.

    Attributes:
        descriptor: a descriptor that is readable when `collect` has results to deliver.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._tasks: RoundRobinQueue[_Task] = RoundRobinQueue()
        self._results: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._tasks_changed = threading.Condition()

    def start(self) -> None:
        """Start the thread, which runs until the process exits."""
        threading.Thread(target=self._run_thread, daemon=True).start()

    def submit(self, user: str, function: Callable[[], Any], on_done: Callable[[Any], object]) -> None:
        """Have the thread call `function`, as a task of a user.

        When the task has finished, `collect` calls `on_done` with the result, or with None if `function` raised
        MemoryError.
        """
        with self._tasks_changed:
            self._tasks.put(user, (function, on_done))
            self._tasks_changed.notify()

    def collect(self) -> None:
        """Call `on_done` of each task that has finished, with its result."""
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
            # Drop the references to the large frames. Otherwise they would stay in memory until the next task.
            del call, done, result
            os.eventfd_write(self.descriptor, 1)
