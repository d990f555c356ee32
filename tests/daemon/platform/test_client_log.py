"""Log lines that clients cause: one per client, kind and period, with a limit for all clients together."""

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


class LogHarness:
    def __init__(self) -> None:
        self.now = 100.0
        self.lines = Lines()
        self.log = ClientLog(lambda: self.now)

    def log_line(self, client: str, text: str, level: int = logging.WARNING, kind: str = "") -> list[str]:
        """Log a line and return the lines written."""
        self.lines.texts.clear()
        LOG.addHandler(self.lines)
        try:
            self.log.log(LOG, level, client, "%s", text, kind=kind or text)
        finally:
            LOG.removeHandler(self.lines)
        return [*self.lines.texts]


def test_counts_suppressed_lines_per_period() -> None:
    harness = LogHarness()
    assert harness.log_line("uid 1", "refused") == ["refused"]
    assert [harness.log_line("uid 1", "refused") for _ in range(600)] == [[]] * 600
    assert harness.log_line("uid 2", "refused") == ["refused"]
    assert harness.log_line("uid 1", "disconnected") == ["disconnected"]
    harness.now += WINDOW_S
    assert harness.log_line("uid 1", "refused") == ["refused (600 more of uid 1 suppressed)"]
    harness.now += WINDOW_S
    assert harness.log_line("uid 1", "refused") == ["refused"]


def test_limits_kinds_per_client() -> None:
    harness = LogHarness()
    written = sum(bool(harness.log_line("uid 1", f"text {number}")) for number in range(100_000))
    assert written == 8
    assert harness.log_line("uid 2", "refused") == ["refused"]


def test_disabled_levels_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightd.test")
    harness = LogHarness()
    for number in range(100):
        assert harness.log_line("uid 1", f"text {number}", logging.DEBUG) == []
    assert harness.log_line("uid 1", "refused") == ["refused"]


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 20), st.floats(0.0, 1.0)), max_size=300))
def test_limits_lines_of_all_clients_together(events: list[tuple[int, int, float]]) -> None:
    harness = LogHarness()
    written: list[tuple[float, int]] = []
    for client, kind, seconds in events:
        harness.now += seconds / 10
        if harness.log_line(f"host {client}", f"kind {kind}"):
            written.append((harness.now, client))
    for at, client in written:
        within = [each for when, each in written if at <= when < at + WINDOW_S]
        # The interval can overlap two periods.
        assert len(within) <= 200
        assert within.count(client) <= 16


def test_limits_memory_for_unknown_hosts() -> None:
    harness = LogHarness()
    written = sum(bool(harness.log_line(f"host {number}", "refused")) for number in range(100_000))
    assert written == 100
    assert len(harness.log._suppressed_counts) <= 1024 + 1  # pyright: ignore[reportPrivateUsage]
