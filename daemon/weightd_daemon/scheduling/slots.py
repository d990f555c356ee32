"""The slots of one model: where batches run.

Callers name a slot by its own name or by that of any of its processes. A slot whose processes compute together has
credit for one batch, and none is ever recalled from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from weightd_daemon.scheduling.batch import Batch, BatchItem
from weightd_daemon.scheduling.batching.policy import NO_BATCHING, BatchingPolicy
from weightd_daemon.scheduling.lockstep import LockstepTracker
from weightd_daemon.scheduling.request import Isolation
from weightd_daemon.tenants.tenant import Tenant

# A slot that was lost is replaced by then, or there are to be fewer.
REPLACEMENT_TIMEOUT_S = 10.0

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


class SlotPool:
    """The slots of one model, by their names and those of their processes.

    Args:
        schedule_by: called with the time when a slot that was lost to a tenant is not waited for any more.

    Attributes:
        accepting: those that take batches, by name. One that is not among them gets nothing new but may still answer.
        merging: of these those where requests may share batches. If there is one, what has come is taken in before any
            of it is assigned.
        seen_devices: the devices on which there are slots, or were: the next one may be there.
        has_lockstep: whether there is, or was, a slot whose processes compute together.
        slot_by_process: each slot by its name, and by that of each of its processes; only this object changes it.
    """

    def __init__(self, schedule_by: Callable[[float], object]) -> None:
        self._schedule_by = schedule_by
        self.seen_devices: set[str] = set()
        self.has_lockstep = False
        self._slots: dict[str, Slot] = {}
        self.accepting: dict[str, Slot] = {}
        self.merging: dict[str, Slot] = {}
        # Those that would take batches if it were the turn of this model at their process.
        self._paused: dict[str, Slot] = {}
        self.slot_by_process: dict[str, Slot] = {}
        # How many slots there were when one was lost to a tenant, and for how long they are waited for.
        self._unreplaced_by_tenant: dict[Tenant, tuple[int, float]] = {}

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

    def lockstep_of(self, process: str) -> LockstepTracker | None:
        """Return that of its slot; None if it has none, or computes alone."""
        slot = self.slot_by_process.get(process)
        return None if slot is None else slot.lockstep

    def processes_with(self, process: str) -> tuple[str, ...]:
        """Return all processes of its slot: who loses one of them has lost all."""
        slot = self.slot_by_process.get(process)
        return (process,) if slot is None else slot.all_processes

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    @property
    def count(self) -> int:
        """How many take batches, or would if it were their turn."""
        return len(self.accepting) + len(self._paused)

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

    def count_spare(self, now: float, long_s: float) -> int:
        """Return how many batches the slots could run beside those that are long, or have run for `long_s` seconds."""
        slots = (*self.accepting.values(), *self._paused.values())
        return sum(max(0, slot.concurrency - slot.count_long(now, long_s)) for slot in slots)

    # --- tenants that have lost slots ---------------------------------------------------------------------------

    def is_confined_running(self, tenant: Tenant | None = None) -> bool:
        """Return whether a slot has a batch that is confined, or was lost to one; of this tenant where one is given."""
        if self._unreplaced_by_tenant and (tenant is None or tenant in self._unreplaced_by_tenant):
            return True
        return any(slot.has_confined and (tenant is None or tenant in slot.tenants) for slot in self._slots.values())

    def record_tenant_loss(self, tenant: Tenant, now: float) -> None:
        """A slot is about to be lost to what a tenant has asked: that was its slot until another one is there."""
        deadline = now + REPLACEMENT_TIMEOUT_S
        self._unreplaced_by_tenant[tenant] = self.count, deadline
        self._schedule_by(deadline)

    def update_unreplaced(self, now: float) -> None:
        """See which slots that were lost to tenants have been replaced."""
        if not self._unreplaced_by_tenant:
            return
        slot_count = self.count
        self._unreplaced_by_tenant = {
            tenant: (count, deadline)
            for tenant, (count, deadline) in self._unreplaced_by_tenant.items()
            if slot_count < count and now < deadline
        }

    # --- within -------------------------------------------------------------------------------------------------

    def _update_merging(self) -> None:
        self.merging = {name: slot for name, slot in self.accepting.items() if slot.policy.can_merge}
