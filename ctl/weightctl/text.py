"""Formats numbers, tables, model signatures and untrusted text for the terminal."""

from __future__ import annotations

import textwrap
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence

from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.status import ModelStatus, VersionSetStatus

WIDTH = 100

OWN_REQUESTS_ONLY = "only this tenant's requests are shown; it may not see the status of others"
_NONE = "-"

# Maximum number of tensors that a table cell lists.
_MAX_SHOWN = 3


def megabytes(size: Optional[int]) -> str:
    """Return a number of bytes as text for a column headed MB. One MB is 10^6 bytes."""
    return _NONE if size is None else f"{size / 1e6:,.1f}"


def size(size: int) -> str:
    """Return a number of bytes as text with its unit, for use in a sentence."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def binary(size: int) -> str:
    """Return a number of bytes as text in MiB or GiB, the units in which memory limits are configured."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def milliseconds(microseconds: Optional[float]) -> str:
    """Return seconds as text for a column headed ms. From ten seconds on there are no decimals."""
    if microseconds is None:
        return _NONE
    return f"{microseconds / 1000:,.2f}" if microseconds < 1e7 else f"{microseconds / 1000:,.0f}"


def duration(seconds: float) -> str:
    """Return a number of seconds as text in its two largest units, such as hours and minutes."""
    remaining = int(seconds)
    parts: List[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, remaining = divmod(remaining, length)
        if count or parts or unit == "s":
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def local_time(seconds: float) -> str:
    """Return a Unix time as text in local time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g}"  # The year is out of the range that Python supports


def count(number: int, noun: str) -> str:
    """Return a number with a noun in singular or plural, such as "1 worker" or "2 processes"."""
    suffix = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else suffix}"


def clean(text: str) -> str:
    """Return untrusted text on one line. Control characters, which could affect the terminal, are escaped."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def clean_lines(text: str) -> str:
    """Return untrusted text of several lines, each of them escaped by `clean`."""
    return "\n".join(map(clean, text.split("\n")))


def paragraph(label: str, text: str, indent: str) -> Iterator[str]:
    """Yield the lines of "label: text", wrapped at a fixed width. Words are not split, so paths can be copied."""
    first, further = f"{indent}{label}: ", f"{indent}  "
    for line in clean_lines(text).splitlines():
        yield from textwrap.wrap(
            line,
            WIDTH,
            initial_indent=first,
            subsequent_indent=further,
            break_long_words=False,
            break_on_hyphens=False,
        )
        first = further


def table(rows: Sequence[Sequence[str]], left_columns: int, indent: str) -> List[str]:
    """Return the lines of a table. Each column is as wide as its longest cell.

    Args:
        rows: the cells of each row, all rows of the same length. The first row is the heading.
        left_columns: the number of left-aligned columns. The columns after them contain numbers and are right-aligned.
        indent: the prefix of each line.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines: List[str] = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < left_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def signature_summary(tensors: Sequence[TensorSignature]) -> str:
    """Return a short description of a model's inputs or outputs for a table cell."""
    shown = [f"{clean(each.name)} {each.datatype} {each.shape_text}" for each in tensors[:_MAX_SHOWN]]
    more = [f"and {len(tensors) - _MAX_SHOWN} more"] if len(tensors) > _MAX_SHOWN else []
    return ", ".join([*shown, *more]) or "none"


def signature_lines(tensors: Sequence[TensorSignature], indent: str) -> Iterator[str]:
    """Yield one line for each input or output of a model."""
    if tensors:
        yield from table([[clean(each.name), each.datatype, each.shape_text] for each in tensors], 3, indent)
    else:
        yield f"{indent}none"


def signatures_json(tensors: Sequence[TensorSignature]) -> List[Dict[str, Any]]:
    """Return a model's inputs or outputs for JSON. A shape of null means any number of dimensions."""
    shapes = (None if each.shape is None else list(each.shape) for each in tensors)
    return [{"name": each.name, "datatype": each.datatype, "shape": shape} for each, shape in zip(tensors, shapes)]


def version_line(version_set: VersionSetStatus) -> str:
    """Return a line with the versions of a model that answer the requests without a version, and their shares."""
    shares = ", ".join(f"{each.percent:g} % to version {each.version}" for each in version_set.shares if each.percent)
    source = ", by weightctl rollout" if version_set.is_rollout else ""
    return f"{clean(version_set.name)}: requests without a version go {shares}{source}"


def load_lines(model: ModelStatus) -> Iterator[str]:
    """Yield a line if the daemon does not load the model at its start, and a line if the number of workers varies."""
    if model.load != "start":
        when = {"on_demand": "on demand", "manual": "by weightctl load"}.get(model.load, clean(model.load))
        charged = f", charged to tenant {clean(model.owner)}" if model.owner else ""
        reserved = f"; {binary(model.reserved_bytes)} reserved{charged}" if model.reserved_bytes else ""
        yield f"  loaded {when}{reserved}"
    workers = model.workers
    if workers is not None:
        yield f"  {workers.target} of {workers.min} to {workers.max} workers: {clean(workers.reason)}"
