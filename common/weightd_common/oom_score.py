"""When memory runs out, the kernel ends workers before their holder, and that before the daemon, which can replace it.

See proc_pid_oom_score_adj(5): a process counts as if it took so many thousandths of all memory in addition.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Optional

_log = logging.getLogger("weightd.protocol")

# Above the daemon's own. A worker is replaced alone; with a holder on a card a whole generation is lost.
# With any process of a unit all of it is lost; one rank gives back no more than another one does.
SCORES_ABOVE_DAEMON = {"holder": 200, "broker": 200, "worker": 400, "rank": 400}

_MAX_SCORE = 1000


_FILE = Path("/proc/self/oom_score_adj")


def current_score(file: Path = _FILE) -> Optional[int]:
    """Return the score that this process has: of one that was just started, the daemon's. None if it cannot be had.

    Args:
        file: where the score is.
    """
    try:
        return int(file.read_text("ascii"))
    except (OSError, ValueError) as error:
        _log.debug("cannot read oom_score_adj: %s", error)
        return None


def raise_score(role: str, file: Path = _FILE, *, daemon_score: Optional[int] = None) -> None:
    """Have the kernel choose this process rather than the daemon.

    Raising the score needs no privilege; where it fails nevertheless, nothing else does.

    Args:
        role: a key of ABOVE_DAEMON.
        file: where the score is.
        daemon_score: the daemon's score; None: it is what this process has. One that was forked may have a raised one.
    """
    score = current_score(file) if daemon_score is None else daemon_score
    if score is None:
        return
    try:
        file.write_text(f"{min(score + SCORES_ABOVE_DAEMON[role], _MAX_SCORE)}\n", "ascii")
    except OSError as error:
        _log.debug("cannot raise oom_score_adj: %s", error)
