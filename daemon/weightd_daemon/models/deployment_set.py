"""A set of deployments that are loaded and reconciled together, for one model or for a model group."""

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
    """Keeps deployments loaded from the same sources, and performs the actions of their generations.

    Args:
        name: the prefix of the labels of its generations.
        use: the models that its processes serve.
        placements: the placement of each deployment, with the specification of its generations.
        rollout_policy: how one generation replaces another.
        process_manager: starts and ends the processes.
        ids: numbers the generations.
        load_limiter: limits how many workers of all models load at once; None: workers attach one after another.
        predecessor: the deployments whose room this set may take if there is no room for both.
        memory: the budgets for the memory of the generations; None: no budget.

    Attributes:
        process_events: handles the messages and exits of its processes.
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

    # --- from its models ----------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Start one more of its models; loading begins once all models have started."""
        self._started_count += 1
        if self._started_count == self._use.model_count:
            for deployment in self._deployments:
                deployment.load(self._use.source)
        self.reconcile(now)

    def resume(self, records: Sequence[GenerationRecord], now: float) -> None:
        """Take over the generations that the previous daemon has loaded, and load the missing ones."""
        remaining = list(records)
        for deployment in self._deployments:
            # Several rank groups on the CPU share one device name, so each record is used once.
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
        """Let the deployments that wait for the snapshot of one of its models continue."""
        self._report_snapshots()
        self.reconcile(now)

    def on_snapshot_failed(self, source: ModelSource, cause: str, now: float, *, is_transient: bool) -> None:
        """Fail the generations that wait for a model's source; `is_transient`: the cause may go away by itself."""
        for deployment in self._deployments:
            deployment.on_snapshot_failed(self._use.loaded_source(source), cause, now, is_transient=is_transient)
        self.reconcile(now)

    def load(self, now: float) -> None:
        """Load each deployment that is unloaded or has failed; if all have failed, read the model files again."""
        if all(each.has_failed for each in self._deployments):
            self._use.renew_source()
        for deployment in self._deployments:
            if deployment.is_unloaded or deployment.has_failed:
                deployment.load(self._use.source)
        self.reconcile(now)

    def unload(self, now: float) -> None:
        """Unload each deployment that is not unloaded; none may be updating or vacated."""
        for deployment in self._deployments:
            if not deployment.is_unloaded:
                deployment.unload(now)
        self.reconcile(now)

    def covers_row_test(self, config: ModelConfig) -> bool:
        """Return whether the holder's row test, as it is specified now, suffices for this configuration."""
        return self._deployments[0].spec.row_test.covers(RowTestSpec.from_config(config))

    def on_reconfigured(self) -> None:
        """Apply the changed batching settings of a model to the slots of its serving generations."""
        for deployment in self._deployments:
            if deployment.serving is not None:
                self._use.update_batching(deployment.serving)
        self._process_manager.mark_changed()

    def mark_leaving(self, model: str) -> None:
        """Record that a model will be drained; once all models will be, other generations may wait for their room."""
        self._leaving_models.add(model)
        if len(self._leaving_models) == self._use.model_count:
            for deployment in self._deployments:
                deployment.mark_leaving()

    def vacate(self, now: float) -> None:
        """Drain the serving and loading generations so that their replacement finds room."""
        for deployment in self._deployments:
            if deployment.state is DeploymentState.ESTABLISHED:
                deployment.unload(now, DeploymentEvent.VACATE)
        self.reconcile(now)

    def reinstate(self, now: float) -> None:
        """Load the vacated deployments again, because their replacement cannot be loaded."""
        for deployment in self._deployments:
            deployment.reinstate()
        self.reconcile(now)

    def drain(self, now: float, *, timeout_s: float = 0.0) -> None:
        """Drain the deployments if all models of the process are draining; batches may run for `timeout_s` seconds."""
        if all(each.is_draining for each in self._use.models):
            for deployment in self._deployments:
                deployment.drain(now, timeout_s=timeout_s)
        self.reconcile(now)

    def tick(self, now: float) -> None:
        """Run the watchdog, and perform what is due in each deployment."""
        self.process_events.run_watchdog([each.serving for each in self._deployments if each.serving is not None], now)
        due_deployments = [each for each in self._deployments if now >= each.next_tick_at]
        for deployment in due_deployments:
            deployment.tick(now)
        if due_deployments:
            self.reconcile(now)

    def reconcile(self, now: float) -> None:
        """Perform pending actions after an event of a generation, and let each model apply the new state."""
        self._process_manager.mark_changed()
        self.perform_actions(now)
        for model in self._use.models:
            model.on_reconciled(now)

    def perform_actions(self, now: float) -> None:
        """Perform pending actions until there are no more.

        A generation that waits for an existing snapshot receives it here, which may cause further actions.
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
        """When `tick` is due, in monotonic seconds."""
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
        """Wake all models, because a device has free memory for which a deployment waits."""
        for model in self._use.models:
            model.wake()

    def _report_snapshots(self) -> bool:
        """Offer the existing snapshots to all deployments; return whether a generation waits for one of them."""
        awaited = [
            deployment.on_snapshot_taken(each.source, each.snapshot, each.selftest)
            for each in self._use.ready_snapshots()
            for deployment in self._deployments
        ]
        return any(awaited)


class _GenerationFactory:
    """Makes the generations of a deployment set, each with a new number. `DeploymentSet` describes the arguments."""

    def __init__(self, name: str, use: ProcessUse, ids: IdSequence, load_limiter: LoadLimiter | None) -> None:
        self._name = name
        self._use = use
        self._ids = ids
        self._load_limiter = load_limiter

    def make(self, placement: Placement, source: ModelSource, spec: GenerationSpec) -> GenerationBase:
        """Return a new generation of a source, not yet started."""
        setup = self._setup(placement.name, source, spec, self._ids.next_generation())
        return self._registered(Generation(setup) if spec.rank_group is None else RankGroup(setup))

    def resume(self, spec: GenerationSpec, source: ModelSource, record: GenerationRecord, now: float) -> GenerationBase:
        """Return a generation that the previous daemon has loaded."""
        spec = spec if record.is_sharing else spec.without_sharing()
        return self._registered(resume_generation(self._setup(record.device, source, spec, record.number), record, now))

    def _setup(self, device: str, source: ModelSource, spec: GenerationSpec, number: int) -> GenerationSetup:
        label, counters = f"{self._name}.{number}", ProcessCounters(*(each.counters for each in self._use.dispatchers))
        attach_limit = one_after_another if self._load_limiter is None else self._load_limiter.attach_limit
        return GenerationSetup(label, spec, device, source, number, counters, attach_limit)

    def _registered(self, generation: GenerationBase) -> GenerationBase:
        # Only CPU generations attach in parallel. On a card, an attach may write to memory on which others compute, and
        # the daemon learns its memory use from the free memory that the card reports afterwards.
        if self._load_limiter is not None and is_cpu(generation.device):
            model_bytes = functools.partial(self._snapshot_bytes, generation.source)
            self._load_limiter.add(generation, model_bytes, self._use.build_factor)
        return generation

    def _snapshot_bytes(self, source: ModelSource) -> int:
        return sum(each.snapshot.nbytes for each in self._use.ready_snapshots() if each.source == source)
