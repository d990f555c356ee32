"""Time sharing of one process among several models, each of which has its own dispatcher.

The process has one batch at a time and none queued behind it, so that a crash of the process can be attributed to the
dispatcher whose batch it ran. While the process runs a batch, its slots are paused at all dispatchers. When the process
has answered the batch, all its slots are resumed, and the dispatchers get their turns in a fixed order. So a request
waits for at most one batch of each other model, and the process is never idle while one of its models has requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from weightd_daemon.scheduling.batch import Batch
from weightd_daemon.scheduling.request_queue import RequestQueue
from weightd_daemon.scheduling.slots import Slot, SlotPool


class _Participant(NamedTuple):
    """A dispatcher that uses the process: its slot at the process, its slot pool, its queue and its dispatch function.

    The dispatch function is called with the current time.
    """

    slot: Slot
    slots: SlotPool
    queue: RequestQueue
    dispatch: Callable[[float], None]


class SharedProcessScheduler:
    """Shares one process among the dispatchers of its models.

    Attributes:
        active_slot: the slot of the dispatcher whose batch the process runs; None while the process is idle.
    """

    def __init__(self) -> None:
        self.active_slot: Slot | None = None
        self._participants: list[_Participant] = []
        self._is_closed = False

    def add(self, slot: Slot, slots: SlotPool, request_queue: RequestQueue, dispatch: Callable[[float], None]) -> None:
        """Add a dispatcher's slot at the process. The slot is paused if the process is busy or lost."""
        slots.add(slot)
        self._participants.append(_Participant(slot, slots, request_queue, dispatch))
        if self.active_slot is not None or self._is_closed:
            slots.pause(slot.name)

    def on_start(self, slot: Slot) -> None:
        """Record that the process has received a batch at this slot, and pause all slots."""
        self.active_slot = slot
        self._pause_all()

    def on_end(self, slot: Slot, now: float) -> None:
        """Record that the process has answered the batch of this slot, and start the next batch.

        The next batch comes from the first dispatcher in turn that has requests.
        """
        self.active_slot = None
        if self._is_closed:
            return
        for each in self._participants:
            each.slots.resume(each.slot.name)
        position = next(index for index, each in enumerate(self._participants) if each.slot is slot)
        # The dispatcher of the answered batch is last in turn. It is not called here, because it will dispatch by
        # itself after it has sent the answer.
        for each in self._participants[position + 1 :] + self._participants[:position]:
            if each.queue.has_runnable():
                each.dispatch(now)

    def close(self) -> None:
        """Stop assigning batches to the process, because the process is lost."""
        self._is_closed = True
        self._pause_all()

    def _pause_all(self) -> None:
        for each in self._participants:
            each.slots.pause(each.slot.name)


@dataclass(eq=False, slots=True)
class SharedSlot(Slot):
    """A slot at a process that serves several models.

    Attributes:
        scheduler: divides the time of the process among its models.
    """

    scheduler: SharedProcessScheduler = field(default_factory=SharedProcessScheduler)

    @property
    def is_busy(self) -> bool:
        """Whether the process runs a batch, of any of its models."""
        return self.scheduler.active_slot is not None

    def count_long(self, now: float, long_s: float) -> int:
        """Return 1 if the process runs a long batch, for any of its models; else 0."""
        active_slot = self.scheduler.active_slot
        return 0 if active_slot is None else Slot.count_long(active_slot, now, long_s)

    def add_batch(self, batch: Batch, now: float) -> bool:
        """Add a batch, which starts at once."""
        self.scheduler.on_start(self)
        return Slot.add_batch(self, batch, now)

    def finish_batch(self, batch: Batch, now: float) -> float:
        """Remove an answered batch; return for how many seconds it ran."""
        duration_s = Slot.finish_batch(self, batch, now)
        self.scheduler.on_end(self, now)
        return duration_s

    def on_lost(self) -> None:
        """Stop assigning batches to the process, for all its models."""
        self.scheduler.close()
