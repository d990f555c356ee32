"""Keeps requests from crashing slot after slot, and ends slots that hang.

If a slot crashes, hangs or is corrupted while it runs a batch with a single item, the item's request is the suspected
cause. If the batch has several items, each item runs again alone, which shows the cause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.platform.client_log import ClientLog
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_daemon.scheduling.batch import Batch, record_death
from weightd_daemon.scheduling.direct import DirectLoss, ModelDirect, NoDirectWorkers
from weightd_daemon.scheduling.fault_isolation.content_guard import ContentGuard, FailRequest
from weightd_daemon.scheduling.fault_isolation.offenders import ClientOffenses, OffenderTable
from weightd_daemon.scheduling.fault_isolation.rank_groups import MAX_LOST_GROUPS, GroupLoss, RankGroupFailures
from weightd_daemon.scheduling.fault_isolation.watchdog import Watchdog
from weightd_daemon.scheduling.request import ClientOrigin, Isolation, Request, isolate
from weightd_daemon.scheduling.scheduler import Scheduler
from weightd_daemon.scheduling.slots import Slot
from weightd_daemon.tenants.tenant import Tenant
from weightd_protocol.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    RequestError,
    ResourceExhausted,
    Unavailable,
)
from weightd_protocol.messages.worker import Ping

_log = logging.getLogger("weightd")

# Number of slot deaths after which the request that ran on these slots is considered the cause.
MAX_DEATHS = 2

# A request ends in an error once this number of slots were lost while they ran the request. All losses count, whatever
# the reason, including a lack of memory.
MAX_LOST_SLOTS = 5

# Timeout of a self-test as a multiple of `predict_timeout`: a process may have to finish two predicts before the
# self-test.
_SELFTEST_TIMEOUT_FACTOR = 3


class FaultIsolator:
    """Fault isolation of one model: handles the loss of slots, and decides which requests and clients to restrict.

    Args:
        config: the configuration of the model.
        scheduler: the scheduler of the model.
        fail_request: called with each request that this object ends, and the request's error.
        schedule_by: called with the time when `continue_fingerprint` or `due_pings` has something to do.
        tenant_offenders: the tenants whose requests have crashed slots; one object for all models.
        client_log: the rate-limited log of client events; one object for all models.
        direct: the direct channels of the model. They end when requests must pass through the daemon from now on,
            because one has crashed a slot.

    Attributes:
        watchdog: watches the processes.
        contents: the contents that may crash or hang slots.
        grounds: the tables of offending tenants, offending clients, quarantined contents and suspected contents. While
            all four are empty, callers can skip `check_request` for clients without a tenant.
        suspected: the table of contents that may crash or hang slots.
    """

    def __init__(  # noqa: PLR0913
        self,
        config: ModelConfig,
        scheduler: Scheduler,
        fail_request: FailRequest,
        schedule_by: Callable[[float], object] = lambda _: None,
        tenant_offenders: OffenderTable | None = None,
        client_log: ClientLog | None = None,
        *,
        direct: ModelDirect | None = None,
    ) -> None:
        self._client_log = client_log or ClientLog()
        self.contents = ContentGuard(scheduler, fail_request, schedule_by, self._client_log)
        self._quarantined = self.contents.quarantine.quarantined
        self.suspected = self.contents.quarantine.suspected
        self._offenses = ClientOffenses(tenant_offenders)
        tenants, clients = self._offenses.tables
        self.grounds = tenants.offenders, clients.offenders, self._quarantined, self.suspected
        self.watchdog = Watchdog(
            config.watchdog, config.selftest_interval, _SELFTEST_TIMEOUT_FACTOR * config.predict_timeout, schedule_by
        )
        self._predict_timeout = config.predict_timeout
        self._scheduler = scheduler
        self._slots = scheduler.slots
        self._group_failures = RankGroupFailures(MAX_LOST_SLOTS)
        self._fail_request = fail_request
        # The names of tenants with an answered request at this model. The requests of all other tenants are confined,
        # so that the first requests of a tenant cannot crash several slots at once.
        self._trusted_tenants: set[str] = set()
        self._direct = direct or ModelDirect("", NoDirectWorkers(), config)

    # --- requests -----------------------------------------------------------------------------------------------

    def check_request(self, request: Request, now: float) -> bool:
        """Check a new request; return whether its content must be read first, as the content may have crashed a slot.

        Raises:
            RequestError: the request is refused.
        """
        tenant_offenders, client_offenders, _, _ = self.grounds
        has_offenders = tenant_offenders or client_offenders
        is_untrusted = request.origin.is_tenant and request.tenant.name not in self._trusted_tenants
        if not (has_offenders or is_untrusted or self._quarantined or (self.suspected and request.is_mutable)):
            return False
        if self._direct.losses.pop((request.client, request.id), None) is not None:
            request.deaths += 1
            isolate(request, Isolation.ALONE)
        self._offenses.check_not_refused(request.origin, now)
        if is_untrusted or self._offenses.is_confined(request.origin, now):
            isolate(request, Isolation.CONFINED)
        return self.contents.check_request(request, now)

    def on_answered(self, request: Request, now: float) -> None:
        """Record that a slot has answered the request."""
        if request.origin.is_tenant:
            self._trusted_tenants.add(request.tenant.name)
        self.contents.on_answered(request, now)

    def clear(self) -> None:
        """Forget all contents, trusted tenants and offending clients, because the model version has changed."""
        self.contents.fail_pending()
        self._trusted_tenants.clear()
        self.contents.quarantine.clear()
        self._offenses.clear()

    def check_direct(self, origin: ClientOrigin, tenant: Tenant, now: float) -> None:
        """Check that requests of a client need not pass through the daemon.

        Raises:
            FailedPrecondition: they must.
        """
        if self.confined_clients(now) or self.quarantined_count(now) or any(self.grounds):
            raise FailedPrecondition(
                "requests to this model have crashed or hung workers, so the daemon checks each one"
            )
        if origin.is_tenant and tenant.name not in self._trusted_tenants:
            raise FailedPrecondition("no request of this tenant to this model has been answered yet")

    def on_direct_loss(self, loss: DirectLoss, now: float) -> None:
        """Record that a request of a direct channel may have crashed its worker, or has made it hang."""
        self._direct.add_loss(loss)
        self._offenses.record_death(loss.origin, loss.ran_s, now)
        if loss.origin.is_tenant:
            self._scheduler.tenancy.record_tenant_loss(loss.tenant, now)
        self._direct.reclaim()
        self._restrict_client(loss.origin, now)

    def quarantined_count(self, now: float) -> int:
        """Return the number of contents in quarantine."""
        return self.contents.quarantine.count(now)

    def confined_clients(self, now: float) -> Sequence[str]:
        """Return the clients whose requests run one at a time."""
        return self._offenses.confined_names(now)

    # --- slots --------------------------------------------------------------------------------------------------

    def on_exit(self, process: str, exit_cause: ExitCause, now: float) -> None:
        """Handle the exit of a process, which the batches at its slot may have caused."""
        forgiven = self._group_failures.on_exit(process, exit_cause)
        if forgiven is not None:
            self.contents.on_forgiven(forgiven, now)
        slot = self._slots.slot_of(process)
        if slot is None or not slot.batches:
            self._scheduler.release_slot(process)
            return
        if slot.lockstep is not None:
            self._on_group_lost(
                slot,
                GroupLoss(f"{process} was {exit_cause.description}", Internal if exit_cause.may_be_own_fault else None),
                now,
            )
            return
        batches = list(slot.batches.values())
        _record_times(batches, now)
        # A later batch than the first may have crashed the process, and the answer to the first batch may have been
        # lost in the crash. So the requests of all batches at the slot run alone from now on.
        requests = batches if exit_cause.may_be_own_fault else []
        origins = self._isolate_requests(requests)
        record_death(requests)
        self._record_offense(origins, now - slot.busy_since, now)
        self._record_tenant_loss(requests, now)
        single_request = requests[0].single_request if len(requests) == 1 else None
        awaited = {item.request for batch in batches for item in batch.awaited_items}
        errors = self._find_errors(
            [batch for batch in batches if batch.has_started], exit_cause, now, is_proven=single_request is not None
        )
        self._scheduler.release_slot(process, excluding=[request for request, _ in errors])
        quarantined = single_request if single_request is not None and single_request.deaths >= MAX_DEATHS else None
        for request, error in errors:
            if request in awaited:
                self._fail(request, error, now, is_quarantined=request is quarantined)
        if quarantined is not None and quarantined not in awaited:
            self.contents.on_crash(quarantined, now)
        for origin in origins:
            self._restrict_client(origin, now)

    def on_process_failed(self, process: str, reason: str, now: float) -> None:
        """Handle the failure of a process that cannot continue. Its slot is lost, and its requests are queued again."""
        slot = self._slots.slot_of(process)
        if slot is not None and slot.lockstep is not None:
            self._on_group_lost(slot, GroupLoss(reason, Internal), now)
        else:
            _record_times([] if slot is None else list(slot.batches.values()), now)
            self._scheduler.release_slot(process)

    def on_leaving(self, process: str, number: int, now: float) -> None:
        """Handle a slot that exits because a failed batch may have corrupted its model. The exit counts as a crash."""
        slot = self._slots.slot_of(process)
        batch = slot.batch_of(number) if slot is not None else None
        if batch is not None:
            _record_times([batch], now)
            self._record_loss(batch, now - batch.started_at, now)

    def take_overdue(self, now: float) -> Iterator[tuple[Slot, str]]:
        """Yield the slots in which a batch has exceeded `predict_timeout`, each with the reason to end the slot.

        Later results of such a slot are dropped.
        """
        for slot, batch in self._scheduler.take_overdue(now):
            reason = f"a predict took longer than predict_timeout ({self._predict_timeout:g} s)"
            if slot.lockstep is not None:
                self._on_batch_lost(slot, batch, GroupLoss(reason, DeadlineExceeded), now)
                yield slot, f"{reason} (request {', '.join(each.id for each in batch.requests)})"
                continue
            request = batch.single_request
            if request is None:
                self._scheduler.retry_alone(list(batch.items.values()))
            self._record_loss(batch, self._predict_timeout, now)
            if request is not None and batch.awaited_items:
                self.contents.fail_hung(request, DeadlineExceeded(f"request {request.id}: {reason}"), now)
            elif request is not None:
                self.contents.on_hang(request, now)
            yield slot, f"{reason} (request {', '.join(each.id for each in batch.requests)})"

    def due_pings(self, now: float) -> Iterator[tuple[str, Ping | None]]:
        """Yield pairs of a process and the ping to send; None instead of a ping if the last one was not answered."""
        due = self.watchdog.take_due(now, self._is_busy)
        yield from ((process, Ping(run_selftest=False)) for process in due.pings)
        yield from ((process, Ping(run_selftest=True)) for process in due.selftests)
        yield from ((process, None) for process in due.unresponsive)

    # --- private ------------------------------------------------------------------------------------------------

    def _is_busy(self, process: str) -> bool:
        return self._slots.is_busy(process) or self._direct.is_running(process)

    def _on_group_lost(self, slot: Slot, loss: GroupLoss, now: float) -> None:
        """Handle the loss of a rank group, and of the batch that the group may have been running."""
        batches = list(slot.batches.values())
        _record_times(batches, now)
        slot.batches.clear()
        self._scheduler.release_slot(slot.name)
        for batch in batches:
            self._on_batch_lost(slot, batch, loss, now)

    def _on_batch_lost(self, slot: Slot, batch: Batch, loss: GroupLoss, now: float) -> None:
        """Queue the requests of a lost rank group's batch again, except for requests that end because of the loss."""
        ended = self._group_failures.on_lost(slot, batch, loss, now)
        self._scheduler.retry_alone(list(batch.items.values()), excluding=[request for request, _ in ended])
        suspect = batch.single_request if loss.error_type is not None else None
        quarantined = suspect if suspect is not None and suspect.deaths >= MAX_LOST_GROUPS else None
        for request, error in ended:
            self._fail(request, error, now, is_quarantined=request is quarantined)
        if quarantined is not None:
            if quarantined not in [request for request, _ in ended]:
                self.contents.on_crash(quarantined, now)
            self._record_loss(batch, now - batch.started_at, now)
        elif suspect is not None:
            record_death([batch])
            self.contents.on_group_loss(suspect, now)

    def _isolate_requests(self, batches: Sequence[Batch]) -> set[ClientOrigin]:
        """Isolate the requests of a dead slot's batches, and return their clients.

        The death counts against the request of each batch that has a single item.
        """
        for batch in batches:
            batch.isolate_requests()
            if batch.single_request is not None:
                batch.single_request.deaths += 1
        return {origin for batch in batches for origin in batch.origins}

    def _record_loss(self, batch: Batch, ran_s: float, now: float) -> None:
        """Record that a batch, which has run for `ran_s` seconds, is the cause of the loss of its slot."""
        record_death([batch])
        self._record_offense(batch.origins, ran_s, now)
        self._record_tenant_loss([batch], now)
        for origin in batch.origins:
            self._restrict_client(origin, now)

    def _record_offense(self, origins: set[ClientOrigin], ran_s: float, now: float) -> None:
        """Count a lost slot against the client that sent the requests, unless several clients sent them."""
        if len(origins) == 1:
            [origin] = origins
            self._offenses.record_death(origin, ran_s, now)
        if origins:
            self._direct.reclaim()

    def _record_tenant_loss(self, batches: Sequence[Batch], now: float) -> None:
        """Record a slot's coming loss for the tenant that sent the requests, unless several tenants sent them."""
        tenants = {request.tenant for batch in batches for request in batch.requests if request.origin.is_tenant}
        if len(tenants) == 1:
            [tenant] = tenants
            self._scheduler.tenancy.record_tenant_loss(tenant, now)

    def _find_errors(
        self, executed: Sequence[Batch], exit_cause: ExitCause, now: float, *, is_proven: bool
    ) -> list[tuple[Request, RequestError]]:
        """Return the requests that end because of the loss of their slot, each with its error. The others run again."""
        # Several batches may be parts of the same split request, which must count once. So the keys are requests.
        started_at = {request: batch.started_at for batch in executed for request in batch.requests}
        errors = [
            (each, self._error_for(each, at, exit_cause, now, is_proven=is_proven)) for each, at in started_at.items()
        ]
        return [(request, error) for request, error in errors if error is not None]

    def _error_for(
        self, request: Request, started_at: float, exit_cause: ExitCause, now: float, *, is_proven: bool
    ) -> RequestError | None:
        # Slots that ran parts of the request at the same time may have been lost for the same reason, so they count
        # once.
        if started_at >= request.lost_at:
            request.lost_slots += 1
            request.lost_at = now
        if is_proven and request.deaths >= MAX_DEATHS:
            details = f"was on {request.deaths} workers when they died, the last one {exit_cause.description}"
            return Internal(f"request {request.id} {details}")
        if is_proven and self._offenses.should_fail_next(request.origin, now):
            return Internal(
                f"request {request.id} was on a worker that was {exit_cause.description},"
                " as were other requests of its client"
            )
        if request.lost_slots >= MAX_LOST_SLOTS:
            text = (
                f"request {request.id} was on {request.lost_slots} workers when they exited, the last one"
                f" {exit_cause.description}"
            )
            return ResourceExhausted(text) if exit_cause.initiator is ExitInitiator.KERNEL else Unavailable(text)
        return None

    def _restrict_client(self, origin: ClientOrigin, now: float) -> None:
        """Confine an offending client's requests after the loss of a slot, and reject them if the client is refused."""
        if not self._offenses.is_confined(origin, now):
            return
        self._scheduler.confine(lambda each: self._offenses.is_confined(each.origin, now))
        rejected: list[tuple[Request, RequestError]] = []

        def is_refused(request: Request) -> bool:
            try:
                self._offenses.check_not_refused(request.origin, now)
            except RequestError as error:
                rejected.append((request, error))
                return True
            return False

        self._scheduler.take_matching(is_refused)
        for request, error in rejected:
            self._fail_request(request, error)
        client_name = origin.principal if origin.is_tenant else origin.peer
        text = "requests of %s crashed or hung workers: they run one at a time, or are rejected"
        self._client_log.log(_log, logging.WARNING, origin.principal, text, client_name)

    def _fail(self, request: Request, error: RequestError, now: float, *, is_quarantined: bool) -> None:
        if is_quarantined:
            self.contents.fail_crashed(request, error, now)
        else:
            self._fail_request(request, error)


def _record_times(batches: Sequence[Batch], now: float) -> None:
    """Record the run times of the batches at a lost slot, whatever the cause of the loss."""
    for batch in batches:
        if batch.has_started:
            batch.record_time(now - batch.started_at)
