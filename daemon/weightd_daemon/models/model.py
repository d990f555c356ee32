"""One model of the configuration: its requests, its versions, and the deployments that serve it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from weightd_common.safe_open import Grant
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.restarts import NEVER, LoadBackoff
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.generations.states import advance
from weightd_daemon.models.deployment_set import DeploymentSet
from weightd_daemon.models.interfaces import ClientNotifier, ProcessManager
from weightd_daemon.models.persisted import ModelRecord
from weightd_daemon.models.readiness import MODEL_PHASE_TRANSITIONS, ModelPhase, ModelPhaseEvent, Readiness
from weightd_daemon.models.rollout import Rollouts
from weightd_daemon.models.versions import IdSequence, ModelVersions
from weightd_daemon.platform.event_loop import Timer
from weightd_daemon.processes.events import Snapshot
from weightd_daemon.scheduling.dispatcher import Dispatcher, SharedScheduling
from weightd_protocol.errors import Unavailable

_log = logging.getLogger("weightd")


class ServedModel:
    """Serves one model from one generation on each of its devices.

    Args:
        name: of the model.
        config: of the model.
        process_manager: the processes.
        client_notifier: sends its replies.
        ids: of its generations and sources.
        shared_scheduling: what its dispatcher has in common with others.
        find_deployments: returns its deployments, its own or those that it shares with other models.

    Attributes:
        dispatcher: where its requests are.
        versions: what it loads.
        deployments: one for each device, but one for all sets of cores that have one copy of the weights, and one for
            each group of ranks.
        readiness: how it stands.
        note: what went wrong with the last change of the configuration.
        successor: what loads to replace it, after such a change.
        timer: when `tick` is due.
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
        self._phase = ModelPhase.OPEN
        self._load_backoff = LoadBackoff()

    # --- from clients -------------------------------------------------------------------------------------------

    def update(  # noqa: PLR0913
        self, client: bytes, request_id: str, now: float, *, path: str, weights: str, rollback: bool, grant: Grant
    ) -> None:
        """Load what is at `path` beside what serves, and let it take over; the client is told how that ends.

        Args:
            client: who asked.
            request_id: the id of the question.
            now: the clock.
            path: of the new model, "" for the one that serves.
            weights: of arrays to load over the model's weights, or "".
            rollback: go back to what served before the last update instead.
            grant: the right by which the client names these paths.

        Raises:
            RequestError: it is refused; nothing has changed.
        """
        self._rollouts.check_alone()
        unavailable = self.readiness.unavailable
        if unavailable is not None and not self.may_retry:
            raise unavailable.to_error()
        self._rollouts.start(client, request_id, now, path=path, weights=weights, rollback=rollback, grant=grant)
        self.deployments.reconcile(now)

    # --- from the daemon ----------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Begin to load; models of a shared process do once all of them have started."""
        self.deployments.start(now)

    def resume(self, record: ModelRecord, now: float) -> None:
        """Begin with what a daemon before this one has loaded; load what is not there."""
        self.versions.restore(record.source, record.previous, record.sources)
        self.deployments.resume(record.generations, now)

    def record(self) -> ModelRecord | None:
        """Return what the next daemon has to know to `resume` it; None if it has to load it anew."""
        if self.is_draining or self.config.group is not None:
            return None
        source, sources = self.versions.current.number, self.versions.records()
        resumable = [each for each in self.deployments.records() if each.source == source]
        if not resumable or source not in [each.number for each in sources]:
            return None
        previous, last_ids = sum(each.number for each in sources[1:]), self.versions.last_ids
        return ModelRecord(self.name, self.config, source, previous, last_ids, tuple(sources), tuple(resumable))

    def on_snapshot_taken(self, source: ModelSource, snapshot: Snapshot, now: float) -> None:
        """The snapshot of a source exists."""
        self.versions.snapshots.on_taken(source, snapshot)
        self.deployments.on_snapshot_taken(now)

    def on_snapshot_failed(self, source: ModelSource, cause: str, now: float, *, is_transient: bool = False) -> None:
        """There is no snapshot of a source; `is_transient`: the cause may go away by itself."""
        self.versions.snapshots.on_failed(source)
        cause = cause if self.config.group is None else f"{self.name}: {cause}"
        self.deployments.on_snapshot_failed(source, cause, now, is_transient=is_transient)

    def retry(self, now: float) -> None:
        """Load again what has failed, from the files as they are now."""
        if self.may_retry:
            self.deployments.retry(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self.dispatcher.expire(now, self.readiness.explain_error)
        for source in self.versions.snapshots.take_overdue(now):
            cause = f"no snapshot within load_timeout, {self.config.load_timeout:g} s"
            self.on_snapshot_failed(source, cause, now, is_transient=True)
        self.deployments.tick(now)
        if now >= self._load_backoff.due_at:
            self.retry(now)
        self.dispatcher.dispatch_gathered(now)
        self._set_timer()

    def drain(self, now: float, *, timeout_s: float = 0.0, is_replaced: bool = False) -> None:
        """Take no new work and wind down.

        Args:
            now: the clock.
            timeout_s: how many seconds more what runs may take.
            is_replaced: another model of the name adopts what waits, and what comes to wait because a worker dies; else
                that is given up.
        """
        self._phase = advance(
            MODEL_PHASE_TRANSITIONS, self._phase, ModelPhaseEvent.REPLACE if is_replaced else ModelPhaseEvent.CLOSE
        )
        if not is_replaced:
            self.dispatcher.fail_waiting(Unavailable("weightd is stopping"))
        self.versions.snapshots.cancel_pending()
        self.deployments.drain(now, timeout_s=timeout_s)

    def reconfigure(self, config: ModelConfig) -> bool:
        """Do as another configuration says, if all that is loaded is right for it; return whether that is so."""
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
        """Take over what waits at the model that this one replaces."""
        self.dispatcher.adopt_requests(old.dispatcher, now)
        self.deployments.reconcile(now)

    # --- from its deployments -----------------------------------------------------------------------------------

    def wake(self) -> None:
        """A device has room again that one of the deployments waits for."""
        self.timer.set_no_later_than(0.0)

    def on_reconciled(self, now: float) -> None:
        """Serve what the deployments now allow, and refuse requests, those that wait included, if that is nothing."""
        if self._rollouts.reconcile(now):
            self.deployments.perform_actions(now)
        if self.dispatcher.signature.built is None and (built := self.readiness.built) is not None:
            self.dispatcher.on_built(built)
        self._plan_retry(now)
        unavailable = self.readiness.unavailable
        self.dispatcher.set_unavailable(
            None if unavailable is None else unavailable.to_error, fails_waiting=self._phase is not ModelPhase.REPLACED
        )
        self.dispatcher.dispatch(now)
        self._set_timer()

    # --- what it tells ------------------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        """Whether it was told to wind down."""
        return self._phase is not ModelPhase.OPEN

    @property
    def is_gone(self) -> bool:
        """Whether nothing is left of it after `drain`."""
        return self.is_draining and not self.dispatcher.has_pending_failures and self.deployments.is_gone

    @property
    def is_updating(self) -> bool:
        """Whether an update is under way."""
        return self._rollouts.is_in_progress

    @property
    def generations(self) -> list[GenerationBase]:
        """Every generation of which something is left; where nothing is, the last one that was."""
        generations = self.deployments.generations
        for deployment in self.deployments:
            if deployment.main_generation not in generations:
                generations.append(deployment.main_generation)
        return generations + (self.successor.generations if self.successor is not None else [])

    @property
    def may_retry(self) -> bool:
        """Whether `retry` would load something."""
        return self.readiness.has_failures and not self.is_updating and not self.is_draining

    def retry_delay_s(self, now: float) -> float | None:
        """Return the seconds until what has failed is loaded again by itself; None if it is not."""
        due_at = self._load_backoff.due_at
        return max(0.0, due_at - now) if self.may_retry and due_at != NEVER else None

    # --- within -------------------------------------------------------------------------------------------------

    def _plan_retry(self, now: float) -> None:
        """Plan the next attempt to load what has failed of a cause that may go away by itself."""
        readiness, backoff = self.readiness, self._load_backoff
        if readiness.is_serving_everywhere:
            backoff.on_success()
        elif self.is_updating:
            pass  # should that fail, the next attempt is due as before
        elif not readiness.has_failures:
            backoff.cancel()
        elif backoff.due_at == NEVER and readiness.has_transient_failures:
            backoff.on_failure(now)
            extra = readiness.main_generation.log_extra()
            _log.warning("%s: next attempt to load it in %g s", self.name, backoff.due_at - now, extra=extra)

    def _set_timer(self) -> None:
        """Have `tick` called when something is due; what is due sooner after this tells the timer itself."""
        retry_at = self._load_backoff.due_at if self.may_retry else NEVER
        due_at = min(self.versions.snapshots.next_event_at, retry_at, self.deployments.next_tick_at)
        self.timer.set(min(due_at, self.dispatcher.next_event_at))
