"""All deployments of one model or one model group, which load the same files and are reconciled together."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from weightd_common.devices import is_cpu
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.counters import ProcessCounters
from weightd_daemon.generations.base import GenerationBase, GenerationSetup, one_after_another
from weightd_daemon.generations.persisted import GenerationRecord, record_generation, resume_generation
from weightd_daemon.generations.rank_group import RankGroup
from weightd_daemon.generations.shared_weights import Generation
from weightd_daemon.generations.spec import GenerationSpec, ModelSource, RowTestSpec
from weightd_daemon.models.admission import Admission, ModelMemory
from weightd_daemon.models.deployment import Deployment
from weightd_daemon.models.deployment_state import (
    DeploymentEvent,
    DeploymentState,
    ReplacedDeployments,
    RolloutPolicy,
)
from weightd_daemon.models.interfaces import ProcessManager
from weightd_daemon.models.load_limit import LoadLimiter
from weightd_daemon.models.placement import Placement
from weightd_daemon.models.process_events import ProcessEvents
from weightd_daemon.models.process_use import ProcessUse
from weightd_daemon.models.versions import IdSequence


class DeploymentSet:
    """The deployments of one model or model group, one for each placement; performs the actions of their generations.

    Args:
        name: the name of the model or group, with which the labels of the generations begin.
        use: the models that the processes of the set serve.
        placements: for each deployment, its device or the cards of its rank group, and the configuration of its
            generations.
        rollout_policy: how one generation replaces another.
        process_manager: starts and ends the processes.
        ids: assigns the numbers of the generations.
        load_limiter: limits how many workers of all models attach at the same time; None: one worker of a generation at
            a time.
        predecessor: the deployments of the old model that this set's model replaces; they may be drained if both models
            do not fit. None: the set replaces no model.
        memory: reserves memory for the generations in the budgets; None: there are no budgets.

    Attributes:
        process_events: handles the messages and exits of the set's processes.
    """

    def __init__(  # noqa: PLR0913
        self,
        name: str,
        use: ProcessUse,
        *,
        placements: Sequence[tuple[Placement, GenerationSpec]],
        rollout_policy: RolloutPolicy,
        process_manager: ProcessManager,
        ids: IdSequence,
        load_limiter: LoadLimiter | None = None,
        predecessor: ReplacedDeployments | None = None,
        memory: ModelMemory | None = None,
    ) -> None:
        self._use = use
        self._process_manager = process_manager
        self._factory = _GenerationFactory(name, use, ids, load_limiter)
        self._started_count = 0
        self._leaving_models: set[str] = set()
        self.process_events = ProcessEvents(process_manager, use, self.reconcile)
        self._deployments = [
            Deployment(
                placement,
                spec,
                rollout_policy,
                self._factory.make,
                Admission(placement, rollout_policy, self._wake, predecessor, memory),
            )
            for placement, spec in placements
        ]

    def __iter__(self) -> Iterator[Deployment]:
        return iter(self._deployments)

    # --- called by the models -----------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Record that one more model of the set was started; load the set once all its models were started."""
        self._started_count += 1
        if self._started_count == self._use.model_count:
            for deployment in self._deployments:
                deployment.load(self._use.source)
        self.reconcile(now)

    def resume(self, records: Sequence[GenerationRecord], now: float) -> None:
        """Take over the recorded generations of the previous daemon; load each deployment that has none."""
        remaining = list(records)
        for deployment in self._deployments:
            # Several rank groups on the CPU have the same device name, so a used record is removed from the list.
            record = next((each for each in remaining if each.device == deployment.placement.name), None)
            if record is not None:
                remaining.remove(record)
            if record is None or not self._resume_generation(deployment, record, now):
                deployment.load(self._use.source)
        self.reconcile(now)

    def records(self) -> list[GenerationRecord]:
        """Return a record of each generation that the next daemon can `resume`."""
        by_placement = [(each.placement, each.serving or each.loading) for each in self._deployments]
        storage = self._process_manager.storage
        records = [
            record_generation(each, storage.seal_record(each), placement.port(each.label))
            for placement, each in by_placement
            if each is not None
        ]
        return [each for each in records if each is not None]

    def on_snapshot_taken(self, now: float) -> None:
        """Let the deployments that wait for a snapshot continue, because the snapshot of a model was taken."""
        self._report_snapshots()
        self.reconcile(now)

    def on_snapshot_failed(self, source: ModelSource, cause: str, now: float, *, is_transient: bool) -> None:
        """Fail the generations that wait for the snapshot of this source.

        `is_transient` tells whether the cause may disappear without an operator.
        """
        for deployment in self._deployments:
            deployment.on_snapshot_failed(self._use.loaded_source(source), cause, now, is_transient=is_transient)
        self.reconcile(now)

    def load(self, now: float) -> None:
        """Load each UNLOADED or FAILED deployment; if all have FAILED, take a new snapshot of the model files."""
        if all(each.has_failed for each in self._deployments):
            self._use.renew_source()
        for deployment in self._deployments:
            if deployment.is_unloaded or deployment.has_failed:
                deployment.load(self._use.source)
        self.reconcile(now)

    def unload(self, now: float) -> None:
        """Unload each deployment that is not UNLOADED; the caller ensures that none is updating or vacated."""
        for deployment in self._deployments:
            if not deployment.is_unloaded:
                deployment.unload(now)
        self.reconcile(now)

    def covers_row_test(self, config: ModelConfig) -> bool:
        """Return whether the row test that the holders already run is enough for the batching that `config` sets."""
        return self._deployments[0].spec.row_test.covers(RowTestSpec.from_config(config))

    def on_reconfigured(self) -> None:
        """Apply the changed batching settings of a model to the slots of its serving generations."""
        for deployment in self._deployments:
            if deployment.serving is not None:
                self._use.update_batching(deployment.serving)
        self._process_manager.mark_changed()

    def mark_leaving(self, model: str) -> None:
        """Record that a model of the set will be drained.

        After a call for each model of the set, generations of other models may wait for the resources of the set.
        """
        self._leaving_models.add(model)
        if len(self._leaving_models) == self._use.model_count:
            for deployment in self._deployments:
                deployment.mark_leaving()

    def vacate(self, now: float) -> None:
        """Drain the serving and loading generations, so that a changed model of the same name finds enough memory."""
        for deployment in self._deployments:
            if deployment.state is DeploymentState.ESTABLISHED:
                deployment.unload(now, DeploymentEvent.VACATE)
        self.reconcile(now)

    def reinstate(self, now: float) -> None:
        """Load the vacated deployments again, because the changed model cannot be loaded."""
        for deployment in self._deployments:
            deployment.reinstate()
        self.reconcile(now)

    def drain(self, now: float, *, timeout_s: float = 0.0) -> None:
        """Drain the deployments if all models of the set are draining; batches may run for `timeout_s` seconds more."""
        if all(each.is_draining for each in self._use.models):
            for deployment in self._deployments:
                deployment.drain(now, timeout_s=timeout_s)
        self.reconcile(now)

    def tick(self, now: float) -> None:
        """Run the watchdog, and call `tick` of each deployment whose next event is due."""
        self.process_events.run_watchdog([each.serving for each in self._deployments if each.serving is not None], now)
        due_deployments = [each for each in self._deployments if now >= each.next_tick_at]
        for deployment in due_deployments:
            deployment.tick(now)
        if due_deployments:
            self.reconcile(now)

    def reconcile(self, now: float) -> None:
        """Perform the pending actions after an event of a generation, and let each model react to the new state."""
        self._process_manager.mark_changed()
        self.perform_actions(now)
        for model in self._use.models:
            model.on_reconciled(now)

    def perform_actions(self, now: float) -> None:
        """Perform the pending actions of all deployments, and further actions that follow from them.

        A generation that requests a snapshot which exists already receives the snapshot here.
        """
        may_want_more = True
        while may_want_more:
            for deployment in self._deployments:
                deployment.reconcile(now)
            wanted = [(each, action) for each in self._deployments for action in each.take_actions()]
            for deployment, (generation, action) in wanted:
                self.process_events.perform(deployment, generation, action, now)
            may_want_more = bool(wanted) and self._report_snapshots()

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def next_tick_at(self) -> float:
        """The time at which `tick` is due, in monotonic seconds."""
        return min(each.next_tick_at for each in self._deployments)

    @property
    def generations(self) -> list[GenerationBase]:
        """Every generation that still has processes or files."""
        return [generation for deployment in self._deployments for generation in deployment.generations]

    @property
    def is_gone(self) -> bool:
        """Whether the shutdown that `drain` began is complete."""
        return not self.process_events and not self.generations

    @property
    def deaths(self) -> int:
        """The number of processes that exited unexpectedly or had to be killed."""
        return self.process_events.past_deaths + sum(each.processes.deaths for each in self.generations)

    # --- private ------------------------------------------------------------------------------------------------

    def _resume_generation(self, deployment: Deployment, record: GenerationRecord, now: float) -> bool:
        ready = next(each for each in self._use.ready_snapshots() if each.source.number == record.source)
        generation = self._factory.resume(deployment.spec, ready.source, record, now)
        if not self.process_events.resume(deployment, generation, record):
            return False
        deployment.resume(generation, ready.snapshot, record.port)
        return True

    def _wake(self) -> None:
        """Schedule `tick` of all models, because resources were released for which a generation of this set waits."""
        for model in self._use.models:
            model.wake()

    def _report_snapshots(self) -> bool:
        """Pass all existing snapshots to all deployments; return whether a generation was waiting for one of them."""
        awaited = [
            deployment.on_snapshot_taken(each.source, each.snapshot, each.selftest)
            for each in self._use.ready_snapshots()
            for deployment in self._deployments
        ]
        return any(awaited)


