"""Which requests share a batch, and how many rows the next part of a large one has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from weightd_daemon.scheduling.batching.estimates import DurationEstimates, Kind
from weightd_daemon.scheduling.batching.policy import BatchingPolicy, BatchKey
from weightd_daemon.scheduling.batching.split import SplitRequest
from weightd_daemon.scheduling.request import Isolation, Request
from weightd_protocol import limits

# So many that do not fit are looked at: it is done with each batch.
_MAX_MISFITS = 64

# More is not put together: by itself a request may be larger.
_MAX_BATCH_BYTES = 64 * 1024 * 1024

# While others wait, what can be bounded takes no longer than this.
MAX_BATCH_S = 0.1

# Of the most rows that a part may have: one with so many has all of them.
_NEARLY_ALL = 0.8


class SlotConstraints(NamedTuple):
    """The slot that a batch is for.

    Attributes:
        policy: what may be done with rows there.
        expected_s: returns the seconds that so many rows of a kind take there at most, about.
        max_requests: requests that share the batch: what waits is divided among all slots that are free.
        max_s: seconds that a batch of several may take, about.
    """

    policy: BatchingPolicy
    expected_s: Callable[[Kind, int], float]
    max_requests: int = limits.MAX_BATCH_ITEMS
    max_s: float = math.inf


class BatchGroup(NamedTuple):
    """Requests that share a batch, or one that has it for itself.

    Attributes:
        requests: in the order of their rows.
        rows: of all of them.
        is_full: nothing that may still come could be added.
    """

    requests: list[Request]
    rows: int
    is_full: bool


def form_group(
    first: Request, batch_key: BatchKey, waiting: Iterable[Request], constraints: SlotConstraints, now: float
) -> BatchGroup:
    """Return the first request, and those that share its batch.

    Each of them will be answered before its deadline, as far as it can be told how long the batch runs.

    Args:
        first: whose turn it is.
        batch_key: of that one.
        waiting: what waits, in the order in which it is to run; the first may be among that.
        constraints: they are to run.
        now: the clock.
    """
    policy = constraints.policy
    if not _can_share(first, batch_key, policy):
        return BatchGroup([first], batch_key.rows, is_full=True)
    chosen, rows, nbytes, deadline = [first], batch_key.rows, first.content_bytes, first.deadline
    misfits, is_full = 0, rows == policy.max_rows
    for each in waiting:
        if is_full or misfits >= _MAX_MISFITS or len(chosen) >= constraints.max_requests:
            break
        if each is first:
            continue
        other = policy.batch_key(each.description)
        if other is None or other.kind != batch_key.kind or not _can_share_with(first, each, policy):
            misfits += 1
            continue
        if policy.should_split(other, each.origin.principal):
            misfits += 1
            continue
        total, size, least = rows + other.rows, nbytes + each.content_bytes, min(deadline, each.deadline)
        seconds = constraints.expected_s(batch_key.kind, total)
        if (
            total > policy.max_rows
            or size > _MAX_BATCH_BYTES
            or seconds > (min(MAX_BATCH_S, constraints.max_s) if misfits else constraints.max_s)
        ):
            is_full = True
        elif now + seconds < least:
            chosen.append(each)
            rows, nbytes, deadline = total, size, least
            is_full = rows == policy.max_rows
        else:
            misfits += 1
    return BatchGroup(chosen, rows, is_full)


def next_split_rows(
    split: SplitRequest, device: str, devices: Sequence[str], estimates: DurationEstimates, max_s: float
) -> int:
    """Return how many rows of a request that runs in parts the next part has at most.

    All devices are to be ready at once, and while others wait no part is so long that these wait for long.

    Args:
        split: the request, of which rows are left.
        device: of the slot that is free.
        devices: of all slots that run it, this one among them.
        estimates: of earlier batches.
        max_s: seconds that it may take, about.
    """
    policy, batch_key = split.policy, split.batch_key
    share = math.ceil(batch_key.rows * estimates.share(device, devices, batch_key.kind, batch_key.rows))
    max_rows = min(policy.max_split_rows, split.next_rows)
    # A few rows that were left would be a batch of their own: shares are never known that well.
    rows = max_rows if share >= _NEARLY_ALL * max_rows else share
    if max_s < math.inf:
        rows = estimates.max_rows_within(device, batch_key.kind, rows, max_s)
    return max((size for size in policy.sizes if size <= rows), default=min(policy.sizes, default=rows))


def _can_share(request: Request, batch_key: BatchKey, policy: BatchingPolicy) -> bool:
    """Whether the request may share a batch: nothing speaks against it, and it would not fill more than one alone."""
    is_mergeable = (
        policy.can_merge
        and batch_key.has_only_row_inputs
        and batch_key.rows <= policy.max_rows
        and request.isolation is Isolation.BATCHABLE
    )
    return is_mergeable and not policy.is_unmerged(request.origin.principal)


def _can_share_with(one: Request, other: Request, policy: BatchingPolicy) -> bool:
    if policy.is_unmerged(other.origin.principal):
        return False
    return other.isolation is Isolation.BATCHABLE and (
        policy.is_exact or one.origin.principal == other.origin.principal
    )
