"""What is due when: a heap of times, so that a wake-up costs what is due then, and not what there is.

Plain: whoever has a clock asks when the next one is due, and has them called.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

_NEVER = float("inf")

_serial = itertools.count()

Handler = Callable[[float], object]


class Timer:
    """Something that will be due, once each time that it is set.

    To set it costs nothing in most cases: the heap sees a time only if that is sooner than all that it has of this
    timer. One that was put off is found out when its earlier time comes.

    Args:
        handler: called with the clock once it is due, if it was given to `Timers`.

    Attributes:
        due_at: when, in monotonic seconds; infinite while it is not set.
    """

    __slots__ = ("_entries", "_handler", "_heap", "_serial", "due_at")

    def __init__(self, handler: Handler) -> None:
        self.due_at = _NEVER
        self._handler = handler
        self._heap: Heap = []
        # Its times in the heap, the soonest last.
        self._entries = [_NEVER]
        self._serial = next(_serial)

    def set(self, due: float) -> None:
        """Be due then, and at no other time."""
        self.due_at = due
        if due < self._entries[-1]:
            self._entries.append(due)
            heapq.heappush(self._heap, (due, self._serial, self))

    def set_no_later_than(self, latest: float) -> None:
        """Be due then at the latest."""
        if latest < self.due_at:
            self.set(latest)

    def attach(self, heap: Heap) -> None:
        """Belong to this heap from now on."""
        self._heap = heap
        self._entries = [_NEVER]
        self.set(self.due_at)

    def on_entry_popped(self, now: float) -> bool:
        """Its soonest time has left the heap: return whether it is due."""
        self._entries.pop()
        if self.due_at <= now:
            return True
        self.set(self.due_at)
        return False

    def fire(self, now: float) -> None:
        """Call the handler, unless it was put off meanwhile."""
        if self.due_at <= now:
            self.due_at = _NEVER
            self._handler(now)


Heap = list[tuple[float, int, Timer]]


class Timers:
    """All timers of one loop.

    Attributes:
        heap: their times: nothing is due before the first; one that was put off is not due then either.
    """

    def __init__(self) -> None:
        self.heap: Heap = []

    def add(self, timer: Timer) -> None:
        """Have it called when it is due, as was set before or will be."""
        timer.attach(self.heap)

    def run_due(self, now: float) -> None:
        """Call each that is due; one that a handler sets to a time that has passed waits for the next call."""
        due: dict[Timer, None] = {}
        while self.heap and self.heap[0][0] <= now:
            timer = heapq.heappop(self.heap)[2]
            if timer.on_entry_popped(now):
                due[timer] = None
        for timer in due:
            timer.fire(now)
