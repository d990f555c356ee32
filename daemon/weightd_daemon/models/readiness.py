"""How a model stands: whether it goes on, and what is said where nobody can answer."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weightd_daemon.generations.states import ACTIVE
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


def find_unavailable(name: str, deployments: Sequence[Deployment]) -> ModelUnavailable | None:
    """Return why nobody serves the model of this name, or loads it, if that is so."""
    if all(each.has_failed for each in deployments):
        causes = list(dict.fromkeys(each.cause for each in deployments))
        # The client may try again where the daemon does.
        error_type = Unavailable if any(each.is_transient for each in deployments) else FailedPrecondition
        return ModelUnavailable(error_type, f"{name} failed: {'; '.join(causes)}")
    if any(each.serving is not None or each.is_busy for each in deployments):
        return None
    return ModelUnavailable(Unavailable, f"{name} is being unloaded")


def main_deployment(deployments: Sequence[Deployment]) -> Deployment:
    """Return the deployment that tells how the model stands: one that serves it, if any does."""
    return next((each for each in deployments if each.serving is not None), deployments[0])


def find_built(deployments: Sequence[Deployment]) -> Built | None:
    """Return what a holder has told of the model, if one has whose generation has not ended."""
    active = (each for deployment in deployments for each in deployment.generations if each.state in ACTIVE)
    return next((each.built for each in active if each.built is not None), None)


def explain_error(error: RequestError, name: str, deployments: Sequence[Deployment]) -> RequestError:
    """Return what a deadline says where there was nobody who could have answered; other errors say what they say."""
    serving = [each.serving for each in deployments if each.serving is not None]
    if not isinstance(error, DeadlineExceeded) or any(each.processes.serving for each in serving):
        return error
    generation = main_deployment(deployments).main_generation
    if serving and not generation.cause:
        return error  # a worker has died, and the next one is on its way
    cause = generation.cause or deployments[0].cause or "not ready yet"
    return Unavailable(f"{name} has no worker: {generation.progress}, {cause}")


def unready_reason(name: str, deployments: Sequence[Deployment], processes: SlotProcesses, now: float) -> str:
    """Return why the model is not ready to answer, or "" if it is: a worker has been heard of of late."""
    serving = [each.serving for each in deployments if each.serving is not None]
    if not serving:
        unavailable, generation = find_unavailable(name, deployments), main_deployment(deployments).main_generation
        return (
            unavailable.message
            if unavailable is not None
            else f"{name}: {generation.progress}{f', {generation.cause}' if generation.cause else ''}"
        )
    silence_s = processes.silence_s([process for each in serving for process in each.processes.serving], now)
    if silence_s is None:
        return ""
    if silence_s == float("inf"):
        return f"{name}: no worker is there; they are being replaced"
    return f"{name}: no worker has answered for {silence_s:.1f} s, watchdog is {processes.watchdog_period_s:g} s"
