"""The states of a deployment with their transitions, and a read-only view of a deployment.

A transition that `DEPLOYMENT_TRANSITIONS` does not list raises `IllegalTransition`.
"""

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
    """The state of a deployment; it decides what the daemon does after a generation has failed."""

    UNLOADED = "unloaded"  # the deployment loads nothing until `load` is called
    INITIAL = "initial"  # no generation has served yet; a failed load leads to FAILED
    ESTABLISHED = "established"  # a generation has served; if it is lost, the daemon loads new ones without limit
    UPDATING = "updating"  # an update loads a new source, which takes over on all devices at once
    VACATED = "vacated"  # drained for a changed model of the same name; loads again if that model fails
    FAILED = "failed"  # the load has failed; a retry or an update loads again
    REPAIRING = "repairing"  # an update loads a new source after the load has failed
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
    """The deployments of a model that is being replaced; they can be drained to free memory for its successor."""

    @property
    def generations(self) -> Sequence[GenerationBase]:
        """Every generation that still has processes or files."""
        raise NotImplementedError

    def vacate(self, now: float) -> None:
        """Drain these deployments to free their memory and processes."""


@dataclass(frozen=True)
class RolloutPolicy:
    """The configured policy for replacing one generation by another.

    Attributes:
        policy: whether the old generation is drained before the new one is loaded.
        should_fall_back: whether, after sharing has failed, a generation is loaded that does not share its weights.
        process_bytes: the bytes that each process needs on the device besides the weights; a larger measured value
            takes precedence.
        buffer_bytes: the bytes that the communication between ranks needs on each card.
    """

    policy: ReplacementPolicy
    should_fall_back: bool = False
    process_bytes: int = 0
    buffer_bytes: int = 0

    def vacates_first(self, *, has_room: bool) -> bool:
        """Return whether the serving generation is drained before the next one is loaded.

        `has_room` tells whether the device has enough resources for both generations.
        """
        return self.policy is ReplacementPolicy.REPLACE or (
            self.policy is not ReplacementPolicy.OVERLAP and not has_room
        )


class DeploymentView(Machine[DeploymentState, DeploymentEvent]):
    """The read-only view of a deployment: its generations and its state.

    Args:
        placement: the device, or the cards of the rank group.
        spec: the configuration with which generations are made.

    Attributes:
        serving: the generation whose workers receive requests, or None.
        loading: the generation that loads, or None.
        draining: the generations that are shutting down.
        spec: the configuration of the next generation; without sharing if sharing has failed, without forking if
            forking has failed.
        worker_target: the number of workers that should serve on each device now.
    """

    def __init__(self, placement: Placement, spec: GenerationSpec) -> None:
        super().__init__(DEPLOYMENT_TRANSITIONS, DeploymentState.UNLOADED, f"a deployment on {placement.name}", {})
        self.placement = placement
        self.spec = spec
        self.worker_target = spec.workers
        self.serving: GenerationBase | None = None
        self.loading: GenerationBase | None = None
        self.draining: list[GenerationBase] = []
        # The last generation that has failed since the last take-over; `cause` reports why.
        self._failed_generation: GenerationBase | None = None
        self._last_generation: GenerationBase | None = None
        self._is_failing = False
        # The source that the next generation will load; None if no generation has to be loaded.
        self._wanted_source: ModelSource | None = None

    @property
    def generations(self) -> list[GenerationBase]:
        """Every generation that still has processes or files, the serving one first."""
        return [each for each in (self.serving, self.loading, *self.draining) if each is not None]

    @property
    def cause(self) -> str:
        """Why the last failed generation has failed; "" if a generation has taken over since, or none has failed.

        The text may become longer when the processes of the failed generation exit.
        """
        return self._failed_generation.cause if self._failed_generation is not None else ""

    @property
    def may_recover(self) -> bool:
        """Whether another attempt may succeed, for example because a signal had ended a process."""
        return (
            self._failed_generation is None
            or self._failed_generation.failure.retry_hint is RetryHint.MAY_SUCCEED
            or self.state is DeploymentState.STOPPING
        )

    @property
    def last_generation(self) -> GenerationBase | None:
        """The serving generation, else the loading one, else the most recent one; None if none was ever loaded."""
        return self.serving or self.loading or self._last_generation

    @property
    def main_generation(self) -> GenerationBase:
        """The generation that status reports show: the serving one, else the loading one, else the most recent one.

        Raises:
            RuntimeError: the deployment has never loaded a generation.
        """
        generation = self.last_generation
        if generation is None:
            raise RuntimeError("the deployment has not started")
        return generation

    @property
    def is_update_ready(self) -> bool:
        """Whether the generation that `update` loads can take over: it serves with all its workers."""
        return (
            self.is_updating and self.loading is not None and self.loading.is_complete and self.loading.has_all_workers
        )

    @property
    def is_updating(self) -> bool:
        """Whether an update is in progress: the generation that it loads has neither taken over nor failed."""
        return self.state in (DeploymentState.UPDATING, DeploymentState.REPAIRING)

    @property
    def is_unloaded(self) -> bool:
        """Whether the deployment loads nothing until `load` is called; earlier generations may still be draining."""
        return self.state is DeploymentState.UNLOADED

    @property
    def has_failed(self) -> bool:
        """Whether the load has failed, and the deployment loads nothing until a retry or an update."""
        return self.state is DeploymentState.FAILED

    @property
    def is_failing(self) -> bool:
        """Whether the deployment has failed and no generation has served since, even if it is loading again now."""
        return self._is_failing

    @property
    def is_transient(self) -> bool:
        """Whether the deployment has failed for a cause that may disappear without an operator's action."""
        return self.has_failed and self._failed_generation is not None and self._failed_generation.failure.is_transient

    @property
    def is_lost(self) -> bool:
        """Whether a generation has served and none serves now; the daemon loads another one, now or after a delay."""
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
        """Whether the deployment was drained to free memory for a changed model of the same name."""
        return self.state is DeploymentState.VACATED

    @property
    def may_load(self) -> bool:
        """Whether a new generation has to be loaded and none is loading; the back-off decides when it starts."""
        return self._wanted_source is not None and self.loading is None and self.state in LOADING_STATES

    def is_awaiting_snapshot(self, source: ModelSource) -> bool:
        """Return whether the loading generation waits for the snapshot of this source."""
        loading = self.loading
        return loading is not None and loading.state is GenerationState.SNAPSHOTTING and loading.source == source

    @property
    def is_busy(self) -> bool:
        """Whether a generation is loading or will be loaded, or the deployment is vacated."""
        return self.loading is not None or self._wanted_source is not None or self.is_vacated


def placements(config: ModelConfig, devices: Mapping[str, DeviceBudget]) -> list[tuple[Placement, GenerationSpec]]:
    """Return the placement of each deployment of a model or its group, with the configuration of its generations.

    A model has one deployment for each copy of its weights.
    """
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
    """Return the configured policy for replacing one generation of the model by another."""
    return RolloutPolicy(
        ReplacementPolicy(config.policy),
        # Fall back only on cards. On the CPU, no new generation is needed: a process that cannot share the weights
        # keeps its own copy.
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
    """Return the configuration of a process that serves several models: a rank group with one rank."""
    ranks = RankGroupSpec(1, (device,), config.load_timeout, 0, is_sliced=False, model_count=len(group.models))
    return GenerationSpec(
        1, config.load_timeout, is_sharing=False, predict_timeout=config.predict_timeout, devices=(), rank_group=ranks
    )
