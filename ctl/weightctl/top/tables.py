"""The tables of `weightctl top` (models, processes, tenants), and the view: table, order, filter and selection."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Generic, List, Optional, Sequence, TypeVar

from weightctl.text import megabytes, milliseconds
from weightctl.top.drawing import Style, narrow
from weightd_common.dashboard.overview import ModelRow, Overview, ProcessRow, TenantRow

R = TypeVar("R")


_NONE = "-"


_MAX_PRIORITY = 9


@dataclass(frozen=True)
class ScreenColumn(Generic[R]):
    """A column of a table.

    Attributes:
        heading: the text above the column.
        text: a function that returns the text of the cell in a row.
        priority: the importance of the column. If the width is too small, the columns with the lowest priority are left
            out.
        is_left: whether the column is left-aligned.
        style: a function that returns the style of the cell in a row.
    """

    heading: str
    text: Callable[[R], str]
    priority: int = _MAX_PRIORITY
    is_left: bool = False
    style: Callable[[R], Style] = lambda _: Style.TEXT


@dataclass(frozen=True)
class ScreenTable(Generic[R]):
    """A table of `weightctl top`.

    Attributes:
        title: the name of the table.
        rows: a function that returns the rows of the table from an overview.
        key: a function that returns the name of a row, which identifies the row in later overviews.
        columns: the columns. The first one has the names.
        sort_keys: for each letter of `ORDERS`, a function that returns the value by which a row is sorted.
        spark: a function that returns the values of a row's sparkline, which is shown if the width suffices; None if
            the table has no sparklines.
        model: a function that returns the name of a row's model; "" if it has none.
    """

    title: str
    rows: Callable[[Overview], Sequence[R]]
    key: Callable[[R], str]
    columns: Sequence[ScreenColumn[R]]
    sort_keys: Dict[str, Callable[[R], Any]]
    spark: Optional[Callable[[R], Sequence[Optional[float]]]] = None
    model: Callable[[R], str] = field(default=lambda _: "")


# Sort orders of a table, by the key that selects them. Names are sorted in ascending order, all other values in
# descending order.
ORDERS = {"N": "name", "R": "requests/s", "Q": "queue", "L": "latency", "M": "memory"}


def _rate(value: Optional[float]) -> str:
    return _NONE if value is None else f"{value:,.1f}"


def _ms(seconds: Optional[float]) -> str:
    return milliseconds(None if seconds is None else seconds * 1e6)


def _none_first(value: Optional[float]) -> float:
    return -1.0 if value is None else value


def _state(row: ModelRow) -> Style:
    if row.metrics.state == "failed":
        return Style.BAD
    return Style.GOOD if row.metrics.ready else Style.WARN


def _progress(row: ModelRow) -> str:
    """Return the state of a model. While it loads, the text includes the progress, such as "attaching 3/8"."""
    state, progress = row.metrics.state, row.progress
    return narrow(progress if state != "serving" and progress.startswith(state) else state)


def _process_state(row: ProcessRow) -> Style:
    return Style.TEXT if row.status.state in ("ready", "holding") else Style.WARN


def _short(row: ProcessRow) -> str:
    """Return a process's name without the name of its model, because the column beside it shows the model."""
    prefix = f"{row.model}."
    return narrow(row.status.name[len(prefix) :] if row.status.name.startswith(prefix) else row.status.name)


MODELS: ScreenTable[ModelRow] = ScreenTable(
    "models",
    lambda overview: overview.models,
    lambda row: row.metrics.name,
    [
        ScreenColumn("MODEL", lambda row: narrow(row.metrics.name), is_left=True, style=lambda _: Style.STRONG),
        ScreenColumn("STATE", _progress, is_left=True, style=_state),
        ScreenColumn("GEN", lambda row: str(row.metrics.generation) if row.metrics.generation else _NONE, 1),
        ScreenColumn("PROC", lambda row: f"{row.ready_workers}/{row.desired_workers}"
               if row.desired_workers else _NONE, 6,
               style=lambda row: Style.WARN if row.ready_workers < row.desired_workers else Style.TEXT),
        ScreenColumn("REQ/s", lambda row: _rate(row.throughput.rate)),
        ScreenColumn("ERR/s", lambda row: _rate(row.refused_rate), 4,
               style=lambda row: Style.WARN if row.refused_rate else Style.TEXT),
        ScreenColumn("QUEUE", lambda row: f"{row.metrics.queued:,}", 8),
        ScreenColumn("RUN", lambda row: f"{row.metrics.running:,}", 2),
        ScreenColumn("P50 ms", lambda row: _ms(row.throughput.p50_s), 5),
        ScreenColumn("P99 ms", lambda row: _ms(row.throughput.p99_s), 8),
        ScreenColumn("MEM MB", lambda row: megabytes(row.memory.total_bytes if row.memory else None), 7),
        ScreenColumn("PLAIN MB", lambda row: megabytes(row.memory.without_sharing_bytes if row.memory else None), 6,
               style=lambda _: Style.WEAK),
    ],
    {
        "N": lambda row: row.metrics.name,
        "R": lambda row: _none_first(row.throughput.rate),
        "Q": lambda row: row.metrics.queued,
        "L": lambda row: _none_first(row.throughput.p99_s),
        "M": lambda row: 0 if row.memory is None else row.memory.total_bytes,
    },
    spark=lambda row: [each.rate for each in row.throughput.rate_points],
    model=lambda row: row.metrics.name,
)  # fmt: skip


