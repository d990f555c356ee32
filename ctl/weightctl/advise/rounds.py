"""What is asked in which order: rows alone and together, in turn, so that what else the host does hits all alike."""

from __future__ import annotations

from typing import List, NamedTuple, Sequence


class RowSlice(NamedTuple):
    """Some rows of a block: one request.

    Attributes:
        rows: how many.
        first: the first of them.
    """

    rows: int
    first: int

    @property
    def end(self) -> int:
        """The row behind the last one."""
        return self.first + self.rows


def block_requests(sizes: Sequence[int]) -> List[RowSlice]:
    """Return the requests for as many rows as the largest size has: each row is in one of each size, or in two.

    A row has been asked for alone, if 1 is one of the sizes, before it is in a larger one.
    """
    rows = max(sizes)
    slices = [RowSlice(size, min(first, rows - size)) for size in sizes for first in range(0, rows, size)]
    return sorted(slices, key=lambda each: (each.end, each.rows))


def count_blocks(sizes: Sequence[int], min_rows: int) -> int:
    """Return how many blocks have at least so many rows."""
    return -(-min_rows // max(sizes))
