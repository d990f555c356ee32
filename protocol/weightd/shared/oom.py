"""When memory runs out, the kernel ends workers before their holder, and that before the daemon, which can replace it.

See proc_pid_oom_score_adj(5): a process counts as if it took so many thousandths of all memory in addition.
"""

from __future__ import annotations

import logging
from pathlib import Path

_log = logging.getLogger("weightd.protocol")

# Above the daemon's own. A worker is replaced alone; with a holder on a card a whole generation is lost.
ABOVE_DAEMON = {"holder": 200, "worker": 400}

_MOST = 1000


def go_before_the_daemon(role: str, file: Path = Path("/proc/self/oom_score_adj")) -> None:
    """Have the kernel choose this process rather than its parent, from which it has inherited the score.

    To be called once. Raising the score needs no privilege; where it fails nevertheless, nothing else does.

    Args:
        role: a key of ABOVE_DAEMON.
        file: where the score is.
    """
    try:
        score = min(int(file.read_text("ascii")) + ABOVE_DAEMON[role], _MOST)
        file.write_text(f"{score}\n", "ascii")
    except (OSError, ValueError) as error:
        _log.debug("the score for the end by want of memory cannot be raised: %s", error)
