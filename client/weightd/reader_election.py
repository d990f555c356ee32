"""Election of the thread that reads from the connection of a blocking client, among the threads that wait."""

from __future__ import annotations

import threading
from typing import Callable, Dict, List, Optional

from weightd.pending import PendingCall


class Waiter:
    """A thread that waits for the response of a call while another thread is the reader.

    Attributes:
        call: the call for whose response the thread waits.
        is_reader: whether this thread has become the reader.
        thread: the identifier of the thread.
    """

    __slots__ = ("_lock", "call", "is_reader", "thread")

    def __init__(self, call: PendingCall, thread: int) -> None:
        self.call = call
        self.thread = thread
        self.is_reader = False
        self._lock = threading.Lock()
        self._lock.acquire()

    @property
    def is_awake(self) -> bool:
        """Whether `wait` would return without sleeping."""
        return not self._lock.locked()

    def wait(self, seconds: float) -> None:
        """Sleep until another thread calls `wake`, but for at most `seconds`."""
        self._lock.acquire(timeout=max(0.0, seconds))

    def wake(self) -> None:
        """End the thread's sleep. If the thread does not sleep yet, its `wait` returns at once.

        Repeated calls have no effect.
        """
        try:
            self._lock.release()
        except RuntimeError:
            return


class ReaderElection:
    """Makes one thread at a time the reader. The reader calls `step_down` when it stops reading.

    If no other thread waits, a thread becomes the reader without a lock, by one atomic operation on `reader`.

    Args:
        current_thread: returns the identifier of the calling thread; default `threading.get_ident`.

    Attributes:
        reader: a dictionary with the reader's thread identifier under the key None; empty while there is no reader.
        blocked_count: the number of threads that wait for something other than a response. The reader must notify them
            when it steps down.
    """

    def __init__(self, current_thread: Optional[Callable[[], int]] = None) -> None:
        self.reader: Dict[None, int] = {}
        self.blocked_count = 0
        # The function is looked up at run time, not at import, because gevent and eventlet replace
        # `threading.get_ident`.
        self._current_thread = threading.get_ident if current_thread is None else current_thread
        # Protects the list of waiters, and each transfer of the reader's role from one thread to another.
        self._lock = threading.Lock()
        self._waiters: List[Waiter] = []

    def try_read(self, *, reentrant: bool = True) -> bool:
        """Make the calling thread the reader unless another thread is. Return whether the calling thread is the reader.

        If `reentrant` is False and the calling thread was the reader already, return False.
        """
        thread = self._current_thread()
        return (reentrant or self.reader.get(None) != thread) and self.reader.setdefault(None, thread) == thread

    @property
    def is_current_reader(self) -> bool:
        """Whether the calling thread is the reader."""
        return self.reader.get(None) == self._current_thread()

    def join(self, call: PendingCall) -> Optional[Waiter]:
        """Make the calling thread the reader, and return None.

        If another thread is the reader, return a waiter for `call`.
        """
        thread = self._current_thread()
        if self.reader.setdefault(None, thread) == thread:
            return None
        waiter = Waiter(call, thread)
        with self._lock:
            # First append the waiter, then try to become the reader. `step_down` first gives up the role, then looks
            # for waiters. With these opposite orders, at least one of the two threads notices the other.
            self._waiters.append(waiter)
            if self.reader.setdefault(None, thread) == thread:
                self._waiters.remove(waiter)
                return None
        call.add_done_callback(waiter.wake)
        return waiter

    def withdraw(self, waiter: Waiter) -> bool:
        """Remove the waiter. Return whether its thread has become the reader."""
        with self._lock:
            if not waiter.is_reader:
                self._waiters.remove(waiter)
            return waiter.is_reader

    def step_down(self) -> int:
        """Stop reading and elect the next reader. Return the number of blocked threads; the caller must notify them."""
        if not self._waiters:
            self.reader.clear()
        # Check again: a thread may have begun to wait after the first check, when it could not become the reader yet.
        if self._waiters:
            self._elect_next()
        return self.blocked_count

    def _elect_next(self) -> None:
        thread = self._current_thread()
        with self._lock:
            if self.reader.setdefault(None, thread) != thread:
                return
            for turn in self._waiters:
                if not turn.call.done:
                    self._waiters.remove(turn)
                    self.reader[None] = turn.thread
                    turn.is_reader = True
                    turn.wake()
                    return
            self.reader.clear()
