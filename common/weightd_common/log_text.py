"""Text for logs and status lines: journal priorities (sd-daemon(3)), plurals, foreign text, the progress of a load."""

from __future__ import annotations

import logging
import os
from typing import Mapping, Optional

# Log levels, most severe first, with the corresponding syslog priorities.
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7


def is_connected_to_journal(environment: Mapping[str, str], descriptor: int) -> bool:
    """Return whether systemd has connected the descriptor to the journal.

    The variable alone is no proof: processes whose output goes elsewhere inherit it.
    """
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def add_priority(text: str, priority: int) -> str:
    """Return the text with a syslog priority prefix on each line, in the format that the journal parses."""
    return "\n".join(f"<{priority}>{line}" for line in text.split("\n"))


def priority_of(level: int) -> int:
    """Return the syslog priority of a log level."""
    return next((priority for least, priority in _PRIORITIES if level >= least), _DEBUG)


def plural(number: int, noun: str) -> str:
    """Return the number with its noun: "1 worker", "2 workers", "2 processes"."""
    suffix = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{'' if number == 1 else suffix}"


def format_mib(nbytes: int) -> str:
    """Return a number of bytes in MiB, rounded up: "1,024 MiB"."""
    return f"{-(-nbytes // 2**20):,} MiB"


def to_one_line(text: str) -> str:
    """Return foreign text on one line, with all characters escaped that could affect a terminal."""
    lines = (line.strip() for line in text.replace("\t", " ").splitlines())
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in " | ".join(filter(None, lines)))


def progress_text(fraction: Optional[float], remaining_s: Optional[float]) -> str:
    """Return progress as "43 %, about 20 s left", only one part if the other is unknown, or "" if both are.

    Args:
        fraction: the completed part from 0 to 1, None if unknown. An unfinished load is never shown as 100 %.
        remaining_s: the remaining seconds, None if unknown.
    """
    parts = [] if fraction is None else [f"{percent(fraction)} %"]
    if remaining_s is not None:
        parts.append(f"about {_round_duration(remaining_s)} left")
    return ", ".join(parts)


def percent(fraction: float) -> int:
    """Return a fraction as an integer percentage from 0 to 99."""
    return max(0, min(99, int(100 * fraction)))


def _round_duration(seconds: float) -> str:
    """Return a duration as text, rounded to the precision of an estimate."""
    if seconds < 10:
        return f"{max(1, round(seconds))} s"
    if seconds < 120:
        return f"{5 * round(seconds / 5)} s"
    if seconds < 7200:
        return f"{round(seconds / 60)} min"
    return f"{round(seconds / 3600)} h"
