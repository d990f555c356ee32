from __future__ import annotations

from typing import List

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weightd.worker.pagesharing import runs
from weightd.worker.pagesharing.runs import Run

PAGE = 4096


def match(addresses: List[int], hashes: List[int], stored: List[int]) -> List[Run]:
    found = runs.match(
        np.array(addresses, dtype=np.uint64) * PAGE,
        np.array(hashes, dtype=np.uint64),
        np.array(stored, dtype=np.uint64),
        PAGE,
    )
    return [Run(run.address // PAGE, run.first, run.pages) for run in found]


def long_runs(marked: List[int], starts: List[int], least: int) -> List[int]:
    kept = runs.long_runs_of(np.array(marked, dtype=np.bool_), np.array(starts, dtype=np.intp), least)
    return [int(value) for value in kept]


def test_runs_start_at_gaps() -> None:
    addresses = np.array([4, 5, 7, 8, 9, 20], dtype=np.uint64) * PAGE
    assert runs.run_starts(addresses, PAGE).tolist() == [0, 2, 5]
    assert runs.run_starts(addresses[:1], PAGE).tolist() == [0]
    assert runs.run_starts(addresses[:0], PAGE).tolist() == []


def test_only_long_runs_are_kept() -> None:
    assert long_runs([1, 1, 1, 0, 1, 1, 0, 1, 1, 1], [0], 3) == [1, 1, 1, 0, 0, 0, 0, 1, 1, 1]
    assert long_runs([1, 1, 1, 1, 1], [0, 2], 3) == [0, 0, 1, 1, 1]
    assert long_runs([1, 1, 1, 1], [0, 2], 3) == [0, 0, 0, 0]
    assert long_runs([], [], 3) == []


def test_an_equal_process_matches_in_as_many_runs_as_it_has() -> None:
    hashes = list(range(100, 1100))
    addresses = [*range(500), *range(600, 1100)]
    assert match(addresses, hashes, hashes) == [Run(0, 0, 500), Run(600, 500, 500)]


def test_runs_end_where_either_side_ends_or_differs() -> None:
    stored = [1, 2, 3, 4, 5, 6]
    assert match([0, 1, 2, 3], [2, 3, 9, 5], stored) == [Run(0, 1, 2), Run(3, 4, 1)]
    assert match([0, 1, 2], [5, 6, 7], stored) == [Run(0, 4, 2)]
    assert match([0, 5], [1, 2], stored) == [Run(0, 0, 1), Run(5, 1, 1)]


def test_nothing_matches_nothing() -> None:
    assert match([], [], [1, 2]) == []
    assert match([1, 2], [1, 2], []) == []
    assert match([], [], []) == []


def test_of_many_copies_one_that_goes_on_is_taken() -> None:
    assert match([0, 1, 2], [7, 8, 9], [7, 1, 7, 8, 2, 7, 8, 9, 7]) == [Run(0, 5, 3)]


def test_many_equal_pages_take_few_runs() -> None:
    assert len(match(list(range(1000)), [7] * 1000, [7, 1, *[7] * 1000, 2])) < 20


@given(st.data())
def test_matched_runs_are_equal_and_leave_nothing_out(data: st.DataObject) -> None:
    numbers = st.integers(1, 5)
    stored = data.draw(st.lists(numbers, max_size=30))
    hashes = data.draw(st.lists(numbers, max_size=200))
    gaps = data.draw(st.lists(st.integers(1, 2), min_size=len(hashes), max_size=len(hashes)))
    addresses = [int(address) for address in np.cumsum(gaps)]
    own = dict(zip(addresses, hashes))
    covered: List[int] = []
    for run in match(addresses, hashes, stored):
        assert run.pages > 0
        for step in range(run.pages):
            assert own[run.address + step] == stored[run.first + step]
            covered.append(run.address + step)
    assert covered == [address for address in addresses if own[address] in stored]


def test_the_longest_runs_are_kept_in_order() -> None:
    several = [Run(1, 0, 5), Run(10, 0, 1), Run(20, 0, 7), Run(30, 0, 5)]
    assert runs.longest(several, 4) == several
    assert runs.longest(several, 3) == [several[0], several[2], several[3]]
    assert runs.longest(several, 1) == [several[2]]
    assert runs.longest(several, 0) == []
