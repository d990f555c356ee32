"""Several models in one process on each of their devices: they come up together, and are lost together.

The models have one set of deployments. Each is a model as any other to those who ask it: it has requests and snapshots
of its own, and a slot at each process.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightd_common.launch_arguments import GroupMember as SpecMember
from weightd_common.launch_arguments import GroupMembers, joint_digest
from weightd_daemon.config.model import Membership
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.spec import ModelSource, SelfTestSpec
from weightd_daemon.models.deployment import Deployment
from weightd_daemon.models.interfaces import DeployedModel
from weightd_daemon.models.process_use import ProcessUse
from weightd_daemon.models.versions import IdSequence, ReadySnapshot
from weightd_daemon.processes.events import Snapshot
from weightd_daemon.processes.spec import WorkerProgram
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_daemon.scheduling.fair_share import Users
from weightd_daemon.scheduling.shared_process import SharedProcessScheduler


class SharedProcess(ProcessUse):
    """The process of several models on each of their devices, and its use: each model has a slot at it.

    Args:
        group: of the models.
        ids: of its sources.

    Attributes:
        users: the tenants that use its processes.
    """

    def __init__(self, group: Membership, ids: IdSequence) -> None:
        self.group = group
        self._models: list[DeployedModel] = []
        self.model_count = len(group.models)
        self.users = Users()
        self._ids = ids
        self._source = self._new_source()
        # Of the process of each generation, by its label.
        self._schedulers: dict[str, SharedProcessScheduler] = {}

    @property
    def models(self) -> Sequence[DeployedModel]:
        """The models that have joined, in the order of the group's table."""
        return self._models

    def join(self, model: DeployedModel) -> None:
        """Add a model. Models join in any order; a process numbers them in the order of the group's table."""
        self._models.append(model)
        self._models.sort(key=lambda each: self.group.models.index(each.name))

    # --- what it loads ------------------------------------------------------------------------------------------

    @property
    def source(self) -> ModelSource:
        """The sources of all models together."""
        return self._source

    def renew_source(self) -> None:
        """Read the files of all models again."""
        self._source = self._new_source()
        for model in self._models:
            model.versions.renew_current()

    def loaded_source(self, source: ModelSource) -> ModelSource:
        """Return the one of all models: nobody can be loaded without the others."""
        return self._source

    def ready_snapshots(self) -> Sequence[ReadySnapshot]:
        """Return the joint snapshot, once that of each model exists."""
        snapshots = self._snapshots()
        if not snapshots:
            return ()
        nbytes = sum({each.path: each.nbytes for each in snapshots}.values())
        joint = Snapshot(snapshots[0].path, "", joint_digest([each.sha256 for each in snapshots]), nbytes)
        return (ReadySnapshot(self._source, joint),)

    def request_snapshots(self, source: ModelSource, now: float) -> None:
        """A process is to be started: have the snapshots of all models taken, unless they are there."""
        for model in self._models:
            versions = model.versions
            versions.snapshots.request(versions.current, now + model.config.load_timeout)

    def on_snapshot_lost(self, source: ModelSource) -> None:
        """The files of snapshots have vanished: all are taken anew."""
        for versions in [each.versions for each in self._models]:
            versions.snapshots.on_lost(versions.current)

    # --- what the process is there for ---------------------------------------------------------------------------

    @property
    def dispatchers(self) -> Sequence[Dispatcher]:
        """Where the requests of each model are."""
        return [each.dispatcher for each in self._models]

    def active_dispatcher(self, generation: GenerationBase) -> Dispatcher:
        """Return the dispatcher whose batch the process runs; that of the first member where it runs none."""
        scheduler = self._schedulers.get(generation.label)
        active_slot = None if scheduler is None else scheduler.active_slot
        for dispatcher in self.dispatchers if active_slot is not None else ():
            if any(dispatcher.processes.is_running(each, active_slot) for each in generation.children):
                return dispatcher
        return self._models[0].dispatcher

    def program(self, deployment: Deployment, generation: GenerationBase, name: str) -> WorkerProgram:
        """Return what the process runs: models of one file have one copy of it, and so may share its weights."""
        config = self._models[0].config
        snapshots = self._snapshots() or ()
        first_by_path: dict[str, Snapshot] = {}
        members: list[SpecMember] = []
        for member, snapshot in zip(self._models, snapshots, strict=True):
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

    def _new_source(self) -> ModelSource:
        return ModelSource(self.group.name, number=self._ids.next_source())

    def _snapshots(self) -> list[Snapshot]:
        """Return that of each model, in their order; none if one is missing."""
        versions = [each.versions for each in self._models]
        snapshots = [each.snapshots.find(each.current) for each in versions]
        return [] if None in snapshots else [each for each in snapshots if each is not None]
