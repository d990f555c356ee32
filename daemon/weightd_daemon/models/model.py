"""A configured model: its requests, its versions and the deployments that serve it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Protocol

from weightd_common.safe_open import Grant
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.restarts import NEVER
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.models.deployment_set import DeploymentSet
from weightd_daemon.models.interfaces import ClientNotifier, ProcessManager
from weightd_daemon.models.persisted import ModelRecord
from weightd_daemon.models.readiness import Readiness
from weightd_daemon.models.residency.model_loading import ModelLoading, OnDemandLoader
from weightd_daemon.models.rollout import Rollouts
from weightd_daemon.models.scaling.workers import ScaledWorkers
from weightd_daemon.models.versions import IdSequence, ModelVersions
from weightd_daemon.platform.event_loop import Timer
from weightd_daemon.processes.events import Snapshot
from weightd_daemon.scheduling.dispatcher import Dispatcher, SharedScheduling
from weightd_protocol.errors import Unavailable

_log = logging.getLogger("weightd")


class ModelObserver(OnDemandLoader, Protocol):
    """Loads and unloads models, and is notified of their changes."""

    def on_changed(self, model: ServedModel) -> None:
        """Handle a change of a model, which may have become loaded, unloaded or failed."""


class ServedModel:
    """A model that is served by one generation on each of its devices.

    Args:
        name: the name of the model.
        config: the configuration of the model.
        process_manager: starts and ends the model's processes.
        client_notifier: the objects that send the model's replies to clients.
        ids: assigns the numbers of the model's generations and sources.
        shared_scheduling: the objects that all dispatchers share.
        find_deployments: returns the deployments of the model; the models of a group get the same ones.
        observer: loads the model on demand, and is notified of each change; None: the model stays loaded.

    Attributes:
        dispatcher: the dispatcher of the model's requests.
        versions: the current and the previous source of the model.
        deployments: one deployment for each copy of the weights: on a device, on the sets of cores that share the copy,
            or on a rank group.
        readiness: whether the model can serve requests, and why not.
        loading: loads and unloads the model.
        workers: changes the number of workers with the load, if the configuration gives a range.
        note: why the last changed configuration of the model is not in force; "" if it is.
        successor: the model that is loading to replace this one after a change of the configuration, or None.
        timer: calls `tick` when it is due.
    """

    def __init__(  # noqa: PLR0913
        self,
        name: str,
        config: ModelConfig,
        *,
        process_manager: ProcessManager,
        client_notifier: ClientNotifier,
        ids: IdSequence,
        shared_scheduling: SharedScheduling,
        find_deployments: Callable[[ServedModel], DeploymentSet],
        observer: ModelObserver | None = None,
    ) -> None:
        self.name = name
        self.note = ""
        self.successor: ServedModel | None = None
        self.config = config
        self.timer = Timer(self.tick)
        self.dispatcher = Dispatcher(
            name,
            config,
            client_notifier.response_sink,
            process_manager.messenger.send_order,
            self.timer.set_no_later_than,
            shared_scheduling,
        )
        self.versions = ModelVersions(
            config.path,
            ids,
            functools.partial(process_manager.snapshots.take_snapshot, self, name, config),
            functools.partial(process_manager.snapshots.remove_snapshot, name),
        )
        self.deployments = find_deployments(self)
        index = 0 if config.group is None else config.group.models.index(name)
        self.readiness = Readiness(name, self.deployments, self.dispatcher.processes, index)
        self._rollouts = Rollouts(
            name, config, tuple(self.deployments), self.versions, self.dispatcher, client_notifier.update_sink
        )
        self.loading = ModelLoading(
            name,
            config,
            deployments=self.deployments,
            versions=self.versions,
            rollouts=self._rollouts,
            dispatcher=self.dispatcher,
            readiness=self.readiness,
            loader=observer,
        )
        self.workers = ScaledWorkers(name, config, self.dispatcher, self.deployments)
        self._observer = observer

    # --- from clients -------------------------------------------------------------------------------------------

    def update(  # noqa: PLR0913
        self, client: bytes, request_id: str, now: float, *, path: str, weights: str, rollback: bool, grant: Grant
    ) -> None:
        """Load the model at `path` beside the serving generation, and let the loaded model take over.

        The client receives the result once the update has succeeded or failed.

        Args:
            client: the client that requested the update.
            request_id: the id of the client's request.
            now: the time in monotonic seconds.
            path: the path of the new model file; "" for the path of the current source.
            weights: the path of a file of arrays that replace weights of the model; "" for the weights in the model
                file.
            rollback: whether to load the source from before the last update instead of `path`.
            grant: the file permissions of the client that named these paths.

        Raises:
            RequestError: the update is rejected; nothing has changed.
        """
        self._rollouts.check_alone()
        unavailable = self.loading.unavailable
        if unavailable is not None and not self.loading.may_retry:
            raise unavailable.to_error()
        self._rollouts.start(client, request_id, now, path=path, weights=weights, rollback=rollback, grant=grant)
        self.deployments.reconcile(now)

    # --- called by the daemon -----------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Start to load the model; the models of a group load once all of them have been started."""
        self.deployments.start(now)

    def resume(self, record: ModelRecord, now: float) -> None:
        """Take over the generations of this record, which the previous daemon has loaded; load the missing ones."""
        self.versions.restore(record.source, record.previous, record.sources)
        self.loading.owner = record.owner
        self.deployments.resume(record.generations, now)

    def record(self) -> ModelRecord | None:
        """Return the record from which the next daemon can `resume` this model; None if it must load the model."""
        if self.is_draining or self.config.group is not None:
            return None
        source, sources = self.versions.current.number, self.versions.records()
        resumable = [each for each in self.deployments.records() if each.source == source]
        if not resumable or source not in [each.number for each in sources]:
            return None
        previous, last_ids = sum(each.number for each in sources[1:]), self.versions.last_ids
        owner = self.loading.owner
        return ModelRecord(self.name, self.config, source, previous, last_ids, tuple(sources), tuple(resumable), owner)

    def on_snapshot_taken(self, source: ModelSource, snapshot: Snapshot, now: float) -> None:
        """Record the snapshot of a source, and let the generations that wait for it continue."""
        self.versions.snapshots.on_taken(source, snapshot)
        self.deployments.on_snapshot_taken(now)

    def on_snapshot_failed(self, source: ModelSource, cause: str, now: float, *, is_transient: bool = False) -> None:
        """Fail the generations that wait for the snapshot of this source.

        `is_transient` tells whether the cause may disappear without an operator.
        """
        self.versions.snapshots.on_failed(source)
        cause = cause if self.config.group is None else f"{self.name}: {cause}"
        self.deployments.on_snapshot_failed(source, cause, now, is_transient=is_transient)

    def tick(self, now: float) -> None:
        """Perform everything that is due at the time `now`, and set the timer."""
        explain_error = functools.partial(self.readiness.explain_error, is_on_demand=self.config.is_on_demand)
        self.dispatcher.expire(now, explain_error)
        for source in self.versions.snapshots.take_overdue(now):
            cause = f"no snapshot within load_timeout ({self.config.load_timeout:g} s)"
            self.on_snapshot_failed(source, cause, now, is_transient=True)
        self.deployments.tick(now)
        if now >= self.loading.backoff.due_at:
            self.loading.retry(now)
        self.dispatcher.dispatch_gathered(now)
        self.workers.tick(now)
        self._set_timer(now)

    def drain(self, now: float, *, timeout_s: float = 0.0, is_replaced: bool = False) -> None:
        """Accept no more requests and shut down.

        Args:
            now: the time in monotonic seconds.
            timeout_s: the seconds that running batches may still take.
            is_replaced: whether another model of the same name takes over the queued requests; otherwise they fail. If
                a worker exits later, its requests return to the queue and are taken over, too.
        """
        self.loading.close(is_replaced=is_replaced)
        if not is_replaced:
            self.dispatcher.fail_waiting(Unavailable("weightd is stopping"))
        self.versions.snapshots.cancel_pending()
        self.deployments.drain(now, timeout_s=timeout_s)

    def reconfigure(self, config: ModelConfig) -> bool:
        """Apply another configuration without a load, and return True; return False if a load is necessary."""
        if (
            config.group is not None
            or not config.has_same_load(self.config)
            or not self.deployments.covers_row_test(config)
        ):
            return False
        self.config = config
        self.dispatcher.reconfigure(config)
        self.deployments.on_reconfigured()
        return True

    def adopt_requests(self, old: ServedModel, now: float) -> None:
        """Take over the queued requests of the model that this one replaces."""
        self.dispatcher.adopt_requests(old.dispatcher, now)
        self.deployments.reconcile(now)

    # --- called by the deployments ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Schedule `tick` at once, because resources were released for which a generation of the model waits."""
        self.timer.set_no_later_than(0.0)

    def on_reconciled(self, now: float) -> None:
        """React to the new state of the deployments: dispatch queued requests, or fail them if no device can serve."""
        if self._rollouts.reconcile(now):
            self.deployments.perform_actions(now)
        if self.dispatcher.signature.built is None and (built := self.readiness.built) is not None:
            self.dispatcher.on_built(built)
        self.loading.plan_retry(now)
        self.loading.apply_availability()
        self.dispatcher.dispatch(now)
        self._set_timer(now)
        if self._observer is not None:
            self._observer.on_changed(self)

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        """Whether the model is shutting down."""
        return self.loading.is_draining

    @property
    def is_gone(self) -> bool:
        """Whether the shutdown that `drain` began is complete."""
        return self.is_draining and not self.dispatcher.has_pending_failures and self.deployments.is_gone

    @property
    def is_updating(self) -> bool:
        """Whether an update is in progress."""
        return self._rollouts.is_in_progress

    @property
    def generations(self) -> list[GenerationBase]:
        """Every generation that still has processes or files, and the last one of each deployment that is not UNLOADED.

        The generations of the successor are included.
        """
        generations = self.deployments.generations
        for deployment in self.deployments:
            last = deployment.last_generation
            if last is not None and last not in generations and not deployment.is_unloaded:
                generations.append(last)
        return generations + (self.successor.generations if self.successor is not None else [])

    # --- private ------------------------------------------------------------------------------------------------

    def _set_timer(self, now: float) -> None:
        """Schedule `tick` for the next event that is planned now.

        Code that plans an earlier event after this call must set the timer itself.
        """
        self.workers.observe(now)
        retry_at = self.loading.backoff.due_at if self.loading.may_retry else NEVER
        due_at = min(
            self.versions.snapshots.next_event_at,
            retry_at,
            self.deployments.next_tick_at,
            self.workers.next_event_at,
        )
        self.timer.set(min(due_at, self.dispatcher.next_event_at))
