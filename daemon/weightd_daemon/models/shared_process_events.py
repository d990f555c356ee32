"""The processes of a shared process.

Each dispatcher is told what becomes of them, whichever of its models ran there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.actions import Action, AddSlot, DeleteFiles, RemoveSlot, Spawn, TakeSnapshot
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.models import rank_group
from weightd_daemon.models.deployment import Deployment
from weightd_daemon.models.process_events import ProcessEvents
from weightd_daemon.platform.exit_cause import ExitCause, MissingFile
from weightd_daemon.processes.spec import WorkerProgram
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_daemon.scheduling.shared_process import SharedProcessScheduler
from weightd_protocol.messages.worker import (
    ChildMessage,
    Hello,
    Pong,
    PredictCancelled,
    PredictFailed,
    PredictResult,
    ProcessFailed,
)


class SharedProcess(Protocol):
    """Whose processes they are.

    Attributes:
        schedulers: of the process of each generation, by its label.
    """

    schedulers: dict[str, SharedProcessScheduler]

    @property
    def dispatchers(self) -> Sequence[Dispatcher]:
        """Where the requests of each member are."""
        raise NotImplementedError

    def request_snapshots(self, now: float) -> None:
        """A process is to be started."""

    def on_snapshots_lost(self) -> None:
        """The files of snapshots have vanished."""

    def program(self, config: ModelConfig, device: str) -> WorkerProgram:
        """Return what the process runs there."""
        raise NotImplementedError


class SharedProcessEvents(ProcessEvents):
    """The processes of a shared process: each dispatcher is told what becomes of them.

    Args:
        shared_process: whose processes they are.
        more: as those of `ProcessEvents`.
    """

    def __init__(self, shared_process: SharedProcess, *more: Any) -> None:
        super().__init__(*more)
        self._shared_process = shared_process

    def on_message(self, child: str, message: ChildMessage, frames: Sequence[Any], now: float) -> None:
        """A child has sent `message`."""
        entry = self._by_process.get(child)
        if entry is None:
            return
        generation = entry[1]
        match message:
            case PredictResult():
                if self._can_trust_answers(generation):
                    self._active_dispatcher(generation).on_result(child, message, frames, now)
            case PredictCancelled():
                self._active_dispatcher(generation).on_cancelled(child, message.request, now)
            case Pong():
                for dispatcher in self._shared_process.dispatchers:
                    dispatcher.fault_isolator.watchdog.on_pong(child, now)
            case _:
                self._on_process_message(child, *entry, message, now)
                self._reconcile_deployment(entry[0], now)

    def _on_process_message(
        self, child: str, deployment: Deployment, generation: GenerationBase, message: ChildMessage, now: float
    ) -> None:
        match message:
            case PredictFailed():
                self._active_dispatcher(generation).on_batch_failed(child, message, now)
                if message.is_exiting:
                    self._release_slots(child)
                    generation.on_leaving(child, now)
            case ProcessFailed():
                self._active_dispatcher(generation).on_process_failed(child, message.reason, now)
                self._release_slots(child)
                generation.on_process_failed(child, message, now)
            case Hello():
                generation.on_hello(child, message, now)
            case _:
                rank_group.on_message(child, deployment, generation, self._dispatcher, message, now)

    def on_exit(self, child: str, exit_cause: ExitCause, now: float) -> None:
        """A child has exited: whose batch it had may be to blame, the others' are not."""
        entry = self._by_process.pop(child, None)
        if entry is None:
            return
        deployment, generation = entry
        if exit_cause.missing_file is MissingFile.SNAPSHOT:
            self._shared_process.on_snapshots_lost()
        if not self._can_trust_answers(generation):
            self._release_slots(child)
        has_answered = any(dispatcher.has_answered(child) for dispatcher in self._shared_process.dispatchers)
        for dispatcher in self._shared_process.dispatchers:
            dispatcher.on_exit(child, exit_cause, now)
        generation.on_exit(child, exit_cause, now, has_answered=has_answered)
        self._reconcile_deployment(deployment, now)

    def perform(self, deployment: Deployment, generation: GenerationBase, action: Action, now: float) -> None:
        """Do what a generation wants."""
        match action:
            case TakeSnapshot():
                self._shared_process.request_snapshots(now)
            case Spawn(name, role, _):
                self._by_process[name] = deployment, generation
                program = self._shared_process.program(self._config, generation.children[name].device)
                self._process_manager.spawn(self._event_handler, generation, program, name, role)
            case AddSlot(name):
                self._add_slots(name, generation, now)
            case RemoveSlot(name):
                self._remove_slots(name, generation)
            case DeleteFiles():
                self._shared_process.schedulers.pop(generation.label, None)
                super().perform(deployment, generation, action, now)
            case _:
                super().perform(deployment, generation, action, now)

    def end_process(self, process: str, reason: str, now: float) -> None:
        """End a process that is of no use any more."""
        self._release_slots(process)
        entry = self._by_process.get(process)
        if entry is not None:
            entry[1].on_hung(process, reason, now)
            self._reconcile_deployment(entry[0], now)

    def run_watchdog(self, serving: Iterable[tuple[Deployment, GenerationBase]], now: float) -> None:
        """End who computes for too long, and who does not answer a ping."""
        del serving
        for dispatcher in self._shared_process.dispatchers:
            for process, why in list(dispatcher.overdue_processes(now)):
                self.end_process(process, why, now)
            if now >= dispatcher.fault_isolator.watchdog.next_event_at:
                for process in list(dispatcher.ping_idle(now)):
                    self.end_process(process, "it has not answered a ping", now)

    def _add_slots(self, name: str, generation: GenerationBase, now: float) -> None:
        scheduler = self._shared_process.schedulers[generation.label] = SharedProcessScheduler()
        for process in generation.slots.get(name, ()):
            for index, dispatcher in enumerate(self._shared_process.dispatchers):
                dispatcher.add_shared_slot(process, scheduler, index, now, device=generation.device)

    def _remove_slots(self, slot: str, generation: GenerationBase) -> None:
        for process in [each for each in generation.children if each.startswith(f"{slot}.")]:
            for dispatcher in self._shared_process.dispatchers:
                dispatcher.remove_slot(process)
            if not generation.attach_control.is_valid:
                # It will not answer what it has, and is not to blame.
                self._release_slots(process)

    def _release_slots(self, process: str) -> None:
        for dispatcher in self._shared_process.dispatchers:
            dispatcher.release_slot(process)

    def _active_dispatcher(self, generation: GenerationBase) -> Dispatcher:
        """The dispatcher whose batch the process runs; that of the first member where it runs none."""
        scheduler = self._shared_process.schedulers.get(generation.label)
        active_slot = None if scheduler is None else scheduler.active_slot
        for dispatcher in self._shared_process.dispatchers:
            if active_slot is not None and any(
                dispatcher.scheduler.slots.slot_of(each) is active_slot for each in generation.children
            ):
                return dispatcher
        return self._shared_process.dispatchers[0]