PROCESSES: ScreenTable[ProcessRow] = ScreenTable(
    "processes",
    lambda overview: overview.processes,
    lambda row: row.status.name,
    [
        ScreenColumn("MODEL", lambda row: narrow(row.model), is_left=True, style=lambda _: Style.STRONG),
        ScreenColumn("PROCESS", _short, is_left=True),
        ScreenColumn("ROLE", lambda row: narrow(row.status.role), 6, is_left=True),
        ScreenColumn("STATE", lambda row: narrow(row.status.state), 7, is_left=True, style=_process_state),
        ScreenColumn("DEVICE", lambda row: narrow(row.device), 1, is_left=True),
        ScreenColumn("PID", lambda row: str(row.status.pid), 5),
        ScreenColumn("REQ/s", lambda row: _rate(row.rate)),
        ScreenColumn("NOW", lambda row: f"{row.status.in_flight:,}", 4),
        ScreenColumn("P50 ms", lambda row: milliseconds(row.status.p50_us), 3),
        ScreenColumn("P99 ms", lambda row: milliseconds(row.status.p99_us), 6),
        ScreenColumn("PSS MB", lambda row: megabytes(row.status.pss_bytes), 7),
        ScreenColumn("OWN MB", lambda row: megabytes(row.status.private_bytes), 7),
        ScreenColumn("SHARED MB", lambda row: megabytes(row.status.shared_bytes or None), 2),
    ],
    {
        "N": lambda row: (row.model, row.status.name),
        "R": lambda row: _none_first(row.rate),
        "Q": lambda row: row.status.in_flight,
        "L": lambda row: _none_first(row.status.p99_us),
        "M": lambda row: row.status.pss_bytes or 0,
    },
    model=lambda row: row.model,
)


TENANTS: ScreenTable[TenantRow] = ScreenTable(
    "tenants",
    lambda overview: overview.tenants,
    lambda row: row.status.name,
    [
        ScreenColumn("TENANT", lambda row: narrow(row.status.name), is_left=True, style=lambda _: Style.STRONG),
        ScreenColumn("WEIGHT", lambda row: f"{row.status.weight:g}", 3),
        ScreenColumn("SHARE", lambda row: _NONE if row.status.share is None else f"{row.status.share:.0%}", 7),
        ScreenColumn("REQ/s", lambda row: _rate(row.rate)),
        ScreenColumn("REF/s", lambda row: _rate(row.refused_rate), 7,
               style=lambda row: Style.WARN if row.refused_rate else Style.TEXT),
        ScreenColumn("NOW", lambda row: f"{row.total.in_flight:,}", 6),
        ScreenColumn("QUEUED", lambda row: f"{row.total.queued:,}", 8),
        ScreenColumn("WAIT ms", lambda row: _ms(row.total.mean_queue_s), 5),
        ScreenColumn("SERVED", lambda row: f"{row.total.served:,}", 4),
        ScreenColumn("REFUSED", lambda row: f"{row.total.refused:,}", 4),
        ScreenColumn("SLOT s", lambda row: f"{row.total.slot_seconds:,.1f}", 2),
    ],
    {
        "N": lambda row: row.status.name,
        "R": lambda row: _none_first(row.rate),
        "Q": lambda row: row.total.queued,
        "L": lambda row: _none_first(row.total.mean_queue_s),
    },
)  # fmt: skip


TABLES: Sequence[ScreenTable[Any]] = (MODELS, PROCESSES, TENANTS)


# Maximum length of a filter in characters. A filter must fit on one line.
_MAX_FILTER_LENGTH = 40


MIN_DELAY_S, MAX_DELAY_S = 0.2, 3600.0


class KeyAction(enum.Enum):
    """An action that a key requires of the screen's event loop."""

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
    """Return the next longer delay between polls."""
    return min(2 * delay_s, MAX_DELAY_S)


def faster(delay_s: float) -> float:
    """Return the next shorter delay between polls."""
    return max(delay_s / 2, MIN_DELAY_S)


class View:
    """The state of the view, which the user changes by keys.

    A key is a character, or a name such as "up", "tab", "enter", "escape" or "page down".

    Attributes:
        table: the table that is shown.
        order: the sort order: a letter of `ORDERS`.
        is_reversed: whether the sort order is reversed.
        filter: a text. Only rows whose names contain this text are shown.
        is_typing: whether the user is typing the filter.
        has_help: whether the help text is shown instead of the table.
        model: the model whose processes are shown; "" for the processes of all models.
        top: the index of the first visible row.
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
        """Return the rows of the table that pass the filter, in the sort order."""
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
        """Scroll so that the selected row is visible. Return its index, or 0 if the row does not exist any more."""
        keys = [self.table.key(row) for row in rows]
        selected = self._selected.get(self.table.title)
        index = keys.index(selected) if selected in keys else 0
        self._page_height = max(1, height)
        self.top = max(0, min(self.top, len(rows) - self._page_height))
        self.top = min(max(self.top, index - self._page_height + 1), index)
        return index

    def on_key(self, key: str, overview: Overview) -> Optional[KeyAction]:
        """Change the view as `key` requires. Return what the screen's event loop must do, or None for nothing."""
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
        """Handle a key that changes the table, the filter or the help text."""
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
        """Switch from the table of models to the processes of the selected model, or back."""
        rows = self.rows(overview)
        if self.table is MODELS and rows:
            self.filter, row = "", rows[self.scroll_to_selected(rows, self._page_height)]
            self._show_table(PROCESSES, row.metrics.name)
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


# By how many rows, or pages, each key moves the selection. `_FAR` exceeds the number of rows of any table.
_FAR = 1 << 30


_STEPS = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -1, "page down": 1, "home": -_FAR, "end": _FAR}
