"""The interface between the dispatchers and direct channels, over which clients send requests to workers directly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.scheduling.batching.policy import NO_BATCHING
from weightd_daemon.scheduling.request import ClientOrigin
from weightd_daemon.scheduling.slots import Slot
from weightd_daemon.tenants.tenant import Tenant

# Seconds after which `DirectUse` counts again, and seconds without a request after which it begins anew.
_USE_WINDOW_S = 0.4
_USE_GAP_S = 0.25

# Share of a worker's time below which requests need no further worker.
_MIN_USE = 0.2

# Maximum number of lost requests that are remembered for a model. The oldest is dropped first.
_MAX_LOSSES = 256


class DirectLoss(NamedTuple):
    """A request of a direct channel that ran on a worker that exited or hung.

    Attributes:
        client: the key of the client's connection.
        request_id: the id of the request.
        origin: the client.
        tenant: the tenant of the request.
        ran_s: the seconds for which the request had run.
    """

    client: bytes
    request_id: str
    origin: ClientOrigin
    tenant: Tenant
    ran_s: float


OnDirectFault = Callable[[str, DirectLoss | None, str, float], object]
"""Called with the name of a process that has to be ended, the request that hangs in it if any, the reason and the time.
"""


class DirectRuns(NamedTuple):
    """Requests of direct channels that have ended at a worker.

    Attributes:
        answered: the number of requests that the model has answered.
        failed: the number of requests that ended in another way.
        seconds: the seconds for which the model ran.
    """

    answered: int
    failed: int
    seconds: float


class DirectWorker(NamedTuple):
    """A worker that can read direct channels.

    Attributes:
        process: the name of the process: the label of its generation, a dot and its own name.
        model: the name of the model.
        device: the name of the device.
        predict_timeout_s: seconds after which a predict counts as hung.
        on_fault: ends the process.
        on_ran: called with the name of the process and the requests that have ended since the last call.
        on_active: called about every 0.1 s, while the process runs requests of channels, with the name of the process,
            the seconds for which its request has run, and the time; then once with None instead of the seconds.
    """

    process: str
    model: str
    device: str
    predict_timeout_s: float
    on_fault: OnDirectFault
    on_ran: Callable[[str, DirectRuns], object]
    on_active: Callable[[str, float | None, float], object] = lambda process, seconds, now: None


class DirectWorkers(Protocol):
    """The workers that read direct channels, of all models."""

    def add_worker(self, worker: DirectWorker, now: float) -> None:
        """Let a worker that is ready read direct channels."""

    def retire_worker(self, process: str) -> None:
        """Take all channels from a worker that takes no new requests."""

    def remove_worker(self, process: str, now: float) -> DirectLoss | None:
        """Remove a worker that has exited; return the request that it was running, if any."""
        raise NotImplementedError

    def is_running(self, process: str) -> bool:
        """Return whether a worker runs a request of a channel."""
        raise NotImplementedError

    def has_work(self, model: str) -> bool:
        """Return whether requests to a model are queued in a channel, or run."""
        raise NotImplementedError

    def waiting_count(self, model: str) -> int:
        """Return the number of channels of a model with requests that no worker has taken."""
        raise NotImplementedError

    def reclaim(self, model: str) -> None:
        """End all channels of a model; the daemon dispatches the requests that are queued in them."""


class NoDirectWorkers:
    """The `DirectWorkers` of a dispatcher without direct channels."""

    def add_worker(self, worker: DirectWorker, now: float) -> None:
        """Do nothing."""

    def retire_worker(self, process: str) -> None:
        """Do nothing."""

    def remove_worker(self, process: str, now: float) -> DirectLoss | None:
        """Return None."""
        return None

    def is_running(self, process: str) -> bool:
        """Return False."""
        return False

    def has_work(self, model: str) -> bool:
        """Return False."""
        return False

    def waiting_count(self, model: str) -> int:
        """Return 0."""
        return 0

    def reclaim(self, model: str) -> None:
        """Do nothing."""


class ModelDirect:
    """The direct channels of one model, as its dispatcher and the events of its processes see them.

    Args:
        model: the name of the model.
        workers: the workers of all models that read direct channels.
        config: the configuration of the model.

    Attributes:
        on_ran: see `DirectWorker`.
        on_active: see `DirectWorker`.
        losses: the requests that were lost with their workers and may have crashed them, by client and id, the oldest
            first. The clients send them again, to the daemon.
    """

    def __init__(self, model: str, workers: DirectWorkers, config: ModelConfig) -> None:
        self.on_ran: Callable[[str, DirectRuns], object] = lambda process, runs: None
        self.on_active: Callable[[str, float | None, float], object] = lambda process, seconds, now: None
        self.losses: dict[tuple[bytes, str], DirectLoss] = {}
        self._model = model
        self._workers = workers
        self._config = config

    def add_worker(self, slot: Slot, on_fault: OnDirectFault, now: float) -> None:
        """Let a worker read direct channels, unless its batches depend on more than one request."""
        is_alone = slot.lockstep is None and slot.concurrency == 1 and slot.policy == NO_BATCHING
        if is_alone and self._config.priority_levels == 1:
            timeout_s = self._config.predict_timeout
            worker = DirectWorker(slot.name, self._model, slot.device, timeout_s, on_fault, self.on_ran, self.on_active)
            self._workers.add_worker(worker, now)

    def retire_worker(self, process: str) -> None:
        """Take all channels from a worker that takes no new requests."""
        self._workers.retire_worker(process)

    def remove_worker(self, process: str, now: float) -> DirectLoss | None:
        """Remove a worker that has exited; return the request that it was running, if any."""
        return self._workers.remove_worker(process, now)

    def is_running(self, process: str) -> bool:
        """Return whether a worker runs a request of a channel."""
        return self._workers.is_running(process)

    @property
    def has_work(self) -> bool:
        """Whether requests to the model are queued in a channel, or run."""
        return self._workers.has_work(self._model)

    @property
    def waiting_count(self) -> int:
        """The number of channels with requests that no worker has taken."""
        return self._workers.waiting_count(self._model)

    def reclaim(self) -> None:
        """End all channels of the model; the daemon dispatches the requests that are queued in them."""
        self._workers.reclaim(self._model)

    def add_loss(self, loss: DirectLoss) -> None:
        """Remember a lost request that may have crashed its worker."""
        self.losses[loss.client, loss.request_id] = loss
        if len(self.losses) > _MAX_LOSSES:
            del self.losses[next(iter(self.losses))]


class DirectUse:
    """Counts how many workers the requests of direct channels need.

    All idle workers read the channels, so even one client, which waits for each answer, uses all of them in turn.
    """

    def __init__(self) -> None:
        self._run_s = 0.0
        self._since = self._seen_at = -math.inf

    def add(self, run_s: float) -> None:
        """Add the run time of requests."""
        self._run_s += run_s

    def take(self, now: float) -> int:
        """Return how many workers have been needed, or 0 if this was counted recently. Called while requests run."""
        if now > self._seen_at + _USE_GAP_S:
            self._since, self._run_s = now, 0.0
        self._seen_at = now
        if now < self._since + _USE_WINDOW_S:
            return 0
        needed = math.ceil(self._run_s / (now - self._since) - _MIN_USE)
        self._since, self._run_s = now, 0.0
        return max(1, needed)
