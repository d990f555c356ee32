"""The interface between the dispatchers and direct channels, over which clients send requests to workers directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from weightd_daemon.scheduling.request import ClientOrigin
from weightd_daemon.tenants.tenant import Tenant


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


class DirectWorker(NamedTuple):
    """A worker that can read direct channels.

    Attributes:
        process: the name of the process: the label of its generation, a dot and its own name.
        model: the name of the model.
        device: the name of the device.
        predict_timeout_s: seconds after which a predict counts as hung.
        on_fault: ends the process.
    """

    process: str
    model: str
    device: str
    predict_timeout_s: float
    on_fault: OnDirectFault


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

    def reclaim(self, model: str) -> None:
        """Do nothing."""
