"""The picture as lines: what it is of, memory as bars, a table, and what keys do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence

from weightd.ctl.text import count, duration, size
from weightd.ctl.top.bars import ASCII, Glyphs, Part, bar, spark
from weightd.ctl.top.lines import Line, Piece, Style, cut, line, narrow
from weightd.ctl.top.tables import ORDERS, TABLES, Column, Table
from weightd.ctl.top.view import View
from weightd.shared.overview.memory import Memory
from weightd.shared.overview.rows import Overview

HELP = """\
q            quit                       Tab        models, processes, tenants
h ?          this help                  Enter      processes of the model; back
r space      ask now                    /          only names with this in them
+ -          ask less, more often       Esc        all names; back to the models
arrows j k   up and down                N R Q L M  sort by name, requests/s, queue,
PgUp PgDn Home End                                 latency, memory; again: reversed

REQ/s and times are those of the last 5 seconds, from a request's arrival to its answer.
Processes and memory are looked at every 10 seconds, or when something changes.
memory: one copy of the weights, what workers have beside it, and all else
plain:  what as many plain processes would take, each with a copy of its own
PROC is who takes requests, of those that are to. MB is 10^6 bytes."""

_LABEL = 9
_LEAST_SPARK = 8
_MOST_SPARK = 60

# A name has so much at most; so has a state.
_MOST_NAME = 32
_MOST_TEXT = 18


class Standing(NamedTuple):
    """How the asking goes.

    Attributes:
        delay_s: seconds between two questions.
        age_s: how long ago the last answer came.
        trouble: why there is none since, if there is none.
    """

    delay_s: float
    age_s: float = 0.0
    trouble: str = ""


class Size(NamedTuple):
    """Of the screen."""

    height: int
    width: int


def draw(overview: Overview, view: View, standing: Standing, size: Size, glyphs: Glyphs) -> List[Line]:
    """Return the lines of the screen, no more of them, and none longer than there is room for."""
    room = max(_LEAST_SPARK, min(_MOST_SPARK, size.width - _LABEL - 40))
    head = [_title(overview, standing, size.width), *_summary(overview, room, glyphs), line()]
    if view.has_help:
        lines = [*head, *map(line, HELP.splitlines()), line(), line("any key: back", Style.WEAK)]
    else:
        rows = view.rows(overview)
        height = max(1, size.height - len(head) - 2)
        selected = view.place(rows, height)
        shown = slice(view.top, view.top + height)
        body = table(view.table, rows, size.width, glyphs)
        marked = [Line(each.pieces, index == selected) for index, each in enumerate(body[1:])][shown]
        lines = [*head, body[0], *marked]
        lines += [line() for _ in range(size.height - len(lines) - 1)]
        lines.append(_foot(view, len(rows)))
    return [cut(each, size.width) for each in lines[: size.height]]


def printed(overview: Overview, width: int) -> List[str]:
    """Return all tables as text, without sparks and bars; no line is longer than there is room for."""
    lines = [_title(overview, None, width), *_summary(overview, 0, ASCII)]
    for each in TABLES:
        rows = sorted(each.rows(overview), key=each.sorts["N"])
        if rows:
            lines += [line(), *table(replace(each, spark=None), rows, width, ASCII)]
    return [cut(each, width).text.rstrip() for each in lines]


def _title(overview: Overview, standing: Optional[Standing], width: int) -> Line:
    left = f"weightd {narrow(overview.version)}: {narrow(overview.state)}, up {duration(overview.uptime_s)}"
    right, style = ("", Style.WEAK) if standing is None else _standing(standing)
    # What is wrong is worth more than since when all is well.
    left = left[: max(0, width - len(right) - 1)]
    gap = max(1, width - len(left) - len(right))
    return Line([(left, Style.STRONG), (" " * gap if right else "", Style.TEXT), (right, style)])


def _standing(standing: Standing) -> Piece:
    if standing.trouble:
        return f"no answer for {duration(standing.age_s)}: {narrow(standing.trouble)}", Style.BAD
    if standing.age_s >= 2 + 2 * standing.delay_s:
        return f"no answer for {duration(standing.age_s)}", Style.BAD
    return f"every {standing.delay_s:g} s", Style.WEAK


def _summary(overview: Overview, room: int, glyphs: Glyphs) -> Iterator[Line]:
    """Yield requests and latency as sparks, memory as bars, which have so much room."""
    pace = overview.pace
    rate = "-" if pace.rate is None else f"{pace.rate:,.1f}"
    yield _labelled("requests", spark([each.rate for each in pace.moments], room, glyphs), Style.COPY,
                    f"{rate}/s, {overview.queued:,} queued, {overview.running:,} running")  # fmt: skip
    times = "-" if pace.p50_s is None or pace.p99_s is None else f"p50 {_time(pace.p50_s)}, p99 {_time(pace.p99_s)}"
    yield _labelled("latency", spark([each.p99_s for each in pace.moments], room, glyphs), Style.BESIDE, times)
    if overview.memory is not None:
        yield from _memory(overview.memory, room, glyphs)
    if not overview.whole:
        yield line("only this tenant's own requests are shown: it may not see the status of others", Style.WEAK)


def _labelled(label: str, drawn: str, style: Style, text: str) -> Line:
    return Line([(label.ljust(_LABEL), Style.WEAK), (drawn, style), (f"{' ' if drawn else ''}{text}", Style.TEXT)])


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _memory(memory: Memory, width: int, glyphs: Glyphs) -> Iterator[Line]:
    now, plain = memory.now_bytes, memory.plain_bytes
    parts = [
        (memory.copy_bytes, glyphs.copy, Style.COPY),
        (memory.beside_bytes, glyphs.beside, Style.BESIDE),
        (memory.other_bytes, glyphs.other, Style.OTHER),
    ]
    weights = f", {size(memory.copy_bytes)} of it weights, once" if memory.workers else ""
    yield _bar("memory", parts, max(now, plain), width, f"{size(now)}{weights}")
    if memory.workers:
        text = f"{size(plain)} as {count(memory.processes, 'plain process')}"
        yield _bar("plain", [(plain, glyphs.plain, Style.PLAIN)], max(now, plain), width, text)


def _bar(label: str, parts: Sequence[Part], whole: int, width: int, text: str) -> Line:
    gap = " " if width else ""
    return Line([(label.ljust(_LABEL), Style.WEAK), *bar(parts, whole, width), (f"{gap}{text}", Style.TEXT)])


def table(table: Table[Any], rows: Sequence[Any], width: int, glyphs: Glyphs) -> List[Line]:
    """Return the heading, and a line for each row; columns for which there is no room are left out."""
    columns = [*table.columns]
    while len(columns) > 1 and _width(columns, rows) > width:
        columns.remove(min(columns, key=lambda each: each.worth))
    widths = [_column(column, rows) for column in columns]
    room = width - sum(widths) - 2 * len(widths)
    draws = table.spark if room >= _LEAST_SPARK else None
    heading = [_cell(each.heading, least, each.is_left) for each, least in zip(columns, widths)]
    lines = [Line([("  ".join(heading).ljust(width), Style.HEAD)])]
    for row in rows:
        pieces: List[Piece] = []
        for column, each in zip(columns, widths):
            pieces += [(_cell(column.text(row), each, column.is_left), column.style(row)), ("  ", Style.TEXT)]
        if draws is not None:
            pieces.append((spark(draws(row), min(room, _MOST_SPARK), glyphs), Style.COPY))
        lines.append(Line(pieces))
    return lines


def _width(columns: Sequence[Column[Any]], rows: Sequence[Any]) -> int:
    return sum(_column(each, rows) for each in columns) + 2 * (len(columns) - 1)


def _column(column: Column[Any], rows: Sequence[Any]) -> int:
    longest = max([len(column.heading), *(len(column.text(row)) for row in rows)])
    return min(longest, _MOST_NAME if column.worth == 9 else _MOST_TEXT)


def _cell(text: str, width: int, is_left: bool) -> str:
    return text[:width].ljust(width) if is_left else text.rjust(width)


def _foot(view: View, rows: int) -> Line:
    if view.is_typing:
        return Line([("/", Style.STRONG), (f"{narrow(view.filter)}_", Style.TEXT)])
    pieces: List[Piece] = []
    for each in TABLES:
        pieces += [(each.title, Style.STRONG if each is view.table else Style.WEAK), (" ", Style.TEXT)]
    what = f" {rows:,} by {ORDERS[view.order]}{' reversed' if view.is_reversed else ''}"
    of = f" of {narrow(view.model)}" if view.model else ""
    having = f', with "{narrow(view.filter)}"' if view.filter else ""
    return Line([*pieces, (f"{what}{of}{having}", Style.TEXT), ("   h help  q quit", Style.WEAK)])
