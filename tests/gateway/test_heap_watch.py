from __future__ import annotations

from weightd_gateway.heap_watch import GROWTH_BYTES, HeapGrowth

SMALL = 50 * 1024 * 1024
LARGE = SMALL + GROWTH_BYTES + 1


def test_memory_is_returned_while_the_process_is_much_larger_than_it_was() -> None:
    growth = HeapGrowth()
    assert not growth.is_due(SMALL)
    assert not growth.is_due(SMALL + GROWTH_BYTES)
    for _ in range(3):
        assert growth.is_due(LARGE)
        growth.record_trimmed(GROWTH_BYTES)
    # Also where it has grown in the meantime, and has been at work when memory was returned.
    assert growth.is_due(2 * LARGE)
    growth.record_trimmed(LARGE)
    assert growth.is_due(LARGE)


def test_where_the_memory_is_in_use_attempts_are_made_less_often() -> None:
    growth = HeapGrowth()
    growth.is_due(SMALL)
    attempts = 0
    for _ in range(1000):
        if growth.is_due(LARGE):
            attempts += 1
            growth.record_trimmed(0)
    assert 200 < attempts < 300
    # What is large is used no more.
    assert not growth.is_due(SMALL)
    assert growth.is_due(LARGE)


def test_the_least_is_that_of_the_whole_life() -> None:
    growth = HeapGrowth()
    assert not growth.is_due(LARGE)
    assert not growth.is_due(SMALL)
    assert growth.is_due(LARGE)
