"""The interfaces between a model, its processes, its clients and its deployments."""

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
    """Takes and removes snapshots of models."""

    def take_snapshot(
        self,
        event_handler: SnapshotEventHandler,
        model: str,
        config: ModelConfig,
        source: ModelSource,
        expected_sha256: str = "",
    ) -> None:
        """Begin to take the snapshot of a model's source.

        The handler receives the result as `on_snapshot_taken` or `on_snapshot_failed`.

        Args:
            event_handler: receives the result.
            model: the name of the model.
            config: the configuration of the model.
            source: the files to copy.
            expected_sha256: the sha256 that the snapshot must have, or "" for any.
        """

    def remove_snapshot(self, model: str, source: ModelSource) -> None:
        """Remove the snapshot of a source, or cancel it while it is being taken."""


class GenerationStore(Protocol):
    """The files of generations, page stores included."""

    @property
    def fingerprints(self) -> Mapping[str, object]:
        """The fingerprint of each page store, by the label of its generation."""
        raise NotImplementedError

    def on_exported(self, generation: GenerationBase) -> None:
        """Record the fingerprint of the page store, if the holder has written one."""

    def seal_record(self, generation: GenerationBase) -> SealRecord | None:
        """Return the fingerprint that the page store had when it was exported; None without a page store."""
        raise NotImplementedError

    def is_store_intact(self, generation: GenerationBase) -> bool:
        """Return whether the page store is unchanged since its export; True without a page store."""
        raise NotImplementedError

    def remove_files(self, generation: GenerationBase) -> None:
        """Remove the files of a generation whose processes have all exited."""


class OrderSender(Protocol):
    """Sends orders to child processes."""

    def send_order(
        self, name: str, order: ChildOrder, frames: Sequence[Any] = (), regions: Sequence[SharedRegion] = ()
    ) -> None:
        """Send an order to a child, with these tensor frames and shared regions."""


class ProcessManager(Protocol):
    """Starts and ends the child processes of a model. No method calls the model back before it returns."""

    @property
    def snapshots(self) -> SnapshotTaker:
        """The taker of model snapshots."""
        raise NotImplementedError

    @property
    def storage(self) -> GenerationStore:
        """The store of the generations' files."""
        raise NotImplementedError

    @property
    def messenger(self) -> OrderSender:
        """The sender of orders to child processes."""
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
        """Start a child process, forked from the process `template` unless that is "".

        The handler receives each message as `on_message` and finally the exit as `on_exit`.
        """

    def resume(
        self, event_handler: ProcessEventHandler, generation: GenerationBase, seal_record: SealRecord | None
    ) -> bool:
        """Take over the children of a generation that the previous daemon has loaded; call the handler as for `spawn`.

        Return False if the generation's page store has changed.
        """
        raise NotImplementedError

    def mark_changed(self) -> None:
        """Record that state which the next daemon needs has changed."""

    def is_alive(self, name: str) -> bool:
        """Return whether a child has not begun to exit, so that it still holds its memory."""
        raise NotImplementedError

    def kill(self, name: str, *, abort: bool = False) -> None:
        """Kill a child; `abort`: with a signal that makes it log its stacks, and that it may survive."""


class ClientNotifier(NamedTuple):
    """The sinks for a model's replies to clients.

    Attributes:
        response_sink: receives the responses to inference requests.
        update_sink: receives the results of updates.
    """

    response_sink: ResponseSink
    update_sink: UpdateSink


class DeployedModel(Protocol):
    """A model as its deployments see it; several models may share deployments."""

    name: str
    config: ModelConfig
    dispatcher: Dispatcher
    versions: ModelVersions

    @property
    def is_draining(self) -> bool:
        """Whether the model is shutting down."""
        raise NotImplementedError

    def wake(self) -> None:
        """Schedule the model's `tick`, because a device has free memory for which a deployment waits."""

    def on_reconciled(self, now: float) -> None:
        """Apply a change of the deployments: serve the requests that they now allow."""
