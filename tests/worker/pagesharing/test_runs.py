from __future__ import annotations

from typing import List, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_worker.pagesharing import runs
from weightd_worker.pagesharing.runs import Run

PAGE = 4096


def match(addresses: Sequence[int], hashes: Sequence[int], stored: Sequence[int]) -> List[Run]:
    found = runs.find_matches(
        np.array(addresses, dtype=np.uint64) * PAGE,
        np.array(hashes, dtype=np.uint64),
        np.array(stored, dtype=np.uint64),
        PAGE,
    )
    return [Run(run.address // PAGE, run.first_page, run.page_count) for run in found]


def test_runs_start_at_gaps() -> None:
    for addresses, starts in (([4, 5, 7, 8, 9, 20], [0, 2, 5]), ([4], [0]), ([], [])):
        assert runs.run_starts(np.array(addresses, dtype=np.uint64) * PAGE, PAGE).tolist() == starts


@pytest.mark.parametrize(
    ("marked", "starts", "kept"),
    [
        ([1, 1, 1, 0, 1, 1, 0, 1, 1, 1], [0], [1, 1, 1, 0, 0, 0, 0, 1, 1, 1]),
        ([1, 1, 1, 1, 1], [0, 2], [0, 0, 1, 1, 1]),
        ([1, 1, 1, 1], [0, 2], [0, 0, 0, 0]),
        ([], [], []),
    ],
)
def test_keeps_long_runs(marked: List[int], starts: List[int], kept: List[int]) -> None:
    found = runs.keep_long_runs(np.array(marked, dtype=np.bool_), np.array(starts, dtype=np.intp), 3)
    assert [int(value) for value in found] == kept


@pytest.mark.parametrize(
    ("addresses", "hashes", "stored", "expected"),
    [
        # An identical process matches in as many runs as it has.
        ([*range(500), *range(600, 1100)], range(100, 1100), range(100, 1100), [Run(0, 0, 500), Run(600, 500, 500)]),
        # A run ends where either side ends or differs.
        ([0, 1, 2, 3], [2, 3, 9, 5], [1, 2, 3, 4, 5, 6], [Run(0, 1, 2), Run(3, 4, 1)]),
        ([0, 1, 2], [5, 6, 7], [1, 2, 3, 4, 5, 6], [Run(0, 4, 2)]),
        ([0, 5], [1, 2], [1, 2, 3, 4, 5, 6], [Run(0, 0, 1), Run(5, 1, 1)]),
        # Of several copies, one whose run continues is chosen.
        ([0, 1, 2], [7, 8, 9], [7, 1, 7, 8, 2, 7, 8, 9, 7], [Run(0, 5, 3)]),
        ([], [], [1, 2], []),
        ([1, 2], [1, 2], [], []),
    ],
)
def test_matches(addresses: Sequence[int], hashes: Sequence[int], stored: Sequence[int], expected: List[Run]) -> None:
    assert match(addresses, hashes, stored) == expected


def test_many_equal_pages_take_few_runs() -> None:
    assert len(match(range(1000), [7] * 1000, [7, 1, *[7] * 1000, 2])) < 20


@given(st.data())
def test_matched_runs_are_equal_and_complete(data: st.DataObject) -> None:
    numbers = st.integers(1, 5)
    stored = data.draw(st.lists(numbers, max_size=30))
    hashes = data.draw(st.lists(numbers, max_size=200))
    gaps = data.draw(st.lists(st.integers(1, 2), min_size=len(hashes), max_size=len(hashes)))
    addresses = [int(address) for address in np.cumsum(gaps)]
    own = dict(zip(addresses, hashes))
    covered: List[int] = []
    for run in match(addresses, hashes, stored):
        assert run.page_count > 0
        for step in range(run.page_count):
            assert own[run.address + step] == stored[run.first_page + step]
            covered.append(run.address + step)
    assert covered == [address for address in addresses if own[address] in stored]


def test_keeps_longest_runs_in_order() -> None:
    several = [Run(1, 0, 5), Run(10, 0, 1), Run(20, 0, 7), Run(30, 0, 5)]
    for count, kept in ((4, several), (3, [several[0], *several[2:]]), (1, [several[2]]), (0, [])):
        assert runs.longest_runs(several, count) == kept
