"""What the daemon has counted of a model, before and after."""

from __future__ import annotations

from typing import NamedTuple, Optional

from weightd_protocol.messages.status import StatusResponse


class CounterSample(NamedTuple):
    """What the daemon has counted of a model since its start.

    Attributes:
        requests: how many were answered.
        executions: in how many executions: fewer, where some were run together; more, where some were cut.
        split_requests: how many requests were.
    """

    requests: int
    executions: int
    split_requests: int


def read_counters(status: StatusResponse, name: str) -> Optional[CounterSample]:
    """Return what is told of a model; None where there is none, or nothing is told."""
    for model in status.models:
        if model.name == name and model.executions is not None:
            return CounterSample(model.served, model.executions.count, model.executions.split)
    return None


def per_execution(before: Optional[CounterSample], after: Optional[CounterSample]) -> Optional[float]:
    """Return how many requests were in an execution on average; None where nothing is known of that."""
    if before is None or after is None or after.executions <= before.executions:
        return None
    return (after.requests - before.requests) / (after.executions - before.executions)


def has_split(before: Optional[CounterSample], after: Optional[CounterSample]) -> bool:
    """Whether a request was run in parts; not where nothing is known of that."""
    return before is not None and after is not None and after.split_requests > before.split_requests
