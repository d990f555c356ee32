"""How a model stands: whether it goes on, and what is said where nobody can answer."""

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
    """Whether a model goes on."""

    OPEN = "open"
    REPLACED = "replaced"  # it winds down; another model of the name adopts what waits, or comes to wait
    CLOSED = "closed"  # it winds down; what waits is given up


class ModelPhaseEvent(enum.Enum):
    """What a model is told."""

    REPLACE = "replace"
    CLOSE = "close"


MODEL_PHASE_TRANSITIONS: Mapping[tuple[ModelPhase, ModelPhaseEvent], ModelPhase] = {
    (ModelPhase.OPEN, ModelPhaseEvent.REPLACE): ModelPhase.REPLACED,
    (
        ModelPhase.CLOSED,
        ModelPhaseEvent.REPLACE,
    ): ModelPhase.CLOSED,  # a stop while another model loads: nothing waits any more
    **{(phase, ModelPhaseEvent.CLOSE): ModelPhase.CLOSED for phase in ModelPhase},
}


class ModelUnavailable(NamedTuple):
    """Why nobody serves a model, or loads it: requests are refused at once."""

    error_type: type[RequestError]
    message: str

    def to_error(self) -> RequestError:
        """Return what a client is told."""
        return self.error_type(self.message)


class Readiness:
    """How a model stands, by its deployments.

    Args:
        name: of the model.
        deployments: its own, or those of its shared process.
        processes: that take its requests.
        index: of the model among those of a shared process.

    Attributes:
        index: likewise.
    """

    def __init__(self, name: str, deployments: Iterable[Deployment], processes: SlotProcesses, index: int = 0) -> None:
        self._name = name
        self._deployments = tuple(deployments)
        self._processes = processes
        self.index = index

    @property
    def is_serving(self) -> bool:
        """Whether any device serves it."""
        return any(each.serving is not None for each in self._deployments)

    @property
    def is_serving_everywhere(self) -> bool:
        """Whether each device serves it."""
        return all(each.serving is not None for each in self._deployments)

    @property
    def may_serve_soon(self) -> bool:
        """Whether any device serves it, or will as soon as a worker of the daemon before this one is back.

        Or if that cannot be loaded for which it has made way.
        """
        is_reconnecting = any(
            generation.is_reconnecting for each in self._deployments for generation in each.generations
        )
        return self.is_serving or is_reconnecting or any(each.is_vacated for each in self._deployments)

    @property
    def is_complete(self) -> bool:
        """Whether each device serves it with all its workers, or has failed while another one does not."""
        return self.is_serving and all(
            each.has_failed or (each.serving is not None and each.serving.is_complete) for each in self._deployments
        )

    @property
    def has_failed(self) -> bool:
        """Whether no device serves it, or loads it."""
        return all(each.has_failed for each in self._deployments)

    @property
    def has_failures(self) -> bool:
        """Whether a device does not serve it, or load it."""
        return any(each.has_failed for each in self._deployments)

    @property
    def has_transient_failures(self) -> bool:
        """Whether a device has failed of a cause that may go away by itself."""
        return any(each.is_transient for each in self._deployments)

    @property
    def state(self) -> GenerationState:
        """How it stands: it serves if any device does, and has failed if all have."""
        if self.is_serving:
            return GenerationState.SERVING
        loading = [each for each in self._deployments if not each.has_failed]
        return (loading or self._deployments)[0].main_generation.state

    @property
    def main_generation(self) -> GenerationBase:
        """The generation that tells how it stands: one that serves, if any does."""
        main = next((each for each in self._deployments if each.serving is not None), self._deployments[0])
        return main.main_generation

    @property
    def built(self) -> Built | None:
        """What a holder has told of the model, if one has whose generation has not ended."""
        active = (each for deployment in self._deployments for each in deployment.generations if each.state in ACTIVE)
        return next((built for each in active if (built := each.built_model(self.index)) is not None), None)

    @property
    def unavailable(self) -> ModelUnavailable | None:
        """Why nobody serves the model, or loads it; None if somebody does."""
        if self.has_failed:
            causes = list(dict.fromkeys(each.cause for each in self._deployments))
            # The client may try again where the daemon does.
            error_type = Unavailable if self.has_transient_failures else FailedPrecondition
            return ModelUnavailable(error_type, f"{self._name} failed: {'; '.join(causes)}")
        if any(each.serving is not None or each.is_busy for each in self._deployments):
            return None
        return ModelUnavailable(Unavailable, f"{self._name} is being unloaded")

    def explain_error(self, error: RequestError) -> RequestError:
        """Return what a deadline says where there was nobody who could have answered; others say what they say."""
        serving = [each.serving for each in self._deployments if each.serving is not None]
        if not isinstance(error, DeadlineExceeded) or any(each.processes.serving for each in serving):
            return error
        generation = self.main_generation
        if serving and not generation.cause:
            return error  # a worker has died, and the next one is on its way
        cause = generation.cause or self._deployments[0].cause or "not ready yet"
        return Unavailable(f"{self._name} has no worker: {generation.progress}, {cause}")

    def unready_reason(self, now: float) -> str:
        """Return why the model is not ready to answer, or "" if it is: a worker has been heard of of late."""
        serving = [each.serving for each in self._deployments if each.serving is not None]
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
            return f"{self._name}: no worker is there; they are being replaced"
        period_s = processes.watchdog_period_s
        return f"{self._name}: no worker has answered for {silence_s:.1f} s, watchdog is {period_s:g} s"
