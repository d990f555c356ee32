"""A number for the content of a page, by which equal pages are looked for.

It is fast and no more than a key: content is compared byte for byte before anything is done with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .libc import PAGE
from .memory import words

if TYPE_CHECKING:
    from numpy.typing import NDArray

ZERO_PAGE = 0
"""The hash of a page that is all zeros (and, rarely, of another one)."""

_BLOCK_PAGES = (16 << 20) // PAGE
_WORD_BYTES = 8


def multipliers(count: int) -> NDArray[np.uint64]:
    """Return fixed odd numbers without a pattern, splitmix64 of 1, 2, 3 ...; the store's format has them."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd: NDArray[np.uint64] = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return odd


_MULTIPLIERS = multipliers(PAGE // _WORD_BYTES)


def hash_pages(address: int, hashes: NDArray[np.uint64]) -> None:
    """Hash consecutive pages into ``hashes``: the sum of a page's words times the multipliers, mod 2**64."""
    for first in range(0, len(hashes), _BLOCK_PAGES):
        part = hashes[first : first + _BLOCK_PAGES]
        block = words(address + first * PAGE, len(part) * PAGE).reshape(len(part), -1)
        block.dot(_MULTIPLIERS, out=part)
