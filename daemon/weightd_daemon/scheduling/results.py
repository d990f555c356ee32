"""Handles the results of batches and ends requests.

`BatchResults` handles the reports of the slots' processes on their batches. `Replies` ends each accepted request with
one reply: the result of the request, or an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from weightd_daemon.counters import ModelCounters
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.scheduling.batch import BatchItem, OutputBufferLeases
from weightd_daemon.scheduling.batching.split import SplitRequest
from weightd_daemon.scheduling.direct import DirectRuns, DirectUse
from weightd_daemon.scheduling.fault_isolation.isolator import FaultIsolator
from weightd_daemon.scheduling.lockstep import InferenceResult, LockstepTracker, Outcome, OutOfStep, Rejected
from weightd_daemon.scheduling.measurements import LatencyWindow
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.scheduler import AT_ONCE, MAX_ENDED_PER_TURN, Scheduler
from weightd_protocol.errors import RequestError, request_error
from weightd_protocol.messages.control import ModelMetadataResponse
from weightd_protocol.messages.worker import PredictFailed, PredictResult


class ResponseSink(Protocol):
    """Sends replies to clients."""

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        """Send the result of a request to its client."""

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        """Send a client the error in which its request ends."""

    def reserve_partial_result(self, request: Request, nbytes: int) -> None:
        """Reserve `nbytes` more of the memory budget for a request until the request ends.

        Raises:
            ResourceExhausted: the memory budget is used up.
        """

    def notify_released(self, request: Request) -> None:
        """Notify the client of an ended request that no process writes to its output memory any more."""

    def reply(self, client: bytes, message: ModelMetadataResponse) -> None:
        """Send the metadata of a model to a client."""

    def reply_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Send an error to a client."""


