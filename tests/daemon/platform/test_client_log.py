"""What clients cause is logged once for each client, kind and period, and for all of them together within a limit."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.platform.client_log import WINDOW_S, ClientLog

LOG = logging.getLogger("weightd.test")


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.lines = Lines()
        self.log = ClientLog(lambda: self.now)

    def said(self, client: str, text: str, level: int = logging.WARNING, kind: str = "") -> list[str]:
        """Log a line, and return what has been written."""
        self.lines.texts.clear()
        LOG.addHandler(self.lines)
        try:
            self.log.log(LOG, level, client, "%s", text, kind=kind or text)
        finally:
            LOG.removeHandler(self.lines)
        return [*self.lines.texts]


def test_a_line_is_written_once_in_each_period_with_how_many_were_left_out() -> None:
    world = World()
    assert world.said("uid 1", "refused") == ["refused"]
    assert [world.said("uid 1", "refused") for _ in range(600)] == [[]] * 600
    assert world.said("uid 2", "refused") == ["refused"]
    assert world.said("uid 1", "hung up") == ["hung up"]
    world.now += WINDOW_S
    assert world.said("uid 1", "refused") == ["refused (600 more of uid 1 suppressed)"]
    world.now += WINDOW_S
    assert world.said("uid 1", "refused") == ["refused"]


def test_a_client_that_finds_ever_new_things_to_log_leaves_room_for_others() -> None:
    world = World()
    written = sum(bool(world.said("uid 1", f"text {number}")) for number in range(100_000))
    assert written == 8
    assert world.said("uid 2", "refused") == ["refused"]


def test_what_is_not_logged_at_this_level_counts_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightd.test")
    world = World()
    for number in range(100):
        assert world.said("uid 1", f"text {number}", logging.DEBUG) == []
    assert world.said("uid 1", "refused") == ["refused"]


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 20), st.floats(0.0, 1.0)), max_size=300))
def test_all_clients_together_stay_far_below_what_the_journal_takes(events: list[tuple[int, int, float]]) -> None:
    world = World()
    written: list[tuple[float, int]] = []
    for client, kind, seconds in events:
        world.now += seconds / 10
        if world.said(f"host {client}", f"kind {kind}"):
            written.append((world.now, client))
    for at, client in written:
        within = [each for when, each in written if at <= when < at + WINDOW_S]
        # Two periods may meet in it.
        assert len(within) <= 200
        assert within.count(client) <= 16


def test_strangers_from_a_million_addresses_are_counted_within_a_bound() -> None:
    world = World()
    written = sum(bool(world.said(f"host {number}", "refused")) for number in range(100_000))
    assert written == 100
    assert len(world.log._suppressed_counts) <= 1024 + 1  # pyright: ignore[reportPrivateUsage]
