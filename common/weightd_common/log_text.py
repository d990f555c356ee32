"""Text for logs and status lines: journal priorities (sd-daemon(3)), plurals, escaping, and the progress of a load."""

from __future__ import annotations

import logging
import os
from typing import Mapping, Optional

# Pairs of a log level, the most severe first, and its syslog priority.
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7


def is_connected_to_journal(environment: Mapping[str, str], descriptor: int) -> bool:
    """Return whether systemd has connected the descriptor to the journal.

    JOURNAL_STREAM in `environment` names the device and inode of the journal's socket. A child process inherits this
    variable even if its output goes elsewhere, so the function compares the descriptor's device and inode with the
    variable.
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
    """Return text from outside of weightd on one line. Characters that could affect a terminal are escaped."""
    if text.isprintable():
        return text.strip()
    lines = (line.strip() for line in text.replace("\t", " ").splitlines())
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in " | ".join(filter(None, lines)))


def progress_text(fraction: Optional[float], remaining_s: Optional[float]) -> str:
    """Return the progress of a load as text, such as "43 %, about 20 s left". A value that is unknown is left out.

    Args:
        fraction: the completed part of the load from 0 to 1; None if unknown.
        remaining_s: the estimated seconds until the load is complete; None if unknown.
    """
    parts = [] if fraction is None else [f"{percent(fraction)} %"]
    if remaining_s is not None:
        parts.append(f"about {_round_duration(remaining_s)} left")
    return ", ".join(parts)


def percent(fraction: float) -> int:
    """Return the completed part of a load as an integer percentage, at most 99 because the load is not complete."""
    return max(0, min(99, int(100 * fraction)))


def _round_duration(seconds: float) -> str:
    """Return an estimated duration as text, such as "20 s". The longer the duration, the coarser the rounding."""
    if seconds < 10:
        return f"{max(1, round(seconds))} s"
    if seconds < 120:
        return f"{5 * round(seconds / 5)} s"
    if seconds < 7200:
        return f"{round(seconds / 60)} min"
    return f"{round(seconds / 3600)} h"
