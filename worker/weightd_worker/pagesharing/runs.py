"""Runs of consecutive pages: finds runs, equal runs in the page store, and the longest runs.

The functions compute on arrays only. They access neither the memory of the pages nor files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterator, List, NamedTuple, Sequence

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_TRIED_COPIES = 8
"""Maximum number of places in the store that are tried if a page occurs there several times. The place at which the
longest run of equal pages begins is used."""

_FIRST_COMPARED = 64
"""Number of pages that are compared first to find the length of a run. Each further comparison takes twice as many
pages as the one before, so a short run costs little.
"""


class Run(NamedTuple):
    """Consecutive pages of this process."""

    address: int
    """The address of the first page."""
    first_page: int
    """The number of the store's page that has the same hash as the first page. Further pages of the run have the same
    hashes as the store's pages that follow."""
    page_count: int
    """The number of pages in the run."""


def run_starts(addresses: NDArray[np.uint64], page: int) -> NDArray[np.intp]:
    """Return the indices at which runs of consecutive pages begin.

    Args:
        addresses: the addresses of pages in ascending order.
        page: the size of a page in bytes.
    """
    breaks = np.flatnonzero(np.diff(addresses) != page) + 1
    return np.concatenate((np.zeros(min(len(addresses), 1), dtype=breaks.dtype), breaks))


def keep_long_runs(marked: NDArray[np.bool_], starts: NDArray[np.intp], min_length: int) -> NDArray[np.bool_]:
    """Return ``marked``, but without marks in groups of fewer than ``min_length`` consecutive marked pages.

    Args:
        marked: for each page, whether it is marked.
        starts: the indices at which runs of consecutive pages begin (`run_starts`).
        min_length: the minimum number of pages in a group.
    """
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
    """Yield runs of pages whose hashes are in the store. Each run is consecutive in this process and in the store.

    Args:
        addresses: the addresses of this process's pages in ascending order.
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
    """Return at most `_MAX_TRIED_COPIES` indices from ``low`` to below ``high``, evenly spread."""
    count = min(high - low, _MAX_TRIED_COPIES)
    return low + np.arange(count) * (high - low) // count


def _common_prefix(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> int:
    """Return the number of equal elements at the beginning of both arrays."""
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
    """Return the ``count`` longest runs, in the order in which they are in ``runs``."""
    if len(runs) <= count:
        return list(runs)
    ranked = sorted(range(len(runs)), key=lambda index: -runs[index].page_count)
    return [runs[index] for index in sorted(ranked[:count])]
