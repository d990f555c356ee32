"""The execution slots of one model, and the batches that each slot has.

Callers identify a slot by its own name or by the name of any of its processes. A slot with quick batches gets one batch
more than it can run at once, so that it never waits for the daemon between two batches. A slot whose batches run long
gets no batch in advance, and batches queued behind a long one are recalled, so that no request waits for one slot while
another is free. A slot whose processes run in lockstep gets one batch at a time, which is never recalled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from weightd_daemon.counters import ModelCounters
from weightd_daemon.scheduling.batch import Batch, BatchItem
from weightd_daemon.scheduling.batching.policy import NO_BATCHING, BatchingPolicy
from weightd_daemon.scheduling.lockstep import LockstepTracker
from weightd_daemon.scheduling.measurements import BatchTimes, ExecutionCounters
from weightd_daemon.scheduling.request import Isolation, Request
from weightd_daemon.tenants.tenant import Tenant

# Seconds below which a batch is quick. Only after quick batches does a slot get a batch in advance: a round trip takes
# a fraction of a millisecond (a few with 8 MiB), which is less than a hundredth of the run time of longer batches.
MAX_QUICK_S = 0.25


@dataclass(eq=False, slots=True)
class Slot:
    """One or more processes that run every batch together. If one process exits, the slot is lost.

    Attributes:
        name: the name of the slot.
        processes: the names of its processes.
        device: the device on which the processes run.
        policy: the batching policy of the loaded model.
        concurrency: the number of batches that the slot runs at once.
        batches: the batches by number, in the order in which the slot received them and starts them.
        is_quick: whether the last batch ran for less than `MAX_QUICK_S`, so that the slot may get a batch in advance.
        lockstep: tracks the reports of processes that compute together; their items are never recalled.
        support_processes: processes that receive no batches, but without which the slot is lost.
        model_index: the index of the model in a process that serves several models.
        idle_since: when the slot answered its last batch, in monotonic seconds.
    """

    name: str
    processes: tuple[str, ...]
    device: str = ""
    policy: BatchingPolicy = NO_BATCHING
    concurrency: int = 1
    batches: dict[int, Batch] = field(default_factory=dict[int, Batch])
    is_quick: bool = True
    lockstep: LockstepTracker | None = None
    support_processes: tuple[str, ...] = ()
    model_index: int = 0
    idle_since: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether the processes compute."""
        return bool(self.batches)

    @property
    def all_processes(self) -> tuple[str, ...]:
        """All processes whose exit ends the slot."""
        return (*self.processes, *self.support_processes)

    @property
    def is_free(self) -> bool:
        """Whether the slot would start another batch at once."""
        return len(self.batches) < self.concurrency

    def count_long(self, now: float, long_s: float) -> int:
        """Return how many batches are expected to run long, or have already run for `long_s` seconds."""
        return sum(batch.is_long or batch.started_at + long_s <= now for batch in self.batches.values())

    @property
    def has_confined(self) -> bool:
        """Whether one of the batches has a confined request."""
        return any(batch.isolation is Isolation.CONFINED for batch in self.batches.values())

    @property
    def tenants(self) -> set[Tenant]:
        """The tenants of the batches."""
        return {tenant for batch in self.batches.values() for tenant in batch.tenants}

    @property
    def busy_since(self) -> float:
        """When the longest running batch started, in monotonic seconds; infinity if none runs."""
        return min((batch.started_at for batch in self.batches.values()), default=float("inf"))

    @property
    def queued_batches(self) -> list[Batch]:
        """The batches that the slot has received but not started."""
        return [batch for batch in self.batches.values() if not batch.has_started]

    def accepts(self, isolation: Isolation, now: float) -> bool:
        """Return whether the slot takes another batch of this isolation level, to run now or after the running ones."""
        if not self.batches:
            return True
        if self.lockstep is not None:
            return False
        if isolation is not Isolation.BATCHABLE or any(
            batch.isolation is not Isolation.BATCHABLE for batch in self.batches.values()
        ):
            return False
        if self.is_free:
            return True
        return len(self.batches) == self.concurrency and self.is_quick and now < self.busy_since + MAX_QUICK_S

    def add_batch(self, batch: Batch, now: float) -> bool:
        """Add a batch; return whether the slot was free and starts it at once."""
        starts = len(self.batches) < self.concurrency
        if starts:
            batch.started_at = now
        self.batches[batch.number] = batch
        return starts

    def batch_of(self, number: int) -> Batch | None:
        """Return the batch that has the unanswered item with this number, or None."""
        batch = self.batches.get(number)  # a batch has the number of its first item
        if batch is not None and number in batch.items:
            return batch
        return next((each for each in self.batches.values() if number in each.items), None)

    def finish_batch(self, batch: Batch, now: float) -> float:
        """Remove an answered batch; return for how many seconds it ran."""
        del self.batches[batch.number]
        # If the daemon still considered the batch queued, its start is unknown, and its duration counts as 0.
        duration_s = now - batch.started_at if batch.started_at < now else 0.0
        self.is_quick = duration_s < MAX_QUICK_S
        self.idle_since = now
        if self.batches:
            self._start_queued(now)
        return duration_s

    def on_lost(self) -> None:
        """Handle the loss of the slot's processes. The base class does nothing."""

    def _start_queued(self, now: float) -> None:
        """Mark queued batches as started, up to the concurrency."""
        for batch in list(self.batches.values())[: self.concurrency]:
            batch.started_at = min(batch.started_at, now)


