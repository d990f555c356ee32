"""What who sits before the screen has chosen: table, order, filter, selection; and what a key does to that."""

from __future__ import annotations

import enum
from typing import Any, Dict, List, Optional

from weightctl.top.tables import MODELS, ORDERS, PROCESSES, TABLES, ScreenTable
from weightd_common.dashboard.rows import Overview

# Nobody types more, and it has room on a line.
_MAX_FILTER_LENGTH = 40

MIN_DELAY_S, MAX_DELAY_S = 0.2, 3600.0


class KeyAction(enum.Enum):
    """What a key asks of who drives the screen."""

    QUIT = "quit"
    POLL = "ask"
    SLOWER = "slower"
    FASTER = "faster"


_KEY_ACTIONS: Dict[str, KeyAction] = {
    "q": KeyAction.QUIT,
    "r": KeyAction.POLL,
    " ": KeyAction.POLL,
    "+": KeyAction.SLOWER,
    "=": KeyAction.SLOWER,
    "-": KeyAction.FASTER,
}


def slower(delay_s: float) -> float:
    """Return the next longer delay."""
    return min(2 * delay_s, MAX_DELAY_S)


def faster(delay_s: float) -> float:
    """Return the next shorter delay."""
    return max(delay_s / 2, MIN_DELAY_S)


class View:
    """What is to be seen. Keys are characters, and names such as "up", "tab", "enter", "escape", "page down".

    Attributes:
        table: which one.
        order: the letter by which it is sorted, of `ORDERS`.
        is_reversed: whether the other way round.
        filter: rows whose names do not have this in them are not shown.
        is_typing: whether keys go into the filter.
        has_help: whether the keys are explained instead.
        model: of which model processes are shown; all where it is empty.
        top: the first row that is seen.
    """

    def __init__(self) -> None:
        self.table: ScreenTable[Any] = MODELS
        self.order = "R"
        self.is_reversed = False
        self.filter = ""
        self.is_typing = False
        self.has_help = False
        self.model = ""
        self.top = 0
        self._page_height = 1
        self._selected: Dict[str, str] = {}

    def rows(self, overview: Overview) -> List[Any]:
        """Return what is to be seen of a picture, in order."""
        needle = self.filter.lower()
        rows = [
            row for row in self.table.rows(overview)
            if needle in self.table.key(row).lower() and (not self.model or self.table.model(row) == self.model)
        ]  # fmt: skip
        rows.sort(key=self.table.sort_keys["N"])
        order = self.table.sort_keys.get(self.order)
        if order is not None:
            rows.sort(key=order, reverse=(self.order != "N") != self.is_reversed)
        return rows

    def scroll_to_selected(self, rows: List[Any], height: int) -> int:
        """Have the selected row among the `height` that are seen; return its index, 0 where that row has gone."""
        keys = [self.table.key(row) for row in rows]
        selected = self._selected.get(self.table.title)
        index = keys.index(selected) if selected in keys else 0
        self._page_height = max(1, height)
        self.top = max(0, min(self.top, len(rows) - self._page_height))
        self.top = min(max(self.top, index - self._page_height + 1), index)
        return index

    def on_key(self, key: str, overview: Overview) -> Optional[KeyAction]:
        """A key was pressed; return what it asks of others."""
        if self.is_typing:
            self._on_filter_key(key)
        elif self.has_help:
            self.has_help = False
            return KeyAction.QUIT if key == "q" else None
        elif key in _KEY_ACTIONS:
            return _KEY_ACTIONS[key]
        elif key in ORDERS:
            self._sort(key)
        elif key in _STEPS:
            self._move(key, overview)
        else:
            self._on_view_key(key, overview)
        return None

    def _on_view_key(self, key: str, overview: Overview) -> None:
        """Another table, or another part of it."""
        if key in ("h", "?"):
            self.has_help = True
        elif key == "/":
            self.is_typing = True
        elif key == "tab":
            self._show_table(TABLES[(TABLES.index(self.table) + 1) % len(TABLES)])
        elif key == "enter":
            self._toggle_processes(overview)
        elif key == "escape":
            if self.model:
                self._show_table(MODELS)
            self.filter = ""

    def _show_table(self, table: ScreenTable[Any], model: str = "") -> None:
        self.table, self.model, self.top = table, model, 0

    def _toggle_processes(self, overview: Overview) -> None:
        """From a model to its processes, and back."""
        rows = self.rows(overview)
        if self.table is MODELS and rows:
            self.filter, row = "", rows[self.scroll_to_selected(rows, self._page_height)]
            self._show_table(PROCESSES, row.name)
        elif self.model:
            self._show_table(MODELS)

    def _sort(self, key: str) -> None:
        self.is_reversed = self.order == key and not self.is_reversed
        self.order = key

    def _on_filter_key(self, key: str) -> None:
        if key == "escape":
            self.filter = ""
        if key in ("escape", "enter"):
            self.is_typing = False
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif len(key) == 1 and key.isprintable() and len(self.filter) < _MAX_FILTER_LENGTH:
            self.filter += key

    def _move(self, key: str, overview: Overview) -> None:
        rows = self.rows(overview)
        if rows:
            index = self.scroll_to_selected(rows, self._page_height) + _STEPS[key] * (
                self._page_height if key.startswith("page") else 1
            )
            last = len(rows) - 1
            self._selected[self.table.title] = self.table.key(rows[max(0, min(index, last))])


# So many rows, or pages; there are fewer rows than the last two leap.
_FAR = 1 << 30
_STEPS = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -1, "page down": 1, "home": -_FAR, "end": _FAR}
