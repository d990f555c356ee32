"""Text for logs and status lines: priorities of systemd's journal (sd-daemon(3)), foreign text, progress of a load."""

from __future__ import annotations

import logging
import os
from typing import Mapping, Optional

# Levels, from the most severe, and the priorities of syslog that they are.
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7


def is_connected_to_journal(environment: Mapping[str, str], descriptor: int) -> bool:
    """Return whether systemd has connected the descriptor to the journal.

    The variable alone does not tell: it is inherited by processes whose output goes elsewhere.
    """
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def add_priority(text: str, priority: int) -> str:
    """Return the text with the priority of syslog in front of each line, by which the journal knows it."""
    return "\n".join(f"<{priority}>{line}" for line in text.split("\n"))


def priority_of(level: int) -> int:
    """Return the priority of an event of this level of logging."""
    return next((priority for least, priority in _PRIORITIES if level >= least), _DEBUG)


def to_one_line(text: str) -> str:
    """Return foreign text on one line, and without what could play tricks on a terminal."""
    lines = (line.strip() for line in text.replace("\t", " ").splitlines())
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in " | ".join(filter(None, lines)))


def progress_text(fraction: Optional[float], remaining_s: Optional[float]) -> str:
    """Return "43 %, about 20 s left", or as much of it as is known, "" for nothing.

    Args:
        fraction: from 0 to 1; None if nobody knows. What is not over is never told as 100 %.
        remaining_s: seconds; None likewise.
    """
    parts = [] if fraction is None else [f"{percent(fraction)} %"]
    if remaining_s is not None:
        parts.append(f"about {_round_duration(remaining_s)} left")
    return ", ".join(parts)


def percent(fraction: float) -> int:
    """Return a share as a number of percent that is less than 100."""
    return max(0, min(99, int(100 * fraction)))


def _round_duration(seconds: float) -> str:
    """Seconds, no more exactly than anybody could know."""
    if seconds < 10:
        return f"{max(1, round(seconds))} s"
    if seconds < 120:
        return f"{5 * round(seconds / 5)} s"
    if seconds < 7200:
        return f"{round(seconds / 60)} min"
    return f"{round(seconds / 3600)} h"