class SlotPool:
    """The slots of one model, by name and by process.

    Attributes:
        accepting: slots that take batches, by name. Other slots get no new batches, but may still answer.
        merging: accepting slots where requests may share batches. If there are any, all messages that have arrived are
            read before a request is assigned.
        seen_devices: the devices that have or had slots. A replacement slot may start on any of them.
        has_lockstep: whether there is or was a slot whose processes run in lockstep.
        slot_by_process: each slot by its name and by the names of its processes; other objects must not change it.
    """

    def __init__(self) -> None:
        self.seen_devices: set[str] = set()
        self.has_lockstep = False
        self._slots: dict[str, Slot] = {}
        self.accepting: dict[str, Slot] = {}
        self.merging: dict[str, Slot] = {}
        # Slots of shared processes, which accept batches again when the process has finished a batch of another model.
        self._paused: dict[str, Slot] = {}
        self.slot_by_process: dict[str, Slot] = {}

    # --- slots --------------------------------------------------------------------------------------------------

    def add(self, slot: Slot) -> None:
        """Add a slot that accepts batches. If a slot of this name exists, the existing one accepts batches again."""
        slot = self._slots.setdefault(slot.name, slot)
        self.has_lockstep = self.has_lockstep or slot.lockstep is not None
        self.accepting[slot.name] = slot
        self._update_merging()
        self.slot_by_process.update(dict.fromkeys((slot.name, *slot.all_processes), slot))
        self.seen_devices.add(slot.device)

    def set_policy(self, process: str, policy: BatchingPolicy) -> None:
        """Change the batching policy of the slot of a process."""
        slot = self.slot_by_process.get(process)
        if slot is not None:
            slot.policy = policy
            self._update_merging()

    def retire(self, process: str) -> None:
        """Stop assigning batches to the slot of a process. The slot may still answer earlier batches."""
        slot = self.slot_by_process.get(process)
        if slot is not None:
            self.accepting.pop(slot.name, None)
            self._paused.pop(slot.name, None)
            self._update_merging()

    def pause(self, name: str) -> None:
        """Stop assigning batches to a slot until `resume`."""
        slot = self.accepting.pop(name, None)
        if slot is not None:
            self._paused[name] = slot
            self._update_merging()

    def resume(self, name: str) -> None:
        """Assign batches to a paused slot again, unless it has been retired meanwhile."""
        slot = self._paused.pop(name, None)
        if slot is not None:
            self.accepting[name] = slot
            self._update_merging()

    def remove(self, slot: Slot) -> list[BatchItem]:
        """Remove a slot that is lost or considered lost; return its awaited items."""
        for name in {slot.name, *slot.all_processes}:
            del self.slot_by_process[name]
        del self._slots[slot.name]
        self.accepting.pop(slot.name, None)
        self._paused.pop(slot.name, None)
        self._update_merging()
        slot.on_lost()
        for batch in slot.batches.values():
            batch.record_time(0.0)
        return [item for batch in slot.batches.values() for item in batch.awaited_items]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    @property
    def active(self) -> Sequence[Slot]:
        """The accepting slots, and the paused ones."""
        return (*self.accepting.values(), *self._paused.values())

    @property
    def awaited_items(self) -> Iterator[BatchItem]:
        """The awaited items at all slots."""
        return (
            item for slot in self._slots.values() for batch in slot.batches.values() for item in batch.awaited_items
        )

    def slot_of(self, process: str) -> Slot | None:
        """Return the slot of a process, even if the slot is retired; None if the process has no slot."""
        return self.slot_by_process.get(process)

    def in_flight(self, process: str) -> int:
        """Return the number of batches at the slot of a process, including batches whose requests have ended."""
        slot = self.slot_by_process.get(process)
        return 0 if slot is None else len(slot.batches)

    def is_busy(self, process: str) -> bool:
        """Return whether the process runs a batch of this model or of another one."""
        slot = self.slot_by_process.get(process)
        return slot is not None and slot.is_busy

    # --- free slots ---------------------------------------------------------------------------------------------

    def idle_slot(self) -> Slot | None:
        """Return an accepting slot without a batch, or None."""
        for slot in self.accepting.values():
            if not slot.batches:
                return slot
        return None

    def free_slots(self, now: float) -> list[Slot]:
        """Return the slots that would start a batch at once, the least loaded first."""
        free = [slot for slot in self.accepting.values() if slot.is_free and slot.accepts(Isolation.BATCHABLE, now)]
        return sorted(free, key=lambda slot: len(slot.batches) / slot.concurrency)

    def devices_with(self, policy: BatchingPolicy) -> list[str]:
        """Return the device of each accepting slot with this policy."""
        return [slot.device for slot in self.accepting.values() if slot.policy == policy]

    # --- private ------------------------------------------------------------------------------------------------

    def _update_merging(self) -> None:
        self.merging = {name: slot for name, slot in self.accepting.items() if slot.policy.can_merge}


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

        Yields:
            The slot, the batch that exceeded the timeout (None if the slot stays), and the items to queue again.
        """
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
