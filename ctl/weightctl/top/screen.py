"""Converts an overview to the lines of the screen: title, sparklines, memory bars, a table and a footer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence

from weightctl.text import OWN_REQUESTS_ONLY, count, duration, size
from weightctl.top.drawing import (
    ASCII,
    Glyphs,
    Segment,
    Span,
    Style,
    StyledLine,
    bar,
    narrow,
    spark,
    text_line,
    truncate,
)
from weightctl.top.tables import ORDERS, TABLES, ScreenColumn, ScreenTable, View
from weightd_common.dashboard.memory import MemoryUsage
from weightd_common.dashboard.overview import Overview

KEYS = """\
q            quit                       Tab        models, processes, tenants
h ?          this help                  Enter      processes of the model; back
r space      refresh now                /          filter by name
+ -          refresh less, more often   Esc        clear the filter; back to models
arrows j k   move the selection         N R Q L M  sort by name, requests/s, queue,
PgUp PgDn Home End                                 latency, memory; again: reverse"""

HELP = f"""\
{KEYS}

REQ/s and latencies cover the last 5 seconds.
Processes and memory are read every 10 seconds, and when processes have changed.
memory: one copy of the weights, additional memory of the workers, all other memory
plain:  estimate for the same number of processes, each with its own copy
PROC: ready and desired workers. MB is 10^6 bytes."""

_LABEL_WIDTH = 9
_MIN_SPARK_WIDTH = 8
_MAX_SPARK_WIDTH = 60

# Maximum width of the column with names, and of all other columns, such as states, in characters.
_MAX_NAME_WIDTH = 32
_MAX_TEXT_WIDTH = 18


class PollStatus(NamedTuple):
    """The state of the polls, for the title line.

    Attributes:
        delay_s: seconds between two polls.
        age_s: seconds since the last successful poll.
        error: the reason why polls have failed since the last successful poll; "" if none has failed.
    """

    delay_s: float
    age_s: float = 0.0
    error: str = ""


class ScreenSize(NamedTuple):
    """Height and width of the screen in characters."""

    height: int
    width: int


def draw(overview: Overview, view: View, poll_status: PollStatus, size: ScreenSize, glyphs: Glyphs) -> List[StyledLine]:
    """Return the lines of the screen for an overview. They are cut to the size of the screen."""
    spark_width = max(_MIN_SPARK_WIDTH, min(_MAX_SPARK_WIDTH, size.width - _LABEL_WIDTH - 40))
    head = [_title(overview, poll_status, size.width), *_summary(overview, spark_width, glyphs), text_line()]
    if view.has_help:
        lines = [
            *head,
            *map(text_line, HELP.splitlines()),
            text_line(),
            text_line("press any key to go back", Style.WEAK),
        ]
    else:
        rows = view.rows(overview)
        height = max(1, size.height - len(head) - 2)
        selected = view.scroll_to_selected(rows, height)
        shown = slice(view.top, view.top + height)
        body = table(view.table, rows, size.width, glyphs)
        marked = [StyledLine(each.spans, index == selected) for index, each in enumerate(body[1:])][shown]
        lines = [*head, body[0], *marked]
        lines += [text_line() for _ in range(size.height - len(lines) - 1)]
        lines.append(_footer(view, len(rows)))
    return [truncate(each, size.width) for each in lines[: size.height]]


def render_text(overview: Overview, width: int) -> List[str]:
    """Return all tables as lines of text, cut to the width. Sparklines and bars are left out."""
    lines = [_title(overview, None, width), *_summary(overview, 0, ASCII)]
    for each in TABLES:
        rows = sorted(each.rows(overview), key=each.sort_keys["N"])
        if rows:
            lines += [text_line(), *table(replace(each, spark=None), rows, width, ASCII)]
    return [truncate(each, width).text.rstrip() for each in lines]


def _title(overview: Overview, poll_status: Optional[PollStatus], width: int) -> StyledLine:
    daemon = overview.metrics
    left = f"weightd {narrow(daemon.version)}: {narrow(daemon.state)}, up {duration(daemon.uptime_s)}"
    right, style = ("", Style.WEAK) if poll_status is None else _poll_status_span(poll_status)
    # If the width is too small, cut the left part of the line, so that an error in the right part stays complete.
    left = left[: max(0, width - len(right) - 1)]
    gap = max(1, width - len(left) - len(right))
    return StyledLine([(left, Style.STRONG), (" " * gap if right else "", Style.TEXT), (right, style)])


def _poll_status_span(poll_status: PollStatus) -> Span:
    if poll_status.error:
        return f"no response for {duration(poll_status.age_s)}: {narrow(poll_status.error)}", Style.BAD
    if poll_status.age_s >= 2 + 2 * poll_status.delay_s:
        return f"no response for {duration(poll_status.age_s)}", Style.BAD
    return f"every {poll_status.delay_s:g} s", Style.WEAK


def _summary(overview: Overview, spark_width: int, glyphs: Glyphs) -> Iterator[StyledLine]:
    """Yield lines with sparklines of requests and latency, and with memory bars, each `spark_width` columns wide."""
    pace = overview.throughput
    rate = "-" if pace.rate is None else f"{pace.rate:,.1f}"
    yield _labelled_line("requests", spark([each.rate for each in pace.rate_points], spark_width, glyphs), Style.COPY,
                    f"{rate}/s, {overview.queued:,} queued, {overview.running:,} running")  # fmt: skip
    times = "-" if pace.p50_s is None or pace.p99_s is None else f"p50 {_time(pace.p50_s)}, p99 {_time(pace.p99_s)}"
    yield _labelled_line(
        "latency", spark([each.p99_s for each in pace.rate_points], spark_width, glyphs), Style.BESIDE, times
    )
    if overview.memory is not None:
        yield from _memory(overview.memory, spark_width, glyphs)
    if not overview.is_complete:
        yield text_line(OWN_REQUESTS_ONLY, Style.WEAK)


def _labelled_line(label: str, drawn: str, style: Style, text: str) -> StyledLine:
    return StyledLine(
        [(label.ljust(_LABEL_WIDTH), Style.WEAK), (drawn, style), (f"{' ' if drawn else ''}{text}", Style.TEXT)]
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _memory(memory: MemoryUsage, width: int, glyphs: Glyphs) -> Iterator[StyledLine]:
    now, plain = memory.total_bytes, memory.without_sharing_bytes
    parts = [
        (memory.copy_bytes, glyphs.copy, Style.COPY),
        (memory.private_bytes, glyphs.beside, Style.BESIDE),
        (memory.other_bytes, glyphs.other, Style.OTHER),
    ]
    weights = f", {size(memory.copy_bytes)} of it shared weights" if memory.workers else ""
    yield _bar("memory", parts, max(now, plain), width, f"{size(now)}{weights}")
    if memory.workers:
        text = f"{size(plain)} as {count(memory.processes, 'plain process')}"
        yield _bar("plain", [(plain, glyphs.plain, Style.PLAIN)], max(now, plain), width, text)


def _bar(label: str, segments: Sequence[Segment], total: int, width: int, text: str) -> StyledLine:
    gap = " " if width else ""
    return StyledLine(
        [(label.ljust(_LABEL_WIDTH), Style.WEAK), *bar(segments, total, width), (f"{gap}{text}", Style.TEXT)]
    )


def table(table: ScreenTable[Any], rows: Sequence[Any], width: int, glyphs: Glyphs) -> List[StyledLine]:
    """Return the lines of a table: a heading, and one line per row.

    If the width is too small, drop the columns of lowest priority.
    """
    columns = [*table.columns]
    while len(columns) > 1 and _table_width(columns, rows) > width:
        columns.remove(min(columns, key=lambda each: each.priority))
    widths = [_column_width(column, rows) for column in columns]
    spark_width = width - sum(widths) - 2 * len(widths)
    spark_of = table.spark if spark_width >= _MIN_SPARK_WIDTH else None
    heading = [_cell(each.heading, least, each.is_left) for each, least in zip(columns, widths)]
    lines = [StyledLine([("  ".join(heading).ljust(width), Style.HEAD)])]
    for row in rows:
        spans: List[Span] = []
        for column, each in zip(columns, widths):
            spans += [(_cell(column.text(row), each, column.is_left), column.style(row)), ("  ", Style.TEXT)]
        if spark_of is not None:
            spans.append((spark(spark_of(row), min(spark_width, _MAX_SPARK_WIDTH), glyphs), Style.COPY))
        lines.append(StyledLine(spans))
    return lines


def _table_width(columns: Sequence[ScreenColumn[Any]], rows: Sequence[Any]) -> int:
    return sum(_column_width(each, rows) for each in columns) + 2 * (len(columns) - 1)


def _column_width(column: ScreenColumn[Any], rows: Sequence[Any]) -> int:
    longest = max([len(column.heading), *(len(column.text(row)) for row in rows)])
    return min(longest, _MAX_NAME_WIDTH if column.priority == 9 else _MAX_TEXT_WIDTH)


def _cell(text: str, width: int, is_left: bool) -> str:
    return text[:width].ljust(width) if is_left else text.rjust(width)


def _footer(view: View, rows: int) -> StyledLine:
    if view.is_typing:
        return StyledLine([("/", Style.STRONG), (f"{narrow(view.filter)}_", Style.TEXT)])
    spans: List[Span] = []
    for each in TABLES:
        spans += [(each.title, Style.STRONG if each is view.table else Style.WEAK), (" ", Style.TEXT)]
    what = f" {rows:,} by {ORDERS[view.order]}{' reversed' if view.is_reversed else ''}"
    model_text = f" of {narrow(view.model)}" if view.model else ""
    filter_text = f', with "{narrow(view.filter)}"' if view.filter else ""
    return StyledLine([*spans, (f"{what}{model_text}{filter_text}", Style.TEXT), ("   h help  q quit", Style.WEAK)])
