"""What follows from what the daemon has counted."""

from __future__ import annotations

from weightd.ctl.counters import Counted, is_split, per_execution


def test_requests_in_an_execution() -> None:
    assert per_execution(Counted(10, 4), Counted(40, 8)) == 7.5
    assert per_execution(Counted(10, 4), Counted(10, 4)) is None
    assert per_execution(None, Counted(10, 4)) is None


def test_what_took_more_executions_than_there_were_requests_was_split() -> None:
    assert is_split(Counted(10, 4), Counted(11, 7))
    assert not is_split(Counted(10, 4), Counted(11, 5))
    assert not is_split(Counted(10, 4), None)
