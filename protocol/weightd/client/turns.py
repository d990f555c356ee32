"""Which of the threads that wait for answers reads them, for all: the first one, until it has its own; then another.

Nobody looks on in vain: who reads may wait in the kernel, the others wait for it alone, each as long as it likes.
"""

from __future__ import annotations

import contextlib
import threading
from typing import List, Optional

from weightd.client.core import Call


class Turn:
    """A thread that waits for `call`, while another one reads.

    Attributes:
        reads: whether it is its turn to read now.
    """

    __slots__ = ("_lock", "call", "reads")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.reads = False
        self._lock = threading.Lock()
        self._lock.acquire()

    @property
    def is_awake(self) -> bool:
        """Whether `sleep` would return at once."""
        return not self._lock.locked()

    def sleep(self, seconds: float) -> None:
        """Wait until somebody has called `wake`."""
        self._lock.acquire(timeout=max(0.0, seconds))

    def wake(self) -> None:
        """End the sleep, or have it not begin. There may be two reasons: the second changes nothing."""
        with contextlib.suppress(RuntimeError):
            self._lock.release()


class Turns:
    """Gives the right to read to one thread at a time. Whoever has it calls `leave` in the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: List[Turn] = []
        self.is_taken = False

    def take(self) -> bool:
        """Return whether it is the caller who reads, from now on."""
        with self._lock:
            if self.is_taken:
                return False
            self.is_taken = True
            return True

    def enter(self, call: Call) -> Optional[Turn]:
        """Return the turn in which to wait for `call`, None where it is the caller who reads, from now on."""
        with self._lock:
            if not self.is_taken:
                self.is_taken = True
                return None
            turn = Turn(call)
            self._waiting.append(turn)
        call.when_done(turn.wake)
        return turn

    def give_up(self, turn: Turn) -> bool:
        """Wait no more; return whether it is the caller who reads now."""
        with self._lock:
            if not turn.reads:
                self._waiting.remove(turn)
            return turn.reads

    def leave(self) -> None:
        """Read no more: somebody who waits does from now on."""
        with self._lock:
            for turn in self._waiting:
                if not turn.call.done:
                    self._waiting.remove(turn)
                    turn.reads = True
                    turn.wake()
                    return
            self.is_taken = False
