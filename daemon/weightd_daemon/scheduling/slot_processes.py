"""Adds and removes the slots of one model, and watches whether their processes still respond."""

from __future__ import annotations

import math
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
"""A function that sends an order to a process, with the order's frames and the memory regions that the order uses."""


class SlotProcesses:
    """Adds and removes the slots of one model, and watches their processes.

    Args:
        scheduler: the scheduler of the model.
        isolator: provides the watchdog.
        results: handles the results from the processes.
        send_order: sends a ping.
        dispatch: called with the current time when a slot may take a batch.
        retire_direct: called with a process that may not read direct channels any more.
        schedule_by: called with the time when requests in direct channels may require more workers.
    """

    def __init__(  # noqa: PLR0913
        self,
        scheduler: Scheduler,
        isolator: FaultIsolator,
        results: BatchResults,
        send_order: SendOrder,
        dispatch: Callable[[float], None],
        retire_direct: Callable[[str], object] = lambda _: None,
        *,
        schedule_by: Callable[[float], object] = lambda _: None,
    ) -> None:
        self._retire_direct = retire_direct
        self._scheduler = scheduler
        self._slots = scheduler.slots
        self._isolator = isolator
        self._watchdog = isolator.watchdog
        self._direct_use = results.direct_use
        self._latencies = results.latencies_by_process
        self._send_order = send_order
        self._dispatch = dispatch
        self._schedule_by = schedule_by

    # --- slots --------------------------------------------------------------------------------------------------

    def add(
        self, process: str, *, device: str = "", policy: BatchingPolicy = NO_BATCHING, concurrency: int = 1
    ) -> None:
        """Add a process as a slot that takes batches; for the arguments, see `Slot`."""
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
        """Add a rank group as one slot that takes batches. Its processes are pinged, but never run the self-test again.

        Args:
            slot_name: the name of the slot.
            lockstep: tracks the reports of the ranks. If it joins the outputs of the ranks, requests may neither share
                a batch nor be padded, because the daemon does not know which rows each rank returns.
            now: the time.
            support_processes: processes without which the ranks are lost.
            device: the device of the ranks.
            policy: the batching policy.
        """
        processes = lockstep.processes
        # All processes have run each answered batch, so they share one latency window.
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
        """Add a slot at a process that serves several models in turn.

        The process is pinged, but never runs the self-test again. Every event of the process must be reported to the
        dispatchers of all its models.

        Args:
            process: the name of the process.
            scheduler: the scheduler of the process.
            model_index: the index of this model in the process.
            now: the time.
            device: the device of the process.
            policy: the batching policy.
        """
        self._latencies[process] = LatencyWindow()
        self._watchdog.add(process, now, runs_selftest=False)
        slot = SharedSlot(process, (process,), device, policy, model_index=model_index, scheduler=scheduler)
        scheduler.add(slot, self._slots, self._scheduler.queue, self._dispatch)

    def set_policy(self, process: str, policy: BatchingPolicy) -> None:
        """Change the batching policy of the slot of a process."""
        self._slots.set_policy(process, policy)
        if policy != NO_BATCHING:
            self._retire_direct(process)

    def retire(self, process: str) -> None:
        """Stop assigning batches to the slot of a process, because the process has exited or is being ended."""
        self._slots.retire(process)

    def remove(self, process: str) -> None:
        """Stop assigning batches to the slot of a process, and stop watching all processes of the slot."""
        self._retire_direct(process)
        self._slots.retire(process)
        for each in self.of_slot(process):
            self._watchdog.remove(each)

    def set_wait_limit(self, seconds: float) -> None:
        """Set after how many seconds a queued request may require more workers; see `Scheduler.wait_limit_s`."""
        self._scheduler.wait_limit_s = seconds

    @property
    def waiting_count(self) -> int:
        """The number of requests that wait only for a slot, in the queue or behind the running batches of a slot."""
        queue = self._scheduler.queue
        queued_batches = sum(max(0, len(slot.batches) - slot.concurrency) for slot in self._slots.accepting.values())
        return queue.normal.count + queue.long.count + queue.splitting.count + queued_batches

    @property
    def accepting(self) -> Sequence[Slot]:
        """The slots that take new batches."""
        return tuple(self._slots.accepting.values())

    def release(self, process: str) -> None:
        """Remove the slot of a lost process and queue its batches again, because they did not cause the loss."""
        self._scheduler.release_slot(process)

    def on_direct_active(self, process: str, seconds: float | None, now: float) -> None:
        """Record for how long a process has run a request of a direct channel; see `DirectWorker.on_active`."""
        slot = self._slots.slot_of(process)
        # Which workers run the requests is chance, so the same ones count as used, and the others as idle.
        for each in self.accepting[: self._direct_use.take(now)]:
            each.idle_since = now
        if slot is not None:
            self._scheduler.queue.put_back(self._scheduler.running.on_direct(slot, seconds, now))
            if self._scheduler.wait_limit_s < math.inf:
                self._schedule_by(now)
            self._dispatch(now)

    def of_slot(self, process: str) -> tuple[str, ...]:
        """Return all processes of the slot to which a process belongs. If one of them exits, the slot is lost."""
        slot = self._slots.slot_of(process)
        return (process,) if slot is None else slot.all_processes

    def is_running(self, process: str, slot: Slot | None) -> bool:
        """Return whether `slot` is still the slot of the process."""
        return slot is not None and self._slots.slot_of(process) is slot

    def in_flight(self, process: str) -> int:
        """Return the number of batches at the slot of a process, including batches whose requests have ended."""
        return self._slots.in_flight(process)

    # --- watchdog -----------------------------------------------------------------------------------------------

    def watch(self, process: str, now: float) -> None:
        """Start to watch a process that has become READY: the daemon pings it while it is idle."""
        self._watchdog.add(process, now)

    def on_pong(self, process: str, now: float) -> None:
        """Record that a process has answered its ping."""
        self._watchdog.on_pong(process, now)

    def overdue(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield the processes of each slot whose batch has exceeded `predict_timeout`, with the reason to end them."""
        for slot, reason in list(self._isolator.take_overdue(now)):
            yield from ((process, reason) for process in slot.processes)

    @property
    def next_ping_at(self) -> float:
        """A time before which neither a ping nor the answer to a ping is due, in monotonic seconds."""
        return self._watchdog.next_event_at

    def ping_idle(self, now: float) -> Iterator[str]:
        """Ping the processes that have been idle; yield each process that has not answered its last ping."""
        for process, ping in list(self._isolator.due_pings(now)):
            if ping is not None:
                self._send_order(process, ping, (), ())
            else:
                yield process

    def silence_s(self, processes: Sequence[str], now: float) -> float | None:
        """Return the seconds since the last message of any of the processes; None within the watchdog's period."""
        return self._watchdog.silence_s(processes, now)

    @property
    def watchdog_period_s(self) -> float:
        """The seconds within which each process must send a message."""
        return self._watchdog.period_s
