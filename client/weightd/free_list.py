"""Which parts of a stretch of memory are taken. Without the memory."""

from __future__ import annotations

from bisect import bisect_left
from typing import Dict, List, Optional

# A line of the cache, and what the widest instruction wants.
ALIGNMENT = 64


class FreeList:
    """Parts are cut where they fit first, so that memory that was used before is used again; free neighbours are one.

    Args:
        nbytes: there are.
    """

    def __init__(self, nbytes: int) -> None:
        # Free stretches, in their order.
        self._free_starts: List[int] = [0]
        self._free_ends: List[int] = [nbytes]
        # End by begin.
        self._allocated: Dict[int, int] = {}

    @property
    def is_unused(self) -> bool:
        """Whether nothing is taken."""
        return not self._allocated

    def take(self, nbytes: int) -> Optional[int]:
        """Take so many bytes: return where they begin, aligned; None where they fit nowhere."""
        nbytes = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        for index, begin in enumerate(self._free_starts):
            end = begin + nbytes
            if end <= self._free_ends[index]:
                if end == self._free_ends[index]:
                    del self._free_starts[index], self._free_ends[index]
                else:
                    self._free_starts[index] = end
                self._allocated[begin] = end
                return begin
        return None

    def release(self, begin: int) -> None:
        """Give back what `take` returned."""
        end = self._allocated.pop(begin)
        index = bisect_left(self._free_starts, begin)
        if index and self._free_ends[index - 1] == begin:
            index -= 1
            self._free_ends[index] = end
        else:
            self._free_starts.insert(index, begin)
            self._free_ends.insert(index, end)
        if index + 1 < len(self._free_starts) and self._free_starts[index + 1] == end:
            self._free_ends[index] = self._free_ends.pop(index + 1)
            del self._free_starts[index + 1]
