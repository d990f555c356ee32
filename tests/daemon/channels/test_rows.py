"""Rows that a worker has damaged: every value that the daemon reads is within bounds."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.examples import examples
from weightd_common.channels.pages import (
    ANSWERED,
    BASE,
    CURRENT_CHANNEL,
    CURRENT_REQUEST,
    REQUESTS,
    SECONDS,
    SINCE,
    STAGE,
    STAGE_RUNNING,
    STAGE_TAKEN,
    START,
    USED,
    WORD_BYTES,
    Layout,
    Page,
    page_over,
)
from weightd_daemon.channels.rows import NO_COUNTS, RowReader, Rows

from .kernel import new_page

LAYOUT = Layout(2, 2)
NOW = 1000.0
WORDS = LAYOUT.row_bytes // WORD_BYTES


def new_row() -> tuple[Page, RowReader]:
    page = new_page(LAYOUT.row_bytes)
    return page, RowReader(LAYOUT, page, 0.0)


def count(page: Page, requests: int, ended: int, seconds: float = 0.0) -> None:
    index = LAYOUT.row_channel(1)
    page.words[index + REQUESTS], page.words[index + ANSWERED] = requests, ended
    page.reals[index + SECONDS] = seconds


_WORDS = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 6),
    st.sampled_from([2**64 - 1, 2**63, 0x7FF8_0000_0000_0000, 0x7FF0_0000_0000_0000, 0xFFF0_0000_0000_0000]),
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.lists(_WORDS, min_size=WORDS, max_size=WORDS), min_size=1, max_size=3), st.floats(0.0, 1e6))
def test_any_bytes_give_bounded_values(contents: list[list[int]], now: float) -> None:
    page, row = new_row()
    rows = Rows()
    rows.readers.append(row)
    earlier = NO_COUNTS
    for words in contents:
        for index, word in enumerate(words):
            page.words[index] = word
        counts = rows.counts(1, now)
        assert all(after >= before for before, after in zip(earlier, counts, strict=True))
        assert counts.requests <= 1e6 * (now + 1)
        assert counts.ended <= counts.requests
        assert counts.seconds <= now + 1001
        earlier = counts
        assert math.isfinite(rows.used_s(1, now))
        assert math.isfinite(rows.device_s(now))
        since = row.running_since(now)
        assert since is None or 0.0 <= since <= now
        current = row.last_request({7})
        assert current is None or (current.channel == 7 and 1 <= current.stage <= 4)
    row.repair(range(2), range(2), now)
    assert row.is_plausible
    assert (row.last_request({7}), row.counts(1, now)) == (None, earlier)
    assert row.is_plausible


@pytest.mark.parametrize(
    ("requests", "ended", "seconds"),
    [(4, 3, 1.0), (5, 2, 1.0), (5, 6, 1.0), (10**12, 5, 1.0), (5, 3, 0.5), (5, 3, float("nan")), (5, 3, float("inf"))],
)
def test_counts_that_decrease_or_jump_are_implausible(requests: int, ended: int, seconds: float) -> None:
    page, row = new_row()
    count(page, 5, 3, 1.0)
    assert row.counts(1, NOW) == (5, 0, 1.0, 3, 0, 0, 0, 0, 0)
    assert row.is_plausible
    count(page, requests, ended, seconds)
    assert row.counts(1, NOW) == (5, 0, 1.0, 3, 0, 0, 0, 0, 0)
    assert not row.is_plausible


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e18])
@pytest.mark.parametrize("word", [START, LAYOUT.row_tenant(1) + USED, LAYOUT.row_tenant(1) + BASE])
def test_implausible_times_are_ignored(word: int, value: float) -> None:
    page, row = new_row()
    page.reals[word] = value
    assert (row.start_s(NOW), row.used_s(1, NOW), row.base_s(1, NOW)) == (0.0, 0.0, 0.0)
    assert not row.is_plausible


@pytest.mark.parametrize(("channel", "stage"), [(8, STAGE_TAKEN), (7, 5), (7, 2**64 - 1)])
def test_a_foreign_channel_or_unknown_stage_is_implausible(channel: int, stage: int) -> None:
    page, row = new_row()
    page.words[CURRENT_CHANNEL], page.words[CURRENT_REQUEST], page.words[STAGE] = channel, 1, stage
    assert row.last_request({7}) is None
    assert not row.is_plausible


def test_a_running_request_has_a_start() -> None:
    page, row = new_row()
    assert row.running_since(NOW) is None
    page.reals[SINCE], page.words[STAGE] = 5.0, STAGE_RUNNING
    assert row.running_since(NOW) == 5.0
    # The worker has started a request after the daemon had read the clock.
    page.reals[SINCE] = NOW + 1
    assert row.running_since(NOW) == NOW
    page.reals[SINCE] = NOW + 100
    assert row.running_since(NOW) is None
    assert not row.is_plausible


def test_a_successor_continues_the_counts() -> None:
    page, row = new_row()
    count(page, 5, 4, 1.0)
    row.counts(1, NOW)
    count(page, 3, 9, float("nan"))
    page.reals[LAYOUT.row_tenant(0) + USED] = 2.5
    row.repair(range(2), range(2), NOW)
    assert row.counts(1, NOW) == (5, 0, 1.0, 4, 0, 0, 0, 0, 0)
    assert row.used_s(0, NOW) == 2.5


def test_pages_have_no_overlapping_words() -> None:
    def check(entries: list[tuple[int, int]], words: int) -> None:
        used = sorted(entries)
        assert all(first + size <= second for (first, size), (second, _) in itertools.pairwise(used))
        assert used[-1][0] + used[-1][1] <= words

    layout = Layout(3, 4)
    check(
        [(0, 8), *((layout.tenant(each), 2) for each in range(3)), *((layout.channel(each), 8) for each in range(4))],
        layout.daemon_page_bytes // WORD_BYTES,
    )
    check(
        [(0, 8), *((layout.row_tenant(n), 2) for n in range(3)), *((layout.row_channel(n), 4) for n in range(4))],
        layout.row_bytes // WORD_BYTES,
    )
    page = page_over(memoryview(bytearray(16)))
    page.reals[1] = 1.0
    assert page.words[1] == 0x3FF0_0000_0000_0000
