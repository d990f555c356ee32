"""Which losses of a unit's processes may only follow from that of another one.

Processes that compute together fail together: what is noticed first need not be what happened first. One of them that
has ended by itself, before the daemon ended the others, is the cause; what is listed here is at most a sign of it.
"""

from __future__ import annotations

import signal

from weightd_daemon.generations.actions import Role
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator

# What libraries say of a peer that has not come: MindSpore's, HCCL's of a link and of a collective, and MindSpore's of
# every predict after one that has failed.
_PEER_FAILURE_TEXTS = ("Launch kernel failed", "EI0006", "EI0002", "previous step")

# MindSpore ends its process by SIGTERM when its broker has gone; as a status where that signal is handled.
_BROKER_LOST_STATUSES = frozenset({-signal.SIGTERM, 128 + signal.SIGTERM})

# With these MindSpore's broker ends when a rank has gone, with the second when it cannot listen.
_RANK_LOST_STATUSES = frozenset({0, 1})
_LISTEN_FAILED_STATUS = 1


def is_peer_failure_text(text: str) -> bool:
    """Return whether a library has said this because of another process."""
    return any(each in text for each in _PEER_FAILURE_TEXTS)


def is_peer_failure_exit(role: Role, exit_cause: ExitCause, *, has_connected: bool) -> bool:
    """Return whether a process may have ended in this way because of another one.

    Args:
        role: what it was for.
        exit_cause: how it has ended.
        has_connected: whether ranks had found each other. Before that a broker ends of a reason of its own.
    """
    if role is Role.BROKER:
        return has_connected and exit_cause.status in _RANK_LOST_STATUSES
    return exit_cause.status in _BROKER_LOST_STATUSES or is_peer_failure_text(exit_cause.detail)


def is_port_taken(exit_cause: ExitCause, *, has_connected: bool) -> bool:
    """Return whether a broker that was told to begin has most likely found its port taken: the next gets another."""
    return not has_connected and exit_cause.status == _LISTEN_FAILED_STATUS


def is_independent_exit(exit_cause: ExitCause) -> bool:
    """Return whether a process that the daemon has sent SIGKILL had ended before that came."""
    if exit_cause.status is None or exit_cause.initiator is ExitInitiator.SHIM:
        return False
    return exit_cause.status != -signal.SIGKILL or exit_cause.initiator is not ExitInitiator.DAEMON
