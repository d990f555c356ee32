from __future__ import annotations

from collections.abc import Callable

import pytest

from weightd_common.exposition import exposition
from weightd_daemon.metrics_endpoint import page
from weightd_daemon.metrics_endpoint.page import MAX_AGE_S, MetricsPage
from weightd_protocol.messages.metrics import MetricsResponse, ReloadCounts


class PageMaker:
    """Who makes the page; its clock passes a millisecond with each look at it."""

    def __init__(self) -> None:
        self.now, self.told, self.takes = 0.0, 0, 0.0
        self.soon: list[Callable[[], object]] = []
        self.page = MetricsPage(self.tell, self.soon.append, self.clock)

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def tell(self) -> MetricsResponse:
        self.told += 1
        self.now += self.takes
        return response(self.told)

    def turns(self) -> int:
        count = 0
        while self.soon:
            self.soon.pop(0)()
            count += 1
        return count


def response(uptime: float) -> MetricsResponse:
    return MetricsResponse("7", "1", "running", uptime, (1.0,), (1,), (), (), 0, 0, 0, ReloadCounts(0, 0))


def test_all_who_want_it_at_a_time_are_given_the_same_text() -> None:
    desk, given = PageMaker(), list[bytes]()
    for _ in range(3):
        desk.page.request_text(given.append)
    assert (desk.told, given) == (1, [])
    desk.turns()
    assert given == 3 * [exposition(response(1)).encode()]
    desk.page.request_text(given.append)
    assert (desk.told, len(given)) == (1, 4)
    desk.now += MAX_AGE_S
    desk.page.request_text(given.append)
    assert desk.turns() > 0
    assert (desk.told, given[-1]) == (2, exposition(response(2)).encode())


def test_what_takes_the_loop_long_is_told_the_more_seldom() -> None:
    desk, given = PageMaker(), list[bytes]()
    desk.takes = 0.1
    for count, seconds in ((1, 0.0), (1, 9.0), (2, 2.0)):
        desk.now += seconds
        desk.page.request_text(given.append)
        desk.turns()
        assert desk.told == count
    assert len(given) == 3


def test_others_have_their_turn_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    # This text has few pieces: one each turn.
    monkeypatch.setattr(page, "_SECTIONS_PER_CLOCK_CHECK", 1)
    desk, given = PageMaker(), list[bytes]()
    desk.page.request_text(given.append)
    desk.soon.pop(0)()
    assert given == []
    assert desk.turns() > 2
    assert given == [exposition(response(1)).encode()]
