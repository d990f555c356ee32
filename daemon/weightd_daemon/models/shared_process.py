"""Several models in one process on each of their devices: they come up together, and are lost together.

A shared process owns the deployments, and so the units, of all its members. Each member is a model as any other to
those who ask it; what it would do with generations of its own, it has the shared process do for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from weightd_common.launch_arguments import GroupMember as SpecMember
from weightd_common.launch_arguments import GroupMembers, joint_digest
from weightd_common.safe_open import Grant
from weightd_daemon.config.model import Membership, ModelConfig, ReplacementPolicy
from weightd_daemon.counters import ProcessCounters
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.rank_group import RankGroup
from weightd_daemon.generations.spec import GenerationSpec, ModelSource, RankGroupSpec, SelfTestSpec
from weightd_daemon.generations.states import ACTIVE, advance
from weightd_daemon.models.deployment import Deployment
from weightd_daemon.models.deployment_state import RolloutPolicy
from weightd_daemon.models.interfaces import ClientNotifier, ProcessManager
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.persisted import ModelRecord
from weightd_daemon.models.placement import DeviceBudget, Placement
from weightd_daemon.models.process_events import ProcessEvents
from weightd_daemon.models.process_use import ProcessUse
from weightd_daemon.models.readiness import MODEL_PHASE_TRANSITIONS, ModelPhaseEvent
from weightd_daemon.models.versions import IdSequence
from weightd_daemon.platform.memory import MIB
from weightd_daemon.processes.events import Snapshot
from weightd_daemon.processes.spec import WorkerProgram
from weightd_daemon.scheduling.dispatcher import Dispatcher, SharedScheduling
from weightd_daemon.scheduling.fair_share import Users
from weightd_daemon.scheduling.shared_process import SharedProcessScheduler
from weightd_protocol.errors import FailedPrecondition, Unavailable
from weightd_protocol.messages.worker import Built


class SharedProcessGroup(ProcessUse):
    """The process of several models on each of their devices, and its use: each model has a slot at it.

    Args:
        config: of its first member.
        devices: by name.
        process_manager: the processes.
        ids: of its generations.

    Attributes:
        members: in their order, as far as they have been made.
        process_events: what its processes say.
        deployments: one for each device.
        users: the tenants that use its processes.
    """

    def __init__(
        self, config: ModelConfig, devices: Mapping[str, DeviceBudget], process_manager: ProcessManager, ids: IdSequence
    ) -> None:
        if config.group is None:
            raise ValueError("expected a model of a group")
        self.group = config.group
        self.members: list[GroupedModel] = []
        self._process_manager = process_manager
        self.process_events = ProcessEvents(process_manager, self, self.reconcile)
        self._ids = ids
        self._source = ModelSource(self.group.name, number=ids.next_source())
        self._started_count = 0
        self._is_reconciling = False
        # Of the process of each generation, by its label.
        self._schedulers: dict[str, SharedProcessScheduler] = {}
        count = len(self.group.models)
        self.deployments = [
            Deployment(
                devices[device],
                _generation_spec(config, device, count),
                RolloutPolicy(ReplacementPolicy(config.policy), process_bytes=config.process_mib * MIB),
                make_generation=self._make_generation,
                wake=self._wake,
            )
            for device in config.devices
        ]
        self.users = Users()

    # --- from its members ---------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """One more member is to be loaded: when all are, they begin."""
        self._started_count += 1
        if self._started_count == len(self.group.models):
            for deployment in self.deployments:
                deployment.start(self._source)
        self.reconcile(now)

    def report_snapshots(self, now: float) -> None:
        """One more snapshot exists; when all do, the process may start."""
        snapshots = self._snapshots()
        if snapshots is not None:
            nbytes = sum({each.path: each.nbytes for each in snapshots}.values())
            joint_snapshot = Snapshot(snapshots[0].path, "", joint_digest([each.sha256 for each in snapshots]), nbytes)
            for deployment in self.deployments:
                deployment.on_snapshot_taken(self._source, joint_snapshot, now)

    def on_snapshot_failed(self, cause: str, now: float, *, is_transient: bool) -> None:
        """There is no snapshot of one member: nobody can be loaded."""
        for deployment in self.deployments:
            deployment.on_snapshot_failed(self._source, cause, now, is_transient=is_transient)
        self.reconcile(now)

    def retry(self, now: float) -> None:
        """Load again what has failed."""
        if all(each.has_failed for each in self.deployments):
            self._source = ModelSource(self.group.name, number=self._ids.next_source())
            for member in self.members:
                member.renew_source()
        for deployment in self.deployments:
            if deployment.has_failed:
                deployment.retry(self._source)
        self.reconcile(now)

    def mark_leaving(self) -> None:
        """One more member will be drained: once all will, who needs the room may wait for that."""
        if all(each.is_marked_leaving for each in self.members):
            for deployment in self.deployments:
                deployment.mark_leaving()

    def drain(self, now: float, timeout_s: float) -> None:
        """A member winds down; the process goes with the last one that is served."""
        if all(each.is_draining for each in self.members):
            for deployment in self.deployments:
                deployment.drain(now, timeout_s=timeout_s)
        self.reconcile(now)

    def reconcile(self, now: float) -> None:
        """After each event: do what is wanted, and let each member serve what that allows."""
        if self._is_reconciling:
            return
        self._is_reconciling = True
        self._process_manager.mark_changed()
        self.report_snapshots(now)
        while wanted := [(each, action) for each in self.deployments for action in each.take_actions()]:
            for deployment, (generation, action) in wanted:
                self.process_events.perform(deployment, generation, action, now)
            self.report_snapshots(now)
        self._is_reconciling = False
        for member in self.members:
            member.on_reconciled(now)

    # --- what the process is there for ---------------------------------------------------------------------------

    @property
    def dispatchers(self) -> Sequence[Dispatcher]:
        """Where the requests of each member are."""
        return [each.dispatcher for each in self.members]

    def active_dispatcher(self, generation: GenerationBase) -> Dispatcher:
        """Return the dispatcher whose batch the process runs; that of the first member where it runs none."""
        scheduler = self._schedulers.get(generation.label)
        active_slot = None if scheduler is None else scheduler.active_slot
        for dispatcher in self.dispatchers if active_slot is not None else ():
            if any(dispatcher.processes.is_running(each, active_slot) for each in generation.children):
                return dispatcher
        return self.members[0].dispatcher

    def request_snapshots(self, source: ModelSource, now: float) -> None:
        """A process is to be started: have the snapshots of all members taken, unless they are there."""
        for member in self.members:
            member.request_snapshot(now)

    def on_snapshot_lost(self, source: ModelSource) -> None:
        """The files of snapshots have vanished: all are taken anew."""
        for member in self.members:
            member.on_snapshot_lost()

    def program(self, deployment: Deployment, generation: GenerationBase, name: str) -> WorkerProgram:
        """Return what the process runs: models of one file have one copy of it, and so may share its weights."""
        config = self.members[0].config
        snapshots = self._snapshots() or ()
        first_by_path: dict[str, Snapshot] = {}
        members: list[SpecMember] = []
        for member, snapshot in zip(self.members, snapshots, strict=True):
            copy = first_by_path.setdefault(member.config.path, snapshot)
            snapshot_identity = f"{copy.identity}:{copy.sha256}" if copy.identity else ""
            options, tolerance = member.config.engine_options.to_json(), member.config.selftest_tolerance
            members.append(SpecMember(copy.path, snapshot_identity, options, snapshot.sample, tolerance))
        return WorkerProgram(
            config.python,
            config.engine,
            members[0].model,
            generation.children[name].device,
            threads=config.threads,
            sharing=False,
            spawn_reason="what drives a card does not survive a fork",
            members_json=GroupMembers(self.group.share, tuple(members)).json(),
        )

    def add_slot(self, name: str, generation: GenerationBase, now: float) -> None:
        """Give each member a slot at the process."""
        scheduler = self._schedulers[generation.label] = SharedProcessScheduler()
        for process in generation.processes.slots.get(name, ()):
            for index, dispatcher in enumerate(self.dispatchers):
                dispatcher.processes.add_shared(process, scheduler, index, now, device=generation.device)

    def remove_slot(self, name: str, generation: GenerationBase) -> None:
        """Give the process no further request of any member."""
        for process in [each for each in generation.children if each.startswith(f"{name}.")]:
            for dispatcher in self.dispatchers:
                dispatcher.processes.remove(process)
                if not generation.attach_control.is_valid:
                    # It will not answer what it has, and is not to blame.
                    dispatcher.processes.release(process)

    def on_process_failed(self, name: str, generation: GenerationBase, reason: str, now: float) -> None:
        """Let what the process has wait again, of whichever member that is."""
        self.active_dispatcher(generation).results.on_process_failed(name, reason, now)
        for dispatcher in self.dispatchers:
            dispatcher.processes.release(name)

    def on_generation_ended(self, generation: GenerationBase) -> None:
        """Forget whose turn it was."""
        self._schedulers.pop(generation.label, None)

    def on_selftest_found(self, source: ModelSource, selftest: SelfTestSpec) -> None:
        """Each self-test is configured, with the right answer."""

    def update_batching(self, generation: GenerationBase) -> None:
        """No requests are put together."""

    # --- within -------------------------------------------------------------------------------------------------

    def _snapshots(self) -> list[Snapshot] | None:
        snapshots = [each.snapshot for each in self.members]
        return None if None in snapshots else [each for each in snapshots if each is not None]

    def _make_generation(self, placement: Placement, source: ModelSource, spec: GenerationSpec) -> GenerationBase:
        number = self._ids.next_generation()
        counters = ProcessCounters(*(each.dispatcher.counters for each in self.members))
        return RankGroup(f"{self.group.name}@group.{number}", spec, placement.name, source, number, counters)

    def _wake(self) -> None:
        for member in self.members:
            member.wake()


class GroupedModel(ServedModel):
    """A model whose process serves others, too.

    Args:
        shared_process: all of them.
        model: as those of `Model`.

    Attributes:
        is_marked_leaving: it was removed, and will be drained.
    """

    def __init__(
        self, shared_process: SharedProcessGroup, *model: Any, shared_scheduling: SharedScheduling | None = None
    ) -> None:
        scheduling = dataclasses.replace(shared_scheduling or SharedScheduling(), users=shared_process.users)
        super().__init__(*model, shared_scheduling=scheduling)
        self._shared_process = shared_process
        self._index = len(shared_process.members)
        self.is_marked_leaving = False
        self.deployments = shared_process.deployments
        self.process_events = shared_process.process_events
        shared_process.members.append(self)

    @property
    def snapshot(self) -> Snapshot | None:
        """The copy of what it loads, if that exists."""
        return self._versions.snapshots.find(self._versions.current)

    def update(  # noqa: PLR0913
        self, client: bytes, request_id: str, now: float, *, path: str, weights: str, rollback: bool, grant: Grant
    ) -> None:
        """Refuse it: the process of all members would have to go.

        Raises:
            FailedPrecondition: always.
        """
        group = self._shared_process.group
        other_models = ", ".join(each for each in group.models if each != self.name)
        raise FailedPrecondition(
            f"{self.name} is in one process with {other_models}, the group {group.name}: it cannot be updated alone; "
            "change the configuration and reload"
        )

    def start(self, now: float) -> None:
        """Begin to load, once all members do."""
        self._shared_process.start(now)

    def resume(self, record: ModelRecord, now: float) -> None:
        """Load it: what a daemon before this one had loaded of a shared process, it does not hand over."""
        self.start(now)

    def record(self) -> ModelRecord | None:
        """Return None: it is loaded anew."""
        return None

    def on_snapshot_taken(self, source: ModelSource, snapshot: Snapshot, now: float) -> None:
        """The snapshot of a source exists."""
        self._versions.snapshots.on_taken(source, snapshot)
        self._shared_process.reconcile(now)

    def on_snapshot_failed(self, source: ModelSource, cause: str, now: float, *, is_transient: bool = False) -> None:
        """There is no snapshot of a source; `is_transient`: the cause may go away by itself."""
        self._versions.snapshots.on_failed(source)
        self._shared_process.on_snapshot_failed(f"{self.name}: {cause}", now, is_transient=is_transient)

    def retry(self, now: float) -> None:
        """Load the group again, as far as it has failed."""
        if self.may_retry:
            self._shared_process.retry(now)

    def mark_leaving(self) -> None:
        """It is served no more; who waits for the room of the process waits for all members."""
        self.is_marked_leaving = True
        self._shared_process.mark_leaving()

    def drain(self, now: float, *, timeout_s: float = 0.0, is_replaced: bool = False) -> None:
        """Take no new work; the process goes when all members wind down."""
        event = ModelPhaseEvent.REPLACE if is_replaced else ModelPhaseEvent.CLOSE
        self._phase = advance(MODEL_PHASE_TRANSITIONS, self._phase, event)
        if not is_replaced:
            self.dispatcher.fail_waiting(Unavailable("weightd is stopping"))
        self._versions.snapshots.cancel_pending()
        self._shared_process.drain(now, timeout_s)

    def reconfigure(self, config: ModelConfig) -> bool:
        """Return whether nothing has changed: another configuration is that of another shared process."""
        return config == self.config

    # --- from the shared process -------------------------------------------------------------------------------------

    def request_snapshot(self, now: float) -> None:
        """A process is to be started."""
        self._versions.snapshots.request(self._versions.current, now + self.config.load_timeout)

    def on_snapshot_lost(self) -> None:
        """The files of its snapshot have vanished."""
        self._versions.snapshots.on_lost(self._versions.current)

    def renew_source(self) -> None:
        """Read the model's files again."""
        self._versions.renew_current()

    def wake(self) -> None:
        """A device has room again."""
        self._wake()

    def on_reconciled(self, now: float) -> None:
        """Serve what a generation now allows."""
        built = self._find_built()
        if self.dispatcher.signature.built is None and built is not None:
            self.dispatcher.on_built(built)
        self._plan_retry(now)
        self._update_availability()
        self.dispatcher.dispatch(now)
        self._update_next_tick()

    def _reconcile(self, now: float) -> None:
        self._shared_process.reconcile(now)

    def _report_snapshots(self, now: float) -> None:
        self._shared_process.report_snapshots(now)

    def _find_built(self) -> Built | None:
        """What the process has told of this model."""
        active = (each for deployment in self.deployments for each in deployment.generations if each.state in ACTIVE)
        loaded = (each.models for each in active if isinstance(each, RankGroup) and each.models)
        return next((models[self._index] for models in loaded), None)


