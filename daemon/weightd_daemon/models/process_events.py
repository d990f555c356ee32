"""Handles the messages and exits of child processes, and performs the actions that generations return.

`ProcessEvents` passes the results of predicts to the dispatcher, and all other messages to the generation of the
process. `ProcessUse` implements what differs between the processes of one model and a process that serves several
models.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from weightd_daemon.generations.actions import (
    Action,
    AddSlot,
    DeleteFiles,
    Kill,
    RemoveSlot,
    Send,
    Spawn,
    TakeSnapshot,
)
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.persisted import GenerationRecord
from weightd_daemon.generations.progress import FailureReason
from weightd_daemon.generations.rank_group import RankGroup
from weightd_daemon.generations.shared_weights import Generation
from weightd_daemon.generations.states import AttachState
from weightd_daemon.models.deployment import Deployment
from weightd_daemon.models.interfaces import ProcessManager
from weightd_daemon.models.process_use import ProcessUse, rank_number
from weightd_daemon.platform.exit_cause import ExitCause, MissingFile
from weightd_daemon.scheduling.direct import DirectLoss
from weightd_protocol.codec import clip
from weightd_protocol.messages.ranks import JoinedGroup, PredictDone, SelfTestDone
from weightd_protocol.messages.worker import (
    Attached,
    BatchMismatch,
    Built,
    ChildMessage,
    Forked,
    Pong,
    PredictCancelled,
    PredictFailed,
    PredictResult,
    ProcessFailed,
    Reconnected,
)

_log = logging.getLogger("weightd")


class ProcessEvents:
    """Routes events between child processes, their generations and the dispatchers.

    Args:
        process_manager: starts and ends the processes.
        use: the models that the processes serve.
        reconcile: called with the time after each event of a generation.

    Attributes:
        past_deaths: the number of processes that exited unexpectedly or had to be killed, in generations that no longer
            exist.
    """

    def __init__(
        self,
        process_manager: ProcessManager,
        use: ProcessUse,
        reconcile: Callable[[float], None],
    ) -> None:
        self.past_deaths = 0
        self._process_manager = process_manager
        self._storage = process_manager.storage
        self._use = use
        self._reconcile = reconcile
        # The deployment and the generation of each child, by the child's name.
        self._by_process: dict[str, tuple[Deployment, GenerationBase]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_process)

    def resume(self, deployment: Deployment, generation: GenerationBase, record: GenerationRecord) -> bool:
        """Take over the children of a generation that the previous daemon has loaded.

        Return False if the generation's page store has changed, so that the model has to be loaded again.
        """
        if not self._process_manager.resume(self, generation, record.store_fingerprint):
            text = "%s: loading again: the page store was changed while no daemon was running"
            _log.error(text, generation.label, extra=generation.log_extra())
            return False
        self._by_process.update((child, (deployment, generation)) for child in generation.children)
        if record.built.selftest_cases:
            cases, digest = record.built.selftest_cases, record.built.selftest_digest
            selftest = dataclasses.replace(generation.spec.selftest, cases=cases, digest=digest)
            self._use.on_selftest_found(generation.source, selftest)
        return True

    # --- from children ------------------------------------------------------------------------------------------

    def on_message(self, child: str, message: ChildMessage, frames: Sequence[Any], now: float) -> None:
        """Handle a message from a child process; `frames` are the tensors of a result."""
        entry = self._by_process.get(child)
        if entry is None:
            return
        deployment, generation = entry
        attach_control = generation.attach_control
        match message:
            # Results that may have been computed on invalid weights are discarded.
            case PredictResult() | PredictFailed() if (
                attach_control.state is AttachState.INVALID
                or attach_control.required_holder
                or generation.label in self._storage.fingerprints
            ) and not self._can_trust_answers(generation):
                self.verify_store(generation, now)
            # Only a rank of a divided model may send `PredictDone`. Any other `PredictDone` is passed to the
            # generation, which ends the process that has sent it.
            case PredictDone() if not (_is_lockstep(generation) and self._can_trust_answers(generation)):
                self._on_load_message(child, deployment, generation, message, now)
            case PredictResult():
                dispatcher = self._use.only_dispatcher or self._use.active_dispatcher(generation)
                out_of_step = dispatcher.results.on_result(child, message, frames, now)
                if out_of_step:
                    self._end_out_of_step(child, generation, out_of_step, now)
            case PredictDone() | PredictFailed() | PredictCancelled():
                self._on_other_outcome(child, generation, message, now)
            case Pong():
                self._on_pong(child, generation, message, now)
            case Forked():
                pass  # `ForkCoordinator`, which has requested the fork, handles this message
            case _:
                self._on_load_message(child, deployment, generation, message, now)

    def _on_other_outcome(
        self,
        child: str,
        generation: GenerationBase,
        message: PredictDone | PredictFailed | PredictCancelled,
        now: float,
    ) -> None:
        """Pass the outcome of a predict without a result to the dispatcher."""
        dispatcher = self._use.only_dispatcher or self._use.active_dispatcher(generation)
        match message:
            case PredictDone():
                out_of_step = dispatcher.results.on_done(child, message.request, now)
            case PredictCancelled():
                out_of_step = dispatcher.results.on_cancelled(child, message.request, now)
            case PredictFailed():
                out_of_step = dispatcher.results.on_batch_failed(child, message, now)
        if isinstance(message, PredictFailed) and message.is_exiting:
            generation.on_leaving(child, now, message.error)
            self._reconcile(now)
        elif out_of_step:
            self._end_out_of_step(child, generation, out_of_step, now)

    def _end_out_of_step(self, child: str, generation: GenerationBase, reason: str, now: float) -> None:
        """Fail a rank whose report contradicts the reports of other ranks."""
        generation.on_message(child, ProcessFailed(clip(reason)), now)
        self._reconcile(now)

    def _on_load_message(
        self, child: str, deployment: Deployment, generation: GenerationBase, message: ChildMessage, now: float
    ) -> None:
        """Pass a message about the child's own state to its generation; update watchdog, batching and free memory."""
        match generation, message:
            case Generation(), BatchMismatch(note, numbers):
                names = self._use.dispatchers[0].principal_names
                generation.on_batch_mismatch(note, {each: names.name_of(each) for each in numbers})
                self._use.update_batching(generation)
            case Generation(), Built():
                # The fingerprint of the page store must be taken before any worker maps the page store.
                self._storage.on_exported(generation)
                if not self._is_refused(generation, message, now):
                    generation.on_message(child, message, now)
                self._use.on_selftest_found(generation.source, generation.selftest_search.spec)
            case RankGroup(), JoinedGroup():
                generation.on_message(child, message, now)
                if generation.built is not None:
                    self._is_refused(generation, generation.built, now)
            case _, ProcessFailed():
                self._use.on_process_failed(child, generation, message.reason, now)
                generation.on_message(child, message, now)
            case _:
                generation.on_message(child, message, now)
        if isinstance(message, (Built, Attached, JoinedGroup, SelfTestDone)):
            deployment.admission.on_device_memory(generation, message.device, rank_number(child) or 0)
        is_watched = isinstance(generation, Generation) and isinstance(message, (Attached, Reconnected))
        if is_watched and generation.processes.is_ready(child):
            self._use.dispatchers[0].processes.watch(child, now)
        self._reconcile(now)

    def _is_refused(self, generation: GenerationBase, built: Built, now: float) -> bool:
        """Fail a generation whose signature is not compatible with the serving model's; return whether it failed."""
        difference = self._use.dispatchers[0].signature.difference(built)
        if difference:
            reason = f"the new model is not compatible with the serving one: {difference}"
            generation.fail(FailureReason(reason), now)
        return bool(difference)

    def _on_pong(self, child: str, generation: GenerationBase, pong: Pong, now: float) -> None:
        for dispatcher in self._use.dispatchers:
            dispatcher.processes.on_pong(child, now)
        expected = "" if generation.built is None else generation.built.selftest_digest
        if pong.selftest_digest and expected and pong.selftest_digest != expected:
            generation.processes.counters.on_selftest_failed()
            self.end_process(
                child, "the self-test answer differs from the holder's: the worker would return wrong results", now
            )

    def on_exit(self, child: str, exit_cause: ExitCause, now: float) -> None:
        """Handle the exit of a child; its dispatchers decide whether the running batch may have caused the exit."""
        entry = self._by_process.pop(child, None)
        if entry is None:
            return
        _, generation = entry
        if exit_cause.missing_file is MissingFile.SNAPSHOT:
            self._use.on_snapshot_lost(generation.source)
        is_trusted = self._can_trust_answers(generation)
        if not is_trusted:
            self.verify_store(generation, now)
            # The process may have exited because its holder had exited or its page store was damaged, so its batch is
            # not blamed for the exit.
            self._release_slots(child)
        has_answered = self._has_answered(child)
        for dispatcher in self._use.dispatchers:
            # The end of a channel can dispatch the requests of its queue, which must not be blamed for this exit.
            dispatcher.processes.retire(child)
            direct_loss = dispatcher.direct.remove_worker(child, now)
            if direct_loss is not None:
                # The batches were waiting for this request.
                dispatcher.processes.release(child)
                if is_trusted and exit_cause.may_be_own_fault:
                    dispatcher.isolator.on_direct_loss(direct_loss, now)
            dispatcher.results.on_exit(child, exit_cause, now)
        generation.on_exit(child, exit_cause, now, has_answered=has_answered)
        self._reconcile(now)

    # --- actions ------------------------------------------------------------------------------------------------

    def perform(self, deployment: Deployment, generation: GenerationBase, action: Action, now: float) -> None:
        """Perform an action of a generation."""
        match action:
            case TakeSnapshot():
                self._use.request_snapshots(generation.source, now)
            case Spawn(name, role, template):
                self._by_process[name] = deployment, generation
                program = self._use.program(deployment, generation, name)
                self._process_manager.spawn(self, generation, program, name, role, template)
            case Send(name, order):
                self._process_manager.messenger.send_order(name, order)
            case Kill(name, abort):
                self._process_manager.kill(name, abort=abort)
            case AddSlot(name):
                self._use.add_slot(name, generation, now)
                self._add_direct_worker(name, generation, now)
            case RemoveSlot(name):
                self._use.remove_slot(name, generation)
            case DeleteFiles():
                self.past_deaths += generation.processes.deaths
                self._use.on_generation_ended(generation)
                self._storage.remove_files(generation)

    def run_watchdog(self, serving: Iterable[GenerationBase], now: float) -> None:
        """End processes that take too long or answer no ping, ping idle processes, and check the page stores."""
        for dispatcher in self._use.dispatchers:
            for process, why in list(dispatcher.processes.overdue(now)):
                self.end_process(process, why, now)
            if now >= dispatcher.processes.next_ping_at:
                for generation in serving:
                    self.verify_store(generation, now)
                for process in list(dispatcher.processes.ping_idle(now)):
                    self.end_process(process, "no reply to a ping", now)

    def end_process(self, process: str, reason: str, now: float) -> None:
        """Return the batches of a hung or faulty process to the queue, remove its slot, and end the process."""
        self._release_slots(process)
        entry = self._by_process.get(process)
        if entry is not None:
            _, generation = entry
            generation.on_hung(process, reason, now, has_answered=self._has_answered(process))
            self._reconcile(now)

    def verify_store(self, generation: GenerationBase, now: float) -> None:
        """Check the page store of a generation; if the store has changed, let another generation replace this one.

        A generation whose required holder has exited is skipped, because the exit of the holder ends the generation.
        """
        if not isinstance(generation, Generation):
            return  # rank groups have no page store
        if generation.attach_control.can_trust_answers(
            self._process_manager.is_alive
        ) and not self._storage.is_store_intact(generation):
            generation.on_store_lost("the page store was changed or truncated, so its pages may be wrong", now)
            self._reconcile(now)

    # --- private ------------------------------------------------------------------------------------------------

    def _add_direct_worker(self, process: str, generation: GenerationBase, now: float) -> None:
        """Let a worker read direct channels, and check its weights before each answer as this object does."""
        dispatcher = self._use.only_dispatcher
        if (
            dispatcher is not None
            and isinstance(generation, Generation)
            and self._process_manager.watch_weights(process, generation)
            and self._can_trust_answers(generation)
        ):
            for slot in dispatcher.processes.accepting:
                if slot.name == process:
                    dispatcher.direct.add_worker(slot, self._on_direct_fault, now)

    def _on_direct_fault(self, process: str, loss: DirectLoss | None, reason: str, now: float) -> None:
        """End a process in which a request of a direct channel hangs, or that has written nonsense about channels."""
        self._release_slots(process)
        if self._use.only_dispatcher is not None and loss is not None:
            self._use.only_dispatcher.isolator.on_direct_loss(loss, now)
        self.end_process(process, reason, now)

    def _can_trust_answers(self, generation: GenerationBase) -> bool:
        """Return whether a generation's weights and page store are intact, so that its results may go to clients."""
        return generation.attach_control.can_trust_answers(
            self._process_manager.is_alive
        ) and self._storage.is_store_intact(generation)

    def _release_slots(self, process: str) -> None:
        for dispatcher in self._use.dispatchers:
            dispatcher.processes.release(process)

    def _has_answered(self, process: str) -> bool:
        return any(dispatcher.results.has_answered(process) for dispatcher in self._use.dispatchers)


def _is_lockstep(generation: GenerationBase) -> bool:
    """Return whether the model is divided among ranks, so that every rank runs each predict and reports its end."""
    return generation.spec.rank_group is not None and generation.spec.rank_group.is_sliced
