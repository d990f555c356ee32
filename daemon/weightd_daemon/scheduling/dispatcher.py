"""Accepts the requests for one model, dispatches them to workers and sends one reply to each.

    enqueue   `Dispatcher.infer` checks a request, and starts it or queues it (`Scheduler.submit`)
    dispatch  `Dispatcher.dispatch` starts all batches that can run now; `Scheduler` selects them
    execute   `BatchSender` sends a batch to the processes of its slot
    reply     `BatchResults` handles the processes' results, and `Replies` ends each request with its result or an error

The special cases are in other modules: batches of several requests and split requests in `batching`, rank groups in
`lockstep`, several models in one process in `shared_process`, several tenants in `tenancy`, and requests that crash or
hang slots in `fault_isolation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.counters import ModelCounters
from weightd_daemon.platform.client_log import ClientLog
from weightd_daemon.scheduling.batch import Batch, BatchItem, OutputBufferLeases
from weightd_daemon.scheduling.batching.policy import RecentNames
from weightd_daemon.scheduling.direct import DirectWorkers, ModelDirect, NoDirectWorkers
from weightd_daemon.scheduling.fair_share import FairClocks, Users
from weightd_daemon.scheduling.fault_isolation.isolator import FaultIsolator
from weightd_daemon.scheduling.fault_isolation.offenders import OffenderTable
from weightd_daemon.scheduling.lockstep import LockstepTracker
from weightd_daemon.scheduling.measurements import DispatcherStatus
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

# Maximum number of turns of the event loop for which dispatching is postponed while new requests arrive.
_MAX_GATHER_ROUNDS = 64


@dataclass(frozen=True)
class SharedScheduling:
    """The objects that the dispatchers of all models share.

    Attributes:
        clocks: the fair-share clocks of the devices.
        tenant_offenders: the tenants whose requests have crashed slots.
        client_log: the rate-limited log of client events.
        counters_of: called with the name of a model; returns the model's counters.
        users: for the models of a model group, the tenants that use the processes of the group; None for other models.
        direct: the workers that read direct channels.
    """

    clocks: FairClocks = field(default_factory=FairClocks)
    tenant_offenders: OffenderTable = field(default_factory=OffenderTable)
    client_log: ClientLog = field(default_factory=ClientLog)
    counters_of: Callable[[str], ModelCounters] = lambda _: ModelCounters()
    users: Users | None = None
    direct: DirectWorkers = field(default_factory=NoDirectWorkers)


class Dispatcher:
    """Accepts the inference requests for one model, dispatches them to slots and sends the replies.

    Args:
        name: the name of the model.
        config: the configuration of the model.
        response_sink: sends replies to clients.
        send_order: sends an order to a process, with its frames and memory regions.
        schedule_by: called with the time of each new event, which may be sooner than the previous `next_event_at`.
        shared: the objects that the dispatchers of all models share.

    Attributes:
        signature: the inputs and outputs of the model.
        metadata: replies to metadata requests.
        processes: adds and removes slots, and watches their processes.
        results: handles the results from the processes.
        principal_names: the tenants and users whose requests have shared a batch.
        counters: the counters of the model, which outlive this dispatcher.
        direct: the direct channels of the model.
        isolator: keeps requests from crashing slot after slot.
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
        self.direct = ModelDirect(name, shared.direct, config)
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
        self._replies = Replies(self._scheduler, response_sink, self.counters, schedule_by)
        self.isolator = FaultIsolator(
            config,
            self._scheduler,
            self._replies.fail,
            schedule_by,
            shared.tenant_offenders,
            shared.client_log,
            direct=self.direct,
        )
        self._sender = BatchSender(send_order)
        self.principal_names = self._sender.principal_names
        self.results = BatchResults(
            self._scheduler,
            self.isolator,
            self._replies,
            self._sender.output_leases,
            self._on_slot_free,
            self.dispatch,
        )
        self.direct.on_ran = self.results.on_direct_ran
        self.processes = SlotProcesses(
            self._scheduler,
            self.isolator,
            self.results,
            send_order,
            self.dispatch,
            self.direct.retire_worker,
            schedule_by=schedule_by,
        )
        self.direct.on_active = self.processes.on_direct_active
        self._scheduler.running.runs_direct = self.direct.is_running
        self.signature = Signature(_row_limits(config))
        self.metadata = MetadataReplies(name, config, self.signature, response_sink)
        # `_is_gathering`: whether dispatching is postponed so that more requests can join the batches. `_has_new`:
        # whether a request has arrived since the last call of `dispatch_gathered`.
        self._is_gathering = False
        self._has_new = False
        self._gather_rounds = 0
        self._schedule_by = schedule_by

    # --- requests -----------------------------------------------------------------------------------------------

    def infer(self, request: Request, now: float) -> None:
        """Accept a request. While the model loads, the request is queued, and checked once the signature is known.

        Raises:
            RequestError: the request is refused.
        """
        if self.metadata.make_unavailable is not None:
            raise self.metadata.make_unavailable()
        # The decoder returns the same description object for equal bytes, so most descriptions need no second check.
        checked = self.signature.checked.get(id(request.description))
        request.description = self.signature.check_request(request.description) if checked is None else checked[1]
        scheduler, tenant = self._scheduler, request.tenant
        tenancy, clocks = scheduler.tenancy, scheduler.clocks
        if tenant is not tenancy.last_tenant or tenant is not clocks.last_tenant or now < clocks.multi_tenant_until:
            scheduler.on_request(request, now)
        isolator = self.isolator
        needs_check = (request.origin.is_tenant or any(isolator.grounds)) and isolator.check_request(request, now)
        if not needs_check and scheduler.slots.merging:
            self._gather(request, now)
            return
        started = None if needs_check else scheduler.try_start(request, now)
        if started is None:
            self._replies.fail_all(scheduler.submit(request, now, needs_check=needs_check))
        else:
            self._sender.start(started[0], started[1])
        if self._scheduler.queue.splitting.count or self._scheduler.queue.is_multi_tenant:
            self.dispatch(now)

    def cancel(self, client: bytes, request_id: str, now: float) -> None:
        """End a client's requests with this id, because the client has cancelled them."""
        error = Cancelled("cancelled by the client")
        self._replies.fail_all([(each, error) for each in self._scheduler.end_of_client(client, request_id)])
        self.dispatch(now)

    def on_disconnect(self, client: bytes, now: float) -> None:
        """End all requests of a client that has disconnected."""
        self.metadata.forget(client)
        error = Cancelled("the client disconnected")
        self._replies.fail_all([(each, error) for each in self._scheduler.end_of_client(client)])
        self.dispatch(now)

    def shed(self, should_reject: Callable[[Request], bool], error: RequestError, now: float) -> None:
        """Refuse matching queued requests at once, to free the memory of their tensors. Running requests continue."""
        self._replies.fail_pending(should_reject)
        for request in self._scheduler.take_matching(should_reject):
            self._replies.fail(request, error)
        self.dispatch(now)

    # --- slots --------------------------------------------------------------------------------------------------

    def dispatch(self, now: float) -> None:
        """Start every batch that can run now. A slot receives its cancellations before its next batch."""
        sender, running = self._sender, self._scheduler.running
        for slot, batch in self._scheduler.assign(now):
            sender.cancel(running.take_recalled())
            sender.start(slot, batch)
        sender.cancel(running.take_recalled())

    def dispatch_gathered(self, now: float) -> None:
        """Dispatch the queued requests, or wait for another turn of the event loop because more requests may arrive.

        The dispatcher waits while each turn brings new requests and a batch has room for more, but for at most
        `_MAX_GATHER_ROUNDS` turns, because requests may end as fast as new ones arrive. It never waits for a fixed
        time.
        """
        if self._has_new and self._gather_rounds < _MAX_GATHER_ROUNDS and self._scheduler.may_gather:
            self._has_new = False
            self._gather_rounds += 1
        else:
            self._is_gathering = False
            self._gather_rounds = 0
            self.dispatch(now)

    def expire(self, now: float, explain_error: Callable[[RequestError], RequestError]) -> None:
        """End requests whose deadlines have passed, send the next pending error replies, and continue content checks.

        `explain_error` is called with the error of each expired request, and returns the error to send.
        """
        self._replies.fail_some()
        for request, error in self._scheduler.expire(now):
            self._replies.fail(request, explain_error(error))
        self.isolator.contents.continue_fingerprint(now)

    def on_suspended(self, seconds: float, now: float) -> None:
        """Bring the deadlines of requests forward by the seconds for which the daemon was paused."""
        self._scheduler.on_suspended(seconds, now)

    # --- model --------------------------------------------------------------------------------------------------

    def reconfigure(self, config: ModelConfig) -> None:
        """Apply a configuration that differs from the previous one only in `batching`, `split` or the default priority.

        Only these keys can change without loading the model again.
        """
        self.metadata.reconfigure(config)
        self.signature.set_row_limits(_row_limits(config))

    def on_built(self, built: Built) -> None:
        """Record the signature of the model, and reject the queued requests that do not match it."""
        self.signature.on_built(built)
        errors = self.signature.check_waiting(list(self._scheduler.queue))
        rejected = self._scheduler.take_matching(lambda each: each.number in errors)
        self._replies.fail_all([(each, errors[each.number]) for each in rejected])
        self.metadata.reply_all()

    def on_model_replaced(self, built: Built | None) -> None:
        """Replace the signature by the signature of a new model version, and reset the fault isolation."""
        self.isolator.clear()
        if built is not None:
            self.signature.on_built(built)

    def set_unavailable(self, make_error: Callable[[], RequestError] | None, *, fails_waiting: bool = False) -> None:
        """Refuse all further requests with the error that `make_error` returns. With None, accept requests again.

        With `fails_waiting`, the queued requests and metadata requests end with this error, too.
        """
        self.metadata.make_unavailable = make_error
        if make_error is not None and fails_waiting:
            self.fail_waiting(make_error())
            self.metadata.reject(lambda _: True, make_error())

    def adopt_requests(self, old: Dispatcher, now: float) -> None:
        """Take over the queued requests of the dispatcher that this one replaces."""
        for request in old.take_waiting():
            try:
                self.infer(request, now)
            except RequestError as error:
                self._replies.fail(request, error)
        self.metadata.adopt(old.metadata)
        self.principal_names.update(old.principal_names)

    def take_waiting(self) -> Sequence[Request]:
        """Remove and return all queued requests."""
        self.isolator.contents.fail_pending()
        waiting = self._scheduler.take_all_waiting()
        for request in waiting:
            self._scheduler.deadlines.requests.pop(request.number, None)
        return waiting

    def fail_waiting(self, error: RequestError) -> None:
        """End all queued requests with an error."""
        self.isolator.contents.fail_pending()
        self._replies.fail_all([(each, error) for each in self._scheduler.take_all_waiting()])

    def hand_over(self) -> None:
        """End all requests in an error, because the next daemon takes over the workers but not the requests."""
        self.isolator.contents.fail_pending()
        error = Unavailable("weightd is restarting")
        self._replies.fail_all([(each, error) for each, _ in self._scheduler.end_matching(lambda _: True)])
        self._replies.fail_pending()

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether every accepted request has ended. Requests of direct channels do not count."""
        return not self._replies.is_pending and self._scheduler.is_idle

    @property
    def has_pending_failures(self) -> bool:
        """Whether requests that are neither queued nor running still await their error replies."""
        return self._replies.is_pending

    @property
    def queued_by_tenant(self) -> Mapping[Tenant, int]:
        """The number of queued requests of each tenant."""
        return self._scheduler.queue.counts_by_tenant

    @property
    def next_event_at(self) -> float:
        """The earliest time at which the dispatcher has something to do, in monotonic seconds."""
        if self._is_gathering or self._replies.is_pending or self.isolator.contents.has_work:
            return AT_ONCE
        ping_at, event_at = self.processes.next_ping_at, self._scheduler.next_event_at
        return ping_at if ping_at < event_at else event_at

    def status(self, now: float) -> DispatcherStatus:
        """Return the state of the dispatcher."""
        return DispatcherStatus(
            self._scheduler.queue.count,
            len({item.request for item in self._scheduler.slots.awaited_items}),
            self._replies.failed_count,
            self._replies.latencies,
            self.isolator.quarantined_count(now),
            self.isolator.confined_clients(now),
            self._scheduler.running.execution_counters,
        )

    # --- private ------------------------------------------------------------------------------------------------

    def _on_slot_free(self, now: float) -> None:
        if self._scheduler.slots.merging:
            self._schedule_dispatch()
        else:
            self.dispatch(now)

    def _gather(self, request: Request, now: float) -> None:
        """Queue a request that may share a batch; batches are formed after the daemon has read all arrived messages."""
        try:
            self._scheduler.submit(request, now, can_evict=False)
        except ResourceExhausted:
            # The queue is full. Dispatching moves requests to free slots, so the queue may have room afterwards.
            self.dispatch(now)
            self._replies.fail_all(self._scheduler.submit(request, now))
        self._schedule_dispatch()

    def _schedule_dispatch(self) -> None:
        self._has_new = self._is_gathering = True
        self._schedule_by(AT_ONCE)


class BatchSender:
    """Sends batches to the processes of their slots.

    Args:
        send_order: sends an order to a process, with its frames and memory regions.

    Attributes:
        output_leases: tracks which processes may write to output memory of clients.
        principal_names: the tenants and users whose requests have shared a batch.
    """

    def __init__(self, send_order: SendOrder) -> None:
        self._send_order = send_order
        self.output_leases = OutputBufferLeases()
        self.principal_names = RecentNames()

    def start(self, slot: Slot, batch: Batch) -> None:
        """Send a batch to its slot, with one `Predict` order for each item and process."""
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
        """Send the cancellations of batch items to the processes of their slots."""
        for slot, number in recalled:
            for process in slot.processes:
                self._send_order(process, CancelPredict(number), (), ())

    def _announce(self, slot: Slot, batch: Batch) -> None:
        """Announce a batch to the processes of its slot, if it has several items or must be padded."""
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
        """Send an item to all ranks of a slot. At most one rank may write outputs to the client's shared memory."""
        step, reply_process = lockstep.start(item.number), lockstep.reply_process
        read_only = locations.without_outputs() if locations.outputs else locations
        # Output memory that overlaps an input is not used: another process may still have to read the input.
        if locations.outputs and (
            reply_process is None or locations.has_overlap or not self.output_leases.acquire((reply_process,), item)
        ):
            locations = read_only
        for process in slot.processes:
            own_locations = locations if process == reply_process else read_only
            predict = Predict(item.number, description, own_locations.mapped_regions, step)
            self._send_order(process, predict, frames, own_locations.regions)


def _row_limits(config: ModelConfig) -> RowLimits:
    """Return the limits for a request's rows: from `split` if requests are split, otherwise from `batching.sizes`."""
    sizes = config.batching.sizes
    if config.split.part_rows:
        return RowLimits(config.split.max_rows, "split.max_rows", sizes)
    return RowLimits(max(sizes, default=0), "the largest of batching.sizes", sizes)