class ModelFactory:
    """Makes models, those of a group as members of one shared process."""

    def __init__(self) -> None:
        self._incomplete: dict[Membership, SharedProcessGroup] = {}
        self._id_sequences: dict[str, IdSequence] = {}

    def make(  # noqa: PLR0913
        self,
        name: str,
        config: ModelConfig,
        devices: Mapping[str, DeviceBudget],
        process_manager: ProcessManager,
        client_notifier: ClientNotifier,
        ids: IdSequence,
        *,
        shared_scheduling: SharedScheduling | None = None,
    ) -> ServedModel:
        """Return a model that has not started; the arguments are those of `Model`."""
        group = config.group
        if group is None:
            return ServedModel(
                name, config, devices, process_manager, client_notifier, ids, shared_scheduling=shared_scheduling
            )
        shared_process = self._incomplete.pop(group, None)
        if shared_process is None:
            group_ids = self._id_sequences.setdefault(group.name, IdSequence())
            shared_process = SharedProcessGroup(config, devices, process_manager, group_ids)
        model = name, config, devices, process_manager, client_notifier, ids
        member = GroupedModel(shared_process, *model, shared_scheduling=shared_scheduling)
        if len(shared_process.members) < len(group.models):
            self._incomplete[group] = shared_process
        return member


def _generation_spec(config: ModelConfig, device: str, model_count: int) -> GenerationSpec:
    ranks = RankGroupSpec(1, (device,), config.load_timeout, 0, is_sliced=False, model_count=model_count)
    return GenerationSpec(
        1, config.load_timeout, is_sharing=False, predict_timeout=config.predict_timeout, devices=(), rank_group=ranks
    )
