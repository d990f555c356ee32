"""How many processes can compute at the same time: the cores that this one may use, or the time that its group has."""

from __future__ import annotations

import os

from weightd_daemon.platform import cgroup


def usable_core_count() -> int:
    """Return how many cores there are for this process and its children; at least 1."""
    cores = len(allowed_cores())
    quota = cgroup.cores()
    return cores if quota is None else max(1, min(cores, round(quota)))


def allowed_cores() -> frozenset[int]:
    """Return the cores on which this process and its children may run."""
    return frozenset(os.sched_getaffinity(0))
