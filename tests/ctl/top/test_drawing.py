"""Tests of sparklines and bars."""

from __future__ import annotations

from typing import List, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightctl.top.drawing import ASCII, BLOCKS, Segment, Style, bar, glyphs, spark


def test_height_of_spark() -> None:
    assert spark([0.0, None, 1.0, 50.0, 100.0], 6, BLOCKS) == "   ▁▄█"
    assert spark([0.0, None, 1.0, 50.0, 100.0], 2, ASCII) == "=@"
    assert spark([], 3, ASCII) == "   "
    assert spark([1.0], 0, ASCII) == ""


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e300)), max_size=80), st.integers(0, 70))
def test_width_and_contents_of_spark(values: List[Optional[float]], width: int) -> None:
    drawn = spark(values, width, ASCII)
    assert len(drawn) == width
    last = values[-width:] if width else []
    assert [each != " " for each in drawn[len(drawn) - len(last) :]] == [bool(each) for each in last]


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=5), st.integers(0, 200), st.floats(1, 3))
def test_bar_is_proportional(sizes: List[int], width: int, more: float) -> None:
    whole = int(sum(sizes) * more)
    parts: List[Segment] = [(size, "x", Style.COPY) for size in sizes]
    *drawn, rest = bar(parts, whole, width)
    assert sum(len(text) for text, _ in drawn) + len(rest[0]) == width
    for size, (text, _) in zip(sizes, drawn):
        assert abs(len(text) - (width * size / whole if whole else 0)) <= 1


@pytest.mark.parametrize(
    ("encoding", "expected"), [("UTF-8", BLOCKS), ("ascii", ASCII), ("latin-1", ASCII), (None, ASCII), ("?", ASCII)]
)
def test_glyphs_depend_on_encoding(encoding: Optional[str], expected: object) -> None:
    assert glyphs(encoding) is expected
