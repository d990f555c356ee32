"""The states and queries of a deployment; a state transition that the table does not list raises."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from weightd_common.devices import CPU
from weightd_daemon.config.model import Membership, ModelConfig, ReplacementPolicy
from weightd_daemon.config.ranks import RanksConfig
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.progress import RetryHint
from weightd_daemon.generations.spec import CONCAT, GenerationSpec, ModelSource, RankGroupSpec
from weightd_daemon.generations.states import GenerationState, Machine
from weightd_daemon.models.placement import CardGroup, DeviceBudget, Placement
from weightd_daemon.platform.memory import MIB


class DeploymentState(enum.Enum):
    """The state of a deployment, which decides what follows the failure of a generation."""

    UNLOADED = "unloaded"  # nothing is loaded until `load`
    INITIAL = "initial"  # nothing has served yet: a generation that cannot be loaded leads to FAILED
    ESTABLISHED = "established"  # something has served: a lost generation is loaded again without limit
    UPDATING = "updating"  # another source is loaded beside it, to take over on all devices at once
    VACATED = "vacated"  # it has made room for another model of its name, and loads again if that cannot be loaded
    FAILED = "failed"  # nothing is loaded until a retry or an update
    REPAIRING = "repairing"  # an update is loaded although nothing has served
    STOPPING = "stopping"  # everything is shutting down


class DeploymentEvent(enum.Enum):
    """An event that changes the state of a deployment."""

    LOAD = "load"
    UNLOAD = "unload"
    SERVE = "serve"
    UPDATE = "update"
    FINISH_UPDATE = "finish update"
    VACATE = "vacate"
    REINSTATE = "reinstate"
    FAIL = "fail"
    RETRY = "retry"
    STOP = "stop"


LOADING_STATES = frozenset(
    {DeploymentState.INITIAL, DeploymentState.ESTABLISHED, DeploymentState.UPDATING, DeploymentState.REPAIRING}
)

DEPLOYMENT_TRANSITIONS: Mapping[tuple[DeploymentState, DeploymentEvent], DeploymentState] = {
    (DeploymentState.UNLOADED, DeploymentEvent.LOAD): DeploymentState.INITIAL,
    (DeploymentState.UNLOADED, DeploymentEvent.SERVE): DeploymentState.ESTABLISHED,
    (DeploymentState.INITIAL, DeploymentEvent.UNLOAD): DeploymentState.UNLOADED,
    (DeploymentState.ESTABLISHED, DeploymentEvent.UNLOAD): DeploymentState.UNLOADED,
    (DeploymentState.FAILED, DeploymentEvent.UNLOAD): DeploymentState.UNLOADED,
    (DeploymentState.INITIAL, DeploymentEvent.SERVE): DeploymentState.ESTABLISHED,
    (DeploymentState.INITIAL, DeploymentEvent.FAIL): DeploymentState.FAILED,
    (DeploymentState.ESTABLISHED, DeploymentEvent.UPDATE): DeploymentState.UPDATING,
    (DeploymentState.FAILED, DeploymentEvent.RETRY): DeploymentState.INITIAL,
    (DeploymentState.FAILED, DeploymentEvent.UPDATE): DeploymentState.REPAIRING,
    (DeploymentState.REPAIRING, DeploymentEvent.FINISH_UPDATE): DeploymentState.ESTABLISHED,
    (DeploymentState.REPAIRING, DeploymentEvent.FAIL): DeploymentState.FAILED,
    (DeploymentState.UPDATING, DeploymentEvent.FINISH_UPDATE): DeploymentState.ESTABLISHED,
    (DeploymentState.ESTABLISHED, DeploymentEvent.VACATE): DeploymentState.VACATED,
    (DeploymentState.VACATED, DeploymentEvent.REINSTATE): DeploymentState.ESTABLISHED,
    (DeploymentState.VACATED, DeploymentEvent.STOP): DeploymentState.STOPPING,
    **{(stage, DeploymentEvent.STOP): DeploymentState.STOPPING for stage in DeploymentState if stage in LOADING_STATES},
}


class ReplacedDeployments(Protocol):
    """The deployments of a model whose room the deployments of its replacement may take."""

    @property
    def generations(self) -> Sequence[GenerationBase]:
        """Every generation that still has processes or files."""
        raise NotImplementedError

    def vacate(self, now: float) -> None:
        """Drain these deployments to free their room."""


@dataclass(frozen=True)
class RolloutPolicy:
    """The configured policy for replacing one generation by another.

    Attributes:
        policy: whether the old generation leaves before the new one is loaded.
        should_fall_back: whether a generation that cannot share its weights is followed by one without sharing.
        process_bytes: the bytes that each process takes on the device beside the weights; a larger observed value takes
            precedence.
        buffer_bytes: the bytes that communication between ranks takes on each card.
    """

    policy: ReplacementPolicy
    should_fall_back: bool = False
    process_bytes: int = 0
    buffer_bytes: int = 0

    def vacates_first(self, *, has_room: bool) -> bool:
        """Return whether the serving generation leaves before the next one is loaded."""
        return self.policy is ReplacementPolicy.REPLACE or (
            self.policy is not ReplacementPolicy.OVERLAP and not has_room
        )


class DeploymentView(Machine[DeploymentState, DeploymentEvent]):
    """The read-only view of a deployment: its generations and its state.

    Args:
        placement: the device, or the cards of all ranks.
        spec: the specification of each generation.

    Attributes:
        serving: the generation whose workers receive requests, or None.
        loading: the generation that loads, or None.
        draining: the generations that are shutting down.
        spec: the specification of the next generation.
        worker_target: the number of workers on each device that should serve now.
    """

    def __init__(self, placement: Placement, spec: GenerationSpec) -> None:
        super().__init__(DEPLOYMENT_TRANSITIONS, DeploymentState.UNLOADED, f"a deployment on {placement.name}", {})
        self.placement = placement
        self.spec = spec
        self.worker_target = spec.workers
        self.serving: GenerationBase | None = None
        self.loading: GenerationBase | None = None
        self.draining: list[GenerationBase] = []
        # The last generation that failed: its cause explains why no generation, or no newer one, serves.
        self._failed_generation: GenerationBase | None = None
        self._last_generation: GenerationBase | None = None
        self._is_failing = False
        # The source of the next generation, or None if no generation is wanted.
        self._wanted_source: ModelSource | None = None

    @property
    def generations(self) -> list[GenerationBase]:
        """Every generation that still has processes or files, the serving one first."""
        return [each for each in (self.serving, self.loading, *self.draining) if each is not None]

    @property
    def cause(self) -> str:
        """Why no generation, or no newer one, serves; the exit of its processes may add details later."""
        return self._failed_generation.cause if self._failed_generation is not None else ""

    @property
    def may_recover(self) -> bool:
        """Whether another attempt may succeed: the last generation was killed, say, or the daemon is stopping."""
        return (
            self._failed_generation is None
            or self._failed_generation.failure.retry_hint is RetryHint.MAY_SUCCEED
            or self.state is DeploymentState.STOPPING
        )

    @property
    def last_generation(self) -> GenerationBase | None:
        """The serving, the loading or the last generation; None if nothing was ever loaded."""
        return self.serving or self.loading or self._last_generation

    @property
    def main_generation(self) -> GenerationBase:
        """The generation that represents the deployment in reports: the serving, the loading or the last one.

        A deployment that was never loaded has none.
        """
        generation = self.last_generation
        if generation is None:
            raise RuntimeError("the deployment has not started")
        return generation

    @property
    def is_update_ready(self) -> bool:
        """Whether the generation that `update` has loaded can take over."""
        return (
            self.is_updating and self.loading is not None and self.loading.is_complete and self.loading.has_all_workers
        )

    @property
    def is_updating(self) -> bool:
        """Whether the generation that `update` loads has neither taken over nor failed."""
        return self.state in (DeploymentState.UPDATING, DeploymentState.REPAIRING)

    @property
    def is_unloaded(self) -> bool:
        """Whether nothing is loaded until `load`; generations may still be draining."""
        return self.state is DeploymentState.UNLOADED

    @property
    def has_failed(self) -> bool:
        """Whether nothing has served and nothing is loaded until a retry or an update."""
        return self.state is DeploymentState.FAILED

    @property
    def is_failing(self) -> bool:
        """Whether the deployment has failed, and no attempt since then has succeeded."""
        return self._is_failing

    @property
    def is_transient(self) -> bool:
        """Whether the deployment has failed for a reason that may go away by itself."""
        return self.has_failed and self._failed_generation is not None and self._failed_generation.failure.is_transient

    @property
    def is_lost(self) -> bool:
        """Whether a generation has served and none does now; its replacement loads or will load, and may fail."""
        is_reconnecting = self.loading is not None and self.loading.is_reconnecting
        return self.state is DeploymentState.ESTABLISHED and self.serving is None and not is_reconnecting

    @property
    def is_being_replaced(self) -> bool:
        """Whether the serving generation has lost workers that only a new generation can replace."""
        return (
            self.state is DeploymentState.ESTABLISHED and self.serving is not None and self.serving.should_be_replaced
        )

    @property
    def is_vacated(self) -> bool:
        """Whether the deployment has made room for another model of its name."""
        return self.state is DeploymentState.VACATED

    @property
    def may_load(self) -> bool:
        """Whether a generation is wanted and none is loading; the backoff decides when it starts."""
        return self._wanted_source is not None and self.loading is None and self.state in LOADING_STATES

    def is_awaiting_snapshot(self, source: ModelSource) -> bool:
        """Return whether a generation waits for the snapshot of that source."""
        loading = self.loading
        return loading is not None and loading.state is GenerationState.SNAPSHOTTING and loading.source == source

    @property
    def is_busy(self) -> bool:
        """Whether a generation loads, is wanted, or may be wanted again after `vacate`."""
        return self.loading is not None or self._wanted_source is not None or self.is_vacated


def placements(config: ModelConfig, devices: Mapping[str, DeviceBudget]) -> list[tuple[Placement, GenerationSpec]]:
    """Return each place where the model or its group has a copy of the weights, with the generation's specification."""
    if config.group is not None:
        return [(devices[each], _shared_process_spec(config, config.group, each)) for each in config.devices]
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
    """Return how one generation of the model replaces another."""
    return RolloutPolicy(
        ReplacementPolicy(config.policy),
        # On the CPU, each process falls back by itself.
        should_fall_back=config.sharing == "auto" and config.is_on_cards,
        process_bytes=config.process_mib * MIB,
        buffer_bytes=0 if config.ranks is None else config.ranks.buffer_bytes,
    )


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


def _shared_process_spec(config: ModelConfig, group: Membership, device: str) -> GenerationSpec:
    """Return the specification of a process of several models: a rank group of size 1."""
    ranks = RankGroupSpec(1, (device,), config.load_timeout, 0, is_sliced=False, model_count=len(group.models))
    return GenerationSpec(
        1, config.load_timeout, is_sharing=False, predict_timeout=config.predict_timeout, devices=(), rank_group=ranks
    )
