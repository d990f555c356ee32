"""Which of the threads that wait for answers reads them, for all: the first one, until it has its own; then another.

An exception from outside, as of Ctrl-C, may hit a thread before it can say that it reads no more. It still has the
right to read then, and uses it when it is back.

Nobody looks on in vain: who reads may wait in the kernel, the others wait for it alone, each as long as it likes.
"""

from __future__ import annotations

import threading
from typing import Callable, Dict, List, Optional

from weightd.protocol_core import PendingCall


class Waiter:
    """A thread that waits for `call`, while another one reads.

    Attributes:
        is_reader: whether it is its turn to read now.
        thread: which it is.
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
        """Whether `wait` would return at once."""
        return not self._lock.locked()

    def wait(self, seconds: float) -> None:
        """Wait until somebody has called `wake`."""
        self._lock.acquire(timeout=max(0.0, seconds))

    def wake(self) -> None:
        """End the sleep, or have it not begin. There may be two reasons: the second changes nothing."""
        try:
            self._lock.release()
        except RuntimeError:
            return


class ReaderElection:
    """Gives the right to read to one thread at a time. Whoever has it calls `step_down` in the end.

    Who is alone needs no lock for that: the right is taken in one step, with the name of who has it.

    Args:
        current_thread: tells which one calls; by default `threading.get_ident`.

    Attributes:
        reader: the thread that has the right, under the one key that there is; empty where none has.
        blocked_count: how many wait for something else than an answer, and have to know when somebody leaves.
    """

    def __init__(self, current_thread: Optional[Callable[[], int]] = None) -> None:
        self.reader: Dict[None, int] = {}
        self.blocked_count = 0
        # Looked up now, and not when this module is imported: gevent and eventlet replace it.
        self._current_thread = threading.get_ident if current_thread is None else current_thread
        # Held by those who change what follows.
        self._lock = threading.Lock()
        self._waiters: List[Waiter] = []

    def try_read(self, *, reentrant: bool = True) -> bool:
        """Return whether it is the caller who reads, from now on; not `reentrant`: and has not done so before."""
        thread = self._current_thread()
        return (reentrant or self.reader.get(None) != thread) and self.reader.setdefault(None, thread) == thread

    @property
    def is_current_reader(self) -> bool:
        """Whether it is the caller who reads."""
        return self.reader.get(None) == self._current_thread()

    def join(self, call: PendingCall) -> Optional[Waiter]:
        """Return the turn in which to wait for `call`, None where it is the caller who reads, from now on."""
        thread = self._current_thread()
        if self.reader.setdefault(None, thread) == thread:
            return None
        waiter = Waiter(call, thread)
        with self._lock:
            # In this order, as who leaves looks in the other one.
            self._waiters.append(waiter)
            if self.reader.setdefault(None, thread) == thread:
                self._waiters.remove(waiter)
                return None
        call.add_done_callback(waiter.wake)
        return waiter

    def withdraw(self, waiter: Waiter) -> bool:
        """Wait no more; return whether it is the caller who reads now."""
        with self._lock:
            if not waiter.is_reader:
                self._waiters.remove(waiter)
            return waiter.is_reader

    def step_down(self) -> int:
        """Read no more: somebody who waits does from now on. Return how many are stuck: the caller tells them."""
        if not self._waiters:
            self.reader.clear()
        # Who has begun to wait meanwhile was refused the right, maybe.
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
