"""Which regions of clients' memory a worker has."""

from __future__ import annotations

from collections.abc import Sequence

from weightd_daemon.scheduling.tensor_location import SharedRegion

# More than one connection may have, so what a request needs always fits.
MAX_REGIONS = 64


class WorkerRegions:
    """The regions that one worker has been given, by number. Those that were not used for longest give way.

    Orders are obeyed in the order in which they are given: a region may be taken away behind the last predict that
    names it, whether or not that has run.

    Attributes:
        latest_number: the one that was used last: as long as requests name that alone, there is nothing to say. None
            where there is none.
    """

    def __init__(self, max_regions: int = MAX_REGIONS) -> None:
        self.latest_number: int | None = None
        self._max_regions = max_regions
        # The one that was used last is the last.
        self._numbers: dict[int, None] = {}

    def mark_used(self, regions: Sequence[SharedRegion]) -> tuple[Sequence[int], Sequence[SharedRegion]]:
        """A request is given to the worker: return what has to be taken away before, and what has to be given."""
        missing = [memory for memory in regions if memory.number not in self._numbers]
        for memory in regions:
            self._numbers.pop(memory.number, None)
            self._numbers[memory.number] = None
            self.latest_number = memory.number
        surplus = [*self._numbers][: -self._max_regions]
        for number in surplus:
            del self._numbers[number]
        return surplus, missing

    def remove(self, number: int) -> bool:
        """A region is gone; return whether the worker had it."""
        if number == self.latest_number:
            self.latest_number = None
        return self._numbers.pop(number, 0) is None

    def clear(self) -> None:
        """It is another process, or has forgotten all."""
        self._numbers.clear()
        self.latest_number = None
