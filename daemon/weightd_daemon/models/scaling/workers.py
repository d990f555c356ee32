"""Applies the decisions of `WorkerScaling` to the workers of a model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.workers import WorkerRange
from weightd_daemon.generations.restarts import NEVER
from weightd_daemon.generations.worker_target import has_surplus_workers, set_worker_target
from weightd_daemon.models.deployment_set import DeploymentSet
from weightd_daemon.models.scaling.policy import WorkerLoad, WorkerScaling, WorkerUse
from weightd_daemon.platform.log_setup import subject_extra
from weightd_daemon.scheduling.dispatcher import Dispatcher

_log = logging.getLogger("weightd")


class WorkerNumber(NamedTuple):
    """The number of workers of a model on each device, and its range.

    Attributes:
        target: the wanted number.
        min: the configured minimum.
        max: the configured maximum.
        reason: why `target` has its value, as text for users.
    """

    target: int
    min: int
    max: int
    reason: str


class ScaledWorkers:
    """Starts workers of a model while requests wait, and stops idle ones, within the configured range.

    If the configured number of workers is fixed, the methods do nothing.

    Args:
        name: the name of the model.
        config: the configuration of the model.
        dispatcher: the dispatcher of the model, which has the waiting requests.
        deployments: the deployments of the model, which have the workers.
    """

    def __init__(self, name: str, config: ModelConfig, dispatcher: Dispatcher, deployments: DeploymentSet) -> None:
        self._name = name
        self._slots = dispatcher.processes
        self._direct = dispatcher.direct
        self._deployments = deployments
        workers = config.workers
        self._bounds = workers if isinstance(workers, WorkerRange) and workers.min < workers.max else None
        self._scaling = None if self._bounds is None else WorkerScaling(self._bounds, len(config.devices))

    def observe(self, now: float) -> None:
        """Record whether requests wait."""
        scaling = self._scaling
        if scaling is None:
            return
        if not self._slots.accepting:
            scaling.reset()
            return
        target = self._target
        self._slots.set_wait_limit(scaling.wait_limit_s(target))
        scaling.observe(target, self._waiting_count, now)

    def tick(self, now: float) -> None:
        """Change the number of workers if the load requires it and the next check is due."""
        self.observe(now)
        scaling = self._scaling
        if scaling is None or now < self.next_event_at:
            return
        slots = self._slots.accepting
        uses = [WorkerUse(each.name, each.device, None if each.batches else each.idle_since) for each in slots]
        target, has_surplus = self._target, self._has_surplus
        wanted = scaling.decide(target, WorkerLoad(self._waiting_count, uses, has_surplus), now)
        if wanted != target:
            _log.info(
                "model %s: %d workers on each device instead of %d: %s",
                self._name,
                wanted,
                target,
                scaling.reason,
                extra=subject_extra(self._name),
            )
        if wanted != target or has_surplus:
            # The workers that have been idle longest are stopped first.
            idle = sorted((each.idle_since, each.name) for each in uses if each.idle_since is not None)
            self._set_target(wanted, [name for _, name in idle], now)

    @property
    def next_event_at(self) -> float:
        """The time at which `tick` is due, in monotonic seconds."""
        if self._scaling is None or not self._slots.accepting:
            return NEVER
        return self._scaling.next_check_at

    @property
    def number(self) -> WorkerNumber | None:
        """The number of workers, its range and its reason; None if the configured number is fixed."""
        if self._bounds is None or self._scaling is None:
            return None
        target = self._target
        return WorkerNumber(target, self._bounds.min, self._bounds.max, self._scaling.reason)

    # --- private ------------------------------------------------------------------------------------------------

    @property
    def _waiting_count(self) -> int:
        """The number of waiting requests; of each direct channel, one counts, and only while every worker is busy."""
        in_channels = self._direct.waiting_count
        if in_channels and not all(
            each.batches or self._direct.is_running(each.name) for each in self._slots.accepting
        ):
            in_channels = 0
        return self._slots.waiting_count + in_channels

    @property
    def _target(self) -> int:
        return max(each.worker_target for each in self._deployments)

    @property
    def _has_surplus(self) -> bool:
        return any(each.serving is not None and has_surplus_workers(each.serving) for each in self._deployments)

    def _set_target(self, workers: int, idle: Sequence[str], now: float) -> None:
        """Set the number of workers on each device for the loading and serving generations, and for later ones.

        `idle` has the names of the idle workers; surplus workers are stopped in this order.
        """
        for deployment in self._deployments:
            deployment.worker_target = workers
            for generation in (deployment.serving, deployment.loading):
                if generation is not None:
                    set_worker_target(generation, workers, idle, now)
        self._deployments.reconcile(now)
