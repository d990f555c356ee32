"""The order in which rows are asked for."""

from __future__ import annotations

from typing import Dict, List, Set

from hypothesis import given
from hypothesis import strategies as st

from weightctl.advise.rounds import block_requests, count_blocks

SIZES = st.sets(st.integers(2, 40), min_size=1, max_size=5).map(lambda sizes: [1, *sorted(sizes)])


@given(SIZES)
def test_each_row_is_in_each_size_and_alone_before(sizes: List[int]) -> None:
    rows: Dict[int, Set[int]] = {size: set() for size in sizes}
    alone = 0
    for each in block_requests(sizes):
        assert 0 <= each.first < each.end <= max(sizes)
        rows[each.rows] |= {*range(each.first, each.end)}
        if each.rows == 1:
            assert each.first == alone
            alone += 1
        assert each.end <= alone
    assert all(covered == {*range(max(sizes))} for covered in rows.values())


@given(SIZES)
def test_sizes_take_turns(sizes: List[int]) -> None:
    ends = dict.fromkeys(sizes, 0)
    for each in block_requests(sizes):
        assert each.end - ends[each.rows] <= each.rows
        ends[each.rows] = each.end
        assert all(each.end - end <= size for size, end in ends.items())


@given(SIZES, st.integers(1, 1000))
def test_there_are_as_many_blocks_as_are_needed(sizes: List[int], different: int) -> None:
    number = count_blocks(sizes, different)
    assert (number - 1) * max(sizes) < different <= number * max(sizes)
