"""Tests of the lines on the screen of `weightctl top`."""

from __future__ import annotations

from dataclasses import replace
from typing import List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import looks
from weightctl.top.drawing import ASCII, BLOCKS, Style, narrow, text_line, truncate
from weightctl.top.screen import PollStatus, ScreenSize, draw, render_text
from weightctl.top.tables import View
from weightd_common.dashboard.history import History

from .pictures import picture

OVERVIEW = picture("alpha", "bravo")
ALL_IS_WELL = PollStatus(1.0)


def drawn(*keys: str, standing: PollStatus = ALL_IS_WELL, width: int = 79) -> List[str]:
    view = View()
    for key in keys:
        view.on_key(key, OVERVIEW)
    return [each.text.rstrip() for each in draw(OVERVIEW, view, standing, ScreenSize(24, width), ASCII)]


def test_small_screen() -> None:
    lines = drawn()
    assert lines[:9] == [
        "weightd 0.1.0: running, up 3 s                                        every 1 s",
        "requests                            @@@ 101.0/s, 3 queued, 0 running",
        "latency                             @@@ p50 0.50 ms, p99 0.99 ms",
        "memory   #######+++-                    330.0 MB, 200.0 MB of it shared weights",
        "plain    .............................. 880.0 MB as 8 plain processes",
        "",
        "MODEL  STATE    PROC  REQ/s  ERR/s  QUEUE  P50 ms  P99 ms  MEM MB  PLAIN MB",
        "bravo  serving   4/4  100.0    0.0      1    0.50    0.99   150.0     440.0",
        "alpha  serving   4/4    1.0    0.0      2    0.50    0.99   150.0     440.0",
    ]
    assert (len(lines), lines[-1]) == (24, "models processes tenants  2 by requests/s   h help  q quit")


def test_wide_screen_has_a_spark_per_model() -> None:
    [model] = [each for each in drawn(width=140) if each.startswith("bravo")]
    assert " ".join(model.split()) == "bravo serving 1 4/4 100.0 0.0 1 0 0.50 0.99 150.0 440.0 @@@"


def test_processes_of_a_model() -> None:
    lines = drawn("enter")
    assert _words(lines[6:9], 5) == [
        "MODEL PROCESS ROLE STATE PID",
        f"bravo 1.holder holder holding {OVERVIEW.processes[5].status.pid}",
        f"bravo 1.w1 worker ready {OVERVIEW.processes[6].status.pid}",
    ]
    assert lines[-1] == "models processes tenants  5 by requests/s of bravo   h help  q quit"


def test_tenants() -> None:
    lines = drawn("tab", "tab")
    assert _words(lines[6:8], 4) == ["TENANT WEIGHT SHARE REQ/s", "research 1 50% 0.0"]


def _words(lines: List[str], most: int) -> List[str]:
    return [" ".join(each.split()[:most]) for each in lines]


def test_help_lists_all_keys() -> None:
    lines = drawn("h")
    assert [each for each in lines if each.startswith("q ") and "quit" in each]
    assert "press any key to go back" in lines
    assert len(lines) <= 24


def test_shows_typed_filter() -> None:
    assert drawn("/", "a", "l")[-1] == "/al_"
    assert drawn("/", "a", "l", "enter")[-1] == 'models processes tenants  1 by requests/s, with "al"   h help  q quit'


@pytest.mark.parametrize(
    ("standing", "expected"),
    [
        (PollStatus(2.0, 4.0), "every 2 s"),
        (PollStatus(0.5, 3.1), "no response for 3 s"),
        (PollStatus(1.0, 75.0, "UNAVAILABLE: no daemon"), "no response for 1 min 15 s: UNAVAILABLE: no daemon"),
        (PollStatus(1.0, 1.0, "a\x1b[2Jb"), "no response for 1 s: a\\x1b[2Jb"),
    ],
)  # fmt: skip
def test_shows_unresponsive_daemon(standing: PollStatus, expected: str) -> None:
    first = drawn(standing=standing)[0]
    assert first.endswith(expected)
    assert len(first) <= 79


