"""Maps the pages of a device, which its daemon and its workers share, into a worker."""

from __future__ import annotations

import mmap
from typing import Any, List

import numpy as np

from weightd_common.channels.pages import (
    DEVICE_BYTES,
    DEVICE_LAYOUT,
    WORD_BYTES,
    Page,
    daemon_page,
    page_over,
    row_offset,
    row_page,
)

_ROW_BYTES = -(-DEVICE_LAYOUT.row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class MappedPages:
    """The pages of a device. Only this worker's own row is writable, so that a stray write damages no other page.

    Args:
        descriptor: the memory of the pages. The caller may close it afterwards.
        row: the index of this worker's row.

    Attributes:
        daemon_page: the daemon's page.
        own: this worker's row.
    """

    def __init__(self, descriptor: int, row: int) -> None:
        self._memory = memoryview(mmap.mmap(descriptor, DEVICE_BYTES, prot=mmap.PROT_READ))
        self._rows: List[Page] = []
        own = mmap.mmap(descriptor, _ROW_BYTES, offset=row_offset(row))
        self.daemon_page = daemon_page(self._memory)
        self.own = page_over(memoryview(own)[: DEVICE_LAYOUT.row_bytes])

    def rows(self, count: int) -> List[Page]:
        """Return the first `count` rows. The page of a row is always the same object."""
        for row in range(len(self._rows), count):
            self._rows.append(row_page(self._memory, row))
        return self._rows[:count]

    def table(self, count: int) -> Any:
        """Return the first `count` rows as an array of doubles: the row, the word."""
        shape, strides = (count, DEVICE_LAYOUT.row_bytes // WORD_BYTES), (row_offset(1) - row_offset(0), WORD_BYTES)
        return np.ndarray(shape, np.float64, self._memory, row_offset(0), strides)
