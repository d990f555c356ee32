"""The requests for one model: each is accepted or refused here, and answered once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.counters import ModelCounters
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.scheduling.batch import Batch, BatchItem
from weightd_daemon.scheduling.batching.policy import NO_BATCHING, BatchingPolicy, RecentNames
from weightd_daemon.scheduling.batching.split import SplitRequest
from weightd_daemon.scheduling.fair_share import FairClocks
from weightd_daemon.scheduling.fault_isolation.isolator import FaultIsolator
from weightd_daemon.scheduling.lockstep import InferenceResult, LockstepTracker, Outcome, OutOfStep, Rejected
from weightd_daemon.scheduling.measurements import LatencyWindow
from weightd_daemon.scheduling.output_buffers import OutputBufferLeases
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.scheduler import AT_ONCE, MAX_ENDED_PER_TURN, Scheduler
from weightd_daemon.scheduling.shared_process import SharedProcessScheduler, SharedSlot
from weightd_daemon.scheduling.signature import MetadataRequest, RowLimits, Signature, example_shapes
from weightd_daemon.scheduling.slots import Slot
from weightd_daemon.scheduling.tensor_location import SharedRegion, TensorLocations
from weightd_protocol.errors import Cancelled, RequestError, ResourceExhausted, Unavailable, request_error
from weightd_protocol.messages.control import ModelMetadataResponse
from weightd_protocol.messages.inference import RequestDescription
from weightd_protocol.messages.worker import (
    BeginBatch,
    Built,
    CancelPredict,
    ChildOrder,
    Predict,
    PredictFailed,
    PredictResult,
)

# At what comes, before something runs that waits.
_MAX_GATHER_ROUNDS = 64

SendOrder = Callable[[str, ChildOrder, Sequence[Any], Sequence[SharedRegion]], None]


class ResponseSink(Protocol):
    """What those have to be told who have asked something of a model."""

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        """Send the model's answer to the client."""

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        """Send an error to the client."""

    def reserve_partial_result(self, request: Request, nbytes: int) -> None:
        """So much more is kept of a request until it has ended.

        Raises:
            ResourceExhausted: there is no room for it.
        """

    def notify_released(self, request: Request) -> None:
        """Tell the client of a request that was still running at its end that nobody writes for it any more."""

    def reply(self, client: bytes, message: ModelMetadataResponse) -> None:
        """Send a model's metadata to the client."""

    def reply_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Send an error to the client."""


class Dispatcher:
    """Takes requests, has slots run them, and tells each one's client how it has ended.

    Args:
        name: of the model.
        config: of the model.
        response_sink: are told.
        send_order: sends an order, with the frames that follow it and the memory that it names, to a process.
        schedule_by: called with a time that may be sooner than what `next_event_at` was.
        clocks: of the devices, for all models.

    Attributes:
        latencies: from a request's arrival to its answer, in the daemon.
        latencies_by_process: the same for each process's answers, by its name.
        failed_count: requests that ended in an error after they were accepted.
        counters: of the model, whichever dispatcher it has.
        principal_names: of tenants and users whose requests have shared a batch.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        response_sink: ResponseSink,
        send_order: SendOrder,
        schedule_by: Callable[[float], object],
        clocks: FairClocks | None = None,
    ) -> None:
        queue_limits = config.max_queue, config.max_queue_bytes, config.predict_timeout
        levels, count = config.priority_levels, config.max_concurrency
        self.scheduler = Scheduler(*queue_limits, schedule_by, levels=levels, clocks=clocks, concurrency=count)
        self._deadlines = self.scheduler.deadlines
        self.fault_isolator = FaultIsolator(config, self.scheduler, self.fail_request, schedule_by)
        self.signature = Signature(_row_limits(config))
        self.principal_names = RecentNames()
        self.output_leases = OutputBufferLeases()
        self.latencies = LatencyWindow()
        self.latencies_by_process: dict[str, LatencyWindow] = {}
        self.failed_count = 0
        self.counters = self.scheduler.slots.counters
        # Whether there is, or was, a slot whose processes compute together.
        self._has_lockstep = False
        # Requests wait for those that have come with them, and there is news since that was last looked at.
        self._is_gathering = False
        self._has_new = False
        self._gather_rounds = 0
        # Requests that have been taken from the queue and from the slots, and still have to be refused.
        self._pending_failures: deque[tuple[Request, RequestError]] = deque()
        self._schedule_by = schedule_by
        self._make_unavailable: Callable[[], RequestError] | None = None
        self._name = name
        self._config = config
        self._response_sink = response_sink
        self._send_order = send_order

    def set_counters(self, counters: ModelCounters) -> None:
        """From now on what becomes of requests is counted there."""
        self.counters = self.scheduler.slots.counters = counters

    # --- from clients -------------------------------------------------------------------------------------------

    def infer(self, request: Request, now: float) -> None:
        """Accept a request. While the model loads it waits, and is checked once it is known what the model takes.

        Raises:
            RequestError: it is refused.
        """
        if self._make_unavailable is not None:
            raise self._make_unavailable()
        request.description = self.signature.check_request(request.description)
        self.scheduler.on_request(request, now)
        needs_check = False
        if self.fault_isolator.needs_check(request):
            needs_check = self.fault_isolator.check_request(request, now)
        if not needs_check and self.scheduler.slots.merging:
            self._gather(request, now)
            return
        started = None if needs_check else self.scheduler.try_start(request, now)
        if started is None:
            self.scheduler.submit(request, now, needs_check=needs_check)
            self._fail_evicted()
        else:
            self._start_batch(*started)
        if self.scheduler.queue.splitting.count or self.scheduler.queue.is_multi_tenant:
            self.dispatch(now)

    def request_metadata(self, request: MetadataRequest) -> None:
        """Tell somebody what the model takes and gives, at once or when it is known.

        Raises:
            RequestError: nobody will answer, or too many wait and most of them are this one's.
        """
        if self._make_unavailable is not None:
            raise self._make_unavailable()
        rejected = self.signature.add_request(request, self._config.max_queue)
        if rejected is not None:
            error = ResourceExhausted(
                f"{self._config.max_queue} metadata requests are waiting already, most of them of this client's user"
            )
            if rejected == request:
                raise error
            self._response_sink.reply_error(rejected.client, rejected.request_id, error)
        self._reply_metadata()

    def cancel(self, client: bytes, request_id: str, now: float) -> None:
        """The client takes its request back."""
        error = Cancelled("cancelled by the client")
        self._fail_all([(each, error) for each in self.scheduler.end_of_client(client, request_id)])
        self.dispatch(now)

    def on_disconnect(self, client: bytes, now: float) -> None:
        """The client is gone: nobody waits for what it asked."""
        self.signature.take_requests(lambda request: request.client == client)
        error = Cancelled("the client disconnected")
        self._fail_all([(each, error) for each in self.scheduler.end_of_client(client)])
        self.dispatch(now)

    def shed(self, should_reject: Callable[[Request], bool], error: RequestError, now: float) -> None:
        """Refuse what waits and is `should_reject`, all at once, as its memory is needed; what runs goes on."""
        pending, self._pending_failures = self._pending_failures, deque()
        for request, its_error in pending:
            if should_reject(request):
                self.fail_request(request, its_error)
            else:
                self._pending_failures.append((request, its_error))
        for request in self.scheduler.take_matching(should_reject):
            self.fail_request(request, error)
        self.dispatch(now)

    def reject_metadata_requests(self, should_reject: Callable[[bytes], bool], error: RequestError) -> None:
        """Refuse who waits for the metadata and is `should_reject`."""
        for request in self.signature.take_requests(lambda each: should_reject(each.client)):
            self._response_sink.reply_error(request.client, request.request_id, error)

    # --- from slots ---------------------------------------------------------------------------------------------

    def add_slot(
        self, process: str, *, device: str = "", policy: BatchingPolicy = NO_BATCHING, concurrency: int = 1
    ) -> None:
        """The process is a slot that takes batches from now on: see `Slot`."""
        self.latencies_by_process[process] = LatencyWindow()
        self.scheduler.slots.add_new(process, (process,), device=device, policy=policy, concurrency=concurrency)

    def add_rank_slot(
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
        self._has_lockstep = True
        # What one answers all have run.
        self.latencies_by_process.update(dict.fromkeys((*lockstep.processes, *support_processes), LatencyWindow()))
        for each in lockstep.processes:
            self.fault_isolator.watchdog.add(each, now, runs_selftest=False)
        self.scheduler.slots.add(
            Slot(
                slot_name,
                lockstep.processes,
                device,
                policy,
                lockstep=lockstep,
                support_processes=tuple(support_processes),
            )
        )

    def add_shared_slot(
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
        self.latencies_by_process[process] = LatencyWindow()
        self.fault_isolator.watchdog.add(process, now, runs_selftest=False)
        slot = SharedSlot(process, (process,), device, policy, model_index=model_index, scheduler=scheduler)
        scheduler.add(slot, self.scheduler.slots, self.scheduler.queue, self.dispatch)

    def remove_slot(self, process: str) -> None:
        """Its slot gets nothing new, and nobody asks whether it still answers."""
        self.scheduler.slots.retire(process)
        for each in self.slot_processes(process):
            self.fault_isolator.watchdog.remove(each)

    def on_result(self, process: str, result: PredictResult, frames: Sequence[Any], now: float) -> str:
        """A part of a batch has been answered.

        Returns:
            Why the process has to be ended, and all of its slot, which is lost; "" if it has not.
        """
        if self._has_lockstep and (lockstep := self.scheduler.slots.lockstep_of(process)) is not None:
            return self._on_outcome(process, result.request, lockstep.on_result(process, result, frames), now)
        if self.output_leases.leases:
            self._notify_released(self.output_leases.release(process, result.request))
        item = self.scheduler.slots.finish(process, result.request, now)
        if item is not None and item.split is not None:
            self._add_partial_result(item, item.split, process, result, frames, now)
        elif item is not None:
            self._complete(item.request, process, result, frames, now)
        self.fault_isolator.watchdog.on_message(process, now)
        if not self.scheduler.queue.is_idle:
            if self.scheduler.slots.merging:
                self._schedule_dispatch()
            else:
                self.dispatch(now)
        return ""

    def on_done(self, process: str, number: int, now: float) -> str:
        """A rank has run a part, and another one has the outputs; return as `on_result` does."""
        lockstep = self.scheduler.slots.lockstep_of(process)
        if lockstep is None:
            # It was of a slot that is lost.
            return ""
        return self._on_outcome(process, number, lockstep.on_done(process, number), now)

    def on_batch_failed(self, process: str, failed: PredictFailed, now: float) -> str:
        """A part of a batch has ended in an error, or a batch of several, which run again alone then.

        Who leaves has lost what it had. Return as `on_result` does.
        """
        if self._has_lockstep and (lockstep := self.scheduler.slots.lockstep_of(process)) is not None:
            outcome = (
                OutOfStep(f"{process}: {failed.error}") if failed.is_exiting else lockstep.on_failed(process, failed)
            )
            return self._on_outcome(process, failed.request, outcome, now)
        self.fault_isolator.watchdog.on_message(process, now)
        self._notify_released(self.output_leases.release(process, failed.request))
        slot = self.scheduler.slots.slot_of(process)
        if failed.is_exiting:
            self.fault_isolator.on_leaving(process, failed.request, now)
            if slot is not None:
                slot.on_lost()
        batch = slot.batch_of(failed.request) if slot is not None else None
        if batch is not None and failed.is_exiting and batch.single_request is None:
            batch.isolate_requests()
        else:
            item = self.scheduler.slots.finish(process, failed.request, now)
            if item is not None:
                self.fail_request(item.request, request_error(failed.code, failed.error))
        if failed.is_exiting:
            self.scheduler.release_slot(process)
        else:
            self.dispatch(now)
        return ""

    def on_cancelled(self, process: str, number: int, now: float) -> str:
        """A part of a batch was taken back before that had begun; return as `on_result` does."""
        if self._has_lockstep and self.scheduler.slots.lockstep_of(process) is not None:
            return self._on_outcome(process, number, OutOfStep(f"{process}: has cancelled {number}"), now)
        self._notify_released(self.output_leases.release(process, number))
        return ""

    def on_process_failed(self, process: str, reason: str, now: float) -> None:
        """A process can go on no more, for this reason, and its slot is lost with it."""
        self.fault_isolator.on_process_failed(process, reason, now)

    def on_exit(self, process: str, exit_cause: ExitCause, now: float) -> None:
        """A process has ended, and with it its slot."""
        self._notify_released(self.output_leases.release_process(process))
        self.fault_isolator.on_exit(process, exit_cause, now)
        self.fault_isolator.watchdog.remove(process)
        self.latencies_by_process.pop(process, None)

    def release_slot(self, process: str) -> None:
        """Its slot is lost, and what it had is not to blame: that waits again."""
        self.scheduler.release_slot(process)

    def slot_processes(self, process: str) -> tuple[str, ...]:
        """Return all processes of its slot: who loses one of them has lost all."""
        slot = self.scheduler.slots.slot_of(process)
        return (process,) if slot is None else slot.all_processes

    def has_answered(self, process: str) -> bool:
        """Whether the process has answered any request."""
        latencies = self.latencies_by_process.get(process)
        return latencies is not None and latencies.count > 0

    # --- from the model -----------------------------------------------------------------------------------------

    def reconfigure(self, config: ModelConfig) -> None:
        """Do as this configuration says, which differs in no bound and in no time from the one before."""
        self._config = config
        self.signature.set_row_limits(_row_limits(config))

    def dispatch_gathered(self, now: float) -> None:
        """All that is known to have come has been taken in: have everything run that can.

        Where requests share batches, one more look is taken first at what has come meanwhile; and another as long as
        that was something, and could go with it. Nothing is waited for; and looks have an end, for what comes may have
        ended at the next one.
        """
        if self._has_new and self._gather_rounds < _MAX_GATHER_ROUNDS and self.scheduler.may_gather:
            self._has_new = False
            self._gather_rounds += 1
        else:
            self._is_gathering = False
            self._gather_rounds = 0
            self.dispatch(now)

    def dispatch(self, now: float) -> None:
        """Have everything run that can; a slot hears what it need not run before it gets something in its place."""
        for slot, batch in self.scheduler.assign(now):
            self._cancel_recalled()
            self._start_batch(slot, batch)
        self._cancel_recalled()

    def expire(self, now: float, explain_error: Callable[[RequestError], RequestError]) -> None:
        """Go on with ending requests, and end those whose deadlines have passed.

        The latter end with the error that `explain_error` makes of theirs.
        """
        self._fail_some()
        for request, error in self.scheduler.expire(now):
            self.fail_request(request, explain_error(error))

    def overdue_processes(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield each process whose slot computes for too long, with the reason to end it."""
        for slot, reason in list(self.fault_isolator.take_overdue(now)):
            yield from ((process, reason) for process in slot.processes)

    def ping_idle(self, now: float) -> Iterator[str]:
        """Ping who has been idle; yield who has not answered the last one."""
        for process, ping in list(self.fault_isolator.due_pings(now)):
            if ping is not None:
                self._send_order(process, ping, (), ())
            else:
                yield process

    def on_built(self, built: Built) -> None:
        """It is known what the model takes: what waits and does not fit ends."""
        self.signature.on_built(built)
        errors = self.signature.check_waiting(list(self.scheduler.queue))
        rejected = self.scheduler.take_matching(lambda each: each.number in errors)
        self._fail_all([(each, errors[each.number]) for each in rejected])
        self._reply_metadata()

    def on_model_replaced(self, built: Built | None) -> None:
        """Another model is served, which may take more sizes; what killed the last one says nothing."""
        self.fault_isolator.clear()
        if built is not None:
            self.signature.on_built(built)

    def set_unavailable(self, make_error: Callable[[], RequestError] | None) -> None:
        """From now on refuse each request with an error that this function makes; None: accept requests."""
        self._make_unavailable = make_error

    def adopt_requests(self, old: Dispatcher, now: float) -> None:
        """Take over the requests that wait at another dispatcher."""
        old.fault_isolator.fail_pending()
        for request in old.scheduler.take_all_waiting():
            old.scheduler.deadlines.remove(request)
            try:
                self.infer(request, now)
            except RequestError as error:
                self.fail_request(request, error)
        self.signature.adopt_requests(old.signature)
        self.principal_names = old.principal_names
        self._reply_metadata()

    def fail_request(self, request: Request, error: RequestError) -> None:
        """End a request in an error."""
        self.failed_count += 1
        self.scheduler.end_split(request)
        self._deadlines.remove(request)
        request.may_still_write = bool(request.pending_writes)
        self._response_sink.reply_request_error(request, error)

    def fail_waiting(self, error: RequestError) -> None:
        """End what waits."""
        self.fault_isolator.fail_pending()
        self._fail_all([(each, error) for each in self.scheduler.take_all_waiting()])

    def close(self, error: RequestError) -> None:
        """Nobody will ever answer: end what waits, metadata included."""
        self.fail_waiting(error)
        for client, request_id, _ in self.signature.take_requests():
            self._response_sink.reply_error(client, request_id, error)

    def hand_over(self, now: float) -> None:
        """The daemon ends before its workers: answer what has not been answered."""
        self.fault_isolator.fail_pending()
        error = Unavailable("weightd is restarting")
        self._fail_all([(each, error) for each, _ in self.scheduler.end_matching(lambda _: True)])
        while self._pending_failures:
            self._fail_some()

    # --- what it tells ------------------------------------------------------------------------------------------

    @property
    def built(self) -> Built | None:
        """What a holder has told of the model; None while the first one loads."""
        return self.signature.built

    @property
    def is_idle(self) -> bool:
        """Whether each request that was accepted has ended."""
        return not self._pending_failures and self.scheduler.is_idle

    @property
    def has_pending_failures(self) -> bool:
        """Whether clients have still to be told of requests that neither wait nor run any more."""
        return bool(self._pending_failures)

    @property
    def next_event_at(self) -> float:
        """Nothing is due before this, in monotonic seconds."""
        if self._pending_failures or self.fault_isolator.has_work or self._is_gathering:
            return AT_ONCE
        ping_at, event_at = self.fault_isolator.watchdog.next_event_at, self.scheduler.next_event_at
        return ping_at if ping_at < event_at else event_at

    # --- within -------------------------------------------------------------------------------------------------

    def _gather(self, request: Request, now: float) -> None:
        """What comes with it may share its batch: it runs once all of that has been taken in."""
        try:
            self.scheduler.submit(request, now, can_evict=False)
        except ResourceExhausted:
            # There is room again once those run that could.
            self.dispatch(now)
            self.scheduler.submit(request, now)
            self._fail_evicted()
        self._schedule_dispatch()

    def _fail_evicted(self) -> None:
        self._fail_all(self.scheduler.take_evicted())

    def _schedule_dispatch(self) -> None:
        self._has_new = self._is_gathering = True
        self._schedule_by(AT_ONCE)

    def _fail_all(self, requests: Iterable[tuple[Request, RequestError]]) -> None:
        """Refuse requests that neither wait nor run any more: some at once, and the rest in the next turns."""
        was_pending = bool(self._pending_failures)
        self._pending_failures += requests
        if not was_pending:
            self._fail_some()

    def _fail_some(self) -> None:
        for _ in range(min(MAX_ENDED_PER_TURN, len(self._pending_failures))):
            self.fail_request(*self._pending_failures.popleft())
        if self._pending_failures:
            self._schedule_by(AT_ONCE)

    def _cancel_recalled(self) -> None:
        for slot, number in self.scheduler.slots.take_recalled():
            for process in slot.processes:
                self._send_order(process, CancelPredict(number), (), ())

    def _start_batch(self, slot: Slot, batch: Batch) -> None:
        if batch.batch_key is not None:
            rows = slot.policy.padded_rows(batch.rows)
            if batch.item_count > 1 or rows:
                principal_ids: tuple[int, ...] = ()
                if batch.item_count > 1 and slot.policy.is_exact and slot.lockstep is None:
                    principal_ids = tuple(
                        [self.principal_names.number_of(item.request.origin.principal) for item in batch.items.values()]
                    )
                self._send_to_slot(slot, BeginBatch(batch.item_count, rows, principal_ids))
        for item in batch.items.values():
            self._predict(slot, item)

    def _predict(self, slot: Slot, item: BatchItem) -> None:
        request, split = item.request, item.split
        if split is None:
            frames, locations, description = request.frames, request.locations, request.description
        else:
            (frames, locations), description = (
                split.tensors_of(item.first_row, item.rows),
                split.description_of(item.rows),
            )
        if slot.lockstep is not None:
            self._predict_in_step(slot, slot.lockstep, item, description, frames, locations)
            return
        if locations.outputs and not self.output_leases.acquire(slot.processes, item):
            locations = locations.without_outputs()
        predict = Predict(item.number, description, locations.mapped_regions, 0, slot.model_index)
        self._send_to_slot(slot, predict, frames, locations.regions)

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
            self._send_order(
                process,
                Predict(item.number, description, own_locations.mapped_regions, step),
                frames,
                own_locations.regions,
            )

    def _on_outcome(self, process: str, number: int, outcome: Outcome | None, now: float) -> str:
        """A process has told of a part that all of its slot were given, and this comes of it; None: nothing yet."""
        self.fault_isolator.watchdog.on_message(process, now)
        if isinstance(outcome, OutOfStep):
            # Nor is it believed that it does not write any more.
            self.fault_isolator.on_process_failed(process, outcome.reason, now)
            return outcome.reason
        self._notify_released(self.output_leases.release(process, number))
        if outcome is None:
            return ""
        slot = self.scheduler.slots.slot_of(process)
        batch = slot.batch_of(number) if slot is not None else None
        item = self.scheduler.slots.finish(process, number, now)
        if item is not None and isinstance(outcome, Rejected):
            if batch is not None and batch.item_count > 1:
                self.scheduler.retry_alone(item)
            else:
                self.fail_request(item.request, outcome.error)
        elif item is not None and isinstance(outcome, InferenceResult):
            result, frames = outcome.result, outcome.frames
            if item.split is not None:
                self._add_partial_result(item, item.split, process, result, frames, now)
            else:
                self._complete(item.request, process, result, frames, now)
        if self.scheduler.slots.merging:
            self._schedule_dispatch()
        else:
            self.dispatch(now)
        return ""

    def _send_to_slot(
        self, slot: Slot, message: ChildOrder, frames: Sequence[Any] = (), regions: Sequence[SharedRegion] = ()
    ) -> None:
        for process in slot.processes:
            self._send_order(process, message, frames, regions)

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
                self._response_sink.reserve_partial_result(item.request, sum(map(len, frames)))
        except RequestError as error:
            self.fail_request(item.request, error)
            return
        if complete is not None:
            self.scheduler.end_split(item.request)
            self._complete(item.request, process, *complete, now)

    def _complete(
        self, request: Request, process: str, result: PredictResult, frames: Sequence[Any], now: float
    ) -> None:
        self._deadlines.remove(request)
        request.may_still_write = bool(request.pending_writes)
        self._response_sink.reply_result(request, result, frames)
        latency = now - request.arrived_at
        self.latencies.add(latency)
        self.counters.requests.add(latency)
        self.latencies_by_process[process].add(latency)
        if request.origin.is_tenant or self.fault_isolator.quarantine.suspected:
            self.fault_isolator.on_answered(request, now)

    def _notify_released(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._response_sink.notify_released(request)

    def _reply_metadata(self) -> None:
        built = self.signature.built
        if built is None:
            return
        for client, request_id, _ in self.signature.take_requests():
            self._response_sink.reply(
                client,
                ModelMetadataResponse(
                    request_id,
                    self._name,
                    self._config.engine,
                    built.inputs,
                    built.outputs,
                    _are_answers_exact(self._config, built),
                    example_shapes(built),
                ),
            )


def _row_limits(config: ModelConfig) -> RowLimits:
    """How many rows a request may have: as many as can be run, be it in parts."""
    sizes = config.batching.sizes
    if config.split.part_rows:
        return RowLimits(config.split.max_rows, "split.max_rows", sizes)
    return RowLimits(max(sizes, default=0), "the largest of batching.sizes", sizes)


def _are_answers_exact(config: ModelConfig, built: Built) -> bool | None:
    """Whether answers are known to be those of each request alone; None where each runs alone."""
    row_support, batching, split = built.row_support, config.batching, config.split
    if row_support is None or not row_support.inputs or not row_support.outputs:
        return None
    can_differ = (batching.max_rows > 1 and not batching.exact) or (split.part_rows > 0 and not split.exact)
    return row_support.is_equal if row_support.is_equal or can_differ else None
