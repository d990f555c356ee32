"""Exchanging pages of this process for equal ones.

What is guaranteed: at every moment, and whatever fails, each page of this process has the bytes it had. A
page is exchanged only right after it was compared, byte for byte, with what it is exchanged for; so a wrong
hash, a page that changed since it was hashed, or a store that is not what it should be only mean that a page
is not shared.

What is relied on: between the comparison and the exchange, a few milliseconds for a block, nobody writes to the
page. The interpreter does not (see chunks.py for what memory this is); the engine does not, as it is idle.
"""

from __future__ import annotations

import os
import sys

from . import chunks
from .libc import PAGE, Libc

BLOCK_BYTES = 16 << 20
"""Bytes compared and exchanged in one go: few enough to keep that moment short, and enough to cost nothing."""

_MAPPINGS_PER_EXCHANGE = 2  # a mapping is cut in three where its middle is replaced


def affordable_exchanges() -> int:
    """How many exchanges may be made: half of what the kernel and chunks.py still allow is left for others."""
    free = min(chunks.mapping_limit() - chunks.count_mappings(), chunks.MAX_REGIONS)
    return max(free // 2 // _MAPPINGS_PER_EXCHANGE, 0)


class Remapper:
    """Exchanges pages for those of a file that is also mapped, as a whole, to be read."""

    def __init__(self, c: Libc, fd: int, mapped_at: int) -> None:
        """Take the file, and where it is mapped."""
        self._libc = c
        self._fd = fd
        self._mapping_address = mapped_at
        self._exchanges_left = affordable_exchanges()
        self._last_end = (0, 0)

    def share(self, address: int, offset: int, length: int) -> int:
        """Exchange the pages that are equal to those at ``offset`` of the file; return their bytes."""
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
        if self._last_end != (address, offset):  # otherwise the kernel makes one mapping of this and the one before
            self._exchanges_left -= 1
        self._last_end = (address + length, offset + length)
        try:
            self._libc.map_over(address, length, self._fd, offset)
        except OSError:
            self._restore(address, self._mapping_address + offset, length)
            raise

    def _restore(self, address: int, source: int, length: int) -> None:
        """Undo half an exchange: the kernel may have unmapped the old pages before it failed to map the new."""
        try:
            if not self._libc.is_mapped(address, length):
                self._libc.map_new(address, length)
                self._libc.copy(address, source, length)
        except OSError as error:
            # Memory of the engine is gone. Going on would be a crash, or worse, somewhere else.
            sys.stderr.write(f"weightd: lost memory while sharing pages: {error}\n")
            os.abort()


class ZeroDropper:
    """Gives back pages that are all zeros: they go on reading as zeros, and cost nothing until written."""

    def __init__(self, c: Libc) -> None:
        """Map the zeros to compare with."""
        self._libc = c
        self._zeros = c.map_zeros(BLOCK_BYTES)

    def drop(self, address: int, length: int) -> int:
        """Give back the blocks of a piece of anonymous memory that are all zeros; return their bytes."""
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
