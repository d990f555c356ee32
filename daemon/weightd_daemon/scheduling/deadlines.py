"""The deadlines of the requests for one model."""

from __future__ import annotations

import heapq
import math

from weightd_daemon.scheduling.request import Request

# The heap is rebuilt when it exceeds twice its size after the last rebuild by this many entries.
_MIN_STALE_ENTRIES = 64


class Deadlines:
    """Finds requests whose deadlines have passed, at a cost logarithmic in the number of requests.

    The heap contains only the numbers of requests, so that an outdated entry does not keep its request in memory.

    Attributes:
        requests: the watched requests by number. The code that ends a request also removes it here.
    """

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self._heap: list[tuple[float, int]] = []
        self._rebuild_size = _MIN_STALE_ENTRIES

    def __len__(self) -> int:
        """Return the number of entries in the heap, including outdated ones."""
        return len(self._heap)

    def add(self, request: Request) -> bool:
        """Watch a request, or update its deadline to a sooner one; return whether its deadline is now the next one."""
        deadline, number, heap = request.deadline, request.number, self._heap
        if deadline == math.inf:
            return False
        self.requests[number] = request
        heapq.heappush(heap, (deadline, number))
        if len(heap) > self._rebuild_size:
            heap[:] = [(each.deadline, each.number) for each in self.requests.values()]
            heapq.heapify(heap)
            self._rebuild_size = 2 * len(heap) + _MIN_STALE_ENTRIES
        return heap[0][1] == number

    @property
    def next_deadline(self) -> float:
        """A time before which no deadline passes, in monotonic seconds."""
        return self._heap[0][0] if self._heap else math.inf

    def take_due(self, now: float, max_count: int) -> list[Request]:
        """Remove and return up to `max_count` requests whose deadlines have passed."""
        due: list[Request] = []
        while self._heap and self._heap[0][0] <= now and len(due) < max_count:
            request = self.requests.pop(heapq.heappop(self._heap)[1], None)
            if request is not None:
                due.append(request)
        return due
