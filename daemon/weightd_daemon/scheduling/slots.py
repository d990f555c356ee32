"""The execution slots of one model, and the batches that each slot has.

Callers identify a slot by its own name or by the name of any of its processes. A slot with quick batches gets one batch
more than it can run at once, so that it never waits for the daemon between two batches. A slot whose batches run long
gets no batch in advance, and batches queued behind a long one are recalled, so that no request waits for one slot while
another is free. A slot whose processes run in lockstep gets one batch at a time, which is never recalled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from weightd_daemon.scheduling.batch import Batch, BatchItem
from weightd_daemon.scheduling.batching.policy import NO_BATCHING, BatchingPolicy
from weightd_daemon.scheduling.lockstep import LockstepTracker
from weightd_daemon.scheduling.request import Isolation
from weightd_daemon.tenants.tenant import Tenant

# Seconds below which a batch is quick. Only after quick batches does a slot get a batch in advance: a round trip takes
# a fraction of a millisecond (a few with 8 MiB), which is less than a hundredth of the run time of longer batches.
MAX_QUICK_S = 0.25

# Seconds after which a request of a direct channel counts as long: batches then wait for another slot instead.
MAX_DIRECT_S = 0.1


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
        direct_s: the seconds for which the process had run a request of a direct channel when the daemon last looked;
            None if it ran none. Its batches wait until this request has ended.
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
    direct_s: float | None = None

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
        if self.has_long_direct:
            return 1
        return sum(batch.is_long or batch.started_at + long_s <= now for batch in self.batches.values())

    @property
    def has_long_direct(self) -> bool:
        """Whether the process runs a long request of a direct channel."""
        return self.direct_s is not None and self.direct_s > MAX_DIRECT_S

    @property
    def load(self) -> float:
        """The number of batches, relative to the number that the slot runs at once."""
        return (len(self.batches) + (self.direct_s is not None)) / self.concurrency

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
        if self.lockstep is not None or self.direct_s is not None:
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

    def restart_clock(self, now: float) -> None:
        """Let the time of the started batches begin now, because they wait for a request of a direct channel."""
        for batch in self.batches.values():
            if batch.has_started:
                batch.started_at = now

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
        """Return an accepting slot that runs nothing, or None."""
        for slot in self.accepting.values():
            if not slot.batches and slot.direct_s is None:
                return slot
        return None

    def is_blocked(self, slot: Slot) -> bool:
        """Return whether a batch would wait at this slot for a long request of a direct channel, and not at others."""
        return slot.has_long_direct and not all(each.has_long_direct for each in self.accepting.values())

    def free_slots(self, now: float) -> list[Slot]:
        """Return the slots that would start a batch at once, the least loaded first."""
        free = [
            slot
            for slot in self.accepting.values()
            if slot.is_free and slot.accepts(Isolation.BATCHABLE, now) and not self.is_blocked(slot)
        ]
        return sorted(free, key=lambda slot: slot.load)

    def devices_with(self, policy: BatchingPolicy) -> list[str]:
        """Return the device of each accepting slot with this policy."""
        return [slot.device for slot in self.accepting.values() if slot.policy == policy]

    # --- private ------------------------------------------------------------------------------------------------

    def _update_merging(self) -> None:
        self.merging = {name: slot for name, slot in self.accepting.items() if slot.policy.can_merge}
