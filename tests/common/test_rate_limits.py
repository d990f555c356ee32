"""Tests of the rate-limited log, and of the queue whose users take turns."""

from __future__ import annotations

from typing import List

from weightd_common.rate_limits import RateLimitedLog, RoundRobinQueue


def test_limits_lines_and_counts_suppressed_ones() -> None:
    limited = RateLimitedLog(10.0)
    assert [limited.record("a", now) for now in (5.0, 5.0, 14.9, 15.0, 16.0, 25.0, 99.0)] == [
        0,
        None,
        None,
        2,
        None,
        1,
        0,
    ]


def test_limits_each_key_separately() -> None:
    limited = RateLimitedLog(10.0)
    assert [limited.record(who, 5.0) for who in "abba"] == [0, 0, None, None]


def test_limits_number_of_keys() -> None:
    limited = RateLimitedLog(10.0)
    lines = [limited.record(str(number), 5.0) for number in range(100_000)]
    assert lines.count(0) == 257
    assert lines[257:] == [None] * (100_000 - 257)
    assert limited.record("late", 15.0) == 0


def of(*names: str) -> RoundRobinQueue[str]:
    queue: RoundRobinQueue[str] = RoundRobinQueue()
    for name in names:
        queue.put(name[0], name)
    return queue


def test_users_take_turns_in_order_of_items() -> None:
    queue = of("a1", "a2", "a3", "b1", "c1")
    taken: List[str] = []
    for _ in range(9):
        taken.append(queue.take())
        if taken[-1] in ("a1", "b1"):
            queue.put(taken[-1][0], taken[-1])
    assert taken == ["a1", "b1", "c1", "a2", "b1", "a3", "b1", "a1", "b1"]


def test_user_served_out_of_turn_goes_to_the_end() -> None:
    queue = of("a1", "b1", "b2", "c1")
    assert (queue.take_of("b"), [*queue]) == ("b1", ["a", "c", "b"])


def test_removed_item_is_not_taken() -> None:
    queue = of("a1", "a2", "b1")
    assert [queue.remove(*each) for each in (("b", "b1"), ("b", "b1"), ("a", "a1"), ("c", "a2"))] == [
        *(True, False),
        *(True, False),
    ]
    assert "b" not in queue
    assert queue.take() == "a2"
    assert not queue
