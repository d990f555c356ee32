"""Who does something without end fills no log with it, and hides nobody else."""

from __future__ import annotations

from weightd_common.rate_limits import RateLimitedLog


def test_one_line_in_so_many_seconds_tells_how_often_it_was_since() -> None:
    seldom = RateLimitedLog(10.0)
    assert [seldom.record("a", now) for now in (5.0, 5.0, 14.9, 15.0, 16.0, 25.0, 99.0)] == [
        0,
        None,
        None,
        2,
        None,
        1,
        0,
    ]


def test_each_is_told_apart() -> None:
    seldom = RateLimitedLog(10.0)
    assert [seldom.record(who, 5.0) for who in "abba"] == [0, 0, None, None]


def test_of_very_many_the_last_are_one_until_the_others_are_forgotten() -> None:
    seldom = RateLimitedLog(10.0)
    lines = [seldom.record(str(number), 5.0) for number in range(100_000)]
    assert lines.count(0) == 257
    assert lines[257:] == [None] * (100_000 - 257)
    assert seldom.record("late", 15.0) == 0
