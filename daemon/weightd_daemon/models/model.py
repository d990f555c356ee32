"""One model of the configuration: what clients and the server ask of it, and what follows from that."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

from weightd_common.devices import is_cpu
from weightd_common.safe_open import Grant
from weightd_daemon.config.model import ModelConfig, ReplacementPolicy
from weightd_daemon.counters import ProcessCounters
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.persisted import GenerationRecord, record_generation
from weightd_daemon.generations.rank_group import RankGroup
from weightd_daemon.generations.restarts import NEVER, LoadBackoff
from weightd_daemon.generations.shared_weights import Generation
from weightd_daemon.generations.spec import GenerationSpec, ModelSource, RowTestSpec
from weightd_daemon.generations.states import GenerationState, advance
from weightd_daemon.models import readiness
from weightd_daemon.models.deployment import Deployment
from weightd_daemon.models.deployment_state import ReplacedDeployment, placements, rollout_policy
from weightd_daemon.models.interfaces import ClientNotifier, ProcessManager
from weightd_daemon.models.load_limit import LoadLimiter
from weightd_daemon.models.persisted import ModelRecord
from weightd_daemon.models.placement import DeviceBudget, Placement
from weightd_daemon.models.process_events import ProcessEvents
from weightd_daemon.models.process_use import OneModelUse
from weightd_daemon.models.readiness import MODEL_PHASE_TRANSITIONS, ModelPhase, ModelPhaseEvent, ModelUnavailable
from weightd_daemon.models.rollout import Rollouts
from weightd_daemon.models.versions import IdSequence, ModelVersions
from weightd_daemon.platform.event_loop import Timer
from weightd_daemon.processes.events import Snapshot
from weightd_daemon.scheduling.dispatcher import Dispatcher, SharedScheduling
from weightd_protocol.errors import Unavailable

_log = logging.getLogger("weightd")


class ServedModel:
    """Serves one model from one generation on each of its devices.

    Attributes:
        dispatcher: where its requests are.
        process_events: what its processes say.
        deployments: one for each device, but one for all sets of cores that have one copy of the weights, and one for
            each group of ranks.
        note: what went wrong with the last change of the configuration.
        successor: what loads to replace it, after such a change.
        timer: when `tick` is due.
        load_limiter: bounds how many workers load at once, of all models; None: they attach one after another.
    """

    load_limiter: LoadLimiter | None = None

    def __init__(  # noqa: PLR0913
        self,
        name: str,
        config: ModelConfig,
        devices: Mapping[str, DeviceBudget],
        process_manager: ProcessManager,
        client_notifier: ClientNotifier,
        ids: IdSequence | None = None,
        *,
        shared_scheduling: SharedScheduling | None = None,
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
        self.deployments = [
            Deployment(placement, terms, rollout_policy(config), make_generation=self._make_generation, wake=self._wake)
            for placement, terms in placements(config, devices)
        ]
        self._process_manager = process_manager
        self._ids = ids or IdSequence()
        self._versions = ModelVersions(
            config.path,
            self._ids,
            functools.partial(process_manager.snapshots.take_snapshot, self, name, config),
            functools.partial(process_manager.snapshots.remove_snapshot, name),
        )
        self._process_use = OneModelUse(config, self.dispatcher, self._versions.snapshots)
        self.process_events = ProcessEvents(process_manager, self._process_use, self._reconcile)
        self._rollouts = Rollouts(
            name, config, self.deployments, self._versions, self.dispatcher, client_notifier.update_sink
        )
        self._phase = ModelPhase.OPEN
        self._unavailable: ModelUnavailable | None = None
        # Of what its devices and snapshots wait for.
        self._next_tick_at = float("inf")
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
        if self._unavailable is not None and not self.may_retry:
            raise self._unavailable.to_error()
        self._rollouts.start(client, request_id, now, path=path, weights=weights, rollback=rollback, grant=grant)
        self._reconcile(now)

    # --- from the server ----------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Begin to load."""
        for deployment in self.deployments:
            deployment.start(self._versions.current)
        self._reconcile(now)

    def resume(self, record: ModelRecord, now: float) -> None:
        """Begin with what a daemon before this one has loaded; load what is not there."""
        sources = self._versions.restore(record.source, record.previous, record.sources)
        loaded = list(record.generations)
        for deployment in self.deployments:
            # Several groups of ranks on the CPU are on one device.
            generation_record = next((each for each in loaded if each.device == deployment.placement.name), None)
            loaded = [each for each in loaded if each is not generation_record]
            if generation_record is None or not self._resume_generation(deployment, sources, generation_record, now):
                deployment.start(self._versions.current)
        self._reconcile(now)

    def record(self) -> ModelRecord | None:
        """Return what the next daemon has to know to `resume` it; None if it has to load it anew."""
        source, sources = self._versions.current.number, self._versions.records()
        by_device = [(each.placement, each.serving or each.loading) for each in self.deployments]
        generations = [
            record_generation(each, self._process_manager.storage.seal_record(each), device.port(each.label))
            for device, each in by_device
            if each is not None
        ]
        resumable = [each for each in generations if each is not None and each.source == source]
        if self.is_draining or not resumable or source not in [each.number for each in sources]:
            return None
        previous = sum(each.number for each in sources[1:])
        last_ids = self._ids.last_ids
        return ModelRecord(self.name, self.config, source, previous, last_ids, tuple(sources), tuple(resumable))

    def on_snapshot_taken(self, source: ModelSource, snapshot: Snapshot, now: float) -> None:
        """The snapshot of a source exists."""
        self._versions.snapshots.on_taken(source, snapshot)
        self._report_snapshots(now)
        self._reconcile(now)

    def on_snapshot_failed(self, source: ModelSource, cause: str, now: float, *, is_transient: bool = False) -> None:
        """There is no snapshot of a source; `is_transient`: the cause may go away by itself."""
        self._versions.snapshots.on_failed(source)
        for deployment in self.deployments:
            deployment.on_snapshot_failed(source, cause, now, is_transient=is_transient)
        self._reconcile(now)

    def retry(self, now: float) -> None:
        """Load again what has failed, from the files as they are now."""
        if not self.may_retry:
            return
        source = self._versions.renew_current() if self.has_failed else self._versions.current
        for deployment in self.deployments:
            if deployment.has_failed:
                deployment.retry(source)
        self._reconcile(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self.dispatcher.expire(now, lambda error: readiness.explain_error(error, self.name, self.deployments))
        for source in self._versions.snapshots.take_overdue(now):
            cause = f"no snapshot within load_timeout, {self.config.load_timeout:g} s"
            self.on_snapshot_failed(source, cause, now, is_transient=True)
        self.process_events.run_watchdog(
            [(each, each.serving) for each in self.deployments if each.serving is not None], now
        )
        due_deployments = [deployment for deployment in self.deployments if now >= deployment.next_tick_at]
        for deployment in due_deployments:
            deployment.tick(now)
        if due_deployments:
            self._reconcile(now)
        if now >= self._load_backoff.due_at and self.may_retry:
            self.retry(now)
        self.dispatcher.dispatch_gathered(now)
        self._update_next_tick()

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
        self._versions.snapshots.cancel_pending()
        for deployment in self.deployments:
            deployment.drain(now, timeout_s=timeout_s)
        self._reconcile(now)

    def reconfigure(self, config: ModelConfig) -> bool:
        """Do as another configuration says, if all that is loaded is right for it; return whether that is so."""
        row_test = self.deployments[0].spec.row_test
        if not config.has_same_load(self.config) or not row_test.covers(RowTestSpec.from_config(config)):
            return False
        self.config = config
        self.dispatcher.reconfigure(config)
        self._process_use.reconfigure(config, [each.serving for each in self.deployments if each.serving is not None])
        self._process_manager.mark_changed()
        return True

    def mark_leaving(self) -> None:
        """It is served no more, and will be drained once it has answered what waits."""
        for deployment in self.deployments:
            deployment.mark_leaving()

    def set_predecessor(self, old: ServedModel) -> None:
        """It is to take the place of another model, and its room, where there is none for both."""
        if (
            old.config.ranks is None
            or self.config.ranks is None
            or self.config.policy == ReplacementPolicy.OVERLAP.value
        ):
            return
        predecessor = ReplacedDeployment(lambda: [each.label for each in old.generations], old.vacate)
        for deployment in self.deployments:
            deployment.admission.predecessor = predecessor

    def vacate(self, now: float) -> None:
        """The model that is to replace it needs its room: what serves leaves, and what comes waits."""
        for deployment in self.deployments:
            deployment.vacate(now)
        self._reconcile(now)

    def reinstate(self, now: float) -> None:
        """What was to replace it cannot: where it has made way it is loaded again."""
        for deployment in self.deployments:
            deployment.reinstate(now)
        self._reconcile(now)

    def remove_snapshots(self) -> None:
        """Remove what is left on the disk of a model that is gone."""
        self._versions.snapshots.drop_all()

    def adopt_requests(self, old: ServedModel, now: float) -> None:
        """Take over what waits at the model that this one replaces."""
        self.dispatcher.adopt_requests(old.dispatcher, now)
        self._reconcile(now)

    # --- what it tells ------------------------------------------------------------------------------------------

    @property
    def next_event_at(self) -> float:
        """Nothing is due before this, in monotonic seconds."""
        tick_at, event_at = self._next_tick_at, self.dispatcher.next_event_at
        return tick_at if tick_at < event_at else event_at

    @property
    def is_draining(self) -> bool:
        """Whether it was told to wind down."""
        return self._phase is not ModelPhase.OPEN

    @property
    def is_gone(self) -> bool:
        """Whether nothing is left of it after `drain`."""
        is_drained = self.is_draining and not self.dispatcher.has_pending_failures
        return is_drained and not self.process_events and not any(each.generations for each in self.deployments)

    @property
    def is_serving(self) -> bool:
        """Whether any device serves it."""
        return any(each.serving is not None for each in self.deployments)

    @property
    def may_serve_soon(self) -> bool:
        """Whether any device serves it, or will as soon as a worker of the daemon before this one is back.

        Or if that cannot be loaded for which it has made way.
        """
        is_reconnecting = any(
            generation.is_reconnecting for each in self.deployments for generation in each.generations
        )
        return self.is_serving or is_reconnecting or any(each.is_vacated for each in self.deployments)

    @property
    def is_complete(self) -> bool:
        """Whether each device serves it with all its workers, or has failed while another one does not."""
        return self.is_serving and all(
            each.has_failed or (each.serving is not None and each.serving.is_complete) for each in self.deployments
        )

    @property
    def source(self) -> ModelSource:
        """What it serves, or is to, if no update is under way."""
        return self._versions.current

    def snapshot_bytes(self, generation: GenerationBase) -> int | None:
        """Return of how many bytes the snapshot is that a generation loads; None while it is being taken."""
        snapshot = self._versions.snapshots.find(generation.source)
        return None if snapshot is None else snapshot.nbytes

    @property
    def is_updating(self) -> bool:
        """Whether an update is under way."""
        return self._rollouts.is_in_progress

    @property
    def generations(self) -> list[GenerationBase]:
        """Every generation of which something is left; where nothing is, the last one that was."""
        generations = [generation for deployment in self.deployments for generation in deployment.generations]
        for deployment in self.deployments:
            if deployment.main_generation not in generations:
                generations.append(deployment.main_generation)
        return generations + (self.successor.generations if self.successor is not None else [])

    @property
    def state(self) -> GenerationState:
        """How it stands: it serves if any device does, and has failed if all have."""
        if self.is_serving:
            return GenerationState.SERVING
        loading = [each for each in self.deployments if not each.has_failed]
        return (loading or self.deployments)[0].main_generation.state

    @property
    def has_failed(self) -> bool:
        """Whether no device serves it, or loads it."""
        return all(each.has_failed for each in self.deployments)

    @property
    def may_retry(self) -> bool:
        """Whether `retry` would load something."""
        return any(each.has_failed for each in self.deployments) and not self.is_updating and not self.is_draining

    def retry_delay_s(self, now: float) -> float | None:
        """Return the seconds until what has failed is loaded again by itself; None if it is not."""
        return (
            max(0.0, self._load_backoff.due_at - now) if self.may_retry and self._load_backoff.due_at != NEVER else None
        )

    @property
    def deaths(self) -> int:
        """Processes that ended, or had to be ended, without being asked to."""
        generations = (generation for deployment in self.deployments for generation in deployment.generations)
        return self.process_events.past_deaths + sum(generation.processes.deaths for generation in generations)

    def unready_reason(self, now: float) -> str:
        """Return why it is not ready to answer, or "" if it is: a worker has been heard of of late."""
        return readiness.unready_reason(self.name, self.deployments, self.dispatcher.processes, now)

    @property
    def main_generation(self) -> GenerationBase:
        """The generation that tells how it stands."""
        return readiness.main_deployment(self.deployments).main_generation

    # --- within -------------------------------------------------------------------------------------------------

    def _make_generation(self, placement: Placement, source: ModelSource, spec: GenerationSpec) -> GenerationBase:
        number = self._ids.next_generation()
        generation_type = Generation if spec.rank_group is None else RankGroup
        generation: GenerationBase = generation_type(
            f"{self.name}.{number}", spec, placement.name, source, number, ProcessCounters(self.dispatcher.counters)
        )
        self._limit_load(generation)
        return generation

    def _resume_generation(
        self, deployment: Deployment, sources: Mapping[int, ModelSource], record: GenerationRecord, now: float
    ) -> bool:
        generation = self.process_events.resume(
            f"{self.name}.{record.number}", deployment, sources[record.source], record, now
        )
        if generation is None:
            return False
        self._limit_load(generation)
        deployment.resume(generation, self._versions.snapshots[generation.source], now, record.port)
        return True

    def _limit_load(self, generation: GenerationBase) -> None:
        # On a card an attach may write what others compute on, and what it takes is told by what is free after it.
        if self.load_limiter is not None and is_cpu(generation.device):
            nbytes = functools.partial(self._snapshot_bytes_of, generation.source)
            self.load_limiter.limit(generation, nbytes, self.config.engine_spec.build_factor)

    def _snapshot_bytes_of(self, source: ModelSource) -> int:
        snapshot = self._versions.snapshots.find(source)
        return 0 if snapshot is None else snapshot.nbytes

    def _wake(self) -> None:
        """A device has room again that one of the deployments waits for."""
        self._next_tick_at = 0.0
        self.timer.set_no_later_than(0.0)

    def _reconcile(self, now: float) -> None:
        """After each event of a generation: do what it wants, and serve what it now allows."""
        self._process_manager.mark_changed()
        self._perform_all(now)
        if self._rollouts.reconcile(now):
            self._perform_all(now)
        if self.dispatcher.signature.built is None and (built := readiness.find_built(self.deployments)) is not None:
            self.dispatcher.on_built(built)
        self._plan_retry(now)
        self._update_availability()
        self.dispatcher.dispatch(now)
        self._update_next_tick()

    def _update_availability(self) -> None:
        """Have requests refused if nobody serves the model or loads it, those that wait included."""
        unavailable = self._unavailable = readiness.find_unavailable(self.name, self.deployments)
        self.dispatcher.set_unavailable(
            None if unavailable is None else unavailable.to_error, fails_waiting=self._phase is not ModelPhase.REPLACED
        )

    def _plan_retry(self, now: float) -> None:
        """Plan the next attempt to load what has failed of a cause that may go away by itself."""
        if all(each.serving is not None for each in self.deployments):
            self._load_backoff.on_success()
        elif self.is_updating:
            pass  # should that fail, the next attempt is due as before
        elif not any(each.has_failed for each in self.deployments):
            self._load_backoff.cancel()
        elif self._load_backoff.due_at == NEVER and any(each.is_transient for each in self.deployments):
            self._load_backoff.on_failure(now)
            extra = self.main_generation.log_extra()
            _log.warning("%s: next attempt to load it in %g s", self.name, self._load_backoff.due_at - now, extra=extra)

    def _perform_all(self, now: float) -> None:
        """Perform what is wanted, and what comes of it."""
        while True:
            actions = [(each, action) for each in self.deployments for action in each.take_actions()]
            if not actions:
                return
            for deployment, (generation, action) in actions:
                self.process_events.perform(deployment, generation, action, now)
            self._report_snapshots(now)

    def _report_snapshots(self, now: float) -> None:
        for source, snapshot in self._versions.snapshots.iter_ready():
            for deployment in self.deployments:
                selftest = self._versions.snapshots.selftest(source)
                deployment.on_snapshot_taken(source, snapshot, now, selftest)

    def _update_next_tick(self) -> None:
        due_at = self._versions.snapshots.next_event_at
        due_at = min(due_at, self._load_backoff.due_at) if self.may_retry else due_at
        self._next_tick_at = min(due_at, *(each.next_tick_at for each in self.deployments))
        # Whatever is due sooner after this tells the timer: the loop looks at that alone.
        self.timer.set(self.next_event_at)