class _GenerationFactory:
    """Makes the generations of a deployment set. `DeploymentSet` describes the arguments."""

    def __init__(self, name: str, use: ProcessUse, ids: IdSequence, load_limiter: LoadLimiter | None) -> None:
        self._name = name
        self._use = use
        self._ids = ids
        self._load_limiter = load_limiter

    def make(self, placement: Placement, source: ModelSource, spec: GenerationSpec) -> GenerationBase:
        """Return a new generation with a new number; it loads this source once the caller starts it."""
        setup = self._setup(placement.name, source, spec, self._ids.next_generation())
        return self._registered(Generation(setup) if spec.rank_group is None else RankGroup(setup))

    def resume(self, spec: GenerationSpec, source: ModelSource, record: GenerationRecord, now: float) -> GenerationBase:
        """Return the generation of this record, which the previous daemon has loaded."""
        spec = spec if record.is_sharing else spec.without_sharing()
        return self._registered(resume_generation(self._setup(record.device, source, spec, record.number), record, now))

    def _setup(self, device: str, source: ModelSource, spec: GenerationSpec, number: int) -> GenerationSetup:
        label, counters = f"{self._name}.{number}", ProcessCounters(*(each.counters for each in self._use.dispatchers))
        attach_limit = one_after_another if self._load_limiter is None else self._load_limiter.attach_limit
        return GenerationSetup(label, spec, device, source, number, counters, attach_limit)

    def _registered(self, generation: GenerationBase) -> GenerationBase:
        # Only workers on the CPU attach in parallel. On a card, they attach one by one: an attach may write to memory
        # that other workers use, and the daemon measures the memory of a process by the card's free memory after its
        # attach.
        if self._load_limiter is not None and is_cpu(generation.device):
            model_bytes = functools.partial(self._snapshot_bytes, generation.source)
            self._load_limiter.add(generation, model_bytes, self._use.build_factor)
        return generation

    def _snapshot_bytes(self, source: ModelSource) -> int:
        return sum(each.snapshot.nbytes for each in self._use.ready_snapshots() if each.source == source)
