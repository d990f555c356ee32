"""What processes are there for: what they load, whose batches they run, and where the ranks among them meet."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.rank_group import RankGroup
from weightd_daemon.generations.spec import CONCAT, ModelSource, RankGroupSpec, SelfTestSpec
from weightd_daemon.models import batching
from weightd_daemon.models.deployment import Deployment
from weightd_daemon.models.interfaces import DeployedModel
from weightd_daemon.models.placement import CardGroup, Placement
from weightd_daemon.models.versions import ReadySnapshot
from weightd_daemon.processes.events import Snapshot
from weightd_daemon.processes.rendezvous import Rendezvous, free_port, generate_rank_table, rank_program
from weightd_daemon.processes.spec import WorkerProgram, worker_program
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_daemon.scheduling.lockstep import LockstepTracker


class ProcessUse(abc.ABC):
    """What processes are there for: what they load, and whose batches they run.

    Attributes:
        model_count: how many models they serve.
        only_dispatcher: where the requests are that they answer, if they serve one model; None otherwise.
    """

    model_count: int
    only_dispatcher: Dispatcher | None = None

    @property
    @abc.abstractmethod
    def models(self) -> Sequence[DeployedModel]:
        """The models whose requests they answer, as far as those have been made."""

    @property
    @abc.abstractmethod
    def dispatchers(self) -> Sequence[Dispatcher]:
        """Where the requests are that they answer, of each model of theirs."""

    @property
    @abc.abstractmethod
    def source(self) -> ModelSource:
        """What is loaded, or to be, if no update is under way."""

    @property
    def build_factor(self) -> float:
        """How many times the size of the model's files a build takes."""
        return self.models[0].config.engine_spec.build_factor

    @abc.abstractmethod
    def renew_source(self) -> None:
        """Read the files again: `source` is another one."""

    @abc.abstractmethod
    def loaded_source(self, source: ModelSource) -> ModelSource:
        """Return the source of generations that a source of a model is loaded with."""

    @abc.abstractmethod
    def ready_snapshots(self) -> Sequence[ReadySnapshot]:
        """Return every source that generations can load."""

    @abc.abstractmethod
    def active_dispatcher(self, generation: GenerationBase) -> Dispatcher:
        """Return the dispatcher whose batch a process of the generation runs."""

    @abc.abstractmethod
    def request_snapshots(self, source: ModelSource, now: float) -> None:
        """A generation is to be loaded from that source."""

    @abc.abstractmethod
    def on_snapshot_lost(self, source: ModelSource) -> None:
        """The files of a snapshot of that source have vanished."""

    @abc.abstractmethod
    def program(self, deployment: Deployment, generation: GenerationBase, name: str) -> WorkerProgram:
        """Return what a process of the generation runs."""

    @abc.abstractmethod
    def add_slot(self, name: str, generation: GenerationBase, now: float) -> None:
        """Let a slot of the generation take requests."""

    @abc.abstractmethod
    def remove_slot(self, name: str, generation: GenerationBase) -> None:
        """Give a slot no further request."""

    @abc.abstractmethod
    def on_process_failed(self, name: str, generation: GenerationBase, reason: str, now: float) -> None:
        """A process can go on no more, by its own word: what it has is not to blame."""

    @abc.abstractmethod
    def on_generation_ended(self, generation: GenerationBase) -> None:
        """Nothing is left of the generation."""

    @abc.abstractmethod
    def on_selftest_found(self, source: ModelSource, selftest: SelfTestSpec) -> None:
        """A holder has found out what a model runs on: the next generation of that source need not."""

    @abc.abstractmethod
    def update_batching(self, generation: GenerationBase) -> None:
        """Rows of requests may not be put together any more as was known to be right."""