def test_marks_selected_row() -> None:
    view = View()
    view.on_key("down", OVERVIEW)
    lines = draw(OVERVIEW, view, ALL_IS_WELL, ScreenSize(24, 79), ASCII)
    assert [each.text.split()[0] for each in lines if each.is_selected] == ["alpha"]


def test_highlights_failed_model() -> None:
    history = History()
    history.on_metrics(looks.metrics(1.0, looks.counted("bad", state="failed", ready=False)))
    lines = draw(history.overview(), View(), ALL_IS_WELL, ScreenSize(24, 79), ASCII)
    assert ("failed", Style.BAD) in [piece for each in lines for piece in each.spans]


def test_shows_progress_as_state() -> None:
    history = History()
    history.on_metrics(looks.metrics(1.0, looks.counted("new", state="attaching", ready=False)))
    history.on_status(looks.status(1.0, looks.model("new", progress="attaching 3/8")))
    lines = draw(history.overview(), View(), ALL_IS_WELL, ScreenSize(24, 79), ASCII)
    assert "new    attaching 3/8" in "\n".join(each.text for each in lines)


def test_shows_that_view_is_of_one_tenant() -> None:
    history = History()
    history.on_metrics(looks.metrics(1.0, looks.counted("m", processes=())))
    history.on_status(looks.status(1.0, pid=0))
    lines = [each.text for each in draw(history.overview(), View(), ALL_IS_WELL, ScreenSize(24, 79), ASCII)]
    assert lines[3] == "only this tenant's requests are shown; it may not see the status of others"
    assert lines[6].split() == ["m", "serving", "-", "-", "-", "0", "-", "-", "-", "-"]


def test_text_has_all_tables_and_columns() -> None:
    lines = render_text(OVERVIEW, 200)
    assert lines[:7] == [
        "weightd 0.1.0: running, up 3 s",
        "requests 101.0/s, 3 queued, 0 running",
        "latency  p50 0.50 ms, p99 0.99 ms",
        "memory   330.0 MB, 200.0 MB of it shared weights",
        "plain    880.0 MB as 8 plain processes",
        "",
        "MODEL  STATE    GEN  PROC  REQ/s  ERR/s  QUEUE  RUN  P50 ms  P99 ms  MEM MB  PLAIN MB",
    ]
    assert [each.split()[0] for each in lines if each and each.split()[0].isupper()] == ["MODEL", "MODEL", "TENANT"]
    assert max(map(len, render_text(OVERVIEW, 60))) <= 60


# --- hostile names ----------------------------------------------------------------------------------------------------


characters = st.one_of(st.characters(), st.sampled_from("\x1b\r\n\t\u202e\u0301\u3042\x9b"))
hostile = st.text(characters, min_size=1, max_size=40)


@given(hostile, st.integers(1, 30), st.integers(2, 150), st.sampled_from(["", "h", "/", "enter", "tab"]))
def test_any_name_fits_and_moves_no_cursor(name: str, height: int, width: int, key: str) -> None:
    overview = picture(name)
    overview = replace(overview, metrics=replace(overview.metrics, version=name, state=name))
    view = View()
    view.on_key(key, overview)
    lines = draw(overview, view, PollStatus(1.0, 9.0, name), ScreenSize(height, width), BLOCKS)
    assert len(lines) <= height
    for each in lines:
        assert len(each.text) <= width
        assert each.text.isprintable()
    assert all(each.isprintable() for each in render_text(overview, width))


def test_each_character_has_one_column() -> None:
    assert narrow("a\x1b\u202e\u0301\u3042\n") == "a\\x1b\\u202e\\u0301\\u3042\\n"


def test_truncates_line() -> None:
    assert truncate(text_line("abc"), 2).text == "ab"
    assert truncate(text_line("abc"), 0).spans == []
