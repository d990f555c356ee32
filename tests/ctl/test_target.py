"""Tests of the figures derived from the daemon's counters."""

from __future__ import annotations

from weightctl.target import CounterSample, has_split, per_execution


def test_requests_per_execution() -> None:
    assert per_execution(CounterSample(10, 4, 0), CounterSample(40, 8, 0)) == 7.5
    assert per_execution(CounterSample(10, 4, 0), CounterSample(10, 4, 0)) is None
    assert per_execution(None, CounterSample(10, 4, 0)) is None


def test_detects_split_requests() -> None:
    assert has_split(CounterSample(10, 4, 1), CounterSample(11, 7, 2))
    assert not has_split(CounterSample(10, 4, 1), CounterSample(11, 5, 1))
    assert not has_split(CounterSample(10, 4, 1), None)
