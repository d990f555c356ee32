"""The deadlines of requests, the soonest first."""

from __future__ import annotations

import heapq
import math

from weightd_daemon.scheduling.request import Request

# The heap is built anew when it has grown to twice its size after the last time, and by so many entries more.
_MIN_STALE_ENTRIES = 64


class Deadlines:
    """Finds the requests whose deadlines have passed at a cost that grows with the logarithm of the number of requests.

    The heap has the numbers of requests only: an entry that outlives its request does not keep that in memory.
    """

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._heap: list[tuple[float, int]] = []
        self._rebuild_size = _MIN_STALE_ENTRIES

    def __len__(self) -> int:
        """Return how many entries the heap has, those of ended requests included."""
        return len(self._heap)

    def add(self, request: Request) -> bool:
        """Watch a request, or one whose deadline is sooner now; return whether no other deadline is as soon."""
        deadline, number, heap = request.deadline, request.number, self._heap
        if deadline == math.inf:
            return False
        self._requests[number] = request
        heapq.heappush(heap, (deadline, number))
        if len(heap) > self._rebuild_size:
            heap[:] = [(each.deadline, each.number) for each in self._requests.values()]
            heapq.heapify(heap)
            self._rebuild_size = 2 * len(heap) + _MIN_STALE_ENTRIES
        return heap[0][1] == number

    def remove(self, request: Request) -> None:
        """Watch a request no more; it does not matter whether it was watched."""
        self._requests.pop(request.number, None)

    @property
    def next_deadline(self) -> float:
        """A time before which no deadline passes, in monotonic seconds."""
        return self._heap[0][0] if self._heap else math.inf

    def take_due(self, now: float, max_count: int) -> list[Request]:
        """Return up to `max_count` requests whose deadlines have passed, and watch them no more."""
        due: list[Request] = []
        while self._heap and self._heap[0][0] <= now and len(due) < max_count:
            request = self._requests.pop(heapq.heappop(self._heap)[1], None)
            if request is not None:
                due.append(request)
        return due
