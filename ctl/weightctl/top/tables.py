"""The tables: models, processes, tenants; their columns, and by what they are sorted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Generic, Optional, Sequence, TypeVar

from weightctl.text import megabytes
from weightctl.top.styled_lines import Style, narrow
from weightd_common.dashboard.rows import ModelRow, Overview, ProcessRow, TenantRow

R = TypeVar("R")

_NONE = "-"
_MAX_PRIORITY = 9


@dataclass(frozen=True)
class ScreenColumn(Generic[R]):
    """One column.

    Attributes:
        heading: what stands above it.
        text: what stands in it.
        priority: where there is no room for all, those of least worth go first.
        is_left: whether it is flush left.
        style: how it is written.
    """

    heading: str
    text: Callable[[R], str]
    priority: int = _MAX_PRIORITY
    is_left: bool = False
    style: Callable[[R], Style] = lambda _: Style.TEXT


@dataclass(frozen=True)
class ScreenTable(Generic[R]):
    """One table.

    Attributes:
        title: what is in it.
        rows: of a picture.
        key: by which a row is known again.
        columns: the first is the name.
        sort_keys: what counts, by the letters of `ORDERS` by which it can be sorted.
        spark: what it draws of each row where there is room, if it does.
        model: the name of a row's model, if it has one.
    """

    title: str
    rows: Callable[[Overview], Sequence[R]]
    key: Callable[[R], str]
    columns: Sequence[ScreenColumn[R]]
    sort_keys: Dict[str, Callable[[R], Any]]
    spark: Optional[Callable[[R], Sequence[Optional[float]]]] = None
    model: Callable[[R], str] = field(default=lambda _: "")


# By name in ascending order; by all else the most comes first.
ORDERS = {"N": "name", "R": "requests/s", "Q": "queue", "L": "latency", "M": "memory"}


def _rate(value: Optional[float]) -> str:
    return _NONE if value is None else f"{value:,.1f}"


def _ms(seconds: Optional[float]) -> str:
    if seconds is None:
        return _NONE
    return f"{seconds * 1e3:,.2f}" if seconds < 10 else f"{seconds * 1e3:,.0f}"


def _none_first(value: Optional[float]) -> float:
    return -1.0 if value is None else value


def _state(row: ModelRow) -> Style:
    if row.state == "failed":
        return Style.BAD
    return Style.GOOD if row.ready else Style.WARN


def _progress(row: ModelRow) -> str:
    """The state, or how far it is: "attaching 3/8"."""
    return narrow(row.progress if row.state != "serving" and row.progress.startswith(row.state) else row.state)


def _process_state(row: ProcessRow) -> Style:
    return Style.TEXT if row.state in ("ready", "holding") else Style.WARN


def _short(row: ProcessRow) -> str:
    """Its name without that of its model, which stands beside it."""
    prefix = f"{row.model}."
    return narrow(row.name[len(prefix) :] if row.name.startswith(prefix) else row.name)


MODELS: ScreenTable[ModelRow] = ScreenTable(
    "models",
    lambda overview: overview.models,
    lambda row: row.name,
    [
        ScreenColumn("MODEL", lambda row: narrow(row.name), is_left=True, style=lambda _: Style.STRONG),
        ScreenColumn("STATE", _progress, is_left=True, style=_state),
        ScreenColumn("GEN", lambda row: str(row.generation) if row.generation else _NONE, 1),
        ScreenColumn("PROC", lambda row: f"{row.ready_workers}/{row.desired_workers}"
               if row.desired_workers else _NONE, 6,
               style=lambda row: Style.WARN if row.ready_workers < row.desired_workers else Style.TEXT),
        ScreenColumn("REQ/s", lambda row: _rate(row.throughput.rate)),
        ScreenColumn("ERR/s", lambda row: _rate(row.refused_rate), 4,
               style=lambda row: Style.WARN if row.refused_rate else Style.TEXT),
        ScreenColumn("QUEUE", lambda row: f"{row.queued:,}", 8),
        ScreenColumn("RUN", lambda row: f"{row.running:,}", 2),
        ScreenColumn("P50 ms", lambda row: _ms(row.throughput.p50_s), 5),
        ScreenColumn("P99 ms", lambda row: _ms(row.throughput.p99_s), 8),
        ScreenColumn("MEM MB", lambda row: megabytes(row.memory.total_bytes if row.memory else None), 7),
        ScreenColumn("PLAIN MB", lambda row: megabytes(row.memory.without_sharing_bytes if row.memory else None), 6,
               style=lambda _: Style.WEAK),
    ],
    {
        "N": lambda row: row.name,
        "R": lambda row: _none_first(row.throughput.rate),
        "Q": lambda row: row.queued,
        "L": lambda row: _none_first(row.throughput.p99_s),
        "M": lambda row: 0 if row.memory is None else row.memory.total_bytes,
    },
    spark=lambda row: [each.rate for each in row.throughput.rate_points],
    model=lambda row: row.name,
)  # fmt: skip

PROCESSES: ScreenTable[ProcessRow] = ScreenTable(
    "processes",
    lambda overview: overview.processes,
    lambda row: row.name,
    [
        ScreenColumn("MODEL", lambda row: narrow(row.model), is_left=True, style=lambda _: Style.STRONG),
        ScreenColumn("PROCESS", _short, is_left=True),
        ScreenColumn("ROLE", lambda row: narrow(row.role), 6, is_left=True),
        ScreenColumn("STATE", lambda row: narrow(row.state), 7, is_left=True, style=_process_state),
        ScreenColumn("DEVICE", lambda row: narrow(row.device), 1, is_left=True),
        ScreenColumn("PID", lambda row: str(row.pid), 5),
        ScreenColumn("REQ/s", lambda row: _rate(row.rate)),
        ScreenColumn("NOW", lambda row: f"{row.in_flight:,}", 4),
        ScreenColumn("P50 ms", lambda row: _ms(row.p50_s), 3),
        ScreenColumn("P99 ms", lambda row: _ms(row.p99_s), 6),
        ScreenColumn("PSS MB", lambda row: megabytes(row.pss_bytes), 7),
        ScreenColumn("OWN MB", lambda row: megabytes(row.private_bytes), 7),
        ScreenColumn("SHARED MB", lambda row: megabytes(row.shared_bytes or None), 2),
    ],
    {
        "N": lambda row: (row.model, row.name),
        "R": lambda row: _none_first(row.rate),
        "Q": lambda row: row.in_flight,
        "L": lambda row: _none_first(row.p99_s),
        "M": lambda row: row.pss_bytes or 0,
    },
    model=lambda row: row.model,
)

TENANTS: ScreenTable[TenantRow] = ScreenTable(
    "tenants",
    lambda overview: overview.tenants,
    lambda row: row.name,
    [
        ScreenColumn("TENANT", lambda row: narrow(row.name), is_left=True, style=lambda _: Style.STRONG),
        ScreenColumn("WEIGHT", lambda row: f"{row.weight:g}", 3),
        ScreenColumn("SHARE", lambda row: _NONE if row.share is None else f"{row.share:.0%}", 7),
        ScreenColumn("REQ/s", lambda row: _rate(row.rate)),
        ScreenColumn("REF/s", lambda row: _rate(row.refused_rate), 7,
               style=lambda row: Style.WARN if row.refused_rate else Style.TEXT),
        ScreenColumn("NOW", lambda row: f"{row.in_flight:,}", 6),
        ScreenColumn("QUEUED", lambda row: f"{row.queued:,}", 8),
        ScreenColumn("WAIT ms", lambda row: _ms(row.wait_s), 5),
        ScreenColumn("SERVED", lambda row: f"{row.served:,}", 4),
        ScreenColumn("REFUSED", lambda row: f"{row.refused:,}", 4),
        ScreenColumn("SLOT s", lambda row: f"{row.slot_seconds:,.1f}", 2),
    ],
    {
        "N": lambda row: row.name,
        "R": lambda row: _none_first(row.rate),
        "Q": lambda row: row.queued,
        "L": lambda row: _none_first(row.wait_s),
    },
)  # fmt: skip

TABLES: Sequence[ScreenTable[Any]] = (MODELS, PROCESSES, TENANTS)
