"""Forms the batches of one model: chooses the slot of a request and the requests that share its batch.

`batching.policy` decides which requests may share a batch, and `batching.former` selects the requests of each batch. A
request with more rows than a batch may have is split (`batching.split`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable

from weightd_daemon.scheduling.batch import FIRST_SPLIT_NUMBER, Batch, BatchItem
from weightd_daemon.scheduling.batching.estimates import RollingMax
from weightd_daemon.scheduling.batching.former import MAX_BATCH_S, SlotConstraints, form_group, next_split_rows
from weightd_daemon.scheduling.batching.policy import BatchingPolicy, BatchKey
from weightd_daemon.scheduling.batching.split import SplitRequest
from weightd_daemon.scheduling.measurements import BatchTimes, ExecutionCounters
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.request_queue import RequestQueue, Turns
from weightd_daemon.scheduling.slots import Slot, SlotPool
from weightd_daemon.scheduling.tenancy import Tenancy
from weightd_protocol import limits

# Minimum seconds for which the peak number of concurrent requests is remembered.
_PEAK_WINDOW_S = 1.0


class BatchFormer:
    """Chooses the slot for a request and forms the request's batch.

    Args:
        queue: the request queue of the model.
        turns: determines the order in which queued requests run.
        slots: the slots of the model.
        times: durations of earlier batches.
        tenancy: limits the duration of a batch while several tenants send requests.
        execution_counters: counts split requests.
    """

    def __init__(
        self,
        queue: RequestQueue,
        turns: Turns,
        slots: SlotPool,
        times: BatchTimes,
        tenancy: Tenancy,
        execution_counters: ExecutionCounters,
    ) -> None:
        self._queue = queue
        self._turns = turns
        self._slots = slots
        self._times = times
        self._tenancy = tenancy
        self._execution_counters = execution_counters
        self._split_numbers = itertools.count(FIRST_SPLIT_NUMBER)
        self._request_peak = RollingMax(_PEAK_WINDOW_S)

    def choose_slot(self, request: Request, split: SplitRequest | None, now: float) -> Slot | None:
        """Return the least loaded slot that accepts the request; None if there is no such slot.

        A request is not queued behind a busy slot while later requests could still join its batch.

        Args:
            request: the request to assign.
            split: the state of the request if some of its rows have been assigned to a slot: the other rows must run on
                slots with the same batching policy. None for other requests.
            now: the time in monotonic seconds.
        """
        least_loaded, min_load = None, float("inf")
        for slot in self._slots.accepting.values():
            if split is not None and slot.policy != split.policy:
                continue
            if not slot.batches and slot.direct_s is None:
                return slot
            if self._slots.is_blocked(slot):
                continue
            load = slot.load
            if load < min_load and slot.accepts(request.isolation, now) and self._can_queue_behind(slot, request, now):
                least_loaded, min_load = slot, load
        return least_loaded

    def form_batch(self, slot: Slot, request: Request, batch_key: BatchKey, now: float) -> tuple[Batch, bool]:
        """Form the batch of a request that is not queued, and remove the batch's other requests from the queue.

        Returns:
            The batch, and whether it is a part of a split request.
        """
        policy, queue = slot.policy, self._queue
        split = queue.splits.get(request.number)
        if split is None and policy.should_split(batch_key, request.origin.principal):
            split = self.start_split(request, policy, batch_key)
        if split is not None:
            return self._next_split_batch(split, slot, now), True
        waiting: Iterable[Request] = queue.normal
        if queue.is_multi_tenant:
            waiting = self._turns.fair_order(self._tenancy.clocks.clock_of(slot.device), self._times.mean_item_s)
        max_requests = self._max_requests(slot, batch_key, 1 + queue.normal.count, now)
        constraints = self._constraints(slot, max_requests, self._tenancy.max_batch_s(math.inf, now))
        group = form_group(request, batch_key, waiting, constraints, now)
        for each in group.requests[1:]:
            queue.normal.remove(each)
        items = [BatchItem(each.number, each) for each in group.requests]
        for item in items:
            item_key = policy.batch_key(item.request.description)
            item.rows = item_key.rows if item_key is not None else 0
        return Batch.from_items(items, batch_key, group.rows), False

    def start_split(self, request: Request, policy: BatchingPolicy, batch_key: BatchKey) -> SplitRequest:
        """Create the state of a request that will run in parts, and register the request as split."""
        split = self._queue.splits[request.number] = SplitRequest(request, policy, batch_key)
        self._execution_counters.split_requests += 1
        return split

    def _next_split_batch(self, split: SplitRequest, slot: Slot, now: float) -> Batch:
        devices, estimates = self._slots.devices_with(split.policy), self._times.estimates
        max_s = self._tenancy.max_batch_s(MAX_BATCH_S if self._queue.has_runnable() else math.inf, now)
        first, rows = split.take_rows(next_split_rows(split, slot.device, devices, estimates, max_s))
        if split.is_pending:
            self._queue.put_first([split.request])
        item = BatchItem(next(self._split_numbers), split.request, split, first, rows)
        return Batch.from_items([item], split.batch_key, rows)

    def _can_queue_behind(self, slot: Slot, request: Request, now: float) -> bool:
        """Return whether the request may be queued behind the slot's batches: no later request could join its batch."""
        batch_key = slot.policy.batch_key(request.description) if slot.policy.can_merge and not slot.is_free else None
        if batch_key is None:
            return True
        return form_group(request, batch_key, self._queue.normal, self._constraints(slot), now).is_full

    def _constraints(
        self, slot: Slot, max_requests: int = limits.MAX_BATCH_ITEMS, max_s: float = math.inf
    ) -> SlotConstraints:
        expected_s = functools.partial(self._times.estimates.expected_s, slot.device)
        return SlotConstraints(slot.policy, expected_s, max_requests, max_s)

    def _max_requests(self, slot: Slot, batch_key: BatchKey, waiting: int, now: float) -> int:
        """Return the maximum number of requests in a batch, so that all free slots get some of the requests.

        The maximum is the number of concurrent requests, divided by the number of slots that can share them: `slot`,
        and each slot that will finish its batches before `slot` could have run all queued requests. The number of
        concurrent requests is the recent peak, because clients that have just been answered often send the next
        request.
        """
        slots = self._slots.merging.values()
        running = sum(batch.item_count for each in slots for batch in each.batches.values())
        peak = self._request_peak.add(waiting + running, now)
        completes_at = now + self._times.estimates.expected_s(
            slot.device, batch_key.kind, min(waiting * batch_key.rows, slot.policy.max_rows)
        )
        return math.ceil(peak / (1 + sum(self._free_at(each) <= completes_at for each in slots if each is not slot)))

    def _free_at(self, slot: Slot) -> float:
        """Return when a slot will have run all its batches, in monotonic seconds; infinity if the time is unknown."""
        free_at = slot.busy_since if slot.batches else -math.inf
        for batch in slot.batches.values():
            if batch.batch_key is None:
                return math.inf
            free_at += self._times.estimates.expected_s(slot.device, batch.batch_key.kind, batch.rows)
        return free_at