class BatchResults:
    """Handles the reports of processes on the batches of their slots.

    The methods for reports return "", or the reason to end the processes of the slot if the report makes them unusable.

    Args:
        scheduler: the scheduler of the model.
        isolator: determines the cause when a slot is lost.
        replies: ends requests.
        output_leases: tracks which processes may write to output memory of clients.
        on_slot_free: called with the current time when a slot can take another batch and a queued request may run.
        dispatch: called with the current time when there may also be other work than a batch for the slot, such as
            cancellations to send.

    Attributes:
        latencies_by_process: the latencies of each process's answers.
        direct_use: how many processes the requests of direct channels need.
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
        self._queue = scheduler.queue
        self._slots = scheduler.slots
        self._running = scheduler.running
        self._isolator = isolator
        self._watchdog = isolator.watchdog
        self._suspected = isolator.suspected
        self._replies = replies
        self._response_sink = replies.response_sink
        self._output_leases = output_leases
        self._on_slot_free = on_slot_free
        self._dispatch = dispatch
        self.latencies_by_process: dict[str, LatencyWindow] = {}
        self.direct_use = DirectUse()

    def on_result(self, process: str, result: PredictResult, frames: Sequence[Any], now: float) -> str:
        """Handle the result of a batch item."""
        if self._slots.has_lockstep and (lockstep := self._lockstep_of(process)) is not None:
            return self._on_outcome(process, result.request, lockstep.on_result(process, result, frames), now)
        if self._output_leases.leases:
            self._notify_released(self._output_leases.release(process, result.request))
        # The reply comes first, because the client waits for it. Counters are updated after the reply.
        item, execution = self._running.take_answered(process, result.request, now)
        if item is not None and item.split is not None:
            self._add_partial_result(item, item.split, process, result, frames, now)
        elif item is not None:
            self._response_sink.reply_result(item.request, result, frames)
            self._on_answered(item.request, process, now)
        if execution is not None:
            self._running.record(execution)
        self._watchdog.on_message(process, now)
        if self._queue.has_runnable():
            self._on_slot_free(now)
        return ""

    def on_done(self, process: str, number: int, now: float) -> str:
        """Handle the report of a rank that has run an item but sends no outputs, because another rank sends them."""
        lockstep = self._lockstep_of(process)
        if lockstep is None:
            # The slot of the process was lost before the report arrived, so the report has no effect.
            return ""
        return self._on_outcome(process, number, lockstep.on_done(process, number), now)

    def on_batch_failed(self, process: str, failed: PredictFailed, now: float) -> str:
        """Handle the error of a batch item, which ends the item's request.

        If the process is exiting, its slot is lost. Requests that shared a batch do not end in this case: each runs
        again alone.
        """
        if (lockstep := self._lockstep_of(process)) is not None:
            outcome = (
                OutOfStep(f"{process}: {failed.error}") if failed.is_exiting else lockstep.on_failed(process, failed)
            )
            return self._on_outcome(process, failed.request, outcome, now)
        self._watchdog.on_message(process, now)
        self._notify_released(self._output_leases.release(process, failed.request))
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
        """Handle the report that an item was recalled before the process had started it."""
        if self._lockstep_of(process) is not None:
            return self._on_outcome(
                process, number, OutOfStep(f"{process}: cancelled {number}, which a rank must not do"), now
            )
        self._notify_released(self._output_leases.release(process, number))
        return ""

    def on_process_failed(self, process: str, reason: str, now: float) -> None:
        """Handle the failure of a process that cannot continue; its slot is lost."""
        self._isolator.on_process_failed(process, reason, now)

    def on_exit(self, process: str, exit_cause: ExitCause, now: float) -> None:
        """Handle the exit of a process; its slot is lost."""
        self._notify_released(self._output_leases.release_process(process))
        self._isolator.on_exit(process, exit_cause, now)
        self._watchdog.remove(process)
        self.latencies_by_process.pop(process, None)

    def on_direct_ran(self, process: str, runs: DirectRuns) -> None:
        """Count requests of direct channels. Their latency is the mean run time, without the time in the channel."""
        self.direct_use.add(runs.seconds)
        if runs.answered:
            mean_s = runs.seconds / runs.answered
            if process in self.latencies_by_process:
                self.latencies_by_process[process].add(mean_s, runs.answered)
            self._replies.on_direct_answered(mean_s, runs.answered)
        self._replies.failed_count += runs.failed
        self._running.execution_counters.executions += runs.answered

    def has_answered(self, process: str) -> bool:
        """Return whether the process has answered any request."""
        latencies = self.latencies_by_process.get(process)
        return latencies is not None and latencies.count > 0

    # --- private ------------------------------------------------------------------------------------------------

    def _lockstep_of(self, process: str) -> LockstepTracker | None:
        """Return the lockstep tracker of the slot of a process; None if the process computes alone."""
        slot = self._slots.slot_of(process)
        return None if slot is None else slot.lockstep

    def _on_outcome(self, process: str, number: int, outcome: Outcome | None, now: float) -> str:
        """Handle a report on an item that all processes of a slot run; `outcome` is None while reports are missing."""
        self._watchdog.on_message(process, now)
        if isinstance(outcome, OutOfStep):
            # The output leases stay: the processes may still write to output memory of clients.
            self._isolator.on_process_failed(process, outcome.reason, now)
            return outcome.reason
        self._notify_released(self._output_leases.release(process, number))
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
                self._response_sink.reply_result(item.request, outcome.result, outcome.frames)
                self._on_answered(item.request, process, now)
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
        """Add the result of some rows to their split request, and reply if all rows are answered."""
        try:
            complete = split.add_result(item.first_row, item.rows, result, frames)
            if complete is None:
                self._response_sink.reserve_partial_result(item.request, sum(map(len, frames)))
        except RequestError as error:
            self._replies.fail(item.request, error)
            return
        if complete is not None:
            self._scheduler.end_split(item.request)
            self._response_sink.reply_result(item.request, *complete)
            self._on_answered(item.request, process, now)

    def _on_answered(self, request: Request, process: str, now: float) -> None:
        """Count an answered request, after its reply has been sent."""
        self.latencies_by_process[process].add(self._replies.on_answered(request, now))
        if request.origin.is_tenant or self._suspected:
            self._isolator.on_answered(request, now)

    def _notify_released(self, requests: Iterable[Request]) -> None:
        """Notify the clients of ended requests that no process writes to their memory any more."""
        for request in requests:
            self._response_sink.notify_released(request)


class Replies:
    """Ends the requests of one model, and measures their latencies.

    Args:
        scheduler: the scheduler of the model.
        response_sink: sends replies to clients.
        counters: the counters of the model.
        schedule_by: called with the time at which `fail_some` has to be called.

    Attributes:
        response_sink: as above.
        latencies: the seconds from the arrival of each request in the daemon to its answer.
        failed_count: the number of accepted requests that ended in an error.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        response_sink: ResponseSink,
        counters: ModelCounters,
        schedule_by: Callable[[float], object],
    ) -> None:
        self._scheduler = scheduler
        self._watched_requests = scheduler.deadlines.requests
        self.response_sink = response_sink
        self._counters = counters
        self._schedule_by = schedule_by
        self.latencies = LatencyWindow()
        self.failed_count = 0
        # Requests that have left the queue and the slots, and still await their error replies.
        self._pending_failures: deque[tuple[Request, RequestError]] | None = None

    def on_answered(self, request: Request, now: float) -> float:
        """Record that a request has been answered; return its latency in seconds."""
        self._watched_requests.pop(request.number, None)
        if request.pending_writes:
            request.may_still_write = True
        latency = now - request.arrived_at
        self.latencies.add(latency)
        self._counters.queue.add(request.waited_s)
        self._counters.requests.add(latency)
        return latency

    def on_direct_answered(self, mean_s: float, count: int) -> None:
        """Count answered requests of direct channels, each with the mean of their run times."""
        self.latencies.add(mean_s, count)
        for histogram in (self._counters.requests, self._counters.compute):
            histogram.add(mean_s, count)
        self._counters.queue.add(0.0, count)

    def fail(self, request: Request, error: RequestError) -> None:
        """End a request in an error."""
        self.failed_count += 1
        if request.has_started:
            self._counters.queue.add(request.waited_s)
        self._scheduler.end_split(request)
        self._watched_requests.pop(request.number, None)
        request.may_still_write = bool(request.pending_writes)
        self.response_sink.reply_request_error(request, error)

    def fail_all(self, requests: Sequence[tuple[Request, RequestError]]) -> None:
        """End requests that are neither queued nor running: some now, the others in later turns of the event loop."""
        if not requests:
            return
        if self._pending_failures is None:
            self._pending_failures = deque(requests)
            self.fail_some()
        else:
            self._pending_failures += requests

    def fail_some(self) -> None:
        """End the next of the requests that `fail_all` has left for later turns of the event loop."""
        if self._pending_failures is None:
            return
        for _ in range(MAX_ENDED_PER_TURN):
            if self._pending_failures:
                self.fail(*self._pending_failures.popleft())
        if self._pending_failures:
            self._schedule_by(AT_ONCE)
        else:
            self._pending_failures = None

    def fail_pending(self, should_fail: Callable[[Request], bool] = lambda _: True) -> None:
        """End at once the matching requests that `fail_all` has left for later turns of the event loop."""
        pending, self._pending_failures = self._pending_failures or (), None
        failing: list[tuple[Request, RequestError]] = []
        kept: deque[tuple[Request, RequestError]] = deque()
        for each in pending:
            (failing if should_fail(each[0]) else kept).append(each)
        self._pending_failures = kept or None
        for request, error in failing:
            self.fail(request, error)

    @property
    def is_pending(self) -> bool:
        """Whether requests that are neither queued nor running still await their error replies."""
        return bool(self._pending_failures)
