"""A factory of models, which holds the objects that all models of the daemon share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from weightd_daemon.config.model import Membership, ModelConfig, ReplacementPolicy
from weightd_daemon.models.deployment_set import DeploymentSet
from weightd_daemon.models.deployment_state import placements, rollout_policy
from weightd_daemon.models.interfaces import ClientNotifier, DeployedModel, ProcessManager
from weightd_daemon.models.lifecycle import ModelLifecycle
from weightd_daemon.models.load_limit import LoadLimiter
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.process_use import OneModelUse, ProcessUse
from weightd_daemon.models.shared_process import SharedProcess
from weightd_daemon.models.versions import IdSequence
from weightd_daemon.platform.event_loop import Timer
from weightd_daemon.scheduling.dispatcher import SharedScheduling


class ModelFactory:
    """Makes models; the models of a model group share one process on each of their devices.

    Args:
        devices: the devices that models use, with their limits, by name.
        process_manager: starts and ends the models' processes.
        client_notifier: returns the objects that send a model's replies to clients.
        add_timer: adds the timer of a new model to the event loop.
        scheduling: the objects that all dispatchers share.
        load_limiter: limits how many workers of all models attach at the same time; None: one worker of a generation at
            a time.
        lifecycle: loads and unloads models within the budgets; None: there are no budgets, and every model stays
            loaded.
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        devices: Mapping[str, DeviceBudget],
        process_manager: ProcessManager,
        client_notifier: Callable[[], ClientNotifier],
        add_timer: Callable[[Timer], object],
        scheduling: SharedScheduling,
        load_limiter: LoadLimiter | None,
        lifecycle: ModelLifecycle | None = None,
    ) -> None:
        self._lifecycle = lifecycle
        self._devices = devices
        self._process_manager = process_manager
        self._client_notifier = client_notifier
        self._add_timer = add_timer
        self._scheduling = scheduling
        self._load_limiter = load_limiter
        # The deployments of each model group that still lacks some of its models.
        self._incomplete: dict[Membership, _SharedDeployments] = {}
        self._group_ids: dict[str, IdSequence] = {}

    def make(
        self, name: str, config: ModelConfig, ids: IdSequence, *, predecessor: ServedModel | None = None
    ) -> ServedModel:
        """Return a model that has not started.

        Args:
            name: the name of the model.
            config: the configuration of the model.
            ids: assigns the numbers of the model's generations and sources.
            predecessor: the model that the new one replaces, which may be drained first if both do not fit; None for no
                model.
        """
        scheduling = self._scheduling
        find_deployments: Callable[[DeployedModel], DeploymentSet]
        if config.group is None:
            replaced = _replaced_deployments(predecessor, config)
            find_deployments = functools.partial(self._make_own, ids, replaced)
        else:
            shared = self._find_shared(config, config.group)
            scheduling = dataclasses.replace(scheduling, users=shared.process.users)
            find_deployments = shared.join
        model = ServedModel(
            name,
            config,
            process_manager=self._process_manager,
            client_notifier=self._client_notifier(),
            ids=ids,
            shared_scheduling=scheduling,
            find_deployments=find_deployments,
            observer=self._lifecycle,
        )
        self._add_timer(model.timer)
        return model

    def _make_own(self, ids: IdSequence, replaced: DeploymentSet | None, model: DeployedModel) -> DeploymentSet:
        return self._make_deployments(model.name, model.config, OneModelUse(model), ids, replaced)

    def _find_shared(self, config: ModelConfig, group: Membership) -> _SharedDeployments:
        """Return the deployments of a model group to which one more model will be added."""
        shared = self._incomplete.get(group)
        if shared is None:
            ids = self._group_ids.setdefault(group.name, IdSequence())
            process = SharedProcess(group, ids)
            deployments = self._make_deployments(f"{group.name}@group", config, process, ids)
            shared = self._incomplete[group] = _SharedDeployments(process, deployments)
        if len(shared.process.models) + 1 == shared.process.model_count:
            del self._incomplete[group]
        return shared

    def _make_deployments(
        self,
        name: str,
        config: ModelConfig,
        use: ProcessUse,
        ids: IdSequence,
        predecessor: DeploymentSet | None = None,
    ) -> DeploymentSet:
        return DeploymentSet(
            name,
            use,
            placements=placements(config, self._devices),
            rollout_policy=rollout_policy(config),
            process_manager=self._process_manager,
            ids=ids,
            load_limiter=self._load_limiter,
            predecessor=predecessor,
            memory=self._lifecycle,
        )


class _SharedDeployments(NamedTuple):
    """The deployments of a model group, and the process on each device that the group's models share."""

    process: SharedProcess
    deployments: DeploymentSet

    def join(self, model: DeployedModel) -> DeploymentSet:
        self.process.join(model)
        return self.deployments


def _replaced_deployments(predecessor: ServedModel | None, config: ModelConfig) -> DeploymentSet | None:
    """Return the deployments of the replaced model that may be drained to free memory for the new model.

    Only a rank group is drained for another rank group, because the cards might not have enough memory for both. With
    the policy `overlap`, no deployment is drained.
    """
    if predecessor is None or predecessor.config.ranks is None or config.ranks is None:
        return None
    return None if config.policy == ReplacementPolicy.OVERLAP.value else predecessor.deployments
