"""Which models the processes of a deployment set serve: the source to load, and the dispatchers that use the processes.

The module also keeps the rendezvous of each rank group: the address at which its ranks find each other.
"""

from __future__ import annotations

import abc
import dataclasses
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
    """The models that the processes of a deployment set serve: their sources and their dispatchers.

    Attributes:
        model_count: the number of models that the processes serve.
        only_dispatcher: the dispatcher of the model, if the processes serve only one model; None otherwise.
    """

    model_count: int
    only_dispatcher: Dispatcher | None = None

    @property
    @abc.abstractmethod
    def models(self) -> Sequence[DeployedModel]:
        """The models that the processes serve; models of a group that have not been made yet are missing."""

    @property
    @abc.abstractmethod
    def dispatchers(self) -> Sequence[Dispatcher]:
        """The dispatchers of all models that the processes serve."""

    @property
    @abc.abstractmethod
    def source(self) -> ModelSource:
        """The source that the next generation loads, unless an update loads another one."""

    @property
    def build_factor(self) -> float:
        """The memory that the build of a model needs, as a multiple of the size of the model's files."""
        return self.models[0].config.engine_spec.build_factor

    @abc.abstractmethod
    def renew_source(self) -> None:
        """Replace `source` by a new source of the same path, so that the model files are read again."""

    @abc.abstractmethod
    def loaded_source(self, source: ModelSource) -> ModelSource:
        """Return which source generations load for a model's `source`: `source` itself, or a group's joint source."""

    @abc.abstractmethod
    def ready_snapshots(self) -> Sequence[ReadySnapshot]:
        """Return every source whose snapshot exists, with the snapshot and the known self-test."""

    @abc.abstractmethod
    def active_dispatcher(self, generation: GenerationBase) -> Dispatcher:
        """Return the dispatcher whose batch a process of the generation is running."""

    @abc.abstractmethod
    def request_snapshots(self, source: ModelSource, now: float) -> None:
        """Request the snapshots that a generation of this source needs."""

    @abc.abstractmethod
    def on_snapshot_lost(self, source: ModelSource) -> None:
        """Record that files of the snapshot of this source have vanished, so that a new snapshot is needed."""

    @abc.abstractmethod
    def program(self, deployment: Deployment, generation: GenerationBase, name: str) -> WorkerProgram:
        """Return the model and the settings that a process of the generation runs with."""

    @abc.abstractmethod
    def add_slot(self, name: str, generation: GenerationBase, now: float) -> None:
        """Let a slot of the generation receive requests."""

    @abc.abstractmethod
    def remove_slot(self, name: str, generation: GenerationBase) -> None:
        """Stop dispatching requests to a slot."""

    @abc.abstractmethod
    def on_process_failed(self, name: str, generation: GenerationBase, reason: str, now: float) -> None:
        """Put the batch of a process that has failed back into the queue, without blaming the batch for the failure."""

    @abc.abstractmethod
    def on_generation_ended(self, generation: GenerationBase) -> None:
        """Delete the data of a generation that has ended."""

    @abc.abstractmethod
    def on_selftest_found(self, source: ModelSource, selftest: SelfTestSpec) -> None:
        """Record the self-test that a holder has found, for later generations of the source."""

    @abc.abstractmethod
    def update_batching(self, generation: GenerationBase) -> None:
        """Apply the current batching policy to the slots of a generation."""


