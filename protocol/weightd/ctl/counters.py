"""What the daemon has counted of a model, before and after."""

from __future__ import annotations

from typing import NamedTuple, Optional

from weightd.protocol.messages.status import StatusResponse


class Counted(NamedTuple):
    """What the daemon has counted of a model since its start.

    Attributes:
        requests: how many were answered.
        executions: in how many executions: fewer, where some were run together; more, where some were cut.
    """

    requests: int
    executions: int


def counted(status: StatusResponse, name: str) -> Optional[Counted]:
    """Return what is told of a model; None where there is none, or nothing is told."""
    for model in status.models:
        if model.name == name and model.executions is not None:
            return Counted(model.served, model.executions.count)
    return None


def per_execution(before: Optional[Counted], after: Optional[Counted]) -> Optional[float]:
    """Return how many requests were in an execution on average; None where nothing is known of that."""
    if before is None or after is None or after.executions <= before.executions:
        return None
    return (after.requests - before.requests) / (after.executions - before.executions)


def is_split(before: Optional[Counted], after: Optional[Counted]) -> bool:
    """Whether a request was run in several executions; not where nothing is known of that."""
    if before is None or after is None:
        return False
    return after.executions - before.executions > after.requests - before.requests
