"""Whether what is written to a descriptor goes to the journal of systemd, which takes priorities: see sd-daemon(3)."""

from __future__ import annotations

import os
from typing import Mapping


def to_journal(environment: Mapping[str, str], descriptor: int) -> bool:
    """Return whether systemd has connected the descriptor to the journal.

    The variable alone does not tell: it is inherited by processes whose output goes elsewhere.
    """
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def prefixed(text: str, priority: int) -> str:
    """Return the text with the priority of syslog in front of each line, by which the journal knows it."""
    return "\n".join(f"<{priority}>{line}" for line in text.split("\n"))