class OneModelUse(ProcessUse):
    """The `ProcessUse` of processes that serve one model: each worker, or all ranks of a group together, is a slot."""

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
        """The only model."""
        return self._models

    @property
    def dispatchers(self) -> Sequence[Dispatcher]:
        """The dispatcher of the model."""
        return self._dispatchers

    @property
    def source(self) -> ModelSource:
        """The current source of the model."""
        return self._versions.current

    def renew_source(self) -> None:
        """Replace the current source of the model by a new one of the same path, so that its files are read again."""
        self._versions.renew_current()

    def loaded_source(self, source: ModelSource) -> ModelSource:
        """Return this source."""
        return source

    def ready_snapshots(self) -> Sequence[ReadySnapshot]:
        """Return every source of the model that has a snapshot."""
        return self._versions.snapshots.ready()

    def active_dispatcher(self, generation: GenerationBase) -> Dispatcher:
        """Return the dispatcher of the model."""
        return self._dispatcher

    def request_snapshots(self, source: ModelSource, now: float) -> None:
        """Request the snapshot of this source, unless it exists."""
        self._versions.snapshots.request(source, now + self._model.config.load_timeout)

    def on_snapshot_lost(self, source: ModelSource) -> None:
        """Record that the snapshot of this source is lost, so that the next request takes the snapshot again."""
        self._versions.snapshots.on_lost(source)

    def program(self, deployment: Deployment, generation: GenerationBase, name: str) -> WorkerProgram:
        """Return the model and the settings that a holder, worker, rank or broker runs with."""
        snapshot = self._versions.snapshots[generation.source]
        return self._rendezvous.program(self._model.config, generation, snapshot, name, deployment.placement)

    def add_slot(self, name: str, generation: GenerationBase, now: float) -> None:
        """Let a worker, or all ranks of a group together, receive requests as one slot."""
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
        """Stop dispatching requests to a worker, or to the ranks of a group."""
        self._dispatcher.processes.remove(name)
        if not generation.attach_control.is_valid:
            # The weights are invalid, so the slot will not answer its batch. The batch runs again on another slot, and
            # its requests are not blamed for the failure.
            self._dispatcher.processes.release(name)

    def on_process_failed(self, name: str, generation: GenerationBase, reason: str, now: float) -> None:
        """Put the batch of a failed worker or rank group back into the queue."""
        if generation.processes.is_ready(name):
            self._dispatcher.results.on_process_failed(name, reason, now)

    def on_generation_ended(self, generation: GenerationBase) -> None:
        """Drop the rendezvous of the generation's ranks."""
        self._rendezvous.drop(generation.label)

    def on_selftest_found(self, source: ModelSource, selftest: SelfTestSpec) -> None:
        """Record the self-test that a holder has found, for later generations of this source."""
        if self._model.config.selftest_tolerance:
            # With a tolerance, workers compare their answers with the answers of a holder, which are files of its
            # generation. So every generation needs a holder.
            selftest = dataclasses.replace(selftest, built=None)
        self._versions.snapshots.set_selftest(source, selftest)

    def update_batching(self, generation: GenerationBase) -> None:
        """Apply the configured batching to all slots, as far as the row test of the generation allows it."""
        policy = batching.batching_policy(self._model.config, generation)
        for each in generation.processes.slots:
            self._dispatcher.processes.set_policy(each, policy)


class RendezvousTable:
    """The rendezvous (the address at which the ranks meet) of each rank group, until its generation has ended."""

    def __init__(self) -> None:
        self._by_label: dict[str, Rendezvous] = {}

    def program(
        self, config: ModelConfig, generation: GenerationBase, snapshot: Snapshot, name: str, placement: Placement
    ) -> WorkerProgram:
        """Return the model and the settings that a child of the generation runs with."""
        child, group_spec = generation.children[name], generation.spec.rank_group
        if group_spec is None:
            return worker_program(config, generation, snapshot, child.device)
        rendezvous = self._by_label.get(generation.label)
        if rendezvous is None:
            port = placement.port(generation.label) if isinstance(placement, CardGroup) else 0
            rendezvous = self._by_label[generation.label] = _make_rendezvous(config, group_spec, snapshot, port)
        return rank_program(config, snapshot, child.device, rank_number(child.name), rendezvous)

    def drop(self, label: str) -> None:
        """Drop the rendezvous of a generation that has ended."""
        self._by_label.pop(label, None)


def rank_number(process: str) -> int | None:
    """Return the rank number in a process name; None if the process is no rank, for example a broker."""
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
