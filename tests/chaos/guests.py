"""Guests: models that load on demand and do not all fit into the budget, so the daemon evicts them while clients ask.

This module also checks the reservations in each status: together they never exceed the budget, except after a restart.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from weightd_protocol.messages.status import StatusResponse

NAMES = tuple(f"guest{number}" for number in range(8))

# Requests that a client sends to one guest before it chooses another one, and the pause before each request. The loads
# of guests must leave enough of the machine for the recovery from faults.
VISIT = 30
PAUSE_S = 0.1
IN_FLIGHT = 2

# For the warm-up, in which the needs are measured: more than all models need.
ROOMY = 2**40
MIN_RESIDENT_S = 1.0

# The daemon logs this text for each eviction.
_EVICTION = "its memory is needed for"


def budget(status: StatusResponse, doubled: Collection[str]) -> int:
    """Return the memory that all models except the guests need, with room for one guest.

    Each of the models `doubled` may need as much again, for a second generation or for large requests. Most of the time
    this memory is free, and guests use it.
    """
    needs = {each.name: each.reserved_bytes for each in status.models}
    permanent = sum(nbytes for name, nbytes in needs.items() if name not in NAMES)
    return permanent + sum(needs[name] for name in doubled) + max(needs[name] for name in NAMES)


def unbalanced(status: StatusResponse) -> list[str]:
    """Return a text for each error in the reservations of a status."""
    total = sum(each.reserved_bytes for each in status.models)
    errors = [
        f"{each.reserved_bytes} bytes are reserved for {each.name}, which has no processes"
        for each in status.models
        if each.reserved_bytes and not each.generations
    ]
    if total != status.model_bytes:
        errors.append(f"{total} bytes are reserved for the models, but {status.model_bytes} in all")
    if status.model_bytes > status.max_model_bytes and not _has_resumed_models(status):
        errors.append(f"{status.model_bytes} bytes are reserved, the budget is {status.max_model_bytes}")
    return [f"budget: {each}" for each in errors]


def _has_resumed_models(status: StatusResponse) -> bool:
    """Return whether an earlier daemon has started processes: models that are taken over may exceed the budget."""
    daemon = _start_ticks(status.pid)
    pids = [each.pid for model in status.models for generation in model.generations for each in generation.processes]
    return any(0 < _start_ticks(pid) < daemon for pid in pids)


def _start_ticks(pid: int) -> int:
    """Return when a process was started, in clock ticks since the start of the host; 0 if it does not exist."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def evictions(log: str) -> int:
    """Return the number of evictions in the log of a daemon."""
    return log.count(_EVICTION)
