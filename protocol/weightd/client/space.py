"""Which parts of a stretch of memory are taken. Without the memory."""

from __future__ import annotations

from bisect import bisect_left
from typing import Dict, List, Optional

# A line of the cache, and what the widest instruction wants.
ALIGNMENT = 64


class Space:
    """Parts are cut where they fit first, so that memory that was used before is used again; free neighbours are one.

    Args:
        nbytes: there are.
    """

    def __init__(self, nbytes: int) -> None:
        # Free stretches, in their order.
        self._begins: List[int] = [0]
        self._ends: List[int] = [nbytes]
        # End by begin.
        self._taken: Dict[int, int] = {}

    @property
    def is_free(self) -> bool:
        """Whether nothing is taken."""
        return not self._taken

    def take(self, nbytes: int) -> Optional[int]:
        """Take so many bytes: return where they begin, aligned; None where they fit nowhere."""
        nbytes = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        for index, begin in enumerate(self._begins):
            end = begin + nbytes
            if end <= self._ends[index]:
                if end == self._ends[index]:
                    del self._begins[index], self._ends[index]
                else:
                    self._begins[index] = end
                self._taken[begin] = end
                return begin
        return None

    def give(self, begin: int) -> None:
        """Give back what `take` returned."""
        end = self._taken.pop(begin)
        index = bisect_left(self._begins, begin)
        if index and self._ends[index - 1] == begin:
            index -= 1
            self._ends[index] = end
        else:
            self._begins.insert(index, begin)
            self._ends.insert(index, end)
        if index + 1 < len(self._begins) and self._begins[index + 1] == end:
            self._ends[index] = self._ends.pop(index + 1)
            del self._begins[index + 1]
