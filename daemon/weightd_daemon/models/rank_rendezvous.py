"""What the table [models.NAME.ranks] comes to: which generation is on which devices, and where its ranks meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from weightd_common.devices import CPU
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.policies import ReplacementPolicy
from weightd_daemon.config.ranks import RanksConfig
from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.process import WorkerProcess
from weightd_daemon.generations.spec import CONCAT, GenerationSpec, RankGroupSpec
from weightd_daemon.models.deployment_state import RolloutPolicy
from weightd_daemon.models.placement import DeviceBudget, Placement
from weightd_daemon.models.placement_ranks import CardGroup
from weightd_daemon.platform.memory import MIB
from weightd_daemon.processes.events import Snapshot
from weightd_daemon.processes.rendezvous import Rendezvous, free_port, generate_rank_table, rank_program
from weightd_daemon.processes.spec import WorkerProgram, worker_program


def placements(config: ModelConfig, devices: Mapping[str, DeviceBudget]) -> list[tuple[Placement, GenerationSpec]]:
    """Return where the model has a copy of the weights each, and what is configured of it."""
    if config.ranks is None:
        return [
            (devices[device], GenerationSpec.from_config(config, together))
            for device, together in config.devices_by_weight_copy.items()
        ]
    return [
        (_placement(config.ranks, group, devices), _generation_spec(config, config.ranks, group))
        for group in config.ranks.groups
    ]


def rollout_policy(config: ModelConfig) -> RolloutPolicy:
    """Return how one generation of the model follows another."""
    return RolloutPolicy(
        ReplacementPolicy(config.policy),
        # On the CPU each process falls back by itself.
        should_fall_back=config.sharing == "auto" and config.is_on_cards,
        process_bytes=config.process_mib * MIB,
        buffer_bytes=0 if config.ranks is None else config.ranks.buffer_bytes,
    )


def rank_number(child: WorkerProcess) -> int | None:
    """Return which rank a process of a unit is; None: it is the broker."""
    return None if child.role is Role.BROKER else int(child.name.rpartition(".rank")[2])


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
        return rank_program(config, snapshot, child.device, rank_number(child), rendezvous)

    def drop(self, label: str) -> None:
        """Nothing is left of the generation."""
        self._by_label.pop(label, None)


def _placement(ranks: RanksConfig, group: tuple[str, ...], devices: Mapping[str, DeviceBudget]) -> Placement:
    return CardGroup([devices[each] for each in group], ranks.device_ports) if ranks.is_on_cards else devices[CPU]


def _generation_spec(config: ModelConfig, ranks: RanksConfig, group: tuple[str, ...]) -> GenerationSpec:
    reply_rank = ranks.reply_rank
    group_spec = RankGroupSpec(
        ranks.size,
        group,
        float(ranks.connect_timeout),
        CONCAT if reply_rank is None else reply_rank,
        has_broker=config.engine_spec.has_broker,
    )
    return dataclasses.replace(
        GenerationSpec.from_config(config, ()), is_sharing=False, can_fork_from_holder=False, rank_group=group_spec
    )


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
