"""Loads and unloads models: on demand, by command, when they are idle, and to free memory for other models.

`ResidencyTable` decides which models are in memory, and `ModelLifecycle` carries out the decisions. Models are unloaded
only in `tick`, which a timer calls after each event, so that no model is unloaded while the daemon is still handling an
event.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from weightd_common.devices import is_cpu
from weightd_common.log_text import format_mib, plural
from weightd_daemon.models.admission import Verdict
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.placement import DeviceBudget, ResourceRequest
from weightd_daemon.models.readiness import not_loaded_text
from weightd_daemon.models.residency.load_queue import LoadQueue
from weightd_daemon.models.residency.needs import NeedMeter, card_need_bytes, estimate_bytes, observed_excess
from weightd_daemon.models.residency.reservations import HOST, Budgets, MemoryNeed, Residence
from weightd_daemon.models.residency.table import Grant, ResidencyTable, Unload
from weightd_daemon.platform import audit, event_loop
from weightd_daemon.platform.event_loop import Timer
from weightd_daemon.platform.log_setup import subject_extra
from weightd_protocol.errors import FailedPrecondition, RequestError, ResourceExhausted, Unavailable

_log = logging.getLogger("weightd")

_NEVER = float("inf")

# Seconds between two checks whether the accepted requests of a model that will be unloaded have ended.
_DRAIN_INTERVAL_S = 0.02

# Maximum number of commands that may wait until one model has loaded.
_MAX_LOAD_WAITERS = 64

# Seconds after which a client may repeat a rejected load: an estimate of the time until one waiting model has got its
# memory. Models that wait for memory are also checked again at this interval.
_RETRY_AFTER_S = 1.0

_BY_OPERATOR = "requested by an operator"

OnDone = Callable[[RequestError | None], object]
"""Function that is called at the end of a load or an unload: with the error, or with None after success."""


class LifecycleLimits(NamedTuple):
    """The configured limits of loaded models.

    Attributes:
        max_model_bytes: the budget in bytes for the memory of all models on the CPU; 0: no limit.
        tenant_limits: the budget in bytes of each tenant that has one.
        weights: the configured weight of each tenant.
        min_resident_s: the minimum seconds for which a model stays loaded before it is unloaded for another one.
        max_load_queue: the maximum number of models that may wait for memory.
        max_loading: the maximum number of on-demand models that may load at the same time.
        drain_timeout_s: the maximum seconds for which an unload command waits for the accepted requests of a model.
    """

    max_model_bytes: int = 0
    tenant_limits: Mapping[str, int] = {}
    weights: Mapping[str, float] = {}
    min_resident_s: float = 0.0
    max_load_queue: int = 64
    max_loading: int = 1
    drain_timeout_s: float = 30.0


class _PendingUnload(NamedTuple):
    """An unload command that waits until the accepted requests of a model have ended."""

    deadline: float
    on_done: OnDone


class ModelLifecycle:
    """Loads and unloads models within the budgets.

    Args:
        configured: the configured limits.
        find_model: called with a name; returns the model of this name, or None if there is no such model.
        devices: the devices of all models, by name.
        charge: called with a tenant, a model and the byte-seconds of memory to charge to the tenant.
        measure: returns the measured memory of a model in bytes, or None until the measurement is complete; the first
            call starts the measurement.
        clock: returns the time in monotonic seconds.

    Attributes:
        timer: calls `tick` when it is due.
        table: decides which generations may start, and which models are unloaded.
        reservations: the reservations of all generations.
        needs: the last measured memory of each model.
    """

    def __init__(
        self,
        configured: LifecycleLimits,
        find_model: Callable[[str], ServedModel | None],
        devices: Mapping[str, DeviceBudget],
        charge: Callable[[str, str, float], object] = lambda tenant, model, byte_seconds: None,
        measure: Callable[[str], int | None] = lambda _: None,
        clock: Callable[[], float] = event_loop.now,
    ) -> None:
        self._find_model = find_model
        self._clock = clock
        self._devices = devices
        self._limits = configured
        self.table = ResidencyTable(Budgets(), self._residence, charge)
        self.reservations = self.table.reservations
        self.timer = Timer(self.tick)
        self._pending_unloads: dict[str, _PendingUnload] = {}
        # For each model that fits into no budget now: the error for its requests. The next one tries again.
        self._refused: dict[str, RequestError] = {}
        self._load_waiters: dict[str, list[OnDone]] = {}
        # One more than `max_loading`: while that many models load, the files of the next one are read.
        self._queue = LoadQueue(configured.max_loading + 1)
        # The memory in bytes that each model needed at the last attempt to load it.
        self._known_bytes: dict[str, int] = {}
        self._meter = NeedMeter(measure)
        self.needs = self._meter.needs

    def configure(self, configured: LifecycleLimits) -> None:
        """Apply other limits."""
        self._limits = configured
        self._queue.max_starting = configured.max_loading + 1
        self._known_bytes = {name: each for name, each in self._known_bytes.items() if self._find_model(name)}
        self._wake()

    # --- for clients and operators ------------------------------------------------------------------------------

    def load_on_demand(self, name: str, tenant: str) -> None:
        """Load an unloaded model for a tenant's request; the request will wait in the model's queue.

        The caller has checked that the model `is_unloaded`.

        Raises:
            RequestError: the model does not load on demand or exceeds the tenant's budget, or too many models wait for
                memory.
        """
        model = self._find_model(name)
        if model is None or not model.config.is_on_demand:
            raise FailedPrecondition(not_loaded_text(name))
        if name in self._queue:
            return
        self._check_load(model, tenant)
        self._queue.put(name, tenant)
        # Without `just_wanted`, the model would look unwanted: the request is not in its queue yet.
        self._start_queued(just_wanted=name)

    def load(self, model: ServedModel, tenant: str, on_done: OnDone, reason: str = _BY_OPERATOR) -> None:
        """Load a model that is unloaded or has failed; call `on_done` once it serves or has failed.

        Raises:
            RequestError: the model exceeds the tenant's budget or is being updated or unloaded, or too many models or
                commands wait already.
        """
        if model.name in self._pending_unloads:
            raise Unavailable(f"{model.name} is being unloaded: try again once it is unloaded")
        if model.is_updating:
            raise Unavailable(f"{model.name} is being updated: try again after the update")
        waiters = self._load_waiters.setdefault(model.name, [])
        if len(waiters) >= _MAX_LOAD_WAITERS:
            text = f"{_MAX_LOAD_WAITERS} commands wait for the load of {model.name} already"
            raise ResourceExhausted(text, retry_after=_RETRY_AFTER_S)
        if model.loading.is_unloaded or model.loading.may_retry:
            self._check_load(model, tenant)
            self._begin_load(model, tenant, reason)
        waiters.append(on_done)
        self._wake()

    def unload(self, model: ServedModel, on_done: OnDone) -> None:
        """Refuse further requests of a model, and unload it once the accepted requests have ended.

        After `drain_timeout_s`, the model is unloaded in any case. `on_done` is called after its processes have exited.

        Raises:
            RequestError: the model must stay loaded, shares its processes, or is being updated or unloaded.
        """
        model.loading.check_unloadable()
        if model.config.required:
            raise FailedPrecondition(f"{model.name} has required = true and stays loaded")
        if model.name in self._pending_unloads:
            raise Unavailable(f"{model.name} is being unloaded already")
        if model.loading.is_unloaded:
            on_done(None)
            return
        model.loading.refuse_requests()
        deadline = self._clock() + self._limits.drain_timeout_s
        self._pending_unloads[model.name] = _PendingUnload(deadline, on_done)
        self._wake()

    # --- from deployments (`ModelMemory`) -----------------------------------------------------------------------

    def admit(self, label: str, request: ResourceRequest, device: str) -> Verdict:
        """Reserve memory for a generation, and return whether the generation may start its processes.

        If too little is free, the generation waits for memory, and the caller calls this method again later.
        """
        there = self.reservations.get(label)
        if there is not None:
            return Verdict(not there.is_waiting)
        self._refresh_budgets()
        name, need = _model_of(label), self._need(label, request, device)
        self._queue.on_read(name)
        self._meter.set_file_bytes(label, request.weight_bytes)
        self._known_bytes[name] = sum(need.values())
        reason = self.table.rejection_reason(name, need)
        if reason and not self.table.may_fit_later(name, need):
            return Verdict(is_granted=False, rejection_reason=reason)
        if reason:
            self._refused[name] = ResourceExhausted(reason, retry_after=_RETRY_AFTER_S)
        if reason or (not self._is_charged(name) and not self._find_owner(name)):
            self._wake()
            return Verdict(is_granted=False)
        self.table.request(label, name, need)
        is_granted = self.table.try_grant(label, self._clock())
        self._wake()
        return Verdict(is_granted)

    def restore(self, label: str, request: ResourceRequest, device: str) -> None:
        """Reserve the memory of a generation that an earlier daemon has loaded."""
        self._meter.set_file_bytes(label, request.weight_bytes)
        self.table.restore(label, _model_of(label), self._need(label, request, device), self._clock())

    def on_serving(self, label: str) -> None:
        """Record that a generation serves requests, and schedule the measurement of its memory."""
        now = self._clock()
        self.table.on_loaded(label, now)
        if self._meter.on_serving(label, now):
            self._wake()

    def on_leaving(self, label: str) -> None:
        """Record that a generation is shutting down: its processes are exiting."""
        self.table.on_release(label)

    def on_ended(self, label: str) -> None:
        """Release the memory of a generation whose processes have all exited."""
        self.table.on_ended(label, self._clock())
        self._meter.forget(label)
        self._wake()

    # --- from models --------------------------------------------------------------------------------------------

    def on_changed(self, model: ServedModel) -> None:
        """Handle a change of a model, which may have become loaded, unloaded or failed."""
        if model.readiness.has_failed or model.loading.is_unloaded:
            self._queue.on_read(model.name)
        if (
            self._queue
            or model.name in self._load_waiters
            or model.name in self._pending_unloads
            or model.loading.is_unloaded
        ):
            self._wake()

    # --- the timer ----------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Perform the loads, unloads and measurements that are due, and set the timer for the next ones."""
        self._finish_unloads(now)
        if self._limits.max_model_bytes or self._limits.tenant_limits:
            for label, nbytes in self._meter.run(self.reservations, now):
                self.table.on_measured(label, {HOST: nbytes}, now)
        for label, card, nbytes in observed_excess(self.reservations, self._devices):
            self.table.on_measured(label, {card: nbytes}, now)
        self._refresh_budgets()
        self._start_queued()
        self._cancel_unwanted(now)
        self._perform(self.table.plan(now), now)
        self._notify_load_waiters(now)
        pending = now + _DRAIN_INTERVAL_S if self._pending_unloads else _NEVER
        waiting = now + _RETRY_AFTER_S if self.reservations.waiting_count else _NEVER
        measuring = self._meter.next_event_at if self._limits.max_model_bytes or self._limits.tenant_limits else _NEVER
        self.timer.set(min(self.table.next_event_at, pending, waiting, measuring))

    # --- private ------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self.timer.set_no_later_than(0.0)

    def _residence(self, name: str) -> Residence:
        model = self._find_model(name)
        if model is None:
            return Residence()
        return Residence(
            is_pinned=not model.config.is_on_demand,
            idle_unload_s=model.config.idle_unload,
            is_idle=model.loading.is_evictable and model.successor is None,
            last_used_at=model.loading.last_used_at,
            owner=model.loading.owner,
        )

    def _refresh_budgets(self) -> None:
        """Compute the budgets anew from the limits and the capacities of the cards.

        The capacity of a card is unknown until the card is first used.
        """
        configured = self._limits
        capacities = {HOST: configured.max_model_bytes} if configured.max_model_bytes else {}
        for device in self._devices.values():
            if not is_cpu(device.name) and device.capacity_bytes is not None:
                # Models that load at the start reserve memory only in the card's `DeviceBudget`, not in `reservations`.
                # Subtract it here: the rest is for the other models.
                others = sum(
                    each.total_bytes
                    for label, each in device.reserved.items()
                    if self._residence(_model_of(label)).is_pinned
                )
                capacities[device.name] = max(0, device.capacity_bytes - others)
        self.reservations.budgets = Budgets(
            capacities,
            configured.tenant_limits,
            configured.weights,
            configured.min_resident_s,
            configured.max_loading,
        )

    def _need(self, label: str, request: ResourceRequest, device: str) -> MemoryNeed:
        model = _model_of(label)
        if not is_cpu(device):
            # Models that load at the start need nothing here: only the card's `DeviceBudget` limits them.
            if self._residence(model).is_pinned:
                return {}
            capacity = self.reservations.budgets.capacities.get(device)
            return {device: card_need_bytes(request, self._devices.get(device), capacity)}
        known = self.needs.find(model)
        if known is not None and known.file_bytes == request.weight_bytes:
            return {HOST: known.nbytes}
        return {HOST: estimate_bytes(request)}

    def _check_load(self, model: ServedModel, tenant: str) -> None:
        owners = [*self._queue.tenants, *(each.owner for each in self.reservations if each.is_waiting)]
        max_queue = self._limits.max_load_queue
        # One tenant may have at most half of the places in the load queue.
        if len(owners) >= max_queue or (tenant and owners.count(tenant) >= max(1, max_queue // 2)):
            text = f"{model.name} cannot be loaded now: {plural(len(owners), 'model')} wait for memory (max_load_queue)"
            raise ResourceExhausted(text, retry_after=_RETRY_AFTER_S)
        nbytes, limit = self._known_bytes.get(model.name), self._limits.tenant_limits.get(tenant)
        if nbytes is not None and limit is not None and nbytes > limit:
            raise _tenant_refusal(model.name, nbytes, limit)

    def _begin_load(self, model: ServedModel, owner: str, reason: str) -> None:
        model.loading.owner = owner
        _log.info("%s: loading, %s", model.name, reason, extra=subject_extra(model.name))
        model.loading.load(self._clock())

    def _perform(self, actions: Iterable[Grant | Unload], now: float) -> None:
        for action in actions:
            name = action.model if isinstance(action, Unload) else _model_of(action.label)
            model = self._find_model(name)
            if model is None:
                continue
            if isinstance(action, Grant):
                model.deployments.reconcile(now)
            elif model.loading.is_evictable:
                _log.info("%s: unloading: %s", name, action.reason, extra=subject_extra(name))
                entry = audit.AuditEntry("unload", audit.DAEMON, model.loading.owner, name)
                audit.write(entry, audit.OK, action.reason)
                model.loading.unload(now)

    def _finish_unloads(self, now: float) -> None:
        for name, pending in list(self._pending_unloads.items()):
            model = self._find_model(name)
            if model is None or model.is_draining or model.loading.is_unloaded:
                if model is None or model.is_draining or model.deployments.is_gone:
                    del self._pending_unloads[name]
                    pending.on_done(None)
            elif model.successor is not None:
                continue  # wait: a reload is replacing the model, and its successor will be unloaded
            elif model.dispatcher.is_idle or now >= pending.deadline:
                _log.info("%s: unloading: %s", name, _BY_OPERATOR, extra=subject_extra(name))
                model.loading.unload(now, forget_snapshot=True)

    def _start_queued(self, just_wanted: str = "") -> None:
        for name, tenant in self._queue.take():
            model = self._find_model(name)
            if model is None or not model.loading.is_unloaded or not (name == just_wanted or _is_wanted(model)):
                continue
            audit.write(audit.AuditEntry("load", audit.DAEMON, tenant, name), audit.OK, "on demand")
            self._queue.on_starting(name)
            self._begin_load(model, tenant, f"requested by tenant {tenant}")

    def _cancel_unwanted(self, now: float) -> None:
        """Unload waiting models that no request needs any more, and models that exceed each waiting tenant's budget."""
        for each in list(self.reservations):
            model = self._find_model(each.model) if each.is_waiting else None
            if (
                model is not None
                and model.config.is_on_demand
                and each.model not in self._load_waiters
                and model.loading.is_evictable
                and not _is_wanted(model)
            ):
                _log.info("%s: not loaded: no request waits for it any more", each.model)
                model.loading.unload(now)
        for name in list(self._refused):
            model, error = self._find_model(name), self._refused.pop(name)
            if model is not None and not model.loading.is_unloaded and not model.is_draining:
                model.dispatcher.fail_waiting(error)
                for on_done in self._load_waiters.pop(name, []):
                    on_done(error)
                model.loading.unload(now)

    def _is_charged(self, name: str) -> bool:
        """Return whether a tenant is charged for a generation of the model, and so also for its new generations."""
        return any(each.model == name and each.is_reserved for each in self.reservations)

    def _find_owner(self, name: str) -> bool:
        """Charge a model to a waiting tenant whose budget can hold it; return whether there is such a tenant."""
        model = self._find_model(name)
        if model is None:
            return True
        nbytes = self._known_bytes[name]
        waiting = [each.name for each in model.dispatcher.queued_by_tenant]
        for tenant in [model.loading.owner, *waiting]:
            if nbytes <= self._limits.tenant_limits.get(tenant, nbytes):
                model.loading.owner = tenant
                return True
        self._refused[name] = _tenant_refusal(name, nbytes, self._limits.tenant_limits[model.loading.owner])
        return False

    def _notify_load_waiters(self, now: float) -> None:
        for name in list(self._load_waiters):
            model = self._find_model(name)
            if model is None:
                error: RequestError | None = FailedPrecondition(f"{name} was removed from the configuration")
            elif model.readiness.has_failed or model.readiness.is_complete or model.loading.is_unloaded:
                unavailable = model.readiness.unavailable if not model.loading.is_unloaded else None
                error = None if unavailable is None else unavailable.to_error()
            else:
                continue
            for on_done in self._load_waiters.pop(name):
                on_done(error)


def _is_wanted(model: ServedModel) -> bool:
    """Return whether the model has requests that have not ended, or clients that wait for its metadata."""
    return not model.dispatcher.is_idle or model.dispatcher.metadata.has_waiting


def _tenant_refusal(model: str, nbytes: int, limit: int) -> ResourceExhausted:
    budget = f"max_model_bytes of this tenant is {format_mib(limit)}"
    return ResourceExhausted(f"{model} needs {format_mib(nbytes)}, but {budget}")


def _model_of(label: str) -> str:
    """Return the name of the model from the label of its generation."""
    return label.rpartition(".")[0]
