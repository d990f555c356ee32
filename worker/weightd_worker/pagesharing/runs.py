"""Runs of consecutive pages: finds them, their matches in the store, and the runs that are worth a mapping.

The functions work on arrays only, without memory access, files or the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterator, List, NamedTuple, Sequence

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_TRIED_COPIES = 8
"""How many of several equal pages in the store are tried, to find the one at which the longest run begins."""

_FIRST_COMPARED = 64
"""How many pages are compared first to measure a run. The number is doubled each time, so short runs are cheap."""


class Run(NamedTuple):
    """Consecutive pages of this process."""

    address: int
    """The address of the first page."""
    first_page: int
    """The page of the store with the same hash as the first page. The pages that follow match in the same way."""
    page_count: int
    """The number of pages."""


def run_starts(addresses: NDArray[np.uint64], page: int) -> NDArray[np.intp]:
    """Return the indices of pages that do not follow the one before, including the first."""
    breaks = np.flatnonzero(np.diff(addresses) != page) + 1
    return np.concatenate((np.zeros(min(len(addresses), 1), dtype=breaks.dtype), breaks))


def keep_long_runs(marked: NDArray[np.bool_], starts: NDArray[np.intp], min_length: int) -> NDArray[np.bool_]:
    """Keep marks only in groups of at least ``min_length`` marked pages within one run of addresses."""
    if not len(marked):
        return marked
    borders = np.flatnonzero(marked[1:] != marked[:-1]) + 1
    begins = np.union1d(starts, borders)
    lengths = np.diff(np.append(begins, len(marked)))
    kept: NDArray[np.bool_] = marked & np.repeat(lengths >= min_length, lengths)
    return kept


def find_matches(
    addresses: NDArray[np.uint64], hashes: NDArray[np.uint64], stored: NDArray[np.uint64], page: int
) -> Iterator[Run]:
    """Find the pages whose hash is in the store, in runs that are consecutive on both sides.

    Args:
        addresses: the addresses of this process's pages, ascending.
        hashes: the hashes of these pages.
        stored: the hashes of the store's pages, in the order of the store.
        page: the size of a page in bytes.
    """
    order = np.argsort(stored, kind="stable")
    ascending = stored[order]
    low = np.searchsorted(ascending, hashes, side="left")
    high = np.searchsorted(ascending, hashes, side="right")
    known = np.flatnonzero(low < high)
    ends = np.append(run_starts(addresses, page)[1:], len(addresses))
    index = 0
    while True:
        at = int(np.searchsorted(known, index))
        if at == len(known):
            return
        index = int(known[at])
        end = int(ends[np.searchsorted(ends, index, side="right")])
        copies = order[_spread(int(low[index]), int(high[index]))]
        length, first = max((_common_prefix(hashes[index:end], stored[copy:]), -int(copy)) for copy in copies)
        yield Run(int(addresses[index]), -first, length)
        index += length


def _spread(low: int, high: int) -> NDArray[np.intp]:
    """Return some indices from ``low`` to below ``high``, evenly spread; all of them if they are few."""
    count = min(high - low, _MAX_TRIED_COPIES)
    return low + np.arange(count) * (high - low) // count


def _common_prefix(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> int:
    """Return the number of equal elements before the first difference."""
    length = min(len(one), len(other))
    begin, step = 0, _FIRST_COMPARED
    while begin < length:
        stop = min(begin + step, length)
        differs = one[begin:stop] != other[begin:stop]
        if differs.any():
            return begin + int(differs.argmax())
        begin, step = stop, step * 2
    return length


def longest_runs(runs: Sequence[Run], count: int) -> List[Run]:
    """Return the ``count`` longest runs, in their order."""
    if len(runs) <= count:
        return list(runs)
    ranked = sorted(range(len(runs)), key=lambda index: -runs[index].page_count)
    return [runs[index] for index in sorted(ranked[:count])]
