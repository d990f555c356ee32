"""Tests of the event log: it keeps the last events, and pages neither repeat nor silently skip events."""

from __future__ import annotations

import itertools
import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.observability.event_log import MAX_EVENTS, EventLog
from weightd_daemon.platform.log_setup import client_extra, subject_extra
from weightd_protocol import limits
from weightd_protocol.codec import encode
from weightd_protocol.messages.events import Event, Events

LOG = logging.getLogger("weightd")


def log(event_log: EventLog, text: str, level: int = logging.INFO, model: str = "", name: str = "weightd") -> None:
    record = logging.LogRecord(name, level, __file__, 1, "%s", (text,), None)
    record.__dict__.update(subject_extra(model) if model else {})
    event_log.handle(record)


def pages(event_log: EventLog, after: int = 0, model: str = "", limit: int = limits.MAX_EVENTS) -> list[Event]:
    """Return all events, read page by page."""
    events: list[Event] = []
    while True:
        answer = event_log.query(Events("1", after, model, limit))
        events += answer.events
        assert answer.last >= after
        after = answer.last
        if not answer.remaining:
            return events


@pytest.fixture
def event_log(caplog: pytest.LogCaptureFixture) -> EventLog:
    caplog.set_level(logging.DEBUG, "weightd")
    return EventLog()


def test_event_has_log_text_and_subject(event_log: EventLog) -> None:
    with event_log.capture_logs():
        LOG.info("two\nlines of %s", "m.1.w1", extra=subject_extra("m", 1, "m.1.w1"))
        LOG.warning("x" * 2000)
        LOG.debug("unseen")
        logging.getLogger("weightd.usage").info("each minute")
        logging.getLogger("weightd.usage").warning("begin anew")
        try:
            raise ValueError("as a test")
        except ValueError:
            LOG.critical("it fails", exc_info=True)
    LOG.error("after the block")
    first, *more = pages(event_log)
    assert (first.severity, first.text) == ("info", "two | lines of m.1.w1")
    assert (first.model, first.generation, first.child) == ("m", 1, "m.1.w1")
    assert [(each.severity, each.text[:24]) for each in more] == [
        ("warning", "x" * 24),
        ("warning", "begin anew"),
        ("error", "it fails: ValueError: as"),
    ]
    assert more[0].text.endswith("...")
    assert {after.number - before.number for before, after in pairwise([first, *more])} == {1}


@given(st.lists(st.tuples(st.sampled_from(["", "m", "n"]), st.integers(0, 3000))), st.integers(1, 9), st.integers(1, 5))
def test_pages_return_kept_events_of_model_in_order(logged: list[tuple[str, int]], most: int, limit: int) -> None:
    event_log = EventLog(most, 10_000)
    for model, size in logged:
        log(event_log, "x" * size, model=model)
    kept = pages(event_log)
    assert len(kept) <= most
    # Of each model the latest events are kept.
    for model in ("", "m", "n"):
        model_events, texts = (
            [each for each in kept if each.model == model],
            [size for of, size in logged if of == model],
        )
        assert [len(each.text) for each in model_events] == [
            min(size, 1024) for size in texts[len(texts) - len(model_events) :]
        ]
    assert pages(event_log, limit=limit) == kept
    assert pages(event_log, model="m", limit=limit) == [each for each in kept if each.model == "m"]
    answer = event_log.query(Events("1"))
    assert answer.remaining == 0
    assert answer.missed + len(kept) == len(logged)
    assert event_log.query(Events("1", answer.last)).events == ()


def test_flood_of_one_client_displaces_only_its_own_events(event_log: EventLog) -> None:
    with event_log.capture_logs():
        LOG.error("of the daemon")
        LOG.warning("of a model", extra=subject_extra("m", 1))
        LOG.warning("of b", extra=client_extra("uid 2"))
        for number in range(3000):
            LOG.warning("of a %d", number, extra=client_extra("uid 1"))
        LOG.warning("of a host", extra=client_extra("host ::1"))
    texts = [each.text for each in pages(event_log)]
    assert len(texts) == MAX_EVENTS
    assert {"of the daemon", "of a model", "of b", "of a host", "of a 2999"} <= {*texts}


def test_many_clients_leave_half_of_log_to_daemon(caplog: pytest.LogCaptureFixture) -> None:
    event_log = EventLog(100)
    caplog.set_level(logging.INFO, "weightd")
    with event_log.capture_logs():
        for number in range(80):
            LOG.warning("of the daemon %d", number)
        for number in range(1000):
            LOG.warning("of %d", number, extra=client_extra(f"host {number}"))
    texts = [each.text for each in pages(event_log)]
    assert sum("of the daemon" in each for each in texts) == 50
    assert len(texts) == 100


def test_failing_model_leaves_events_of_others(event_log: EventLog) -> None:
    with event_log.capture_logs():
        LOG.info("of another", extra=subject_extra("n", 1))
        for number in range(3000):
            LOG.warning("lost %d", number, extra=subject_extra("m", number))
    assert "of another" in {each.text for each in pages(event_log)}


def test_log_is_limited_in_bytes_and_page_fits_in_header() -> None:
    event_log = EventLog(10_000, 500_000)
    for _ in range(5000):
        log(event_log, "ü" * 1000, model="m" * 64)
    kept = pages(event_log)
    assert 300 < len(kept) < 500_000 / 1024
    answer = event_log.query(Events("1" * limits.MAX_ID_BYTES))
    assert answer.remaining == len(kept) - len(answer.events)
    assert sum(map(len, encode(answer))) <= limits.MAX_HEADER_BYTES


def test_reader_continues_after_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.time_ns", itertools.count(10**18, 10**10).__next__)
    before, now = EventLog(), EventLog(2)
    log(before, "the last of the daemon before")
    [last] = pages(before)
    for number in range(3):
        log(now, str(number))
    answer = now.query(Events("1", last.number))
    assert ([each.text for each in answer.events], answer.missed) == (["1", "2"], 1)
    # The number comes from a daemon whose clock was ahead.
    assert [each.text for each in now.query(Events("1", 2**62)).events] == ["1", "2"]
