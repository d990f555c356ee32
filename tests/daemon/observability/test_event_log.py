"""The last of what is logged is kept, and told a page at a time: nothing twice, and nothing left out in silence."""

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


def log(happened: EventLog, text: str, level: int = logging.INFO, model: str = "", name: str = "weightd") -> None:
    record = logging.LogRecord(name, level, __file__, 1, "%s", (text,), None)
    record.__dict__.update(subject_extra(model) if model else {})
    happened.handle(record)


def pages(happened: EventLog, after: int = 0, model: str = "", limit: int = limits.MAX_EVENTS) -> list[Event]:
    """All that is told, page by page."""
    told: list[Event] = []
    while True:
        answer = happened.query(Events("1", after, model, limit))
        told += answer.events
        assert answer.last >= after
        after = answer.last
        if not answer.remaining:
            return told


@pytest.fixture
def happened(caplog: pytest.LogCaptureFixture) -> EventLog:
    caplog.set_level(logging.DEBUG, "weightd")
    return EventLog()


def test_an_event_is_what_the_log_says_with_what_it_is_about(happened: EventLog) -> None:
    with happened.capture_logs():
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
    first, *more = pages(happened)
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
def test_pages_tell_what_is_kept_of_a_model_once_and_in_order(
    logged: list[tuple[str, int]], most: int, limit: int
) -> None:
    happened = EventLog(most, 10_000)
    for model, size in logged:
        log(happened, "x" * size, model=model)
    kept = pages(happened)
    assert len(kept) <= most
    # Of each model those that came last.
    for model in ("", "m", "n"):
        mine, texts = [each for each in kept if each.model == model], [size for of, size in logged if of == model]
        assert [len(each.text) for each in mine] == [min(size, 1024) for size in texts[len(texts) - len(mine) :]]
    assert pages(happened, limit=limit) == kept
    assert pages(happened, model="m", limit=limit) == [each for each in kept if each.model == "m"]
    answer = happened.query(Events("1"))
    assert answer.remaining == 0
    assert answer.missed + len(kept) == len(logged)
    assert happened.query(Events("1", answer.last)).events == ()


def test_a_flood_of_one_client_drives_out_nothing_but_its_own_events(happened: EventLog) -> None:
    with happened.capture_logs():
        LOG.error("of the daemon")
        LOG.warning("of a model", extra=subject_extra("m", 1))
        LOG.warning("of b", extra=client_extra("uid 2"))
        for number in range(3000):
            LOG.warning("of a %d", number, extra=client_extra("uid 1"))
        LOG.warning("of a host", extra=client_extra("host ::1"))
    texts = [each.text for each in pages(happened)]
    assert len(texts) == MAX_EVENTS
    assert {"of the daemon", "of a model", "of b", "of a host", "of a 2999"} <= {*texts}


def test_many_clients_leave_half_of_what_is_kept_to_the_daemon(caplog: pytest.LogCaptureFixture) -> None:
    happened = EventLog(100)
    caplog.set_level(logging.INFO, "weightd")
    with happened.capture_logs():
        for number in range(80):
            LOG.warning("of the daemon %d", number)
        for number in range(1000):
            LOG.warning("of %d", number, extra=client_extra(f"host {number}"))
    texts = [each.text for each in pages(happened)]
    assert sum("of the daemon" in each for each in texts) == 50
    assert len(texts) == 100


def test_a_model_whose_workers_die_all_the_time_leaves_the_events_of_others(happened: EventLog) -> None:
    with happened.capture_logs():
        LOG.info("of another", extra=subject_extra("n", 1))
        for number in range(3000):
            LOG.warning("lost %d", number, extra=subject_extra("m", number))
    assert "of another" in {each.text for each in pages(happened)}


def test_what_is_kept_is_bounded_in_bytes_and_an_answer_fits_in_a_header() -> None:
    happened = EventLog(10_000, 500_000)
    for _ in range(5000):
        log(happened, "ü" * 1000, model="m" * 64)
    kept = pages(happened)
    assert 300 < len(kept) < 500_000 / 1024
    answer = happened.query(Events("1" * limits.MAX_ID_BYTES))
    assert answer.remaining == len(kept) - len(answer.events)
    assert sum(map(len, encode(answer))) <= limits.MAX_HEADER_BYTES


def test_who_goes_on_after_a_restart_misses_nothing_and_is_told_what_is_forgotten(
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
    # Of a daemon whose clock was ahead.
    assert [each.text for each in now.query(Events("1", 2**62)).events] == ["1", "2"]