class OneModelUse(ProcessUse):
    """The use of processes that serve one model: each worker is a slot, or all ranks together are one."""

    model_count = 1

    def __init__(self, model: DeployedModel) -> None:
        self._models = (model,)
        self.only_dispatcher = self._dispatcher = model.dispatcher
        self._model = model
        self._dispatchers = (model.dispatcher,)
        self._versions = model.versions
        self._rendezvous = RendezvousTable()

    @property
    def models(self) -> Sequence[DeployedModel]:
        """The only one."""
        return self._models

    @property
    def dispatchers(self) -> Sequence[Dispatcher]:
        """The one of the model."""
        return self._dispatchers

    @property
    def source(self) -> ModelSource:
        """What the model loads."""
        return self._versions.current

    def renew_source(self) -> None:
        """Read the files of the model again."""
        self._versions.renew_current()

    def loaded_source(self, source: ModelSource) -> ModelSource:
        """Return this source."""
        return source

    def ready_snapshots(self) -> Sequence[ReadySnapshot]:
        """Return every source of the model that has a snapshot."""
        return self._versions.snapshots.ready()

    def active_dispatcher(self, generation: GenerationBase) -> Dispatcher:
        """Return the one of the model."""
        return self._dispatcher

    def request_snapshots(self, source: ModelSource, now: float) -> None:
        """Have the snapshot taken, unless it is there."""
        self._versions.snapshots.request(source, now + self._model.config.load_timeout)

    def on_snapshot_lost(self, source: ModelSource) -> None:
        """Have it taken anew by who wants it next."""
        self._versions.snapshots.on_lost(source)

    def program(self, deployment: Deployment, generation: GenerationBase, name: str) -> WorkerProgram:
        """Return what a worker or a rank runs."""
        snapshot = self._versions.snapshots[generation.source]
        return self._rendezvous.program(self._model.config, generation, snapshot, name, deployment.placement)

    def add_slot(self, name: str, generation: GenerationBase, now: float) -> None:
        """Let a worker, or all ranks together, take requests."""
        policy = batching.batching_policy(self._model.config, generation)
        if isinstance(generation, RankGroup):
            ranks, reply_rank = generation.processes.slots[name], generation.group_spec.reply_rank
            reply_process = None if reply_rank == CONCAT else ranks[reply_rank]
            self._dispatcher.processes.add_ranks(
                name,
                LockstepTracker(ranks, reply_process, generation.step),
                now,
                support_processes=[each.name for each in generation.children.values() if each.role is Role.BROKER],
                device=generation.device,
                policy=policy,
            )
        else:
            child = generation.children[name]
            concurrency = child.hello.concurrency if child.hello is not None else 1
            self._dispatcher.processes.add(name, device=child.device, policy=policy, concurrency=concurrency)

    def remove_slot(self, name: str, generation: GenerationBase) -> None:
        """Give a worker, or the ranks, no further request."""
        self._dispatcher.processes.remove(name)
        if not generation.attach_control.is_valid:
            # It will not answer what it has, and is not to blame.
            self._dispatcher.processes.release(name)

    def on_process_failed(self, name: str, generation: GenerationBase, reason: str, now: float) -> None:
        """Let what a worker has, or the ranks, wait again."""
        if generation.processes.is_ready(name):
            self._dispatcher.results.on_process_failed(name, reason, now)

    def on_generation_ended(self, generation: GenerationBase) -> None:
        """Forget where its ranks have met."""
        self._rendezvous.drop(generation.label)

    def on_selftest_found(self, source: ModelSource, selftest: SelfTestSpec) -> None:
        """Remember it for the next generation of that source."""
        self._versions.snapshots.set_selftest(source, selftest)

    def update_batching(self, generation: GenerationBase) -> None:
        """Have slots do with rows of requests what is configured, as far as it is known to be right by now."""
        policy = batching.batching_policy(self._model.config, generation)
        for each in generation.processes.slots:
            self._dispatcher.processes.set_policy(each, policy)


class RendezvousTable:
    """Where the ranks of each generation meet, from its first process to its end."""

    def __init__(self) -> None:
        self._by_label: dict[str, Rendezvous] = {}

    def program(
        self, config: ModelConfig, generation: GenerationBase, snapshot: Snapshot, name: str, placement: Placement
    ) -> WorkerProgram:
        """Return what a child of the generation runs, whatever that is."""
        child, group_spec = generation.children[name], generation.spec.rank_group
        if group_spec is None:
            return worker_program(config, generation, snapshot, child.device)
        rendezvous = self._by_label.get(generation.label)
        if rendezvous is None:
            port = placement.port(generation.label) if isinstance(placement, CardGroup) else 0
            rendezvous = self._by_label[generation.label] = _make_rendezvous(config, group_spec, snapshot, port)
        return rank_program(config, snapshot, child.device, rank_number(child.name), rendezvous)

    def drop(self, label: str) -> None:
        """Nothing is left of the generation."""
        self._by_label.pop(label, None)


def rank_number(process: str) -> int | None:
    """Return which rank of a group the process of this name is; None: it is none, or the broker."""
    _, is_rank, number = process.rpartition(".rank")
    return int(number) if is_rank and number.isdecimal() else None


def _make_rendezvous(config: ModelConfig, group_spec: RankGroupSpec, snapshot: Snapshot, card_port: int) -> Rendezvous:
    ranks = config.ranks
    port = free_port() if group_spec.has_broker else 0
    if ranks is not None and snapshot.rank_tables:
        return Rendezvous(port, rank_table_path=snapshot.rank_tables[ranks.groups.index(group_spec.devices)])
    return Rendezvous(
        port,
        rank_table_text=generate_rank_table(group_spec.devices, ranks.device_ips, card_port)
        if ranks is not None and ranks.is_table_generated
        else "",
    )
