"""The slots of one model: where batches run, and which slot has which batch, for how long.

A slot that is quick has credit for two batches: one runs and one is ready, so it never waits for the daemon between
two. A slot that computes for long has nothing ready, and the pool recalls what waits behind its batch: no request waits
for one slot while another is free.

Callers name a slot by its own name or by that of any of its processes. A slot whose processes compute together has
credit for one batch, and none is ever recalled from it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from weightd_daemon.counters import ModelCounters
from weightd_daemon.scheduling.batch import Batch, BatchItem
from weightd_daemon.scheduling.batching import former
from weightd_daemon.scheduling.batching.policy import NO_BATCHING, BatchingPolicy, BatchKey
from weightd_daemon.scheduling.batching.split import SplitRequest
from weightd_daemon.scheduling.lockstep import LockstepTracker
from weightd_daemon.scheduling.measurements import DurationEstimates, ExecutionCounters, RollingMax
from weightd_daemon.scheduling.request import Isolation, Request
from weightd_daemon.tenants.tenant import Tenant
from weightd_protocol import limits

# A hint to try again sooner would only bring the next refusal.
_MIN_RETRY_S = 0.01

# A slot that was lost is replaced by then, or there are to be fewer.
REPLACEMENT_TIMEOUT_S = 10.0

# Of so many of the last answers the mean duration is taken.
_MEAN_WINDOW = 16

# So long it is remembered how many requests there were at once.
_PEAK_WINDOW_S = 1.0


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
        return {request.tenant for batch in self.batches.values() for request in batch.requests}

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
        batch = self.batches.get(number)
        if batch is not None and number in batch.items:
            return batch
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


class OverdueSlot(NamedTuple):
    """A slot that has computed for long.

    Attributes:
        hung_batch: what it runs, if that was for too long: the slot is taken out then.
        requeued: what it had beside that.
    """

    slot: Slot
    hung_batch: Batch | None
    requeued: list[BatchItem]


class SlotPool:
    """The slots of one model.

    Args:
        predict_timeout: seconds after which a slot that computes is held to hang.
        schedule_by: called with a time that is sooner than `next_check_at` was.
        execution_counters: of what has run.
        on_new_device: called when there is a slot on a device where there was none before.
        on_ran: called with the request of a batch, the seconds that the batch took and the clock, while there are
            several tenants; not for batches of several requests, nor for parts of one.

    Attributes:
        accepting: those that take batches, by name. One that is not among them gets nothing new but may still answer.
        merging: of these those where requests may share batches. If there is one, what has come is taken in before any
            of it is assigned.
        next_check_at: no slot has computed for too long before this.
        estimates: of what has run.
        seen_devices: the devices on which there are slots, or were: the next one may be there.
        counters: of the model.
    """

    def __init__(
        self,
        predict_timeout: float,
        schedule_by: Callable[[float], object],
        execution_counters: ExecutionCounters,
        on_new_device: Callable[[], object] = lambda: None,
        on_ran: Callable[[Request, float, float], object] = lambda _request, _seconds, _now: None,
    ) -> None:
        self._predict_timeout = predict_timeout
        self._schedule_by = schedule_by
        self._execution_counters = execution_counters
        self._on_new_device = on_new_device
        self._on_ran = on_ran
        self.seen_devices: set[str] = set()
        self._slots: dict[str, Slot] = {}
        self.accepting: dict[str, Slot] = {}
        # How many slots there were when one was lost to a tenant, and for how long they are waited for.
        self._unreplaced_by_tenant: dict[Tenant, tuple[int, float]] = {}
        # Those that would be, if it were their turn.
        self._paused: dict[str, Slot] = {}
        # By its name, and by that of each of its processes.
        self._slot_by_process: dict[str, Slot] = {}
        self.merging: dict[str, Slot] = {}
        self.next_check_at = float("inf")
        self.estimates = DurationEstimates()
        self.counters = ModelCounters()
        self._request_peak = RollingMax(_PEAK_WINDOW_S)
        self._recalled: list[tuple[Slot, int]] = []
        # For how long the batches of the last answers ran.
        self._recent_durations_s: deque[float] = deque(maxlen=_MEAN_WINDOW)

    # --- who is there -------------------------------------------------------------------------------------------

    def add_new(
        self,
        name: str,
        processes: tuple[str, ...],
        *,
        device: str = "",
        policy: BatchingPolicy = NO_BATCHING,
        concurrency: int = 1,
    ) -> None:
        """The slot takes batches from now on; it consists of these processes. See `Slot` for the rest."""
        self.add(Slot(name, processes, device, policy, concurrency))

    def add(self, slot: Slot) -> None:
        """The slot takes batches from now on; if there is one of its name already, that one does."""
        slot = self._slots.setdefault(slot.name, slot)
        self.accepting[slot.name] = slot
        self._update_merging()
        self._slot_by_process.update(dict.fromkeys((slot.name, *slot.all_processes), slot))
        if slot.device not in self.seen_devices:
            self.seen_devices.add(slot.device)
            self._on_new_device()

    def set_policy(self, process: str, policy: BatchingPolicy) -> None:
        """From now on this may be done with the rows of requests at the slot of the process."""
        slot = self._slot_by_process.get(process)
        if slot is not None:
            slot.policy = policy
            self._update_merging()

    def retire(self, process: str) -> None:
        """The slot of the process gets nothing new; it may still answer what it has."""
        slot = self._slot_by_process.get(process)
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
            del self._slot_by_process[name]
        del self._slots[slot.name]
        self.accepting.pop(slot.name, None)
        self._paused.pop(slot.name, None)
        self._update_merging()
        slot.on_lost()
        for batch in slot.batches.values():
            batch.record_time(0.0)
        return [item for batch in slot.batches.values() for item in batch.awaited_items]

    def slot_of(self, process: str) -> Slot | None:
        """Return where the process runs batches, or has run some that it may still answer."""
        return self._slot_by_process.get(process)

    def lockstep_of(self, process: str) -> LockstepTracker | None:
        """Return that of its slot; None if it has none, or computes alone."""
        slot = self._slot_by_process.get(process)
        return None if slot is None else slot.lockstep

    def in_flight(self, process: str) -> int:
        """Batches that the slot of the process has, whether or not somebody waits for them."""
        slot = self._slot_by_process.get(process)
        return 0 if slot is None else len(slot.batches)

    def is_busy(self, process: str) -> bool:
        """Return whether the process computes, be it for another model."""
        slot = self._slot_by_process.get(process)
        return slot is not None and slot.is_busy

    # --- what they are given ------------------------------------------------------------------------------------

    def least_loaded(
        self, request: Request, split: SplitRequest | None, waiting: Iterable[Request], now: float
    ) -> Slot | None:
        """Return the slot with the least to do that has credit, the first of them; None if none has any.

        Args:
            request: to be given to it.
            split: what has begun of it: the rest runs on the same model.
            waiting: what could share its batch: it does not wait for a slot while that may become more.
            now: the clock.
        """
        least_loaded, min_load = None, float("inf")
        for slot in self.accepting.values():
            if split is not None and slot.policy != split.policy:
                continue
            if not slot.batches:
                return slot
            load = len(slot.batches) / slot.concurrency
            if (
                load < min_load
                and slot.accepts(request.isolation, now)
                and self._can_queue_behind(slot, request, waiting, now)
            ):
                least_loaded, min_load = slot, load
        return least_loaded

    def free_slots(self, now: float) -> list[Slot]:
        """Return those that would begin with a batch at once, the one with the least to do first."""
        free = [slot for slot in self.accepting.values() if slot.is_free and slot.accepts(Isolation.BATCHABLE, now)]
        return sorted(free, key=lambda slot: len(slot.batches) / slot.concurrency)

    def form_batch(
        self, slot: Slot, request: Request, batch_key: BatchKey, waiting: former.BatchCandidates, now: float
    ) -> former.BatchGroup:
        """Return what shares a batch of a slot that is free with a request of this form, of all that waits."""
        constraints = self._constraints(
            slot, self._max_requests(slot, batch_key, 1 + waiting.request_count, now), waiting.max_s
        )
        return former.form_batch(request, batch_key, waiting.requests, constraints, now)

    def expected_s(self, slot: Slot, batch: Batch) -> float:
        """Return how many seconds a batch will take at a slot, about; 0.0 where nobody knows."""
        estimate_s = (
            self.estimates.expected_s(slot.device, batch.batch_key.kind, batch.rows)
            if batch.batch_key is not None
            else 0.0
        )
        return estimate_s or batch.item_count * self.mean_item_s

    @property
    def mean_item_s(self) -> float:
        """The seconds that a part took of late; 0.0 before anything was answered."""
        return sum(self._recent_durations_s) / len(self._recent_durations_s) if self._recent_durations_s else 0.0

    def assign(self, slot: Slot, batch: Batch, now: float) -> None:
        """Have the slot run a batch, as soon as it has nothing before it."""
        for item in batch.items.values():
            request = item.request
            if not request.has_started:
                request.has_started = True
                waited = now - request.arrived_at
                request.usage.add_queue_time(waited)
                self.counters.queue.add(waited)
                request.tenant.quota.start_request(request.nbytes)
        next_check_at = now + self._predict_timeout if slot.add_batch(batch, now) else slot.busy_since + MAX_QUICK_S
        if next_check_at < self.next_check_at:
            self.next_check_at = next_check_at
            self._schedule_by(next_check_at)

    def finish(self, process: str, number: int, now: float) -> BatchItem | None:
        """A process has answered a part for its slot; return it, or None if nobody waits for this answer any more."""
        slot = self._slot_by_process.get(process)
        batch = None if slot is None else slot.batch_of(number)
        if slot is None or batch is None:
            return None
        item = batch.items.pop(number)
        if batch.items:
            batch.answered_items += (item,)
        else:
            duration_s = slot.finish_batch(batch, now)
            batch.record_time(duration_s, item)
            self._report_ran(batch, item, duration_s, now)
            self._recent_durations_s.append(duration_s / batch.item_count)
            self._execution_counters.executions += 1
            self.counters.compute.add(duration_s)
            if batch.batch_key is not None:
                self._execution_counters.count_rows(batch.rows, slot.policy.padded_rows(batch.rows))
                self.counters.rows.add(batch.rows)
                self.estimates.add(slot.device, batch.batch_key.kind, batch.rows, duration_s)
        return item if item.is_awaited else None

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
        for slot in self._slots.values():
            for batch in slot.queued_batches:
                mine = [item.number for item in batch.items.values() if item.split is split]
                if mine:
                    self._recall_items(slot, batch, mine)

    def take_overdue(self, now: float) -> Iterator[OverdueSlot]:
        """Take out the slots that have computed for too long, and take back what waits behind one that runs long."""
        if now < self.next_check_at:
            return
        for slot in list(self._slots.values()):
            if not slot.batches:
                continue
            if now >= slot.busy_since + self._predict_timeout:
                longest = min(slot.batches.values(), key=lambda batch: batch.started_at)
                del slot.batches[longest.number]
                longest.record_time(now - longest.started_at)
                for item in longest.items.values():
                    self._report_ran(longest, item, now - longest.started_at, now)
                yield OverdueSlot(slot, longest, self.remove(slot))
            elif now >= slot.busy_since + MAX_QUICK_S:
                requeued = [
                    item for batch in slot.queued_batches for item in self._recall_items(slot, batch, list(batch.items))
                ]
                yield OverdueSlot(slot, None, requeued)
        self.next_check_at = min((self._next_check_of(slot) for slot in self._slots.values()), default=float("inf"))

    def recall_of_others(self, tenant: Tenant) -> list[BatchItem]:
        """Take back what slots have not begun with and is another tenant's; return what is awaited of that."""
        recalled: list[BatchItem] = []
        for slot in self._slots.values():
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

    # --- what they tell -----------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    @property
    def running_count(self) -> int:
        """Requests of which they have something that somebody waits for."""
        return len(
            {
                item.request
                for slot in self._slots.values()
                for batch in slot.batches.values()
                for item in batch.awaited_items
            }
        )

    def devices_with(self, policy: BatchingPolicy) -> list[str]:
        """Return where those are that take batches on these terms."""
        return [slot.device for slot in self.accepting.values() if slot.policy == policy]

    def is_confined_running(self, tenant: Tenant | None = None) -> bool:
        """Return whether a slot has a batch that is confined, or was lost to one; of this tenant where one is given."""
        if self._unreplaced_by_tenant and (tenant is None or tenant in self._unreplaced_by_tenant):
            return True
        return any(slot.has_confined and (tenant is None or tenant in slot.tenants) for slot in self._slots.values())

    def record_tenant_loss(self, tenant: Tenant, now: float) -> None:
        """A slot is about to be lost to what a tenant has asked: that was its slot until another one is there."""
        deadline = now + REPLACEMENT_TIMEOUT_S
        self._unreplaced_by_tenant[tenant] = len(self.accepting) + len(self._paused), deadline
        self._schedule_by(deadline)

    def update_unreplaced(self, now: float) -> None:
        """See which slots that were lost to tenants have been replaced."""
        if not self._unreplaced_by_tenant:
            return
        slot_count = len(self.accepting) + len(self._paused)
        self._unreplaced_by_tenant = {
            tenant: (count, deadline)
            for tenant, (count, deadline) in self._unreplaced_by_tenant.items()
            if slot_count < count and now < deadline
        }

    def retry_after_s(self, queued: int, now: float) -> float | None:
        """Return in how many seconds there may be room in a queue that is full.

        It has moved on by one place for each slot after the time that a request takes. Before anything was answered
        nobody knows how long that is.
        """
        slot_count = len(self.accepting) + len(self._paused)
        if not self._recent_durations_s or not slot_count:
            return None
        busy_s = max((now - slot.busy_since for slot in self._slots.values() if slot.batches), default=0.0)
        seconds = max(self.mean_item_s, busy_s) * queued / slot_count
        return max(seconds, _MIN_RETRY_S)

    def count_spare(self, now: float, long_s: float) -> int:
        """Return how many batches the slots could run beside those that are long, or have run for `long_s` seconds."""
        slots = (*self.accepting.values(), *self._paused.values())
        return sum(max(0, slot.concurrency - slot.count_long(now, long_s)) for slot in slots)

    # --- within -------------------------------------------------------------------------------------------------

    def _report_ran(self, batch: Batch, item: BatchItem, seconds: float, now: float) -> None:
        if batch.charge is not None and batch.item_count == 1 and item.split is None:
            self._on_ran(item.request, seconds, now)

    def _can_queue_behind(self, slot: Slot, request: Request, waiting: Iterable[Request], now: float) -> bool:
        """Whether nothing that may still come could share the request's batch.

        So that it need not wait for the slot.
        """
        batch_key = slot.policy.batch_key(request.description) if slot.policy.can_merge and not slot.is_free else None
        return batch_key is None or former.form_batch(request, batch_key, waiting, self._constraints(slot), now).is_full

    def _constraints(
        self, slot: Slot, max_requests: int = limits.MAX_BATCH_ITEMS, max_s: float = math.inf
    ) -> former.SlotConstraints:
        return former.SlotConstraints(slot.policy, partial(self.estimates.expected_s, slot.device), max_requests, max_s)

    def _max_requests(self, slot: Slot, batch_key: BatchKey, waiting: int, now: float) -> int:
        """How many of the requests that wait may share a batch: those of the slots that are free share all there are.

        A slot counts that will be free before this one had run what waits. And what there was a moment ago is counted:
        who has just been answered asks again.
        """
        slots = self.merging.values()
        running = sum(batch.item_count for each in slots for batch in each.batches.values())
        peak = self._request_peak.add(waiting + running, now)
        completes_at = now + self.estimates.expected_s(
            slot.device, batch_key.kind, min(waiting * batch_key.rows, slot.policy.max_rows)
        )
        return math.ceil(peak / (1 + sum(self._free_at(each) <= completes_at for each in slots if each is not slot)))

    def _free_at(self, slot: Slot) -> float:
        """When a slot will have run what it has, as far as is known."""
        free_at = slot.busy_since if slot.batches else -math.inf
        for batch in slot.batches.values():
            if batch.batch_key is None:
                return math.inf
            free_at += self.estimates.expected_s(slot.device, batch.batch_key.kind, batch.rows)
        return free_at

    def _end_items(self, select: Callable[[Batch], list[BatchItem]]) -> dict[Request, bool]:
        """End the requests of the parts that are chosen of each batch; return whether a slot is running any of each."""
        ended: dict[Request, bool] = {}
        for slot in self._slots.values():
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

    def _update_merging(self) -> None:
        self.merging = {name: slot for name, slot in self.accepting.items() if slot.policy.can_merge}
