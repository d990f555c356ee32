"""The slots of one model: where batches run, and which batches each has.

Callers name a slot by its own name or by that of any of its processes. A slot that is quick has credit for two batches:
one runs and one is ready, so it never waits for the daemon between two. A slot that computes for long has nothing
ready, and what waits behind its batch is recalled: no request waits for one slot while another is free. A slot whose
processes compute together has credit for one batch, and none is ever recalled from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weightd_daemon.counters import ModelCounters
from weightd_daemon.scheduling.batch import Batch, BatchItem
from weightd_daemon.scheduling.batching.policy import NO_BATCHING, BatchingPolicy
from weightd_daemon.scheduling.lockstep import LockstepTracker
from weightd_daemon.scheduling.measurements import BatchTimes, ExecutionCounters
from weightd_daemon.scheduling.request import Isolation, Request
from weightd_daemon.tenants.tenant import Tenant

# A slot that has computed for longer than this gets nothing ahead: handing it the next batch then costs it less than a
# hundredth of its time (a round trip is a fraction of a millisecond, one with 8 MiB a few).
MAX_QUICK_S = 0.25


@dataclass(eq=False, slots=True)
class Slot:
    """One or more processes that act together: each is given every batch, and who loses one of them has lost all.

    Attributes:
        name: of the slot.
        processes: their names.
        device: where they run.
        policy: what may be done with the rows of requests here.
        concurrency: how many batches it runs at once.
        batches: by their numbers, in the order in which it got them, and begins with them.
        is_quick: whether it was with its last batch: then it may have one ready behind those that it runs.
        lockstep: of its processes, if these compute together: then it has nothing ready, for what a process has been
            given is never taken back from it.
        support_processes: processes that are given no batches, but without which those of the slot are lost.
        model_index: which of the models of its process.
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

    @property
    def is_busy(self) -> bool:
        """Whether its processes compute."""
        return bool(self.batches)

    @property
    def all_processes(self) -> tuple[str, ...]:
        """The processes without any of which it is lost."""
        return (*self.processes, *self.support_processes)

    @property
    def is_free(self) -> bool:
        """Whether it would begin with a batch at once."""
        return len(self.batches) < self.concurrency

    def count_long(self, now: float, long_s: float) -> int:
        """Return how many of its batches are expected to take long, or already have run for `long_s` seconds."""
        return sum(batch.is_long or batch.started_at + long_s <= now for batch in self.batches.values())

    @property
    def has_confined(self) -> bool:
        """Whether one of its batches is confined."""
        return any(batch.isolation is Isolation.CONFINED for batch in self.batches.values())

    @property
    def tenants(self) -> set[Tenant]:
        """Whose batches it has."""
        return {tenant for batch in self.batches.values() for tenant in batch.tenants}

    @property
    def busy_since(self) -> float:
        """When it began with the batch that runs longest; later than any clock says where none does."""
        return min((batch.started_at for batch in self.batches.values()), default=float("inf"))

    @property
    def queued_batches(self) -> list[Batch]:
        """The batches that wait for those that run."""
        return [batch for batch in self.batches.values() if not batch.has_started]

    def accepts(self, isolation: Isolation, now: float) -> bool:
        """Return whether it takes one more batch that bears this company, be it behind what it has."""
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
        """It has a batch; return whether it begins with it, as it was free."""
        starts = len(self.batches) < self.concurrency
        if starts:
            batch.started_at = now
        self.batches[batch.number] = batch
        return starts

    def batch_of(self, number: int) -> Batch | None:
        """Return the batch that has the part of this number, which has not been answered."""
        return next((each for each in self.batches.values() if number in each.items), None)

    def finish_batch(self, batch: Batch, now: float) -> float:
        """It has answered a batch: return for how many seconds that ran."""
        del self.batches[batch.number]
        # What was only ready, for all that is known here, has run all the same.
        duration_s = now - batch.started_at if batch.started_at < now else 0.0
        self.is_quick = duration_s < MAX_QUICK_S
        if self.batches:
            self._start_queued(now)
        return duration_s

    def on_lost(self) -> None:
        """Its processes are of no use any more."""

    def _start_queued(self, now: float) -> None:
        """What was ready begins where there is room."""
        for batch in list(self.batches.values())[: self.concurrency]:
            batch.started_at = min(batch.started_at, now)


