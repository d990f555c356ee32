"""What a log says: an event is one line, and has a priority where it goes to systemd's journal, see sd-daemon(3)."""

from __future__ import annotations

import logging
import os
from typing import Mapping

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
