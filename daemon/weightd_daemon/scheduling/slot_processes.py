"""The processes that run the batches of a model: which slots they are, and whether they still answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from weightd_daemon.scheduling.batching.policy import NO_BATCHING, BatchingPolicy
from weightd_daemon.scheduling.fault_isolation.isolator import FaultIsolator
from weightd_daemon.scheduling.lockstep import LockstepTracker
from weightd_daemon.scheduling.measurements import LatencyWindow
from weightd_daemon.scheduling.results import BatchResults
from weightd_daemon.scheduling.scheduler import Scheduler
from weightd_daemon.scheduling.shared_process import SharedProcessScheduler, SharedSlot
from weightd_daemon.scheduling.slots import Slot
from weightd_daemon.scheduling.tensor_location import SharedRegion
from weightd_protocol.messages.worker import ChildOrder

SendOrder = Callable[[str, ChildOrder, Sequence[Any], Sequence[SharedRegion]], object]
"""Sends an order, with the frames that follow it and the memory that it names, to a process."""


class SlotProcesses:
    """Adds and removes the slots of one model, and watches their processes.

    Args:
        scheduler: of the model.
        isolator: has the watchdog.
        results: takes the reports of the processes.
        send_order: sends a ping.
        dispatch: called with the clock when a slot may take a batch.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        isolator: FaultIsolator,
        results: BatchResults,
        send_order: SendOrder,
        dispatch: Callable[[float], None],
    ) -> None:
        self._scheduler = scheduler
        self._slots = scheduler.slots
        self._isolator = isolator
        self._watchdog = isolator.watchdog
        self._latencies = results.latencies_by_process
        self._send_order = send_order
        self._dispatch = dispatch

    # --- slots --------------------------------------------------------------------------------------------------

    def add(
        self, process: str, *, device: str = "", policy: BatchingPolicy = NO_BATCHING, concurrency: int = 1
    ) -> None:
        """The process is a slot that takes batches from now on: see `Slot`."""
        self._latencies[process] = LatencyWindow()
        self._slots.add(Slot(process, (process,), device, policy, concurrency))

    def add_ranks(
        self,
        slot_name: str,
        lockstep: LockstepTracker,
        now: float,
        *,
        support_processes: Sequence[str] = (),
        device: str = "",
        policy: BatchingPolicy = NO_BATCHING,
    ) -> None:
        """The ranks of a model are one slot that takes batches from now on.

        They are pinged, and never with the self-test.

        Args:
            slot_name: its name.
            lockstep: of the ranks. Where that joins their outputs, requests may not share a batch, nor be filled up:
                nobody tells which of its rows a rank has.
            now: the clock.
            support_processes: processes without which they are lost.
            device: where they run.
            policy: see `Slot`.
        """
        processes = lockstep.processes
        # What one answers all have run.
        self._latencies.update(dict.fromkeys((*processes, *support_processes), LatencyWindow()))
        for each in processes:
            self._watchdog.add(each, now, runs_selftest=False)
        support = tuple(support_processes)
        self._slots.add(Slot(slot_name, processes, device, policy, lockstep=lockstep, support_processes=support))

    def add_shared(
        self,
        process: str,
        scheduler: SharedProcessScheduler,
        model_index: int,
        now: float,
        *,
        device: str = "",
        policy: BatchingPolicy = NO_BATCHING,
    ) -> None:
        """The process, which serves several models in turn, takes batches of this one from now on.

        It is pinged, and never with the self-test. Whatever becomes of it, all dispatchers of its models have to be
        told.

        Args:
            process: its name.
            scheduler: of the process.
            model_index: which of its models this is.
            now: the clock.
            device: where it runs.
            policy: see `Slot`.
        """
        self._latencies[process] = LatencyWindow()
        self._watchdog.add(process, now, runs_selftest=False)
        slot = SharedSlot(process, (process,), device, policy, model_index=model_index, scheduler=scheduler)
        scheduler.add(slot, self._slots, self._scheduler.queue, self._dispatch)

    def set_policy(self, process: str, policy: BatchingPolicy) -> None:
        """From now on this may be done with the rows of requests at the slot of the process."""
        self._slots.set_policy(process, policy)

    def remove(self, process: str) -> None:
        """The slot of the process gets nothing new, and nobody asks whether it still answers."""
        self._slots.retire(process)
        for each in self.of_slot(process):
            self._watchdog.remove(each)

    def release(self, process: str) -> None:
        """The slot of the process is lost, and what it had is not to blame: that waits again."""
        self._scheduler.release_slot(process)

    def of_slot(self, process: str) -> tuple[str, ...]:
        """Return all processes of the slot of a process: who loses one of them has lost all."""
        slot = self._slots.slot_of(process)
        return (process,) if slot is None else slot.all_processes

    def is_running(self, process: str, slot: Slot | None) -> bool:
        """Return whether this is the slot of a process."""
        return slot is not None and self._slots.slot_of(process) is slot

    def in_flight(self, process: str) -> int:
        """Return how many batches the slot of the process has, whether or not somebody waits for them."""
        return self._slots.in_flight(process)

    # --- whether they answer ------------------------------------------------------------------------------------

    def watch(self, process: str, now: float) -> None:
        """The process is READY: it is pinged from now on while it is idle."""
        self._watchdog.add(process, now)

    def on_pong(self, process: str, now: float) -> None:
        """The process has answered its ping."""
        self._watchdog.on_pong(process, now)

    def overdue(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield each process whose slot computes for too long, with the reason to end it."""
        for slot, reason in list(self._isolator.take_overdue(now)):
            yield from ((process, reason) for process in slot.processes)

    @property
    def next_ping_at(self) -> float:
        """Nobody has to be pinged, or to answer a ping, before this."""
        return self._watchdog.next_event_at

    def ping_idle(self, now: float) -> Iterator[str]:
        """Ping the processes that have been idle; yield those that have not answered the last ping."""
        for process, ping in list(self._isolator.due_pings(now)):
            if ping is not None:
                self._send_order(process, ping, (), ())
            else:
                yield process

    def silence_s(self, processes: Sequence[str], now: float) -> float | None:
        """Return for how many seconds none of these has been heard of, if that is too long; None if it is not."""
        return self._watchdog.silence_s(processes, now)

    @property
    def watchdog_period_s(self) -> float:
        """The seconds within which each process has to be heard of."""
        return self._watchdog.period_s
