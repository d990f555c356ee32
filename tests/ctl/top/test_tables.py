"""Tests of the effects of keys in `weightctl top`."""

from __future__ import annotations

from typing import Any, List

from hypothesis import given
from hypothesis import strategies as st

from weightctl.top.tables import MAX_DELAY_S, MIN_DELAY_S, MODELS, PROCESSES, TENANTS, KeyAction, View, faster, slower

from .pictures import picture

OVERVIEW = picture("charlie", "alpha", "bravo")


def names(view: View) -> List[Any]:
    return [view.table.key(row) for row in view.rows(OVERVIEW)]


def pressed(*keys: str) -> View:
    view = View()
    for key in keys:
        view.on_key(key, OVERVIEW)
        view.scroll_to_selected(view.rows(OVERVIEW), 10)
    return view


def selected(view: View, height: int = 10) -> str:
    rows = view.rows(OVERVIEW)
    return view.table.key(rows[view.scroll_to_selected(rows, height)])


def test_sorts_rows_in_both_orders() -> None:
    assert names(pressed()) == ["bravo", "alpha", "charlie"]  # by requests/s
    assert names(pressed("N")) == ["alpha", "bravo", "charlie"]
    assert names(pressed("N", "N")) == ["charlie", "bravo", "alpha"]
    assert names(pressed("Q")) == ["charlie", "alpha", "bravo"]
    assert names(pressed("Q", "Q")) == ["bravo", "alpha", "charlie"]
    assert names(pressed("Q", "Q", "Q")) == names(pressed("Q"))
    # Equal rows are sorted by name.
    assert names(pressed("M")) == ["alpha", "bravo", "charlie"]


def test_tab_cycles_through_tables() -> None:
    tables = [pressed(*["tab"] * count).table for count in range(4)]
    assert tables == [MODELS, PROCESSES, TENANTS, MODELS]


def test_edits_and_clears_filter() -> None:
    view = pressed("/", "R", "A", "q")
    assert (view.is_typing, view.filter, names(view)) == (True, "RAq", [])
    view = pressed("/", "R", "A", "q", "backspace", "enter")
    assert (view.is_typing, names(view)) == (False, ["bravo"])
    assert names(pressed("/", "r", "a", "enter", "escape")) == names(pressed())
    assert pressed("/", "r", "escape").filter == ""
    assert len(pressed("/", *["x"] * 100).filter) == 40
    assert pressed("/", "\x1b", "up").filter == ""


def test_enter_shows_processes_of_model() -> None:
    view = pressed("down", "enter")
    assert view.table is PROCESSES
    assert {row.model for row in view.rows(OVERVIEW)} == {"alpha"}
    assert len(names(view)) == 5
    for key in ("enter", "escape"):
        back = pressed("down", "enter", key)
        assert (back.table, back.model, selected(back)) == (MODELS, "", "alpha")
    assert pressed("tab", "tab", "enter").table is TENANTS
    # Tab leaves the model's view.
    assert len(names(pressed("enter", "tab", "tab", "tab"))) == 15
    assert pressed("/", "x", "enter", "enter").table is MODELS


def test_selection_survives_sorting() -> None:
    assert selected(pressed()) == "bravo"
    assert [selected(pressed(*["j"] * count)) for count in (1, 2, 3)] == ["alpha", "charlie", "charlie"]
    assert selected(pressed("end", "k")) == "alpha"
    assert selected(pressed("end", "N", "home")) == "alpha"
    assert selected(pressed("down", "N", "Q", "Q")) == "alpha"
    # If the selected row disappears, the first one is selected.
    assert selected(pressed("end", "/", "a", "l", "enter")) == "alpha"


def test_scrolls_to_selection() -> None:
    view = View()
    view.on_key("tab", OVERVIEW)
    rows = view.rows(OVERVIEW)
    assert (len(rows), view.scroll_to_selected(rows, 4), view.top) == (15, 0, 0)
    for key, top in (("page down", 1), ("down", 2), ("end", 11), ("up", 11), ("page up", 9), ("home", 0)):
        view.on_key(key, OVERVIEW)
        index = view.scroll_to_selected(rows, 4)
        assert view.top == top
        assert view.top <= index < view.top + 4


def test_actions_of_keys() -> None:
    keys = {
        "q": KeyAction.QUIT,
        "r": KeyAction.POLL,
        " ": KeyAction.POLL,
        "+": KeyAction.SLOWER,
        "-": KeyAction.FASTER,
        "x": None,
        "ä": None,
    }
    assert {key: View().on_key(key, OVERVIEW) for key in keys} == keys


def test_any_key_closes_help_and_q_quits() -> None:
    for opens in ("h", "?"):
        assert pressed(opens).has_help
        assert not pressed(opens, "x").has_help
        assert pressed(opens).on_key("q", OVERVIEW) is KeyAction.QUIT


def test_limits_delay() -> None:
    assert (slower(1.0), faster(1.0)) == (2.0, 0.5)
    assert (slower(MAX_DELAY_S), faster(MIN_DELAY_S)) == (MAX_DELAY_S, MIN_DELAY_S)


KEYS = [*"qr +-NRQLMjkh?/x", "up", "down", "page up", "page down", "home", "end", "tab", "enter", "escape", "backspace"]


@given(st.lists(st.sampled_from(KEYS), max_size=40), st.integers(1, 5))
def test_any_keys_keep_a_visible_selection(keys: List[str], height: int) -> None:
    view = View()
    for key in keys:
        view.on_key(key, OVERVIEW)
        rows = view.rows(OVERVIEW)
        index = view.scroll_to_selected(rows, height)
        assert 0 <= view.top <= index < view.top + height
        assert index < max(1, len(rows))
