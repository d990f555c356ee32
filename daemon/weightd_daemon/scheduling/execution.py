"""Execution of batches: what is sent to the processes of a slot, and what becomes of their reports.

`BatchSender` sends a batch to its slot; `BatchResults` takes what the slot's processes report, ends the requests of the
batch, and says when a slot is free for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.scheduling.batch import Batch, BatchItem
from weightd_daemon.scheduling.batching.policy import RecentNames
from weightd_daemon.scheduling.batching.split import SplitRequest
from weightd_daemon.scheduling.fault_isolation.isolator import FaultIsolator
from weightd_daemon.scheduling.lockstep import InferenceResult, LockstepTracker, Outcome, OutOfStep, Rejected
from weightd_daemon.scheduling.measurements import LatencyWindow
from weightd_daemon.scheduling.replies import Replies
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.scheduler import Scheduler
from weightd_daemon.scheduling.slots import Slot
from weightd_daemon.scheduling.tensor_location import SharedRegion, TensorLocations
from weightd_protocol.errors import RequestError, request_error
from weightd_protocol.messages.inference import RequestDescription
from weightd_protocol.messages.worker import (
    BeginBatch,
    CancelPredict,
    ChildOrder,
    Predict,
    PredictFailed,
    PredictResult,
)

SendOrder = Callable[[str, ChildOrder, Sequence[Any], Sequence[SharedRegion]], None]


class OutputBufferLeases:
    """The processes of a model that may still write to the memory of clients.

    A worker that has begun with a request cannot be stopped: it writes the outputs where there was room for them even
    if the request has ended long before. Nor can be seen from here whether one has begun with what is recalled from it.
    Only its answer, or its death, tells that it writes no more. Two never write to the same place: what runs again
    while the one that had it first may still write is answered in frames. Parts of a request write to places of their
    own. What is known of a request goes with it: it may end with another model than the one on which it has begun.

    Attributes:
        leases: what they have been given, by process and number; while there is none nothing has to be asked.
    """

    def __init__(self) -> None:
        self.leases: dict[tuple[str, int], BatchItem] = {}

    def acquire(self, processes: Iterable[str], item: BatchItem) -> bool:
        """The processes of a slot are given a part that has room for outputs; return whether they may use it."""
        rows, request = item.row_range, item.request
        if any(rows.start < other.stop and other.start < rows.stop for other in request.pending_writes):
            return False
        for process in processes:
            self.leases[process, item.number] = item
            request.pending_writes += (rows,)
        return True

    def release(self, process: str, number: int) -> list[Request]:
        """The process has done with a part; return its request if that has ended, and nobody writes for it any more."""
        item = self.leases.pop((process, number), None)
        if item is None:
            return []
        request = item.request
        index = request.pending_writes.index(item.row_range)
        request.pending_writes = request.pending_writes[:index] + request.pending_writes[index + 1 :]
        return [request] if request.may_still_write and not request.pending_writes else []

    def release_process(self, process: str) -> list[Request]:
        """The process has ended; return the requests whose clients have to be told."""
        return [request for key in list(self.leases) if key[0] == process for request in self.release(*key)]


class BatchSender:
    """Sends batches to the processes of their slots.

    Args:
        send_order: sends an order, with the frames that follow it and the memory that it names, to a process.

    Attributes:
        output_leases: who may write to the memory of clients.
        principal_names: of tenants and users whose requests have shared a batch.
    """

    def __init__(self, send_order: SendOrder) -> None:
        self._send_order = send_order
        self.output_leases = OutputBufferLeases()
        self.principal_names = RecentNames()

    def start(self, slot: Slot, batch: Batch) -> None:
        """Send a batch to its slot."""
        if batch.batch_key is not None:
            rows = slot.policy.padded_rows(batch.rows)
            if batch.item_count > 1 or rows:
                principal_ids: tuple[int, ...] = ()
                if batch.item_count > 1 and slot.policy.is_exact and slot.lockstep is None:
                    principal_ids = tuple(
                        [self.principal_names.number_of(item.request.origin.principal) for item in batch.items.values()]
                    )
                for process in slot.processes:
                    self._send_order(process, BeginBatch(batch.item_count, rows, principal_ids), (), ())
        for item in batch.items.values():
            request, split = item.request, item.split
            if split is None:
                frames, locations, description = request.frames, request.locations, request.description
            else:
                frames, locations = split.tensors_of(item.first_row, item.rows)
                description = split.description_of(item.rows)
            if slot.lockstep is not None:
                self._predict_in_step(slot, slot.lockstep, item, description, frames, locations)
                continue
            if locations.outputs and not self.output_leases.acquire(slot.processes, item):
                locations = locations.without_outputs()
            predict = Predict(item.number, description, locations.mapped_regions, 0, slot.model_index)
            for process in slot.processes:
                self._send_order(process, predict, frames, locations.regions)

    def cancel(self, recalled: Iterable[tuple[Slot, int]]) -> None:
        """Tell slots what they need not run."""
        for slot, number in recalled:
            for process in slot.processes:
                self._send_order(process, CancelPredict(number), (), ())

    def _predict_in_step(
        self,
        slot: Slot,
        lockstep: LockstepTracker,
        item: BatchItem,
        description: RequestDescription,
        frames: Sequence[Any],
        locations: TensorLocations,
    ) -> None:
        """All processes get the same; one of them alone may write outputs where the client has room for them."""
        step, reply_process = lockstep.start(item.number), lockstep.reply_process
        read_only = locations.without_outputs() if locations.outputs else locations
        # Where there is an input, too, another one may still have to read that.
        if locations.outputs and (
            reply_process is None or locations.has_overlap or not self.output_leases.acquire((reply_process,), item)
        ):
            locations = read_only
        for process in slot.processes:
            own_locations = locations if process == reply_process else read_only
            predict = Predict(item.number, description, own_locations.mapped_regions, step)
            self._send_order(process, predict, frames, own_locations.regions)


class BatchResults:
    """Takes the reports of processes on the batches that their slots have.

    Where a report makes the slot's processes useless, the method returns the reason to end them; "" otherwise.

    Args:
        scheduler: of the model.
        isolator: decides whose fault it is when a slot is lost.
        replies: ends the requests.
        output_leases: who may write to the memory of clients.
        on_slot_free: called with the clock when a slot has credit for another batch.
        dispatch: called with the clock when more may have changed: slots may have to hear what they need not run.

    Attributes:
        latencies_by_process: of each process's answers, by its name.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        isolator: FaultIsolator,
        replies: Replies,
        output_leases: OutputBufferLeases,
        on_slot_free: Callable[[float], None],
        dispatch: Callable[[float], None],
    ) -> None:
        self._scheduler = scheduler
        self._slots = scheduler.slots
        self._running = scheduler.running
        self._isolator = isolator
        self._watchdog = isolator.watchdog
        self._suspected = isolator.suspected
        self._replies = replies
        self._output_leases = output_leases
        self._on_slot_free = on_slot_free
        self._dispatch = dispatch
        self.latencies_by_process: dict[str, LatencyWindow] = {}

    def on_result(self, process: str, result: PredictResult, frames: Sequence[Any], now: float) -> str:
        """A part of a batch has been answered."""
        if self._slots.has_lockstep and (lockstep := self._slots.lockstep_of(process)) is not None:
            return self._on_outcome(process, result.request, lockstep.on_result(process, result, frames), now)
        if self._output_leases.leases:
            self._replies.notify_released(self._output_leases.release(process, result.request))
        item = self._running.finish(process, result.request, now)
        if item is not None and item.split is not None:
            self._add_partial_result(item, item.split, process, result, frames, now)
        elif item is not None:
            self._complete(item.request, process, result, frames, now)
        self._watchdog.on_message(process, now)
        self._on_slot_free(now)
        return ""

    def on_done(self, process: str, number: int, now: float) -> str:
        """A rank has run a part, and another one has the outputs."""
        lockstep = self._slots.lockstep_of(process)
        if lockstep is None:
            # It was of a slot that is lost.
            return ""
        return self._on_outcome(process, number, lockstep.on_done(process, number), now)

    def on_batch_failed(self, process: str, failed: PredictFailed, now: float) -> str:
        """A part of a batch has ended in an error, or a batch of several, which run again alone then.

        A process that is exiting has lost what it had.
        """
        if (lockstep := self._slots.lockstep_of(process)) is not None:
            outcome = (
                OutOfStep(f"{process}: {failed.error}") if failed.is_exiting else lockstep.on_failed(process, failed)
            )
            return self._on_outcome(process, failed.request, outcome, now)
        self._watchdog.on_message(process, now)
        self._replies.notify_released(self._output_leases.release(process, failed.request))
        slot = self._slots.slot_of(process)
        if failed.is_exiting:
            self._isolator.on_leaving(process, failed.request, now)
            if slot is not None:
                slot.on_lost()
        batch = slot.batch_of(failed.request) if slot is not None else None
        if batch is not None and failed.is_exiting and batch.single_request is None:
            batch.isolate_requests()
        else:
            item = self._running.finish(process, failed.request, now)
            if item is not None:
                self._replies.fail(item.request, request_error(failed.code, failed.error))
        if failed.is_exiting:
            self._scheduler.release_slot(process)
        else:
            self._dispatch(now)
        return ""

    def on_cancelled(self, process: str, number: int, now: float) -> str:
        """A part of a batch was recalled before the process had begun with it."""
        if self._slots.lockstep_of(process) is not None:
            return self._on_outcome(process, number, OutOfStep(f"{process}: has cancelled {number}"), now)
        self._replies.notify_released(self._output_leases.release(process, number))
        return ""

    def on_process_failed(self, process: str, reason: str, now: float) -> None:
        """A process can go on no more, for this reason, and its slot is lost with it."""
        self._isolator.on_process_failed(process, reason, now)

    def on_exit(self, process: str, exit_cause: ExitCause, now: float) -> None:
        """A process has ended, and with it its slot."""
        self._replies.notify_released(self._output_leases.release_process(process))
        self._isolator.on_exit(process, exit_cause, now)
        self._watchdog.remove(process)
        self.latencies_by_process.pop(process, None)

    def has_answered(self, process: str) -> bool:
        """Return whether the process has answered any request."""
        latencies = self.latencies_by_process.get(process)
        return latencies is not None and latencies.count > 0

    # --- within -------------------------------------------------------------------------------------------------

    def _on_outcome(self, process: str, number: int, outcome: Outcome | None, now: float) -> str:
        """A process has told of a part that all of its slot were given, and this comes of it; None: nothing yet."""
        self._watchdog.on_message(process, now)
        if isinstance(outcome, OutOfStep):
            # Nor is it believed that it does not write any more.
            self._isolator.on_process_failed(process, outcome.reason, now)
            return outcome.reason
        self._replies.notify_released(self._output_leases.release(process, number))
        if outcome is None:
            return ""
        slot = self._slots.slot_of(process)
        batch = slot.batch_of(number) if slot is not None else None
        item = self._running.finish(process, number, now)
        if item is not None and isinstance(outcome, Rejected):
            if batch is not None and batch.item_count > 1:
                self._scheduler.retry_alone([item])
            else:
                self._replies.fail(item.request, outcome.error)
        elif item is not None and isinstance(outcome, InferenceResult):
            if item.split is not None:
                self._add_partial_result(item, item.split, process, outcome.result, outcome.frames, now)
            else:
                self._complete(item.request, process, outcome.result, outcome.frames, now)
        self._dispatch(now)
        return ""

    def _add_partial_result(
        self,
        item: BatchItem,
        split: SplitRequest,
        process: str,
        result: PredictResult,
        frames: Sequence[Any],
        now: float,
    ) -> None:
        """Rows of a request have been answered."""
        try:
            complete = split.add_result(item.first_row, item.rows, result, frames)
            if complete is None:
                self._replies.reserve_partial_result(item.request, sum(map(len, frames)))
        except RequestError as error:
            self._replies.fail(item.request, error)
            return
        if complete is not None:
            self._scheduler.end_split(item.request)
            self._complete(item.request, process, *complete, now)

    def _complete(
        self, request: Request, process: str, result: PredictResult, frames: Sequence[Any], now: float
    ) -> None:
        latency = self._replies.complete(request, result, frames, now)
        self.latencies_by_process[process].add(latency)
        if request.origin.is_tenant or self._suspected:
            self._isolator.on_answered(request, now)
