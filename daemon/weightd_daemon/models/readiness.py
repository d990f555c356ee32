"""The readiness of a model, and the errors for requests that no worker can serve."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.states import ACTIVE, GenerationState
from weightd_daemon.models.deployment import Deployment
from weightd_daemon.scheduling.slot_processes import SlotProcesses
from weightd_protocol.errors import DeadlineExceeded, FailedPrecondition, RequestError, Unavailable
from weightd_protocol.messages.worker import Built


class ModelPhase(enum.Enum):
    """The phase of a model: open, unloaded, or shutting down."""

    OPEN = "open"
    UNLOADING = "unloading"  # new requests are refused; after the accepted ones have ended, the model is unloaded
    UNLOADED = "unloaded"  # nothing is loaded; a request to a model that loads on demand starts a load
    REPLACED = "replaced"  # shutting down; a new model of the same name takes over all queued requests
    CLOSED = "closed"  # shutting down; queued requests fail


class ModelPhaseEvent(enum.Enum):
    """An event that changes the phase of a model."""

    REFUSE = "refuse"
    UNLOAD = "unload"
    LOAD = "load"
    REPLACE = "replace"
    CLOSE = "close"


MODEL_PHASE_TRANSITIONS: Mapping[tuple[ModelPhase, ModelPhaseEvent], ModelPhase] = {
    (ModelPhase.OPEN, ModelPhaseEvent.REFUSE): ModelPhase.UNLOADING,
    (ModelPhase.OPEN, ModelPhaseEvent.UNLOAD): ModelPhase.UNLOADED,
    (ModelPhase.UNLOADING, ModelPhaseEvent.UNLOAD): ModelPhase.UNLOADED,
    (ModelPhase.OPEN, ModelPhaseEvent.LOAD): ModelPhase.OPEN,
    (ModelPhase.UNLOADED, ModelPhaseEvent.LOAD): ModelPhase.OPEN,
    (ModelPhase.OPEN, ModelPhaseEvent.REPLACE): ModelPhase.REPLACED,
    (ModelPhase.UNLOADING, ModelPhaseEvent.REPLACE): ModelPhase.REPLACED,
    (ModelPhase.UNLOADED, ModelPhaseEvent.REPLACE): ModelPhase.REPLACED,
    (
        ModelPhase.CLOSED,
        ModelPhaseEvent.REPLACE,
    ): ModelPhase.CLOSED,  # the daemon was shutting down when the new model took over, so no requests wait
    **{(phase, ModelPhaseEvent.CLOSE): ModelPhase.CLOSED for phase in ModelPhase},
}


class ModelUnavailable(NamedTuple):
    """The error for all requests to a model that no device serves or loads."""

    error_type: type[RequestError]
    message: str

    def to_error(self) -> RequestError:
        """Return this error as an exception for a client."""
        return self.error_type(self.message)


class Readiness:
    """Reports whether a model can serve requests, from the state of its deployments.

    Args:
        name: the name of the model.
        deployments: the deployments of the model or of its shared process.
        processes: the slots of the model's dispatcher, and the processes of these slots.
        index: the position of the model in its group, 0 without a group.

    Attributes:
        index: the position of the model in its group, 0 without a group.
    """

    def __init__(self, name: str, deployments: Iterable[Deployment], processes: SlotProcesses, index: int = 0) -> None:
        self._name = name
        self._deployments = tuple(deployments)
        self._processes = processes
        self.index = index

    @property
    def is_serving(self) -> bool:
        """Whether any device serves the model."""
        return any(each.serving is not None for each in self._deployments)

    @property
    def is_serving_everywhere(self) -> bool:
        """Whether every device serves the model."""
        return all(each.serving is not None for each in self._deployments)

    @property
    def may_serve_soon(self) -> bool:
        """Whether any device serves the model or is expected to serve it soon.

        A device is expected to serve soon if workers of its generation are reconnecting after a restart of the daemon,
        or if its deployment is vacated: the deployment is loaded again if the changed model fails.
        """
        is_reconnecting = any(
            generation.is_reconnecting for each in self._deployments for generation in each.generations
        )
        return self.is_serving or is_reconnecting or any(each.is_vacated for each in self._deployments)

    @property
    def is_complete(self) -> bool:
        """Whether at least one device serves the model, and each one serves it with all its workers or has failed."""
        return self.is_serving and all(
            each.has_failed or (each.serving is not None and each.serving.is_complete) for each in self._deployments
        )

    @property
    def is_unloaded(self) -> bool:
        """Whether no device serves or loads the model, because it has not been loaded yet or was unloaded."""
        return all(each.is_unloaded for each in self._deployments)

    @property
    def has_failed(self) -> bool:
        """Whether every device has failed to load the model."""
        return all(each.has_failed for each in self._deployments)

    @property
    def has_failures(self) -> bool:
        """Whether any device has failed to load the model."""
        return any(each.has_failed for each in self._deployments)

    @property
    def has_transient_failures(self) -> bool:
        """Whether any device has failed for a cause that may disappear without an operator's action."""
        return any(each.is_transient for each in self._deployments)

    @property
    def state_name(self) -> str:
        """The state of the model in status reports.

        It is "serving" if any device serves the model, "unloaded" if the model is unloaded, "failed" if all devices
        have failed, and otherwise the state of the first device that has not failed.
        """
        if self.is_serving:
            return GenerationState.SERVING.display_name
        if self.is_unloaded:
            return ModelPhase.UNLOADED.value
        loading = [each for each in self._deployments if not each.has_failed]
        return (loading or self._deployments)[0].main_generation.state.display_name

    @property
    def main_generation(self) -> GenerationBase:
        """The generation that status reports show for the model: a serving one, if there is one.

        Raises:
            RuntimeError: the model has never loaded a generation.
        """
        main = next((each for each in self._deployments if each.serving is not None), self._deployments[0])
        return main.main_generation

    @property
    def last_generation(self) -> GenerationBase | None:
        """The generation that status reports show for the model; None if the model was never loaded."""
        return None if self._deployments[0].last_generation is None else self.main_generation

    @property
    def built(self) -> Built | None:
        """The model's description, with its signature, as an active generation has reported it; None if none has."""
        active = (each for deployment in self._deployments for each in deployment.generations if each.state in ACTIVE)
        return next((built for each in active if (built := each.built_model(self.index)) is not None), None)

    @property
    def unavailable(self) -> ModelUnavailable | None:
        """The error for all requests if no device serves or loads the model; None otherwise."""
        if self.has_failed:
            causes = list(dict.fromkeys(each.cause for each in self._deployments))
            # UNAVAILABLE: the daemon loads the model again by itself, so the client may retry.
            # FAILED_PRECONDITION: a retry is useless until the operator acts.
            error_type = Unavailable if self.has_transient_failures else FailedPrecondition
            return ModelUnavailable(error_type, f"{self._name} failed: {'; '.join(causes)}")
        if self.is_unloaded:
            return ModelUnavailable(FailedPrecondition, not_loaded_text(self._name))
        if any(each.serving is not None or each.is_busy for each in self._deployments):
            return None
        return ModelUnavailable(Unavailable, f"{self._name} is being unloaded")

    def explain_error(self, error: RequestError, *, is_on_demand: bool = False) -> RequestError:
        """Return the error for a client: a missed deadline becomes UNAVAILABLE if the model had no worker.

        For a model that loads on demand, the error remains DEADLINE_EXCEEDED, because a load may take longer than a
        request can wait.
        """
        serving = [each.serving for each in self._deployments if each.serving is not None]
        if not isinstance(error, DeadlineExceeded) or any(each.processes.serving for each in serving):
            return error
        if self.is_unloaded or (is_on_demand and not serving):
            last = self.last_generation
            progress = "" if last is None or self.is_unloaded else f": {last.progress}"
            return DeadlineExceeded(f"{self._name} was not loaded within the deadline{progress}")
        generation = self.main_generation
        if serving and not generation.cause:
            return error  # the model has served; its worker has exited and is being replaced
        cause = generation.cause or self._deployments[0].cause or "not ready yet"
        return Unavailable(f"{self._name} has no worker: {generation.progress}, {cause}")

    def unready_reason(self, now: float) -> str:
        """Return why the model is not ready; "" if a worker has answered within the period of the watchdog."""
        serving = [each.serving for each in self._deployments if each.serving is not None]
        if self.is_unloaded:
            return f"{self._name} is not loaded"
        if not serving:
            unavailable, generation = self.unavailable, self.main_generation
            return (
                unavailable.message
                if unavailable is not None
                else f"{self._name}: {generation.progress}{f', {generation.cause}' if generation.cause else ''}"
            )
        processes = self._processes
        silence_s = processes.silence_s([process for each in serving for process in each.processes.serving], now)
        if silence_s is None:
            return ""
        if silence_s == float("inf"):
            return f"{self._name}: all workers have exited and are being replaced"
        period_s = processes.watchdog_period_s
        return f"{self._name}: no worker has answered for {silence_s:.1f} s, the watchdog period is {period_s:g} s"


def not_loaded_text(model: str) -> str:
    """Return the error text for a request to a model that only an operator loads."""
    return f"{model} is not loaded; load it with: weightctl load {model}"
