"""A slot: where batches run."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightd_daemon.scheduling.batch import Batch
from weightd_daemon.scheduling.batching.policy import NO_BATCHING, BatchingPolicy
from weightd_daemon.scheduling.lockstep import LockstepTracker
from weightd_daemon.scheduling.request import Isolation
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