class SlotPool:
    """The slots of one model, by their names and those of their processes.

    Attributes:
        accepting: those that take batches, by name. One that is not among them gets nothing new but may still answer.
        merging: of these those where requests may share batches. If there is one, what has come is taken in before any
            of it is assigned.
        seen_devices: the devices on which there are slots, or were: the next one may be there.
        has_lockstep: whether there is, or was, a slot whose processes compute together.
        slot_by_process: each slot by its name, and by that of each of its processes; only this object changes it.
    """

    def __init__(self) -> None:
        self.seen_devices: set[str] = set()
        self.has_lockstep = False
        self._slots: dict[str, Slot] = {}
        self.accepting: dict[str, Slot] = {}
        self.merging: dict[str, Slot] = {}
        # Those that would take batches if it were the turn of this model at their process.
        self._paused: dict[str, Slot] = {}
        self.slot_by_process: dict[str, Slot] = {}

    # --- who is there -------------------------------------------------------------------------------------------

    def add(self, slot: Slot) -> None:
        """The slot takes batches from now on; if there is one of its name already, that one does."""
        slot = self._slots.setdefault(slot.name, slot)
        self.has_lockstep = self.has_lockstep or slot.lockstep is not None
        self.accepting[slot.name] = slot
        self._update_merging()
        self.slot_by_process.update(dict.fromkeys((slot.name, *slot.all_processes), slot))
        self.seen_devices.add(slot.device)

    def set_policy(self, process: str, policy: BatchingPolicy) -> None:
        """From now on this may be done with the rows of requests at the slot of the process."""
        slot = self.slot_by_process.get(process)
        if slot is not None:
            slot.policy = policy
            self._update_merging()

    def retire(self, process: str) -> None:
        """The slot of the process gets nothing new; it may still answer what it has."""
        slot = self.slot_by_process.get(process)
        if slot is not None:
            self.accepting.pop(slot.name, None)
            self._paused.pop(slot.name, None)
            self._update_merging()

    def pause(self, name: str) -> None:
        """The slot gets nothing new before it goes on."""
        slot = self.accepting.pop(name, None)
        if slot is not None:
            self._paused[name] = slot
            self._update_merging()

    def resume(self, name: str) -> None:
        """The slot takes batches again, if it has not been dismissed meanwhile."""
        slot = self._paused.pop(name, None)
        if slot is not None:
            self.accepting[name] = slot
            self._update_merging()

    def remove(self, slot: Slot) -> list[BatchItem]:
        """The slot is gone, or as good as that: return what it has not answered and somebody waits for."""
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
        """Those that take batches, or would if it were their turn."""
        return (*self.accepting.values(), *self._paused.values())

    @property
    def awaited_items(self) -> Iterator[BatchItem]:
        """The parts that slots have and somebody waits for."""
        return (
            item for slot in self._slots.values() for batch in slot.batches.values() for item in batch.awaited_items
        )

    def slot_of(self, process: str) -> Slot | None:
        """Return where the process runs batches, or has run some that it may still answer."""
        return self.slot_by_process.get(process)

    def in_flight(self, process: str) -> int:
        """Batches that the slot of the process has, whether or not somebody waits for them."""
        slot = self.slot_by_process.get(process)
        return 0 if slot is None else len(slot.batches)

    def is_busy(self, process: str) -> bool:
        """Return whether the process computes, be it for another model."""
        slot = self.slot_by_process.get(process)
        return slot is not None and slot.is_busy

    # --- which of them may take a batch -------------------------------------------------------------------------

    def free_slots(self, now: float) -> list[Slot]:
        """Return those that would begin with a batch at once, the one with the least to do first."""
        free = [slot for slot in self.accepting.values() if slot.is_free and slot.accepts(Isolation.BATCHABLE, now)]
        return sorted(free, key=lambda slot: len(slot.batches) / slot.concurrency)

    def devices_with(self, policy: BatchingPolicy) -> list[str]:
        """Return where those are that take batches on these terms."""
        return [slot.device for slot in self.accepting.values() if slot.policy == policy]

    # --- within -------------------------------------------------------------------------------------------------

    def _update_merging(self) -> None:
        self.merging = {name: slot for name, slot in self.accepting.items() if slot.policy.can_merge}


class Execution(NamedTuple):
    """A batch that a slot has run.

    Attributes:
        last: its part that was answered as the last.
        seconds: for which it ran.
        ended_at: when it was answered.
    """

    slot: Slot
    batch: Batch
    last: BatchItem
    seconds: float
    ended_at: float


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

    def assign(self, slot: Slot, batch: Batch, now: float) -> list[Request]:
        """Have the slot run a batch, as soon as it has nothing before it; return the requests that begin with it."""
        starting = [item.request for item in batch.items.values() if not item.request.has_started]
        for request in starting:
            request.has_started = True
            request.waited_s = now - request.arrived_at
        next_check_at = now + self._predict_timeout if slot.add_batch(batch, now) else slot.busy_since + MAX_QUICK_S
        if next_check_at < self.next_check_at:
            self.next_check_at = next_check_at
            self._schedule_by(next_check_at)
        return starting

    def finish(self, process: str, number: int, now: float) -> BatchItem | None:
        """A process has answered a part for its slot; return it, or None if nobody waits for this answer any more."""
        item, execution = self.take_answered(process, number, now)
        if execution is not None:
            self.record(execution)
        return item

    def take_answered(self, process: str, number: int, now: float) -> tuple[BatchItem | None, Execution | None]:
        """Do what `finish` does; return with the part the batch of which it was the last, which has to be recorded."""
        slot = self._slots.slot_by_process.get(process)
        batch = slot.batch_of(number) if slot is not None else None
        if slot is None or batch is None:
            return None, None
        item, execution = batch.items.pop(number), None
        if batch.items:
            batch.answered_items += (item,)
        else:
            execution = Execution(slot, batch, item, slot.finish_batch(batch, now), now)
        is_awaited = not item.request.is_ended and (item.split is None or item.is_awaited)
        return item if is_awaited else None, execution

    def record(self, execution: Execution) -> None:
        """Count a batch that a slot has run, on the accounts of who has asked for it and on those of the model."""
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

    def take_overdue(self, now: float) -> Iterator[tuple[Slot, Batch | None, list[BatchItem]]]:
        """Take out the slots that have computed for too long, and take back what waits behind one that runs long.

        Yields each with what it has run for too long, if it is taken out, and with what it had beside that.
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
        """Take the parts that are chosen of each batch back from the slots that have not begun with it.

        Returns:
            Those of them that are awaited.
        """
        recalled: list[BatchItem] = []
        for slot in self._slots:
            for batch in slot.queued_batches:
                recalled += self._recall_items(slot, batch, select(batch))
        return recalled

    def take_recalled(self) -> Sequence[tuple[Slot, int]]:
        """Return what slots have in vain, by the part's number, so that they need not begin with it; and forget it."""
        recalled, self._recalled = self._recalled, []
        return recalled

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
