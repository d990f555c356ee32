"""Replaces pages of this process by equal pages of a file.

Guarantee: each page of this process has the same bytes at all times, even if an operation fails. Immediately before a
page is replaced, it is compared byte for byte with its replacement. So if a hash is wrong, if a page has changed since
it was hashed, or if the store is invalid, the page is only not shared.

Condition: no thread writes to a page between the comparison and the replacement, which take a few milliseconds for a
block. The interpreter does not write to these pages (`chunks` explains why), and the engine is idle.
"""

from __future__ import annotations

import os
import sys

from . import chunks
from .libc import PAGE, Libc

BLOCK_BYTES = 16 << 20
"""Maximum number of bytes that are compared and replaced at once. More bytes would lengthen the time in which no thread
may write to them; fewer would require more calls."""

_MAPPINGS_PER_EXCHANGE = 2  # replacing the middle of a mapping splits it in three, which adds two mappings


def affordable_exchanges() -> int:
    """Return the maximum number of replacements by the kernel's limit of mappings per process.

    The replacements may use half of the mappings that this process may still make. The other half is left for the rest
    of the process.
    """
    free = min(chunks.mapping_limit() - chunks.count_mappings(), chunks.MAX_REGIONS)
    return max(free // 2 // _MAPPINGS_PER_EXCHANGE, 0)


class Remapper:
    """Replaces pages of this process by equal pages of a file. The caller has mapped the whole file read-only."""

    def __init__(self, c: Libc, fd: int, mapped_at: int) -> None:
        """Store the C library, the descriptor of the file, and the address at which the file is mapped."""
        self._libc = c
        self._fd = fd
        self._mapping_address = mapped_at
        self._exchanges_left = affordable_exchanges()
        self._last_end = (0, 0)

    def share(self, address: int, offset: int, length: int) -> int:
        """Replace the pages from ``address`` on that equal the file's pages from ``offset`` on.

        Return the number of replaced bytes.
        """
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
        if self._last_end != (address, offset):  # the kernel merges adjacent mappings, so that they count as one
            self._exchanges_left -= 1
        self._last_end = (address + length, offset + length)
        try:
            self._libc.map_over(address, length, self._fd, offset)
        except OSError:
            self._restore(address, self._mapping_address + offset, length)
            raise

    def _restore(self, address: int, source: int, length: int) -> None:
        """Restore the pages after a failed replacement.

        The kernel may have removed the old pages before it failed to map the new ones.
        """
        try:
            if not self._libc.is_mapped(address, length):
                self._libc.map_new(address, length)
                self._libc.copy(address, source, length)
        except OSError as error:
            # Memory of the engine is lost. End the process, because otherwise it would crash later or give wrong
            # answers.
            sys.stderr.write(f"weightd: lost memory while sharing pages: {error}\n")
            os.abort()


class ZeroDropper:
    """Frees pages of zeros. Reading a freed page still returns zeros, and it takes no memory until it is written."""

    def __init__(self, c: Libc) -> None:
        """Map zeros with which pages are compared before they are freed."""
        self._libc = c
        self._zeros = c.map_zeros(BLOCK_BYTES)

    def drop(self, address: int, length: int) -> int:
        """Free each block of anonymous memory that contains only zeros. Return the number of freed bytes.

        A block has `BLOCK_BYTES` bytes, or fewer at the end of the range.
        """
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
