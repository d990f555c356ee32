"""Selects the requests that share a batch, and the number of rows in the next part of a split request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from weightd_daemon.scheduling.batching.estimates import DurationEstimates, Kind
from weightd_daemon.scheduling.batching.policy import BatchingPolicy, BatchKey
from weightd_daemon.scheduling.batching.split import SplitRequest
from weightd_daemon.scheduling.request import Isolation, Request
from weightd_protocol import limits

# Number of unsuitable queued requests after which the search for requests that fit into a batch ends. The search runs
# for each batch, so it must be short.
_MAX_MISFITS = 64

# Maximum total tensor bytes of the requests that share a batch. A request that runs alone may be larger.
_MAX_BATCH_BYTES = 64 * 1024 * 1024

# Maximum expected seconds of a batch that delays other queued requests. The batch may be a part of a split request, or
# contain several requests that overtake others in the queue.
MAX_BATCH_S = 0.1

# If a device's share of the rows is at least this fraction of the maximum part size, its part has the maximum size.
_NEARLY_ALL = 0.8


class SlotConstraints(NamedTuple):
    """The constraints on a batch that is formed for a slot.

    Attributes:
        policy: the batching policy of the slot.
        expected_s: called with a kind of request and a number of rows; returns an upper estimate of the seconds that
            such a batch takes on the slot.
        max_requests: the maximum number of requests in the batch, so that all free slots get some of the queued
            requests.
        max_s: the maximum expected duration of a batch of several requests, in seconds.
    """

    policy: BatchingPolicy
    expected_s: Callable[[Kind, int], float]
    max_requests: int = limits.MAX_BATCH_ITEMS
    max_s: float = math.inf


class BatchGroup(NamedTuple):
    """The requests of one batch.

    Attributes:
        requests: the requests, in the order of their rows.
        rows: the total number of rows.
        is_full: whether no request that arrives later could join the batch.
    """

    requests: list[Request]
    rows: int
    is_full: bool


def form_group(
    first: Request, batch_key: BatchKey, waiting: Iterable[Request], constraints: SlotConstraints, now: float
) -> BatchGroup:
    """Select the requests of a batch: the first request, and queued requests that may share its batch.

    A request is added only if the expected duration of the batch lets all its requests meet their deadlines.

    Args:
        first: the request whose turn it is.
        batch_key: the batch key of `first`.
        waiting: the queued requests in running order; `first` may be among them.
        constraints: the constraints on the batch.
        now: the time in monotonic seconds.
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
    """Return the maximum number of rows for the next part of a split request.

    The number is chosen so that all devices finish the request at the same time, and so that a part does not delay
    other queued requests for long.

    Args:
        split: the split request, which has rows left.
        device: the device of the free slot.
        devices: the devices of all slots that run the request, including `device`.
        estimates: durations of earlier batches.
        max_s: the maximum expected duration of the part, in seconds.
    """
    policy, batch_key = split.policy, split.batch_key
    share = math.ceil(batch_key.rows * estimates.share(device, devices, batch_key.kind, batch_key.rows))
    max_rows = min(policy.max_split_rows, split.next_rows)
    # If the share nearly fills a part, fill the part. A smaller part would leave a few rows that need another batch,
    # and the share is only an estimate.
    rows = max_rows if share >= _NEARLY_ALL * max_rows else share
    if max_s < math.inf:
        rows = estimates.max_rows_within(device, batch_key.kind, rows, max_s)
    return max((size for size in policy.sizes if size <= rows), default=min(policy.sizes, default=rows))


def _can_share(request: Request, batch_key: BatchKey, policy: BatchingPolicy) -> bool:
    """Return whether the request may share a batch: its rows can be merged, and fit into one batch."""
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
