"""The processes of one model: whose each is, what becomes of what it says, and what is done to it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from weightd_daemon.config.model import ModelConfig
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
from weightd_daemon.generations.rank_group import RankGroup
from weightd_daemon.generations.resume import resume_generation, resume_rank_group
from weightd_daemon.generations.shared_weights import Generation
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.models import batching, rank_group
from weightd_daemon.models.deployment import Deployment
from weightd_daemon.models.interfaces import ProcessManager
from weightd_daemon.models.rank_rendezvous import RendezvousTable
from weightd_daemon.models.snapshots import Snapshots
from weightd_daemon.platform.exit_cause import ExitCause, MissingFile
from weightd_daemon.processes.events import ProcessEventHandler
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_protocol.codec import clip
from weightd_protocol.messages.ranks import PredictDone
from weightd_protocol.messages.worker import (
    AnnounceSelfTest,
    AttachAllowed,
    Attached,
    BatchMismatch,
    Built,
    ChildMessage,
    Forked,
    Hello,
    Pong,
    PredictCancelled,
    PredictFailed,
    PredictResult,
    ProcessFailed,
    Reconnected,
)

_log = logging.getLogger("weightd")


class ProcessEvents:
    """Stands between the processes of a model, its generations and its dispatcher.

    Args:
        event_handler: who is told of them.
        config: of the model.
        process_manager: the processes.
        snapshots: of the model's sources.
        dispatcher: where its requests are.
        reconcile: called after each event of a generation.

    Attributes:
        past_deaths: processes of generations of which nothing is left that ended without being asked to.
    """

    def __init__(
        self,
        event_handler: ProcessEventHandler,
        config: ModelConfig,
        process_manager: ProcessManager,
        snapshots: Snapshots,
        dispatcher: Dispatcher,
        reconcile: Callable[[float], None],
    ) -> None:
        self.past_deaths = 0
        self._process_manager = process_manager
        self._event_handler = event_handler
        self._config = config
        self._snapshots = snapshots
        self._dispatcher = dispatcher
        self._reconcile = reconcile
        # Whose child it is, by the child's name.
        self._by_process: dict[str, tuple[Deployment, GenerationBase]] = {}
        self._rendezvous = RendezvousTable()

    def __bool__(self) -> bool:
        return bool(self._by_process)

    def resume(
        self,
        label: str,
        deployment: Deployment,
        sources: Mapping[int, ModelSource],
        record: GenerationRecord,
        now: float,
    ) -> GenerationBase | None:
        """Go on with a generation that a daemon before this one has loaded; None if its page store was changed."""
        spec = deployment.spec if record.is_sharing else deployment.spec.without_sharing()
        resume_function = resume_generation if spec.rank_group is None else resume_rank_group
        generation: GenerationBase = resume_function(label, spec, sources[record.source], record, now)
        if not self._process_manager.resume(self._event_handler, generation, record.store_fingerprint):
            _log.error(
                "%s: loaded anew: the page store was changed while no daemon was there",
                label,
                extra=generation.log_extra(),
            )
            return None
        self._by_process.update((child, (deployment, generation)) for child in generation.children)
        if record.built.selftest_cases:
            selftest = dataclasses.replace(spec.selftest, cases=record.built.selftest_cases)
            self._snapshots.set_selftest(generation.source, selftest)
        return generation

    # --- from children ------------------------------------------------------------------------------------------

    def on_message(self, child: str, message: ChildMessage, frames: Sequence[Any], now: float) -> None:
        """A child has sent `message`."""
        entry = self._by_process.get(child)
        if entry is None:
            return
        deployment, generation = entry
        match message:
            case PredictResult() if self._can_trust_answers(generation):
                self._end_if_out_of_step(
                    child, deployment, generation, self._dispatcher.on_result(child, message, frames, now), now
                )
            case PredictDone() if self._can_trust_answers(generation) and isinstance(generation, RankGroup):
                self._end_if_out_of_step(
                    child, deployment, generation, self._dispatcher.on_done(child, message.request, now), now
                )
            case PredictFailed() if self._can_trust_answers(generation):
                self._on_batch_failed(child, deployment, generation, message, now)
            case PredictResult() | PredictFailed():
                self.verify_store(deployment, generation, now)
            case PredictCancelled():
                self._end_if_out_of_step(
                    child, deployment, generation, self._dispatcher.on_cancelled(child, message.request, now), now
                )
            case Pong():
                self._on_pong(child, generation, message, now)
            case Forked():
                pass  # it is for who has asked for it, which no generation does
            case _:
                self._on_load_message(child, deployment, generation, message, now)
                self._reconcile_deployment(deployment, now)

    def _on_load_message(
        self, child: str, deployment: Deployment, generation: GenerationBase, message: ChildMessage, now: float
    ) -> None:
        match message:
            case Hello():
                generation.on_hello(child, message, now)
            case Reconnected():
                generation.on_reconnected(child, now, message.step)
                self._watch_if_ready(child, generation, now)
            case ProcessFailed():
                if child in generation.ready_workers:
                    # By its own word: what it has is not to blame.
                    self._dispatcher.on_process_failed(child, message.reason, now)
                generation.on_process_failed(child, message, now)
            case _ if isinstance(generation, Generation):
                self._on_shared_weights_message(child, deployment, generation, message, now)
            case _:
                rank_group.on_message(child, deployment, generation, self._dispatcher, message, now)

    def _on_shared_weights_message(
        self, child: str, deployment: Deployment, generation: Generation, message: ChildMessage, now: float
    ) -> None:
        match message:
            case AnnounceSelfTest():
                generation.on_announce_selftest(child, message)
            case Built():
                self._process_manager.storage.on_exported(generation)
                self._on_built(child, generation, message, now)
                self._snapshots.set_selftest(generation.source, generation.selftest_search.spec)
                deployment.on_device_memory(generation, message.device)
            case AttachAllowed():
                generation.on_allowed(child, message, now)
            case Attached():
                generation.on_attached(child, message, now)
                self._watch_if_ready(child, generation, now)
                deployment.on_device_memory(generation, message.device)
            case BatchMismatch():
                generation.on_batch_mismatch(
                    message.note,
                    {each: self._dispatcher.principal_names.name_of(each) for each in message.principal_ids},
                )
                self._update_batching_policy(generation)
            case _:
                rank_group.on_message(child, deployment, generation, self._dispatcher, message, now)

    def on_exit(self, child: str, exit_cause: ExitCause, now: float) -> None:
        """A child has exited."""
        entry = self._by_process.pop(child, None)
        if entry is not None and exit_cause.missing_file is MissingFile.SNAPSHOT:
            self._snapshots.on_lost(entry[1].source)
        if entry is not None and not self._can_trust_answers(entry[1]):
            self.verify_store(*entry, now)
            # It may have died of its holder's death, or of a damaged store: what it had is not to blame.
            self._dispatcher.release_slot(child)
        has_answered, slot_processes = self._dispatcher.has_answered(child), self._dispatcher.slot_processes(child)
        self._dispatcher.on_exit(child, exit_cause, now)
        for mate in slot_processes:
            # A unit ends all that it has, and tells the first cause.
            if mate != child and entry is not None and isinstance(entry[1], Generation):
                self.end_process(mate, f"{child}, without which it is of no use, is gone", now)
        if entry is not None:
            deployment, generation = entry
            generation.on_exit(child, exit_cause, now, has_answered=has_answered)
            self._reconcile_deployment(deployment, now)

    # --- what is done to them -----------------------------------------------------------------------------------

    def perform(self, deployment: Deployment, generation: GenerationBase, action: Action, now: float) -> None:
        """Do what a generation wants."""
        match action:
            case TakeSnapshot():
                self._snapshots.request(generation.source, now + self._config.load_timeout)
            case Spawn(name, role, template):
                self._by_process[name] = deployment, generation
                snapshot = self._snapshots[generation.source]
                program = self._rendezvous.program(self._config, generation, snapshot, name, deployment.placement)
                self._process_manager.spawn(self._event_handler, generation, program, name, role, template)
            case Send(name, order):
                self._process_manager.messenger.send_order(name, order)
            case Kill(name, abort):
                self._process_manager.kill(name, abort=abort)
            case AddSlot(name):
                self._add_slot(name, generation, now)
            case RemoveSlot(name):
                self._dispatcher.remove_slot(name)
                if not generation.attach_control.is_valid:
                    # It will not answer what it has, and is not to blame.
                    self._dispatcher.release_slot(name)
            case DeleteFiles():
                self.past_deaths += generation.deaths
                self._rendezvous.drop(generation.label)
                self._process_manager.storage.remove_files(generation)

    def reconfigure(self, config: ModelConfig, serving: Iterable[GenerationBase]) -> None:
        """Have what serves do as another configuration says that has the same loaded."""
        self._config = config
        for generation in serving:
            self._update_batching_policy(generation)

    def run_watchdog(self, serving: Iterable[tuple[Deployment, GenerationBase]], now: float) -> None:
        """End who computes for too long, ping who has been idle and end who does not answer; look at the stores."""
        for process, why in self._dispatcher.overdue_processes(now):
            self.end_process(process, why, now)
        if now < self._dispatcher.fault_isolator.watchdog.next_event_at:
            return
        for deployment, generation in serving:
            self.verify_store(deployment, generation, now)
        for process in self._dispatcher.ping_idle(now):
            self.end_process(process, "it has not answered a ping", now)

    def end_process(self, process: str, reason: str, now: float) -> None:
        """End a process that is of no use any more, and its slot with it."""
        slot_processes = dict.fromkeys((process, *self._dispatcher.slot_processes(process)))
        self._dispatcher.release_slot(process)
        for mate in slot_processes:
            owner = self._by_process.get(mate)
            if owner is not None:
                deployment, generation = owner
                generation.on_hung(mate, reason, now, has_answered=self._dispatcher.has_answered(mate))
                self._reconcile_deployment(deployment, now)

    def verify_store(self, deployment: Deployment, generation: GenerationBase, now: float) -> None:
        """Have a generation replaced whose page store was changed; of a holder that is dead it will be told."""
        if not isinstance(generation, Generation):
            return  # a unit has none
        if generation.attach_control.can_trust_answers(
            self._process_manager.is_alive
        ) and not self._process_manager.storage.is_store_intact(generation):
            generation.on_store_lost(
                "the page store was changed or truncated by somebody: its pages are not trusted", now
            )
            self._reconcile_deployment(deployment, now)

    # --- within -------------------------------------------------------------------------------------------------

    def _add_slot(self, name: str, generation: GenerationBase, now: float) -> None:
        if isinstance(generation, RankGroup):
            rank_group.add_slot(generation, self._config, self._dispatcher, now)
            return
        policy = batching.batching_policy(self._config, generation)
        child = generation.children[name]
        concurrency = child.hello.concurrency if child.hello is not None else 1
        self._dispatcher.add_slot(name, device=child.device, policy=policy, concurrency=concurrency)

    def _update_batching_policy(self, generation: GenerationBase) -> None:
        policy = batching.batching_policy(self._config, generation)
        for each in generation.slots:
            self._dispatcher.scheduler.slots.set_policy(each, policy)

    def _can_trust_answers(self, generation: GenerationBase) -> bool:
        """Whether what the generation's workers say can be passed on."""
        return generation.attach_control.can_trust_answers(
            self._process_manager.is_alive
        ) and self._process_manager.storage.is_store_intact(generation)

    def _reconcile_deployment(self, deployment: Deployment, now: float) -> None:
        deployment.reconcile(now)
        self._reconcile(now)

    def _on_batch_failed(
        self, child: str, deployment: Deployment, generation: GenerationBase, failed: PredictFailed, now: float
    ) -> None:
        reason = self._dispatcher.on_batch_failed(child, failed, now)
        if failed.is_exiting:
            generation.on_leaving(child, now, failed.error)
            self._reconcile_deployment(deployment, now)
        else:
            self._end_if_out_of_step(child, deployment, generation, reason, now)

    def _end_if_out_of_step(
        self, child: str, deployment: Deployment, generation: GenerationBase, reason: str, now: float
    ) -> None:
        """End who computes together and is not in step any more, for this reason; "": they are."""
        if reason:
            generation.on_process_failed(child, ProcessFailed(clip(reason)), now)
            self._reconcile_deployment(deployment, now)

    def _on_pong(self, child: str, generation: GenerationBase, pong: Pong, now: float) -> None:
        self._dispatcher.fault_isolator.watchdog.on_pong(child, now)
        built = generation.built
        if (
            built is not None
            and pong.selftest_digest
            and built.selftest_digest
            and pong.selftest_digest != built.selftest_digest
        ):
            generation.counters.on_selftest_failed()
            self.end_process(child, "the self-test answer differs from the holder's: it would answer wrongly", now)

    def _watch_if_ready(self, child: str, generation: GenerationBase, now: float) -> None:
        if child in generation.ready_workers and isinstance(generation, Generation):
            self._dispatcher.fault_isolator.watchdog.add(child, now)

    def _on_built(self, child: str, generation: Generation, built: Built, now: float) -> None:
        difference = self._dispatcher.signature.difference(built)
        if difference:
            generation.fail(f"the new model is not a drop-in for the one that serves: {difference}", now)
        else:
            generation.on_holder_built(child, built, now)
