from __future__ import annotations

from weightd_gateway.heap_watch import GROWTH_BYTES, HeapGrowth

SMALL = 50 * 1024 * 1024
LARGE = SMALL + GROWTH_BYTES + 1


def test_trims_while_process_is_much_larger() -> None:
    growth = HeapGrowth()
    assert not growth.is_due(SMALL)
    assert not growth.is_due(SMALL + GROWTH_BYTES)
    for _ in range(3):
        assert growth.is_due(LARGE)
        growth.record_trimmed(GROWTH_BYTES)
    # This also holds if the process has grown meanwhile and was busy during the trim.
    assert growth.is_due(2 * LARGE)
    growth.record_trimmed(LARGE)
    assert growth.is_due(LARGE)


def test_trims_less_often_while_memory_is_used() -> None:
    growth = HeapGrowth()
    growth.is_due(SMALL)
    attempts = 0
    for _ in range(1000):
        if growth.is_due(LARGE):
            attempts += 1
            growth.record_trimmed(0)
    assert 200 < attempts < 300
    # The large memory is no longer used.
    assert not growth.is_due(SMALL)
    assert growth.is_due(LARGE)


def test_minimum_is_since_start() -> None:
    growth = HeapGrowth()
    assert not growth.is_due(LARGE)
    assert not growth.is_due(SMALL)
    assert growth.is_due(LARGE)
