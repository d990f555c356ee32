"""The batches at the slots of one model, both running and queued there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from weightd_daemon.counters import ModelCounters
from weightd_daemon.scheduling.batch import Batch, BatchItem
from weightd_daemon.scheduling.measurements import BatchTimes, ExecutionCounters
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.slots import MAX_QUICK_S, Slot, SlotPool

_Execution = tuple[Slot, Batch, BatchItem, float, float]
"""A batch that a slot has run to its end: the slot, the batch, the item whose answer completed the batch, the run time
of the batch in seconds, and the time of that answer in monotonic seconds."""


class RunningBatches:
    """The batches at the slots of one model, both running and queued there.

    Args:
        slots: the slots of the model.
        times: records the durations of batches.
        predict_timeout: seconds after which a computing slot is considered to hang.
        schedule_by: called with a new value of `next_check_at` that is sooner than the previous one.
        counters: the counters of the model.
        on_ran: called, while several tenants send requests, with the request of each batch that ran one whole request,
            the seconds that the batch took, and the current time.

    Attributes:
        next_check_at: a time before which `take_overdue` has nothing to do.
        runs_direct: returns whether a process runs a request of a direct channel now.
        execution_counters: counters of the batches that have run.
    """

    def __init__(
        self,
        slots: SlotPool,
        times: BatchTimes,
        predict_timeout: float,
        schedule_by: Callable[[float], object],
        counters: ModelCounters,
        on_ran: Callable[[Request, float, float], object],
    ) -> None:
        self._slots = slots
        self._times = times
        self._predict_timeout = predict_timeout
        self._schedule_by = schedule_by
        self._counters = counters
        self._on_ran = on_ran
        self.next_check_at = float("inf")
        self.runs_direct: Callable[[str], bool] = lambda process: False
        self.execution_counters = ExecutionCounters()
        self._recalled: list[tuple[Slot, int]] = []

    def assign(self, slot: Slot, batch: Batch, now: float) -> None:
        """Assign a batch to a slot; count the requests that no slot has received before as started."""
        for item in batch.items.values():
            request = item.request
            if not request.has_started:
                request.has_started = True
                request.waited_s = now - request.arrived_at
                request.tenant.quota.start_request(request.nbytes)
                request.usage.add_queue_time(request.waited_s)
        next_check_at = now + self._predict_timeout if slot.add_batch(batch, now) else slot.busy_since + MAX_QUICK_S
        if next_check_at < self.next_check_at:
            self.next_check_at = next_check_at
            self._schedule_by(next_check_at)

    def finish(self, process: str, number: int, now: float) -> BatchItem | None:
        """Record the answer to an item; return the item, or None if its request does not await the answer any more."""
        item, execution = self.take_answered(process, number, now)
        if execution is not None:
            self.record(execution)
        return item

    def take_answered(self, process: str, number: int, now: float) -> tuple[BatchItem | None, _Execution | None]:
        """Do the same as `finish`, but also return the execution of a completed batch, for the caller to `record`."""
        slot = self._slots.slot_by_process.get(process)
        batch = slot.batch_of(number) if slot is not None else None
        if slot is None or batch is None:
            return None, None
        item, execution = batch.items.pop(number), None
        if batch.items:
            batch.answered_items += (item,)
        else:
            execution = slot, batch, item, slot.finish_batch(batch, now), now
        is_awaited = not item.request.is_ended and (item.split is None or item.is_awaited)
        return item if is_awaited else None, execution

    def record(self, execution: _Execution) -> None:
        """Count the execution of a batch in the usage of its tenants and in the counters of the model."""
        slot, batch, last, seconds, ended_at = execution
        if batch.charge is None and batch.item_count == 1 and not batch.is_time_recorded:
            batch.is_time_recorded = True
            last.request.usage.add_run(seconds, last.rows)
        else:
            batch.record_time(seconds, last)
            self._report_ran(batch, last, seconds, ended_at)
        self._times.add(slot.device, batch, seconds)
        self.execution_counters.executions += 1
        self._counters.compute.add(seconds)
        if batch.batch_key is not None:
            self.execution_counters.count_rows(batch.rows, slot.policy.padded_rows(batch.rows))
            self._counters.rows.add(batch.rows)

    def end_matching(self, should_end: Callable[[Request], bool]) -> list[tuple[Request, bool]]:
        """End the matching requests at slots; return each request once, with whether a slot is running any part of it.

        A running batch cannot be stopped: it occupies its slot until the slot answers, and the answer is dropped.
        """
        return list(
            self._end_items(lambda batch: [item for item in batch.awaited_items if should_end(item.request)]).items()
        )

    def end_requests(self, requests: Sequence[Request]) -> dict[Request, bool]:
        """End these requests at slots; return the same as `end_matching`."""

        def items_to_end(batch: Batch) -> list[BatchItem]:
            return [item for each in requests if (item := batch.item_of(each)) is not None and item.is_awaited]

        return self._end_items(items_to_end)

    def take_overdue(self, now: float) -> Iterator[tuple[Slot, Batch | None, list[BatchItem]]]:
        """Remove the slots in which a batch has exceeded `predict_timeout`; recall batches queued behind a long batch.

        The time during which a batch waits for a request of a direct channel does not count.

        Yields:
            The slot, the batch that exceeded the timeout (None if the slot stays), and the items to queue again.
        """
        if now < self.next_check_at:
            return
        for slot in list(self._slots):
            if not slot.batches:
                continue
            if now >= slot.busy_since + self._predict_timeout and self.runs_direct(slot.name):
                slot.restart_clock(now)
            elif now >= slot.busy_since + self._predict_timeout:
                longest = min(slot.batches.values(), key=lambda batch: batch.started_at)
                del slot.batches[longest.number]
                longest.record_time(now - longest.started_at)
                for item in longest.items.values():
                    self._report_ran(longest, item, now - longest.started_at, now)
                yield slot, longest, self._slots.remove(slot)
            elif now >= slot.busy_since + MAX_QUICK_S:
                requeued = [
                    item for batch in slot.queued_batches for item in self._recall_items(slot, batch, list(batch.items))
                ]
                yield slot, None, requeued
        self.next_check_at = min(
            (slot.busy_since + (MAX_QUICK_S if slot.queued_batches else self._predict_timeout) for slot in self._slots),
            default=float("inf"),
        )

    def recall(self, select: Callable[[Batch], list[int]]) -> list[BatchItem]:
        """Recall the selected items of batches that no slot has started; return the items that are still awaited."""
        recalled: list[BatchItem] = []
        for slot in self._slots:
            for batch in slot.queued_batches:
                recalled += self._recall_items(slot, batch, select(batch))
        return recalled

    def on_direct(self, slot: Slot, seconds: float | None, now: float) -> list[BatchItem]:
        """Record for how long a slot has run a request of a direct channel, so that its batches have not started.

        Args:
            slot: the slot.
            seconds: for how long the request has run; None if the slot runs none.
            now: the time.

        Returns:
            The items that are recalled because another slot can run them sooner.
        """
        slot.direct_s = seconds
        if seconds is None:
            return []
        slot.restart_clock(now)
        if not self._slots.is_blocked(slot):
            return []
        batches = list(slot.batches.values())
        return [item for batch in batches for item in self._recall_items(slot, batch, list(batch.items))]

    def take_recalled(self) -> Sequence[tuple[Slot, int]]:
        """Return the items recalled since the last call, as slots and item numbers, for notifying the slots."""
        recalled, self._recalled = self._recalled, []
        return recalled

    def _report_ran(self, batch: Batch, item: BatchItem, seconds: float, now: float) -> None:
        if batch.charge is not None and batch.item_count == 1 and item.split is None:
            self._on_ran(item.request, seconds, now)

    def _end_items(self, select: Callable[[Batch], list[BatchItem]]) -> dict[Request, bool]:
        """End the requests of the selected items; return each one with whether a slot is running any part of it."""
        ended: dict[Request, bool] = {}
        for slot in self._slots:
            for batch in list(slot.batches.values()):
                chosen_items = select(batch)
                for item in chosen_items:
                    ended[item.request] = ended.get(item.request, False) or batch.has_started
                if chosen_items and not batch.has_started:
                    self._recall_items(slot, batch, [item.number for item in chosen_items])
        for request in ended:
            request.is_ended = True
        return ended

    def _recall_items(self, slot: Slot, batch: Batch, numbers: Sequence[int]) -> list[BatchItem]:
        """Remove items of a batch that the slot has not started; return the items that are still awaited."""
        items = [batch.items.pop(number) for number in numbers]
        self._recalled += [(slot, number) for number in numbers]
        if not batch.items:
            batch.record_time(0.0)
            del slot.batches[batch.number]
        return [item for item in items if item.is_awaited]
