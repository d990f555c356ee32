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
            expected_sha256: the sha256 that the snapshot must have; "" for any.
        """

    def remove_snapshot(self, model: str, source: ModelSource) -> None:
        """Remove the snapshot of a source, or stop taking it if it is still being taken."""


class GenerationStore(Protocol):
    """Manages the files of generations, for example their page stores."""

    @property
    def fingerprints(self) -> Mapping[str, object]:
        """The fingerprint (size and modification time) of each page store, by the label of its generation."""
        raise NotImplementedError

    def on_exported(self, generation: GenerationBase) -> None:
        """Record the fingerprint (size and modification time) of the page store, if the holder has written one."""

    def seal_record(self, generation: GenerationBase) -> SealRecord | None:
        """Return the size and modification time of the page store at its export; None without a page store."""
        raise NotImplementedError

    def is_store_intact(self, generation: GenerationBase) -> bool:
        """Return whether the generation's page store is unchanged since its export; True without a page store."""
        raise NotImplementedError

    def remove_files(self, generation: GenerationBase) -> None:
        """Remove the files of a generation whose processes have all exited."""


class OrderSender(Protocol):
    """Sends orders to child processes."""

    def send_order(
        self, name: str, order: ChildOrder, frames: Sequence[Any] = (), regions: Sequence[SharedRegion] = ()
    ) -> None:
        """Send an order to a child process, with its tensor frames and the shared-memory regions that it refers to."""


class ProcessManager(Protocol):
    """Starts and ends the child processes of a model. No method calls an event handler before the method returns."""

    @property
    def snapshots(self) -> SnapshotTaker:
        """The object that takes and removes the snapshots of models."""
        raise NotImplementedError

    @property
    def storage(self) -> GenerationStore:
        """The object that manages the files of generations."""
        raise NotImplementedError

    @property
    def messenger(self) -> OrderSender:
        """The object that sends orders to child processes."""
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
        """Start a child process of a generation.

        Args:
            event_handler: receives each message of the child as `on_message`, and finally its exit as `on_exit`.
            generation: the generation.
            program: the model and the settings that the child runs with.
            name: the name of the child.
            role: whether the child is a holder, a worker, a rank or a broker.
            template: the name of the template from which the child is forked; "" if it is not forked from a template.
        """

    def resume(
        self, event_handler: ProcessEventHandler, generation: GenerationBase, seal_record: SealRecord | None
    ) -> bool:
        """Take over the children of a generation that the previous daemon has loaded.

        The event handler receives the same calls as for `spawn`. If the generation's page store no longer matches
        `seal_record`, the children are killed and the result is False.
        """
        raise NotImplementedError

    def mark_changed(self) -> None:
        """Record that the state in the hand-over file, which the next daemon reads, has changed."""

    def watch_weights(self, worker: str, generation: GenerationBase) -> bool:
        """Let a worker check before each answer on a direct channel that its shared weights are valid.

        The caller must check afterwards that they still are.

        Returns:
            Whether the worker will check them, or they cannot become invalid.
        """
        raise NotImplementedError

    def is_alive(self, name: str) -> bool:
        """Return whether a child process still has its memory, because it has not begun to exit."""
        raise NotImplementedError

    def kill(self, name: str, *, abort: bool = False) -> None:
        """Kill a child process by SIGKILL.

        With `abort`, send SIGABRT instead: the child logs its stacks first, and it may survive the signal.
        """


class ClientNotifier(NamedTuple):
    """The objects that send a model's replies to clients.

    Attributes:
        response_sink: sends the responses to inference requests.
        update_sink: sends the results of updates.
    """

    response_sink: ResponseSink
    update_sink: UpdateSink


class DeployedModel(Protocol):
    """The part of a model that its deployments use; the models of a group share their deployments."""

    name: str
    config: ModelConfig
    dispatcher: Dispatcher
    versions: ModelVersions

    @property
    def is_draining(self) -> bool:
        """Whether the model is shutting down."""
        raise NotImplementedError

    def wake(self) -> None:
        """Schedule `tick` at once, because resources were released for which a generation of the model waits."""

    def on_reconciled(self, now: float) -> None:
        """React to the new state of the deployments: dispatch queued requests, or fail them if no device can serve."""
