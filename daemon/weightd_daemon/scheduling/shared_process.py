"""Several models in one process, each with a dispatcher of its own: who of them may give it the next batch.

The process has one batch at a time, and nothing ready behind it: so what becomes of it is to be laid to the one
dispatcher whose batch it runs. While it runs one, its slots are paused at all dispatchers; when it has answered, all of
them go on, those first whose turn is next. So nobody waits for more than one batch of each other model, and the process
idles for nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from weightd_daemon.scheduling.batch import Batch
from weightd_daemon.scheduling.request_queue import RequestQueue
from weightd_daemon.scheduling.slots import Slot, SlotPool


class _Participant(NamedTuple):
    """A dispatcher, as far as it has to do with the process.

    Its slot there and all others, what waits, what assigns that.
    """

    slot: Slot
    slots: SlotPool
    queue: RequestQueue
    dispatch: Callable[[float], None]


class SharedProcessScheduler:
    """The turns of one process.

    Attributes:
        active_slot: the slot of the dispatcher whose batch it runs; None where it runs none.
    """

    def __init__(self) -> None:
        self.active_slot: Slot | None = None
        self._participants: list[_Participant] = []
        self._is_closed = False

    def add(self, slot: Slot, slots: SlotPool, request_queue: RequestQueue, dispatch: Callable[[float], None]) -> None:
        """A dispatcher has a slot at the process from now on, where it is of those that have one already."""
        slots.add(slot)
        self._participants.append(_Participant(slot, slots, request_queue, dispatch))
        if self.active_slot is not None or self._is_closed:
            slots.pause(slot.name)

    def on_start(self, slot: Slot) -> None:
        """The process has been given a batch at this slot."""
        self.active_slot = slot
        self._pause_all()

    def on_end(self, slot: Slot, now: float) -> None:
        """The process has answered that batch.

        The next one is that of whoever comes after, and has something to run.
        """
        self.active_slot = None
        if self._is_closed:
            return
        for each in self._participants:
            each.slots.resume(each.slot.name)
        position = next(index for index, each in enumerate(self._participants) if each.slot is slot)
        # Who has just run one comes last; its dispatcher sees to that itself, once it has passed on the answer.
        for each in self._participants[position + 1 :] + self._participants[:position]:
            if not each.queue.is_idle:
                each.dispatch(now)

    def close(self) -> None:
        """The process is of no use any more, to anybody."""
        self._is_closed = True
        self._pause_all()

    def _pause_all(self) -> None:
        for each in self._participants:
            each.slots.pause(each.slot.name)


@dataclass(eq=False, slots=True)
class SharedSlot(Slot):
    """A slot at a process that others have a slot at, too.

    Attributes:
        scheduler: of the process.
    """

    scheduler: SharedProcessScheduler = field(default_factory=SharedProcessScheduler)

    @property
    def is_busy(self) -> bool:
        """Whether the process computes, for whichever model."""
        return self.scheduler.active_slot is not None

    def count_long(self, now: float, long_s: float) -> int:
        """Return whether the batch that the process runs, for whichever model, is long, as 0 or 1."""
        active_slot = self.scheduler.active_slot
        return 0 if active_slot is None else Slot.count_long(active_slot, now, long_s)

    def add_batch(self, batch: Batch, now: float) -> bool:
        """It has a batch, and begins with it."""
        self.scheduler.on_start(self)
        return Slot.add_batch(self, batch, now)

    def finish_batch(self, batch: Batch, now: float) -> float:
        """It has answered a batch: return for how many seconds that ran."""
        duration_s = Slot.finish_batch(self, batch, now)
        self.scheduler.on_end(self, now)
        return duration_s

    def on_lost(self) -> None:
        """The process is of no use any more."""
        self.scheduler.close()
