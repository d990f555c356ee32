"""The processes of deployments: whose each is, what becomes of what it says, and what is done to it.

All that a process sends goes through `ProcessEvents`: answers to the dispatcher, the rest to the generation; and what
the generation then wants comes back as actions, which `perform` does. That is the same for the processes of one model,
for ranks and for a process of several models; where these differ, `ProcessUse` says how.
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
    """Stands between processes, their generations and the dispatchers.

    Args:
        process_manager: the processes.
        use: what they are for.
        reconcile: called after each event of a generation.

    Attributes:
        past_deaths: processes of generations of which nothing is left that ended without being asked to.
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
        # Whose child it is, by the child's name.
        self._by_process: dict[str, tuple[Deployment, GenerationBase]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_process)

    def resume(self, deployment: Deployment, generation: GenerationBase, record: GenerationRecord) -> bool:
        """Take over the children of a generation; return False if its page store was changed: it has to be loaded."""
        if not self._process_manager.resume(self, generation, record.store_fingerprint):
            text = "%s: loaded anew: the page store was changed while no daemon was there"
            _log.error(text, generation.label, extra=generation.log_extra())
            return False
        self._by_process.update((child, (deployment, generation)) for child in generation.children)
        if record.built.selftest_cases:
            selftest = dataclasses.replace(generation.spec.selftest, cases=record.built.selftest_cases)
            self._use.on_selftest_found(generation.source, selftest)
        return True

    # --- from children ------------------------------------------------------------------------------------------

    def on_message(self, child: str, message: ChildMessage, frames: Sequence[Any], now: float) -> None:
        """A child has sent `message`."""
        entry = self._by_process.get(child)
        if entry is None:
            return
        deployment, generation = entry
        attach_control = generation.attach_control
        match message:
            case PredictResult() | PredictFailed() if (
                attach_control.state is AttachState.INVALID
                or attach_control.required_holder
                or generation.label in self._storage.fingerprints
            ) and not self._can_trust_answers(generation):
                self.verify_store(generation, now)
            case PredictDone() if not (_is_lockstep(generation) and self._can_trust_answers(generation)):
                self._on_load_message(child, deployment, generation, message, now)
            case PredictResult() | PredictDone() | PredictFailed() | PredictCancelled():
                self._on_outcome(child, generation, message, frames, now)
            case Pong():
                self._on_pong(child, generation, message, now)
            case Forked():
                pass  # it is for who has asked for it, which no generation does
            case _:
                self._on_load_message(child, deployment, generation, message, now)

    def _on_outcome(
        self,
        child: str,
        generation: GenerationBase,
        message: PredictResult | PredictDone | PredictFailed | PredictCancelled,
        frames: Sequence[Any],
        now: float,
    ) -> None:
        """Tell a dispatcher what has become of its batch; ranks that are out of step, and who leaves, end."""
        dispatcher = self._use.only_dispatcher or self._use.active_dispatcher(generation)
        match message:
            case PredictResult():
                out_of_step = dispatcher.results.on_result(child, message, frames, now)
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
            generation.on_message(child, ProcessFailed(clip(out_of_step)), now)
            self._reconcile(now)

    def _on_load_message(
        self, child: str, deployment: Deployment, generation: GenerationBase, message: ChildMessage, now: float
    ) -> None:
        """Tell a generation what its child says of itself, and others what follows from it."""
        match generation, message:
            case Generation(), BatchMismatch(note, numbers):
                names = self._use.dispatchers[0].principal_names
                generation.on_batch_mismatch(note, {each: names.name_of(each) for each in numbers})
                self._use.update_batching(generation)
            case Generation(), Built():
                # What the holder has left in the page store is remembered before anybody maps it.
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
        """Whether clients of what serves could not go on with it: then the generation ends."""
        difference = self._use.dispatchers[0].signature.difference(built)
        if difference:
            reason = f"the new model is not a drop-in for the one that serves: {difference}"
            generation.fail(FailureReason(reason), now)
        return bool(difference)

    def _on_pong(self, child: str, generation: GenerationBase, pong: Pong, now: float) -> None:
        for dispatcher in self._use.dispatchers:
            dispatcher.processes.on_pong(child, now)
        expected = "" if generation.built is None else generation.built.selftest_digest
        if pong.selftest_digest and expected and pong.selftest_digest != expected:
            generation.processes.counters.on_selftest_failed()
            self.end_process(child, "the self-test answer differs from the holder's: it would answer wrongly", now)

    def on_exit(self, child: str, exit_cause: ExitCause, now: float) -> None:
        """A child has exited: the batch that it had may be to blame."""
        entry = self._by_process.pop(child, None)
        if entry is None:
            return
        _, generation = entry
        if exit_cause.missing_file is MissingFile.SNAPSHOT:
            self._use.on_snapshot_lost(generation.source)
        if not self._can_trust_answers(generation):
            self.verify_store(generation, now)
            # It may have died of its holder's death, or of a damaged store: what it had is not to blame.
            self._release_slots(child)
        has_answered = self._has_answered(child)
        for dispatcher in self._use.dispatchers:
            dispatcher.results.on_exit(child, exit_cause, now)
        generation.on_exit(child, exit_cause, now, has_answered=has_answered)
        self._reconcile(now)

    # --- what is done to them -----------------------------------------------------------------------------------

    def perform(self, deployment: Deployment, generation: GenerationBase, action: Action, now: float) -> None:
        """Do what a generation wants."""
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
            case RemoveSlot(name):
                self._use.remove_slot(name, generation)
            case DeleteFiles():
                self.past_deaths += generation.processes.deaths
                self._use.on_generation_ended(generation)
                self._storage.remove_files(generation)

    def run_watchdog(self, serving: Iterable[GenerationBase], now: float) -> None:
        """End who computes for too long, ping who has been idle and end who does not answer; look at the stores."""
        for dispatcher in self._use.dispatchers:
            for process, why in list(dispatcher.processes.overdue(now)):
                self.end_process(process, why, now)
            if now >= dispatcher.processes.next_ping_at:
                for generation in serving:
                    self.verify_store(generation, now)
                for process in list(dispatcher.processes.ping_idle(now)):
                    self.end_process(process, "it has not answered a ping", now)

    def end_process(self, process: str, reason: str, now: float) -> None:
        """End a process that is of no use any more, and its slot with it."""
        self._release_slots(process)
        entry = self._by_process.get(process)
        if entry is not None:
            _, generation = entry
            generation.on_hung(process, reason, now, has_answered=self._has_answered(process))
            self._reconcile(now)

    def verify_store(self, generation: GenerationBase, now: float) -> None:
        """Have a generation replaced whose page store was changed; of a holder that is dead it will be told."""
        if not isinstance(generation, Generation):
            return  # ranks have none
        if generation.attach_control.can_trust_answers(
            self._process_manager.is_alive
        ) and not self._storage.is_store_intact(generation):
            generation.on_store_lost(
                "the page store was changed or truncated by somebody: its pages are not trusted", now
            )
            self._reconcile(now)

    # --- within -------------------------------------------------------------------------------------------------

    def _can_trust_answers(self, generation: GenerationBase) -> bool:
        """Whether what the generation's workers say can be passed on."""
        return generation.attach_control.can_trust_answers(
            self._process_manager.is_alive
        ) and self._storage.is_store_intact(generation)

    def _release_slots(self, process: str) -> None:
        for dispatcher in self._use.dispatchers:
            dispatcher.processes.release(process)

    def _has_answered(self, process: str) -> bool:
        return any(dispatcher.results.has_answered(process) for dispatcher in self._use.dispatchers)


def _is_lockstep(generation: GenerationBase) -> bool:
    """Whether all ranks take part in each predict, and say so."""
    return generation.spec.rank_group is not None and generation.spec.rank_group.is_sliced
