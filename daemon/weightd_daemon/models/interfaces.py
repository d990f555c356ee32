"""What a model wants of the outside, its children and its clients, and what its deployments want of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.persisted import SealRecord
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.models.rollout import UpdateSink
from weightd_daemon.models.versions import ModelVersions
from weightd_daemon.processes.events import ProcessEventHandler, SnapshotEventHandler
from weightd_daemon.processes.spec import WorkerProgram
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_daemon.scheduling.results import ResponseSink
from weightd_daemon.scheduling.tensor_location import SharedRegion
from weightd_protocol.messages.worker import ChildOrder


class SnapshotTaker(Protocol):
    """Takes snapshots of models and removes them."""

    def take_snapshot(
        self,
        event_handler: SnapshotEventHandler,
        model: str,
        config: ModelConfig,
        source: ModelSource,
        expected_sha256: str = "",
    ) -> None:
        """Take the snapshot of a model's source; answer by `on_snapshot_taken` or `on_snapshot_failed`.

        `expected_sha256`: the sha256 that it has to have, "" for any.
        """

    def remove_snapshot(self, model: str, source: ModelSource) -> None:
        """Remove the snapshot, or stop taking it."""


class GenerationStore(Protocol):
    """The files of generations, page stores among them."""

    @property
    def fingerprints(self) -> Mapping[str, object]:
        """The fingerprint of each page store, by the label of its generation."""
        raise NotImplementedError

    def on_exported(self, generation: GenerationBase) -> None:
        """Remember the fingerprint of the page store, if the holder has written one."""

    def seal_record(self, generation: GenerationBase) -> SealRecord | None:
        """Return the fingerprint of the page store when it was exported; None without a page store."""
        raise NotImplementedError

    def is_store_intact(self, generation: GenerationBase) -> bool:
        """Return whether the page store, if there is one, is what it was when it was exported."""
        raise NotImplementedError

    def remove_files(self, generation: GenerationBase) -> None:
        """Remove the files of a generation that has no process any more."""


class OrderSender(Protocol):
    """Sends orders to children."""

    def send_order(
        self, name: str, order: ChildOrder, frames: Sequence[Any] = (), regions: Sequence[SharedRegion] = ()
    ) -> None:
        """Send an order to a child, with these tensor frames and shared regions."""


class ProcessManager(Protocol):
    """Starts and ends the children of a model. No method calls the model back before it has returned."""

    @property
    def snapshots(self) -> SnapshotTaker:
        """The snapshots of models."""
        raise NotImplementedError

    @property
    def storage(self) -> GenerationStore:
        """The files of generations."""
        raise NotImplementedError

    @property
    def messenger(self) -> OrderSender:
        """The connection to the children."""
        raise NotImplementedError

    def spawn(
        self,
        event_handler: ProcessEventHandler,
        generation: GenerationBase,
        program: WorkerProgram,
        name: str,
        role: Role,
        template: str = "",
    ) -> None:
        """Start a child, forked of `template` if that is one; answer by `on_message` and, in the end, `on_exit`."""

    def resume(
        self, event_handler: ProcessEventHandler, generation: GenerationBase, seal_record: SealRecord | None
    ) -> bool:
        """Take over the children of a generation that the previous daemon has loaded; answer as for `spawn`.

        Return False if its page store is not what it was.
        """
        raise NotImplementedError

    def mark_changed(self) -> None:
        """Record that something has changed that the next daemon has to know."""

    def is_alive(self, name: str) -> bool:
        """Return whether a child has not begun to exit, so that it still holds what it held."""
        raise NotImplementedError

    def kill(self, name: str, *, abort: bool = False) -> None:
        """Kill a child; `abort`: in a way that leaves its stacks in its log, and that it may survive."""


class ClientNotifier(NamedTuple):
    """What sends a model's replies to clients.

    Attributes:
        response_sink: those to requests.
        update_sink: those to updates.
    """

    response_sink: ResponseSink
    update_sink: UpdateSink


class DeployedModel(Protocol):
    """A model, as its deployments know it; several may share deployments."""

    name: str
    config: ModelConfig
    dispatcher: Dispatcher
    versions: ModelVersions

    @property
    def is_draining(self) -> bool:
        """Whether it winds down."""
        raise NotImplementedError

    def wake(self) -> None:
        """A device has room again that one of the deployments waits for."""

    def on_reconciled(self, now: float) -> None:
        """Its deployments have changed: serve what they now allow."""
