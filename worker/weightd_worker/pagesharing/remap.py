"""Replaces pages of this process by equal pages of a file.

Guarantee: at every moment, and whatever fails, each page of this process has the same bytes. A page is replaced only
right after it was compared, byte for byte, with its replacement. So with a wrong hash, a page that has changed since it
was hashed, or an invalid store, a page is just not shared.

Condition: between the comparison and the replacement, a few milliseconds for a block, no thread writes to the page. The
interpreter does not (chunks.py explains why), and the engine does not, because it is idle.
"""

from __future__ import annotations

import os
import sys

from . import chunks
from .libc import PAGE, Libc

BLOCK_BYTES = 16 << 20
"""How many bytes are compared and replaced at once: few enough for a short critical time, many enough for speed."""

_MAPPINGS_PER_EXCHANGE = 2  # replacing the middle of a mapping splits it in three


def affordable_exchanges() -> int:
    """Return how many replacements may be made: half of the mappings that are still allowed are left for others."""
    free = min(chunks.mapping_limit() - chunks.count_mappings(), chunks.MAX_REGIONS)
    return max(free // 2 // _MAPPINGS_PER_EXCHANGE, 0)


class Remapper:
    """Replaces pages by pages of a file that is also mapped read-only as a whole."""

    def __init__(self, c: Libc, fd: int, mapped_at: int) -> None:
        """Take the file, and the address of its mapping."""
        self._libc = c
        self._fd = fd
        self._mapping_address = mapped_at
        self._exchanges_left = affordable_exchanges()
        self._last_end = (0, 0)

    def share(self, address: int, offset: int, length: int) -> int:
        """Replace the pages that equal the file's pages at ``offset``; return the number of replaced bytes."""
        return sum(
            self._share_equal(address + done, offset + done, min(BLOCK_BYTES, length - done))
            for done in range(0, length, BLOCK_BYTES)
        )

    def _share_equal(self, address: int, offset: int, length: int) -> int:
        if not self._can_exchange(address, offset):
            return 0
        if self._libc.is_equal(address, self._mapping_address + offset, length):
            self._exchange(address, offset, length)
            return length
        if length <= PAGE:
            return 0
        half = length // PAGE // 2 * PAGE
        first = self._share_equal(address, offset, half)
        return first + self._share_equal(address + half, offset + half, length - half)

    def _can_exchange(self, address: int, offset: int) -> bool:
        return self._exchanges_left > 0 or self._last_end == (address, offset)

    def _exchange(self, address: int, offset: int, length: int) -> None:
        if self._last_end != (address, offset):  # otherwise the kernel merges this mapping with the one before
            self._exchanges_left -= 1
        self._last_end = (address + length, offset + length)
        try:
            self._libc.map_over(address, length, self._fd, offset)
        except OSError:
            self._restore(address, self._mapping_address + offset, length)
            raise

    def _restore(self, address: int, source: int, length: int) -> None:
        """Undo a failed replacement: the kernel may have unmapped the old pages before it failed to map the new."""
        try:
            if not self._libc.is_mapped(address, length):
                self._libc.map_new(address, length)
                self._libc.copy(address, source, length)
        except OSError as error:
            # Memory of the engine is lost. To go on would mean a crash later, or wrong answers.
            sys.stderr.write(f"weightd: lost memory while sharing pages: {error}\n")
            os.abort()


class ZeroDropper:
    """Frees pages that are all zeros: they still read as zeros, and take no memory until they are written."""

    def __init__(self, c: Libc) -> None:
        """Map zeros for the comparison."""
        self._libc = c
        self._zeros = c.map_zeros(BLOCK_BYTES)

    def drop(self, address: int, length: int) -> int:
        """Free the blocks of anonymous memory that are all zeros; return the number of freed bytes."""
        return sum(
            self._drop_block(address + done, min(BLOCK_BYTES, length - done)) for done in range(0, length, BLOCK_BYTES)
        )

    def _drop_block(self, address: int, length: int) -> int:
        if not self._libc.is_equal(address, self._zeros, length):
            return 0
        self._libc.drop_private_pages(address, length)
        return length

    def close(self) -> None:
        """Unmap the zeros."""
        self._libc.unmap(self._zeros, BLOCK_BYTES)
