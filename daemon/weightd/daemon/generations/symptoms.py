"""Which losses of a unit's processes may only follow from that of another one.

Processes that compute together fail together: what is noticed first need not be what happened first. One of them that
has ended by itself, before the daemon ended the others, is the cause; what is listed here is at most a sign of it.
"""

from __future__ import annotations

import signal

from weightd.daemon.generations.actions import Role
from weightd.daemon.host.ends import By, End

# What libraries say of a peer that has not come: MindSpore's, HCCL's of a link and of a collective, and MindSpore's of
# every predict after one that has failed.
_WORDS = ("Launch kernel failed", "EI0006", "EI0002", "previous step")

# MindSpore ends its process by SIGTERM when its broker has gone; as a status where that signal is handled.
_BROKER_GONE = frozenset({-signal.SIGTERM, 128 + signal.SIGTERM})

# With these MindSpore's broker ends when a rank has gone, with the second when it cannot listen.
_RANK_GONE = frozenset({0, 1})
_NOT_LISTENING = 1


def in_words(words: str) -> bool:
    """Return whether a library has said this because of another process."""
    return any(each in words for each in _WORDS)


def in_end(role: Role, end: End, *, have_met: bool) -> bool:
    """Return whether a process may have ended in this way because of another one.

    Args:
        role: what it was for.
        end: how it has ended.
        have_met: whether ranks had found each other. Before that a broker ends of a reason of its own.
    """
    if role is Role.BROKER:
        return have_met and end.status in _RANK_GONE
    return end.status in _BROKER_GONE or in_words(end.words)


def is_port_taken(end: End, *, have_met: bool) -> bool:
    """Return whether a broker that was told to begin has most likely found its port taken: the next gets another."""
    return not have_met and end.status == _NOT_LISTENING


def is_own(end: End) -> bool:
    """Return whether a process that the daemon has sent SIGKILL had ended before that came."""
    if end.status is None or end.by is By.KEEPER:
        return False
    return end.status != -signal.SIGKILL or end.by is not By.DAEMON
