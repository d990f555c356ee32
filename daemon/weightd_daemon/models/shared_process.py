"""A process that serves all models of a model group; there is one on each device of the group.

The models load together and fail together, because they have one set of deployments. Each model has its own requests
and snapshots, and its own slot at each process, so clients use it like any other model.
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
    """The `ProcessUse` of a process that serves all models of a group; each model has a slot at the process.

    Args:
        group: the model group.
        ids: assigns the numbers of the group's sources.

    Attributes:
        users: the tenants that use the processes of the group.
    """

    def __init__(self, group: Membership, ids: IdSequence) -> None:
        self.group = group
        self._models: list[DeployedModel] = []
        self.model_count = len(group.models)
        self.users = Users()
        self._ids = ids
        self._source = self._new_source()
        # The scheduler of each generation's process, by the label of the generation.
        self._schedulers: dict[str, SharedProcessScheduler] = {}

    @property
    def models(self) -> Sequence[DeployedModel]:
        """The models that were added so far, in the order of the group's configuration."""
        return self._models

    def join(self, model: DeployedModel) -> None:
        """Add a model of the group. A process numbers its models in the order of the group's configuration."""
        self._models.append(model)
        self._models.sort(key=lambda each: self.group.models.index(each.name))

    # --- loading ------------------------------------------------------------------------------------------------

    @property
    def source(self) -> ModelSource:
        """The joint source of the group, which represents the current sources of all its models."""
        return self._source

    def renew_source(self) -> None:
        """Replace the sources of all models by new ones of the same paths, so that their files are read again."""
        self._source = self._new_source()
        for model in self._models:
            model.versions.renew_current()

    def loaded_source(self, source: ModelSource) -> ModelSource:
        """Return the joint source, because all models of the group are loaded together."""
        return self._source

    def ready_snapshots(self) -> Sequence[ReadySnapshot]:
        """Return the joint source with a joint snapshot, once the snapshots of all models exist."""
        snapshots = self._snapshots()
        if not snapshots:
            return ()
        nbytes = sum({each.path: each.nbytes for each in snapshots}.values())
        joint = Snapshot(snapshots[0].path, "", joint_digest([each.sha256 for each in snapshots]), nbytes)
        return (ReadySnapshot(self._source, joint),)

    def request_snapshots(self, source: ModelSource, now: float) -> None:
        """Request the missing snapshots of all models of the group."""
        for model in self._models:
            versions = model.versions
            versions.snapshots.request(versions.current, now + model.config.load_timeout)

    def on_snapshot_lost(self, source: ModelSource) -> None:
        """Record that the snapshots of all models are lost, so that the next request takes new ones."""
        for versions in [each.versions for each in self._models]:
            versions.snapshots.on_lost(versions.current)

    # --- requests ------------------------------------------------------------------------------------------------

    @property
    def dispatchers(self) -> Sequence[Dispatcher]:
        """The dispatchers of all models."""
        return [each.dispatcher for each in self._models]

    def active_dispatcher(self, generation: GenerationBase) -> Dispatcher:
        """Return the dispatcher whose batch the process is running, or the first model's if the process is idle."""
        scheduler = self._schedulers.get(generation.label)
        active_slot = None if scheduler is None else scheduler.active_slot
        for dispatcher in self.dispatchers if active_slot is not None else ():
            if any(dispatcher.processes.is_running(each, active_slot) for each in generation.children):
                return dispatcher
        return self._models[0].dispatcher

    def program(self, deployment: Deployment, generation: GenerationBase, name: str) -> WorkerProgram:
        """Return the models and the settings that the process runs with.

        Models with the same model file load the same copy of the file, so that they can share weights.
        """
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
            spawn_reason="the driver of a card does not survive a fork",
            members_json=GroupMembers(self.group.share, tuple(members)).json(),
        )

    def add_slot(self, name: str, generation: GenerationBase, now: float) -> None:
        """Give each model a slot at the process."""
        scheduler = self._schedulers[generation.label] = SharedProcessScheduler()
        for process in generation.processes.slots.get(name, ()):
            for index, dispatcher in enumerate(self.dispatchers):
                dispatcher.processes.add_shared(process, scheduler, index, now, device=generation.device)

    def remove_slot(self, name: str, generation: GenerationBase) -> None:
        """Stop dispatching requests of any model to the process."""
        for process in [each for each in generation.children if each.startswith(f"{name}.")]:
            for dispatcher in self.dispatchers:
                dispatcher.processes.remove(process)
                if not generation.attach_control.is_valid:
                    # The weights are invalid, so the process will not answer its batch. The batch runs again on another
                    # slot, and its requests are not blamed for the failure.
                    dispatcher.processes.release(process)

    def on_process_failed(self, name: str, generation: GenerationBase, reason: str, now: float) -> None:
        """Put the batch of a failed process back into the queue of the model whose batch it is."""
        self.active_dispatcher(generation).results.on_process_failed(name, reason, now)
        for dispatcher in self.dispatchers:
            dispatcher.processes.release(name)

    def on_generation_ended(self, generation: GenerationBase) -> None:
        """Drop the scheduler of the generation's process."""
        self._schedulers.pop(generation.label, None)

    def on_selftest_found(self, source: ModelSource, selftest: SelfTestSpec) -> None:
        """Ignore the self-test, because each model of a group has a configured self-test with a known answer."""

    def update_batching(self, generation: GenerationBase) -> None:
        """Do nothing, because a shared process does not batch requests."""

    # --- private ------------------------------------------------------------------------------------------------

    def _new_source(self) -> ModelSource:
        return ModelSource(self.group.name, number=self._ids.next_source())

    def _snapshots(self) -> list[Snapshot]:
        """Return the snapshots of all models in the order of `models`; an empty list if one is missing."""
        versions = [each.versions for each in self._models]
        snapshots = [each.snapshots.find(each.current) for each in versions]
        return [] if None in snapshots else [each for each in snapshots if each is not None]
