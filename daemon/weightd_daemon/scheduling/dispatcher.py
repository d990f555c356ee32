"""The requests for one model: each is accepted or refused here, and gets one reply.

    enqueue   `Dispatcher.infer` checks a request, and starts it on a free slot or puts it into the queue;
              `Scheduler.submit` refuses it if the queue is full
    dispatch  `Dispatcher.dispatch` has everything run that can; `Scheduler` decides what that is
    execute   `BatchSender` sends a batch to the processes of its slot
    reply     `BatchResults` takes what these report, and `Replies` ends each request with its result or an error

The special cases are behind these: batches of several requests and requests in parts in `batching`, ranks in
`lockstep`, several models in one process in `shared_process`, several tenants in `tenancy`, and requests that crash or
hang slots in `fault_isolation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.counters import ModelCounters
from weightd_daemon.platform.client_log import ClientLog
from weightd_daemon.scheduling.batch import Batch, BatchItem, OutputBufferLeases
from weightd_daemon.scheduling.batching.policy import RecentNames
from weightd_daemon.scheduling.fair_share import FairClocks, Users
from weightd_daemon.scheduling.fault_isolation.isolator import FaultIsolator
from weightd_daemon.scheduling.fault_isolation.offenders import OffenderTable
from weightd_daemon.scheduling.lockstep import LockstepTracker
from weightd_daemon.scheduling.measurements import ExecutionCounters, LatencyWindow
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.results import BatchResults, Replies, ResponseSink
from weightd_daemon.scheduling.scheduler import AT_ONCE, Scheduler
from weightd_daemon.scheduling.signature import MetadataReplies, RowLimits, Signature
from weightd_daemon.scheduling.slot_processes import SendOrder, SlotProcesses
from weightd_daemon.scheduling.slots import Slot
from weightd_daemon.scheduling.tensor_location import TensorLocations
from weightd_daemon.tenants.tenant import Tenant
from weightd_protocol.errors import Cancelled, RequestError, ResourceExhausted, Unavailable
from weightd_protocol.messages.inference import RequestDescription
from weightd_protocol.messages.worker import BeginBatch, Built, CancelPredict, Predict

# At what comes, before something runs that waits.
_MAX_GATHER_ROUNDS = 64


@dataclass(frozen=True)
class SharedScheduling:
    """What the dispatchers of all models have in common.

    Attributes:
        clocks: of the devices.
        tenant_offenders: the tenants whose requests have crashed slots.
        client_log: of what clients do.
        counters_of: called with the name of a model; returns its counters.
        users: the tenants that use the slots, where several models share their processes.
    """

    clocks: FairClocks = field(default_factory=FairClocks)
    tenant_offenders: OffenderTable = field(default_factory=OffenderTable)
    client_log: ClientLog = field(default_factory=ClientLog)
    counters_of: Callable[[str], ModelCounters] = lambda _: ModelCounters()
    users: Users | None = None


class DispatcherStatus(NamedTuple):
    """The state of a dispatcher.

    Attributes:
        queued: requests that wait.
        running: requests that a slot has.
        failed: requests that ended in an error after they were accepted.
        latencies: of all answers.
        quarantined: contents that are refused.
        confined_clients: clients whose requests run one at a time.
        execution_counters: what has run.
    """

    queued: int
    running: int
    failed: int
    latencies: LatencyWindow
    quarantined: int
    confined_clients: Sequence[str]
    execution_counters: ExecutionCounters


class Dispatcher:
    """Takes the requests of one model, has slots run them, and tells each one's client how it has ended.

    Args:
        name: of the model.
        config: of the model.
        response_sink: sends replies.
        send_order: sends an order, with the frames that follow it and the memory that it names, to a process.
        schedule_by: called with a time that may be sooner than what `next_event_at` was.
        shared: what the dispatchers of all models have in common.

    Attributes:
        signature: what the model takes and gives.
        metadata: tells clients of that.
        processes: adds and removes slots, and watches their processes.
        results: takes the reports of the processes.
        principal_names: of tenants and users whose requests have shared a batch.
        counters: of the model, whichever dispatcher it has.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        response_sink: ResponseSink,
        send_order: SendOrder,
        schedule_by: Callable[[float], object],
        shared: SharedScheduling | None = None,
    ) -> None:
        shared = shared or SharedScheduling()
        self.counters = shared.counters_of(name)
        self._scheduler = Scheduler(
            config.max_queue,
            config.max_queue_bytes,
            config.predict_timeout,
            schedule_by,
            levels=config.priority_levels,
            clocks=shared.clocks,
            concurrency=config.max_concurrency,
            users=shared.users,
            counters=self.counters,
        )
        self._queue = self._scheduler.queue
        self._replies = Replies(self._scheduler, response_sink, self.counters, schedule_by)
        self._isolator = FaultIsolator(
            config, self._scheduler, self._replies.fail, schedule_by, shared.tenant_offenders, shared.client_log
        )
        self._sender = BatchSender(send_order)
        self.principal_names = self._sender.principal_names
        self.results = BatchResults(
            self._scheduler,
            self._isolator,
            self._replies,
            self._sender.output_leases,
            self._on_slot_free,
            self.dispatch,
        )
        self.processes = SlotProcesses(self._scheduler, self._isolator, self.results, send_order, self.dispatch)
        self.signature = Signature(_row_limits(config))
        self.metadata = MetadataReplies(name, config, self.signature, response_sink)
        # Requests wait for those that have come with them, and there is news since that was last looked at.
        self._is_gathering = False
        self._has_new = False
        self._gather_rounds = 0
        self._schedule_by = schedule_by

    # --- from clients -------------------------------------------------------------------------------------------

    def infer(self, request: Request, now: float) -> None:
        """Accept a request. While the model loads it waits, and is checked once the signature is known.

        Raises:
            RequestError: it is refused.
        """
        if self.metadata.make_unavailable is not None:
            raise self.metadata.make_unavailable()
        # The decoder returns the same object for equal bytes, so most descriptions were checked before.
        checked = self.signature.checked.get(id(request.description))
        request.description = self.signature.check_request(request.description) if checked is None else checked[1]
        scheduler, tenant = self._scheduler, request.tenant
        tenancy, clocks = scheduler.tenancy, scheduler.clocks
        if tenant is not tenancy.last_tenant or tenant is not clocks.last_tenant or now < clocks.multi_tenant_until:
            scheduler.on_request(request, now)
        isolator = self._isolator
        needs_check = (request.origin.is_tenant or any(isolator.grounds)) and isolator.check_request(request, now)
        if not needs_check and scheduler.slots.merging:
            self._gather(request, now)
            return
        started = None if needs_check else scheduler.try_start(request, now)
        if started is None:
            self._replies.fail_all(scheduler.submit(request, now, needs_check=needs_check))
        else:
            self._sender.start(*started)
        if self._queue.splitting.count or self._queue.is_multi_tenant:
            self.dispatch(now)

    def cancel(self, client: bytes, request_id: str, now: float) -> None:
        """End a request of a client that does not want the answer any more."""
        error = Cancelled("cancelled by the client")
        self._replies.fail_all([(each, error) for each in self._scheduler.end_of_client(client, request_id)])
        self.dispatch(now)

    def on_disconnect(self, client: bytes, now: float) -> None:
        """The client is gone: nobody waits for what it asked."""
        self.metadata.forget(client)
        error = Cancelled("the client disconnected")
        self._replies.fail_all([(each, error) for each in self._scheduler.end_of_client(client)])
        self.dispatch(now)

    def shed(self, should_reject: Callable[[Request], bool], error: RequestError, now: float) -> None:
        """Refuse at once each request that waits and is `should_reject`, as its memory is needed; what runs goes on."""
        self._replies.fail_pending(should_reject)
        for request in self._scheduler.take_matching(should_reject):
            self._replies.fail(request, error)
        self.dispatch(now)

    # --- slots --------------------------------------------------------------------------------------------------

    def dispatch(self, now: float) -> None:
        """Have everything run that can; a slot hears what it need not run before it gets something in its place."""
        sender, running = self._sender, self._scheduler.running
        for slot, batch in self._scheduler.assign(now):
            sender.cancel(running.take_recalled())
            sender.start(slot, batch)
        sender.cancel(running.take_recalled())

    def dispatch_gathered(self, now: float) -> None:
        """All that is known to have come has been taken in: have everything run that can.

        Where requests share batches, one more look is taken first at what has come meanwhile; and another as long as
        that was something, and could go with it. Nothing is waited for; and looks have an end, for what comes may have
        ended at the next one.
        """
        if self._has_new and self._gather_rounds < _MAX_GATHER_ROUNDS and self._scheduler.may_gather:
            self._has_new = False
            self._gather_rounds += 1
        else:
            self._is_gathering = False
            self._gather_rounds = 0
            self.dispatch(now)

    def expire(self, now: float, explain_error: Callable[[RequestError], RequestError]) -> None:
        """Go on with ending requests, and end those whose deadlines have passed; go on with checks of contents.

        Requests that are late end with the error that `explain_error` makes of theirs.
        """
        self._replies.fail_some()
        for request, error in self._scheduler.expire(now):
            self._replies.fail(request, explain_error(error))
        self._isolator.continue_fingerprint(now)

    def on_suspended(self, seconds: float, now: float) -> None:
        """The daemon did not run for so long: the deadlines of clients come that much sooner."""
        self._scheduler.on_suspended(seconds, now)

    # --- from the model -----------------------------------------------------------------------------------------

    def reconfigure(self, config: ModelConfig) -> None:
        """Do as this configuration says, which differs in no bound and in no time from the one before."""
        self.metadata.reconfigure(config)
        self.signature.set_row_limits(_row_limits(config))

    def on_built(self, built: Built) -> None:
        """The signature is known: end each request that waits and does not fit it."""
        self.signature.on_built(built)
        errors = self.signature.check_waiting(list(self._queue))
        rejected = self._scheduler.take_matching(lambda each: each.number in errors)
        self._replies.fail_all([(each, errors[each.number]) for each in rejected])
        self.metadata.reply_all()

    def on_model_replaced(self, built: Built | None) -> None:
        """Another model is served, which may take more sizes; what crashed the last one says nothing."""
        self._isolator.clear()
        if built is not None:
            self.signature.on_built(built)

    def set_unavailable(self, make_error: Callable[[], RequestError] | None, *, fails_waiting: bool = False) -> None:
        """From now on refuse each request with an error that this function makes; None: accept requests.

        `fails_waiting`: what waits ends in it, too.
        """
        self.metadata.make_unavailable = make_error
        if make_error is not None and fails_waiting:
            self.fail_waiting(make_error())
            self.metadata.reject(lambda _: True, make_error())

    def adopt_requests(self, old: Dispatcher, now: float) -> None:
        """Take over the requests that wait at the dispatcher of the model that this one replaces."""
        for request in old.take_waiting():
            try:
                self.infer(request, now)
            except RequestError as error:
                self._replies.fail(request, error)
        self.metadata.adopt(old.metadata)
        self.principal_names.update(old.principal_names)

    def take_waiting(self) -> Sequence[Request]:
        """Return every request that waits, and forget it."""
        self._isolator.fail_pending()
        waiting = self._scheduler.take_all_waiting()
        for request in waiting:
            self._scheduler.deadlines.requests.pop(request.number, None)
        return waiting

    def fail_waiting(self, error: RequestError) -> None:
        """End what waits."""
        self._isolator.fail_pending()
        self._replies.fail_all([(each, error) for each in self._scheduler.take_all_waiting()])

    def hand_over(self) -> None:
        """The daemon ends before its workers: answer what has not been answered."""
        self._isolator.fail_pending()
        error = Unavailable("weightd is restarting")
        self._replies.fail_all([(each, error) for each, _ in self._scheduler.end_matching(lambda _: True)])
        self._replies.fail_pending()

    # --- what it tells ------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether each request that was accepted has ended."""
        return not self._replies.is_pending and self._scheduler.is_idle

    @property
    def has_pending_failures(self) -> bool:
        """Whether clients have still to be told of requests that neither wait nor run any more."""
        return self._replies.is_pending

    @property
    def queued_by_tenant(self) -> Mapping[Tenant, int]:
        """How many requests of each tenant wait, at the cost of a look at each tenant."""
        return self._queue.counts_by_tenant

    @property
    def next_event_at(self) -> float:
        """Nothing is due before this, in monotonic seconds."""
        if self._is_gathering or self._replies.is_pending or self._isolator.has_work:
            return AT_ONCE
        ping_at, event_at = self.processes.next_ping_at, self._scheduler.next_event_at
        return ping_at if ping_at < event_at else event_at

    def status(self, now: float) -> DispatcherStatus:
        """Return the state."""
        return DispatcherStatus(
            self._queue.count,
            len({item.request for item in self._scheduler.slots.awaited_items}),
            self._replies.failed_count,
            self._replies.latencies,
            self._isolator.quarantined_count(now),
            self._isolator.confined_clients(now),
            self._scheduler.running.execution_counters,
        )

    # --- within -------------------------------------------------------------------------------------------------

    def _on_slot_free(self, now: float) -> None:
        if not self._queue.is_idle:
            if self._scheduler.slots.merging:
                self._schedule_dispatch()
            else:
                self.dispatch(now)

    def _gather(self, request: Request, now: float) -> None:
        """What comes with it may share its batch: it runs once all of that has been taken in."""
        try:
            self._scheduler.submit(request, now, can_evict=False)
        except ResourceExhausted:
            # There is room again once those run that could.
            self.dispatch(now)
            self._replies.fail_all(self._scheduler.submit(request, now))
        self._schedule_dispatch()

    def _schedule_dispatch(self) -> None:
        self._has_new = self._is_gathering = True
        self._schedule_by(AT_ONCE)


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
            self._announce(slot, batch)
        for item in batch.items.values():
            request, split = item.request, item.split
            if split is None:
                frames, locations, description = request.frames, request.locations, request.description
            else:
                frames, locations = split.tensors_of(item.first_row, item.rows)
                description = split.description_of(item.rows)
            if slot.lockstep is not None:
                self._predict_in_step(slot, slot.lockstep, item, description, frames, locations)
            else:
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

    def _announce(self, slot: Slot, batch: Batch) -> None:
        """Tell the processes of a slot that the next requests share a batch, or that it has to be filled up."""
        rows = slot.policy.padded_rows(batch.rows)
        if batch.item_count == 1 and not rows:
            return
        principal_ids: tuple[int, ...] = ()
        if batch.item_count > 1 and slot.policy.is_exact and slot.lockstep is None:
            principal_ids = tuple(
                [self.principal_names.number_of(item.request.origin.principal) for item in batch.items.values()]
            )
        for process in slot.processes:
            self._send_order(process, BeginBatch(batch.item_count, rows, principal_ids), (), ())

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


def _row_limits(config: ModelConfig) -> RowLimits:
    """Return how many rows a request may have: as many as can be run, be it in parts."""
    sizes = config.batching.sizes
    if config.split.part_rows:
        return RowLimits(config.split.max_rows, "split.max_rows", sizes)
    return RowLimits(max(sizes, default=0), "the largest of batching.sizes", sizes)
