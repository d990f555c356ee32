"""The batches that the slots of one model have, from the moment when a slot is given one until all of it is answered.

A slot that is quick has credit for two batches: one runs and one is ready, so it never waits for the daemon between
two. A slot that computes for long has nothing ready, and what waits behind its batch is recalled: no request waits for
one slot while another is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from weightd_daemon.counters import ModelCounters
from weightd_daemon.scheduling.batch import Batch, BatchItem
from weightd_daemon.scheduling.batching.split import SplitRequest
from weightd_daemon.scheduling.measurements import BatchTimes, ExecutionCounters
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.slots import MAX_QUICK_S, Slot, SlotPool
from weightd_daemon.tenants.tenant import Tenant


class OverdueSlot(NamedTuple):
    """A slot that has computed for long.

    Attributes:
        hung_batch: what it runs, if that was for too long: the slot is taken out then.
        requeued: what it had beside that.
    """

    slot: Slot
    hung_batch: Batch | None
    requeued: list[BatchItem]


class RunningBatches:
    """The batches that the slots of one model have: those that run, and those that are ready behind them.

    Args:
        slots: where they run.
        times: takes their durations.
        predict_timeout: seconds after which a slot that computes is considered to hang.
        schedule_by: called with a time that is sooner than `next_check_at` was.
        counters: of the model.
        on_ran: called with the request of a batch, the seconds that the batch took and the clock, while there are
            several tenants; not for batches of several requests, nor for parts of one.

    Attributes:
        next_check_at: no slot has computed for too long before this.
        execution_counters: of what has run.
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
        self.execution_counters = ExecutionCounters()
        self._recalled: list[tuple[Slot, int]] = []

    # --- what slots are given -----------------------------------------------------------------------------------

    def assign(self, slot: Slot, batch: Batch, now: float) -> None:
        """Have the slot run a batch, as soon as it has nothing before it."""
        for item in batch.items.values():
            request = item.request
            if not request.has_started:
                request.has_started = True
                waited = now - request.arrived_at
                request.usage.start(request.tenant.quota, request.nbytes, waited)
                self._counters.queue.add(waited)
        next_check_at = now + self._predict_timeout if slot.add_batch(batch, now) else slot.busy_since + MAX_QUICK_S
        if next_check_at < self.next_check_at:
            self.next_check_at = next_check_at
            self._schedule_by(next_check_at)

    def finish(self, process: str, number: int, now: float) -> BatchItem | None:
        """A process has answered a part for its slot; return it, or None if nobody waits for this answer any more."""
        slot = self._slots.slot_by_process.get(process)
        if slot is None:
            return None
        batch = slot.batches.get(number)
        if batch is None or number not in batch.items:
            batch = slot.batch_of(number)
        if batch is None:
            return None
        item = batch.items.pop(number)
        if batch.items:
            batch.answered_items += (item,)
        else:
            duration_s = slot.finish_batch(batch, now)
            if batch.charge is None and batch.item_count == 1 and not batch.is_time_recorded:
                batch.is_time_recorded = True
                item.request.usage.add_run(duration_s, item.rows)
            else:
                batch.record_time(duration_s, item)
                self._report_ran(batch, item, duration_s, now)
            self._times.add(slot.device, batch, duration_s)
            self.execution_counters.executions += 1
            self._counters.compute.add(duration_s)
            if batch.batch_key is not None:
                self.execution_counters.count_rows(batch.rows, slot.policy.padded_rows(batch.rows))
                self._counters.rows.add(batch.rows)
        return item if not item.request.is_ended and (item.split is None or item.is_awaited) else None

    # --- what is taken from them --------------------------------------------------------------------------------

    def end_matching(self, should_end: Callable[[Request], bool]) -> list[tuple[Request, bool]]:
        """End what slots have that is `should_end`; return each request once, with whether a slot is running any of it.

        What a slot runs cannot be stopped: its credit comes back when it answers, and then nobody waits for that.
        """
        return list(
            self._end_items(lambda batch: [item for item in batch.awaited_items if should_end(item.request)]).items()
        )

    def end_requests(self, requests: Sequence[Request]) -> dict[Request, bool]:
        """End what slots have of these requests, without a look at others; return them as `end_matching` does."""

        def items_to_end(batch: Batch) -> list[BatchItem]:
            return [item for each in requests if (item := batch.item_of(each)) is not None and item.is_awaited]

        return self._end_items(items_to_end)

    def recall_split(self, split: SplitRequest) -> None:
        """Take the parts of a request back from the slots that have not begun with them."""
        for slot in self._slots:
            for batch in slot.queued_batches:
                mine = [item.number for item in batch.items.values() if item.split is split]
                if mine:
                    self._recall_items(slot, batch, mine)

    def take_overdue(self, now: float) -> Iterator[OverdueSlot]:
        """Take out the slots that have computed for too long, and take back what waits behind one that runs long."""
        if now < self.next_check_at:
            return
        for slot in list(self._slots):
            if not slot.batches:
                continue
            if now >= slot.busy_since + self._predict_timeout:
                longest = min(slot.batches.values(), key=lambda batch: batch.started_at)
                del slot.batches[longest.number]
                longest.record_time(now - longest.started_at)
                for item in longest.items.values():
                    self._report_ran(longest, item, now - longest.started_at, now)
                yield OverdueSlot(slot, longest, self._slots.remove(slot))
            elif now >= slot.busy_since + MAX_QUICK_S:
                requeued = [
                    item for batch in slot.queued_batches for item in self._recall_items(slot, batch, list(batch.items))
                ]
                yield OverdueSlot(slot, None, requeued)
        self.next_check_at = min((self._next_check_of(slot) for slot in self._slots), default=float("inf"))

    def recall_of_others(self, tenant: Tenant) -> list[BatchItem]:
        """Take back what slots have not begun with and is another tenant's; return what is awaited of that."""
        recalled: list[BatchItem] = []
        for slot in self._slots:
            for batch in slot.queued_batches:
                if any(request.tenant is not tenant for request in batch.requests):
                    recalled += self._recall_items(slot, batch, list(batch.items))
        return recalled

    def take_recalled(self) -> Sequence[tuple[Slot, int]]:
        """Return what slots have in vain, by the part's number, so that they need not begin with it; and forget it."""
        if not self._recalled:
            return ()
        recalled, self._recalled = self._recalled, []
        return recalled

    # --- within -------------------------------------------------------------------------------------------------

    def _report_ran(self, batch: Batch, item: BatchItem, seconds: float, now: float) -> None:
        if batch.charge is not None and batch.item_count == 1 and item.split is None:
            self._on_ran(item.request, seconds, now)

    def _end_items(self, select: Callable[[Batch], list[BatchItem]]) -> dict[Request, bool]:
        """End the requests of the parts that are chosen of each batch; return whether a slot is running any of each."""
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
        """Take these parts of a batch back from a slot that has not begun with it; return those that are awaited."""
        items = [batch.items.pop(number) for number in numbers]
        self._recalled += [(slot, number) for number in numbers]
        if not batch.items:
            batch.record_time(0.0)
            del slot.batches[batch.number]
        return [item for item in items if item.is_awaited]

    def _next_check_of(self, slot: Slot) -> float:
        if not slot.batches:
            return float("inf")
        return slot.busy_since + (MAX_QUICK_S if slot.queued_batches else self._predict_timeout)
