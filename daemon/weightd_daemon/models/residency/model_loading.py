"""Loads and unloads one model: its phase, its availability, and the next attempt after a failed load."""

from __future__ import annotations

import logging
from typing import Protocol

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.restarts import NEVER, LoadBackoff
from weightd_daemon.generations.states import advance
from weightd_daemon.models.deployment_set import DeploymentSet
from weightd_daemon.models.readiness import (
    MODEL_PHASE_TRANSITIONS,
    ModelPhase,
    ModelPhaseEvent,
    ModelUnavailable,
    Readiness,
    not_loaded_text,
)
from weightd_daemon.models.rollout import Rollouts
from weightd_daemon.models.versions import ModelVersions
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_protocol.errors import FailedPrecondition, Unavailable

_log = logging.getLogger("weightd")


class OnDemandLoader(Protocol):
    """Loads models for requests."""

    def load_on_demand(self, name: str, tenant: str) -> None:
        """Load the model `name` for a tenant's request, which waits until the model serves.

        Raises:
            RequestError: the model does not load on demand or exceeds the tenant's budget, or too many models wait for
                memory.
        """


class ModelLoading:
    """Loads and unloads one model, and retries failed loads.

    Args:
        name: the name of the model.
        config: the configuration of the model.
        deployments: the deployments of the model.
        versions: the current and the previous source of the model.
        rollouts: performs the updates of the model.
        dispatcher: the dispatcher of the model's requests.
        readiness: whether the model can serve requests, and why not.
        loader: loads the model on demand; None: the model stays loaded.

    Attributes:
        is_unloaded: whether the model is unloaded; a request must call `load_on_demand` first.
        last_used_at: when the last request arrived, in monotonic seconds.
        owner: the tenant to which the memory of the model is charged; "" if operators have loaded it.
        backoff: the time of the next attempt after a failed load.
    """

    def __init__(  # noqa: PLR0913
        self,
        name: str,
        config: ModelConfig,
        *,
        deployments: DeploymentSet,
        versions: ModelVersions,
        rollouts: Rollouts,
        dispatcher: Dispatcher,
        readiness: Readiness,
        loader: OnDemandLoader | None,
    ) -> None:
        self._name = name
        self._is_on_demand = config.is_on_demand
        self._deployments = deployments
        self._versions = versions
        self._rollouts = rollouts
        self._dispatcher = dispatcher
        self._readiness = readiness
        self._loader = loader
        self._phase = ModelPhase.OPEN
        self.is_unloaded = False
        self.last_used_at = 0.0
        self.owner = ""
        self.backoff = LoadBackoff()

    # --- loads and unloads --------------------------------------------------------------------------------------

    def start_unloaded(self) -> None:
        """Leave a new model unloaded until `load` is called."""
        self._advance(ModelPhaseEvent.UNLOAD)
        self.apply_availability()

    def load_on_demand(self, tenant: str) -> None:
        """Start to load the model for a waiting request of a tenant; call this only while `is_unloaded` is True.

        Raises:
            RequestError: the model does not load on demand or exceeds the tenant's budget, or too many models wait for
                memory.
        """
        if self._loader is not None:
            self._loader.load_on_demand(self._name, tenant)

    def load(self, now: float) -> None:
        """Load each UNLOADED or FAILED deployment; if all have FAILED, take a new snapshot of the model files."""
        self._advance(ModelPhaseEvent.LOAD)
        self._deployments.load(now)

    def refuse_requests(self) -> None:
        """Refuse further requests, because the model will be unloaded once the accepted ones have ended."""
        self._advance(ModelPhaseEvent.REFUSE)
        self.apply_availability()

    def unload(self, now: float, *, forget_snapshot: bool = False) -> None:
        """Unload the model from all devices. Queued requests fail, unless the model loads on demand.

        Args:
            now: the time in monotonic seconds.
            forget_snapshot: whether the next load reads the model files again, instead of loading their snapshot.
        """
        self._advance(ModelPhaseEvent.UNLOAD)
        self.backoff.cancel()
        self._versions.snapshots.cancel_pending()
        if forget_snapshot:
            self._versions.renew_current()
        self._deployments.unload(now)

    def check_unloadable(self) -> None:
        """Check that the model can be unloaded now, and without unloading other models.

        Raises:
            RequestError: the model shares its processes with other models, or is being updated.
        """
        self._rollouts.check_alone()
        if self._rollouts.is_in_progress or self._has_vacated:
            raise Unavailable(f"{self._name} is being updated: try again after the update")

    def close(self, *, is_replaced: bool) -> None:
        """Record that the model is shutting down.

        `is_replaced` tells whether another model of the same name takes over the queued requests.
        """
        self._advance(ModelPhaseEvent.REPLACE if is_replaced else ModelPhaseEvent.CLOSE)

    # --- failures -----------------------------------------------------------------------------------------------

    def retry(self, now: float) -> None:
        """Load each FAILED deployment again; if all have FAILED, take a new snapshot of the model files."""
        if self.may_retry:
            self._deployments.load(now)

    def plan_retry(self, now: float) -> None:
        """Schedule the next attempt to load deployments whose failure may have had a temporary cause."""
        readiness, backoff = self._readiness, self.backoff
        if readiness.is_serving_everywhere:
            backoff.on_success()
        elif self._rollouts.is_in_progress:
            pass  # keep the planned attempt, which is needed if the update fails
        elif not readiness.has_failures:
            backoff.cancel()
        elif backoff.due_at == NEVER and readiness.has_transient_failures:
            backoff.on_failure(now)
            extra = readiness.main_generation.log_extra()
            _log.warning("%s: next attempt to load the model in %g s", self._name, backoff.due_at - now, extra=extra)

    @property
    def may_retry(self) -> bool:
        """Whether `retry` would load anything."""
        return self._readiness.has_failures and not self._rollouts.is_in_progress and not self.is_draining

    @property
    def awaits_change(self) -> bool:
        """Whether the load has failed for a cause that does not disappear before the files of the model change."""
        readiness = self._readiness
        return readiness.has_failed and not readiness.has_transient_failures and self.may_retry

    @property
    def is_retrying(self) -> bool:
        """Whether the model is being loaded again after a failure whose cause may have disappeared."""
        return self.backoff.failures > 0 and not (
            self.is_unloaded
            or self.is_draining
            or self._readiness.has_failures
            or self._readiness.is_serving_everywhere
        )

    def retry_delay_s(self, now: float) -> float | None:
        """Return the seconds until the daemon repeats a failed load by itself; None if no attempt is planned."""
        due_at = self.backoff.due_at
        return max(0.0, due_at - now) if self.may_retry and due_at != NEVER else None

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        """Whether the model is shutting down."""
        return self._phase in (ModelPhase.REPLACED, ModelPhase.CLOSED)

    @property
    def is_evictable(self) -> bool:
        """Whether the model can be unloaded now without failing a request."""
        return (
            self._phase is ModelPhase.OPEN
            and self._dispatcher.is_idle
            and not self._dispatcher.direct.has_work
            and not self._rollouts.is_in_progress
            and not self._has_vacated
        )

    @property
    def unavailable(self) -> ModelUnavailable | None:
        """The error for requests and updates if the model cannot accept any now; None otherwise."""
        if self._phase is ModelPhase.UNLOADING:
            return ModelUnavailable(Unavailable, f"{self._name} is being unloaded")
        if self._phase is ModelPhase.UNLOADED:
            return ModelUnavailable(FailedPrecondition, not_loaded_text(self._name))
        return self._readiness.unavailable

    def apply_availability(self) -> None:
        """Let the dispatcher accept requests if the model is available, and refuse them otherwise."""
        # An unloaded model that loads on demand accepts requests: the router starts the load before it passes on a
        # request.
        accepts_unloaded = self.is_unloaded and self._is_on_demand
        unavailable = None if accepts_unloaded else self.unavailable
        fails_waiting = self._phase not in (ModelPhase.REPLACED, ModelPhase.UNLOADING)
        self._dispatcher.set_unavailable(
            None if unavailable is None else unavailable.to_error, fails_waiting=fails_waiting
        )

    # --- private ------------------------------------------------------------------------------------------------

    @property
    def _has_vacated(self) -> bool:
        return any(each.is_vacated for each in self._deployments)

    def _advance(self, event: ModelPhaseEvent) -> None:
        self._phase = advance(MODEL_PHASE_TRANSITIONS, self._phase, event)
        self.is_unloaded = self._phase is ModelPhase.UNLOADED
