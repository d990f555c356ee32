"""A generation of a holder and its workers: one copy of the weights of one model on one device.

The weight handle goes from the holder to the workers in these steps:

built      the holder's engine exports the weights and sends `Built` with the handle (`sessions/model.py` of the worker)
received   `GenerationBase.on_message` stores the message as `Generation.built`
sent       `Generation._attach` puts the handle into an `Attach` order; `AttachControl.attach_next` sends it to workers
attached   the worker builds with the handle, or attaches to it, as its engine requires (`sessions/model.py`)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from weightd_daemon.generations.actions import Role, Send
from weightd_daemon.generations.base import HELLO_TIMEOUT_S, GenerationBase, GenerationSetup
from weightd_daemon.generations.process import LossReason, WorkerProcess
from weightd_daemon.generations.progress import FailureReason, RetryHint, UnmergedPrincipal
from weightd_daemon.generations.restarts import WorkerStarts
from weightd_daemon.generations.selftest_search import SelfTestSearch, describe_cases
from weightd_daemon.generations.spec import RowTestSpec, SelfTestSpec
from weightd_daemon.generations.states import (
    ACTIVE,
    LOADING,
    USABLE,
    AttachState,
    ChildEvent,
    ChildState,
    GenerationEvent,
    GenerationState,
)
from weightd_daemon.platform.exit_cause import ExitCause, MissingFile
from weightd_protocol import limits
from weightd_protocol.codec import clip, type_name
from weightd_protocol.messages.worker import (
    AnnounceSelfTest,
    Attach,
    Attached,
    Built,
    ChildMessage,
    ContinueSelfTest,
    Hello,
    ProcessFailed,
    Reconnected,
)
from weightd_protocol.messages.worker_common import AttachAllowed

# Seconds that a hung child has to log its stacks before the daemon kills it.
ABORT_TIMEOUT_S = 2.0


class Generation(GenerationBase):
    """The life cycle of a holder and its workers.

    Args:
        setup: the arguments of the generation.

    Attributes:
        selftest_search: the search for the self-test, with its results so far.
        unmerged_principals: the tenants and users whose rows gave different results in shared batches, by principal id.
        is_without_holder: whether the workers load without a holder, because an earlier holder of the same files shared
            no weights.
    """

    def __init__(self, setup: GenerationSetup) -> None:
        super().__init__(setup)
        self.selftest_search = SelfTestSearch(self.spec.selftest, self.spec.row_test)
        self.unmerged_principals: dict[int, UnmergedPrincipal] = {}
        self.is_without_holder = False
        self._starts = WorkerStarts(self)

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def next_tick_at(self) -> float:
        """When the daemon has to call `tick`, in monotonic seconds."""
        return min(super().next_tick_at, self._starts.next_start_at)

    @property
    def is_complete(self) -> bool:
        """Whether the generation serves, with all configured workers READY or further starts unlikely to succeed."""
        return self.state is GenerationState.SERVING and self._starts.is_done

    @property
    def should_be_replaced(self) -> bool:
        """Whether the generation has lost workers that only a new generation can replace."""
        if self.state is not GenerationState.SERVING or not self.attach_control.is_attach_closed:
            return False
        return self.attach_control.is_frozen or self._starts.is_short

    @property
    def progress(self) -> str:
        """The current activity as a text for users, such as "attaching 1/4"."""
        ready_count, wanted_count = self.processes.count(ChildState.READY), self.wanted_process_count
        if self.state in (GenerationState.SPAWNING, GenerationState.GATHERING):
            hello_count = sum(child.hello is not None for child in self.children.values())
            return f"spawned, {hello_count}/{1 if self.spec.can_fork_from_holder else wanted_count + 1} processes up"
        if self.state is GenerationState.SERVING and self.attach_control.is_frozen:
            return f"serving {ready_count}/{wanted_count}, frozen: the holder has exited"
        if ready_count < wanted_count and self.state is GenerationState.SERVING:
            if self.attach_control.is_attach_closed:
                return f"serving {ready_count}/{wanted_count}, no worker can attach any more"
            if self._starts.backoff_delay_s:
                return f"serving {ready_count}/{wanted_count}, backing off"
        if ready_count < wanted_count and self.state in (
            GenerationState.ATTACHING,
            GenerationState.RESUMING,
            GenerationState.SERVING,
        ):
            return f"attaching {ready_count}/{wanted_count}"
        return self.state.display_name

    @property
    def _is_sharing(self) -> bool:
        """Whether workers attach to the weights of the holder; before the build: whether this is configured."""
        return self.spec.is_sharing and (self.built is None or bool(self.built.handle) or self.built.is_template)

    # --- reports ------------------------------------------------------------------------------------------------

    def on_batch_mismatch(self, note: str, principals: Mapping[int, str] = MappingProxyType({})) -> None:
        """Stop batching after a worker has found that rows give other results in a batch than alone.

        Args:
            note: how the results differ.
            principals: the names of the tenants and users whose rows gave other results, by principal id. Their
                requests share no batch until the next generation. If `principals` is empty or too long, no requests
                are batched: the row test counts as failed.
        """
        built = self.built
        new_principals = {number: name for number, name in principals.items() if number not in self.unmerged_principals}
        if principals and len(self.unmerged_principals) + len(new_principals) <= limits.MAX_TENANTS:
            if new_principals:
                self.unmerged_principals.update(
                    (number, UnmergedPrincipal(name, note)) for number, name in new_principals.items()
                )
                self.processes.counters.on_batch_mismatch()
                self._log.log(f"requests of {', '.join(new_principals.values())} are no longer batched: {note}")
        elif built is not None and built.row_support is not None and built.row_support.is_equal:
            self.built = dataclasses.replace(
                built, row_support=dataclasses.replace(built.row_support, is_equal=False, note=note)
            )
            self.processes.counters.on_batch_mismatch()
            self._log.log(f"requests are no longer batched: {note}")

    def on_store_lost(self, cause: str, now: float) -> None:
        """Fail the generation, because its page store, which the workers have mapped, was changed."""
        if self.state in ACTIVE and self.built is not None:
            self._invalidate(FailureReason(cause), now)

    # --- loading ------------------------------------------------------------------------------------------------

    def _start_processes(self, now: float, selftest: SelfTestSpec | None, slice_digests: tuple[str, ...]) -> None:
        """Set up the self-test search; `_reconcile` then starts the processes.

        If an earlier holder of the same files shared no weights, the workers load without a holder. They have to
        reproduce the self-test answers of the earlier holder.
        """
        self.selftest_search = SelfTestSearch(selftest or self.spec.selftest, self.spec.row_test)
        if selftest is not None and selftest.built is not None:
            self.built, self.is_without_holder = selftest.built, True
            self.advance(GenerationEvent.BUILT)

    def _on_greeted(self, hello: Hello, now: float) -> None:
        self.attach_control.on_hello(has_fixed_pids=self._is_sharing and hello.sharing_traits.pids_fixed_at_build)

    def _on_load_message(self, child: WorkerProcess, message: ChildMessage, now: float) -> None:
        match child.state, message:
            case ChildState.BUILDING, AnnounceSelfTest():
                self.selftest_search.on_announce_selftest(message)
                if message.cases:
                    self._actions.append(Send(child.name, ContinueSelfTest()))
            case ChildState.BUILDING, Built():
                self._on_built(child, message, now)
            case ChildState.ATTACHING, Attached():
                self._on_attached(child, message, now)
            case _, AttachAllowed():
                self.attach_control.on_allowed(message)
            case _, Hello() | Reconnected() | AnnounceSelfTest() | Built() | Attached():
                pass  # a late message of a child that was given up, or a repeated message
            case _:
                reason = f"unexpected message {type_name(message)} from a process outside a rank group"
                self._on_process_failed(child, ProcessFailed(reason), now)

    def _on_built(self, holder: WorkerProcess, built: Built, now: float) -> None:
        """Record the weights that the holder has exported, so that `_reconcile` lets workers attach to them."""
        if holder.hello is None:
            return
        if self.spec.is_sharing and holder.hello.sharing_traits.attach_rewrites_weights and not built.selftest_digest:
            # Each attaching worker writes the weights again, and only a self-test shows whether they are still right.
            # So a holder without a self-test fails.
            reason = f"no self-test: {built.selftest_note}; set the key selftest, or turn sharing off"
            self.selftest_search.current_cases = ()
            self._on_process_failed(holder, ProcessFailed(clip(reason)), now)
            return
        if built.is_template and not (self.spec.can_fork_from_holder and self.attach_control.state is AttachState.OPEN):
            reason = "the holder offered to fork workers, which the daemon had not requested"
            self._on_process_failed(holder, ProcessFailed(reason), now)
            return
        self.built = built
        self.selftest_search.on_built(built)
        self.device_usage.on_built(built.device)
        holder.shared_bytes = built.shared_bytes
        holder.advance(ChildEvent.BUILT)
        self._log.log_built(built, holder.name, self.spec)
        if self._is_sharing:
            self.attach_control.require(holder, can_outlive_holder=self.spec.can_outlive_holder)
        if self.state is GenerationState.BUILDING:
            self.advance(GenerationEvent.BUILT)
            self.attach_control.on_built(is_shared=self._is_sharing, is_template=built.is_template)
        if not self._is_sharing:
            # The holder is not needed any more: it has reported the signature and the self-test, and workers load their
            # own weights.
            self._stop(holder, now)

    def _on_attached(self, worker: WorkerProcess, attached: Attached, now: float) -> None:
        """Handle a worker's report that it has loaded the model. The worker may serve if it passes the self-test."""
        if self.built is None:
            return
        if self.built.selftest_digest and attached.selftest_digest != self.built.selftest_digest:
            self.processes.counters.on_selftest_failed()
            reason = "the self-test answer differs from the holder's: the worker would return wrong results"
            self._on_process_failed(worker, ProcessFailed(reason), now)
            return
        worker.note, worker.shared_bytes = attached.note, attached.shared_bytes
        if self.spec.is_sharing:
            self._log.log_attached(self.built, attached, worker.name)
            self.device_usage.on_attached(attached.device)  # otherwise the measured memory would include the weights
        worker.advance(ChildEvent.ATTACHED)
        self._on_ready(worker, 0, now)

    def _on_ready(self, child: WorkerProcess, step: int, now: float) -> None:
        """Let a worker that has attached or reconnected serve requests, or keep the worker as a spare."""
        child.ready_at = now
        self._starts.on_ready()
        self.failure = FailureReason()
        self.attach_control.on_attached()
        self.processes.fill_slots(self.worker_target)
        if self.state in LOADING:
            self.advance(GenerationEvent.READY)

    # --- decisions ----------------------------------------------------------------------------------------------

    def _reconcile(self, now: float) -> None:
        """Request the actions that lead from the actual state to the wanted one; called after each event."""
        if self.state in ACTIVE:
            self.attach_control.tick(now)
            self.attach_control.stop_unattachable(now)
        # A generation with a usable worker does not fail, because a worker that is still starting may become READY.
        if not self.processes.usable(Role.WORKER):
            if self._starts.is_given_up:
                self.fail(self.failure, now)
            elif self.attach_control.is_attach_closed:
                reason = "all workers have exited, and no worker can attach any more"
                self.fail(
                    self.failure.with_prefix(f"{reason}; ") if self.failure.reason else FailureReason(reason), now
                )
        if self.state in ACTIVE and self.state is not GenerationState.SNAPSHOTTING:
            self.processes.fill_slots(self.worker_target)
            self._spawn_missing(now)
            self._build_if_gathered(now)
            self._attach(now)
        elif self.state not in ACTIVE:
            # The holder is stopped only after all workers have exited, because they use its memory.
            workers = [child for child in self.children.values() if child.role is Role.WORKER]
            for child in workers or list(self.children.values()):
                if child.state in USABLE:
                    self._stop(child, now)
            if not self.children and self.state is GenerationState.DRAINING:
                self.advance(GenerationEvent.EMPTY)
        self._log_progress()

    def _spawn_missing(self, now: float) -> None:
        deadline = now + max(HELLO_TIMEOUT_S, self.spec.load_timeout)
        # After a holder was lost in the self-test search, the next one starts only when the lost one has exited, so
        # that two holders never keep the weights in memory at the same time.
        is_starting = self.state in (GenerationState.SPAWNING, GenerationState.GATHERING)
        if is_starting and not self.processes.has(Role.HOLDER):
            self.processes.spawn(Role.HOLDER, deadline, self.device)
        template = self.processes.holder if self.attach_control.is_fork_only else None
        for device in self._starts.due_devices(now):
            self.processes.spawn(Role.WORKER, deadline, device, "" if template is None else template.name)

    def _build_if_gathered(self, now: float) -> None:
        """Order the holder to build once the holder and all workers whose pids the engine needs have sent HELLO."""
        holder = self.processes.holder
        if self.state is not GenerationState.GATHERING or holder is None or holder.hello is None:
            return
        workers = self.processes.usable(Role.WORKER)
        known_pids = [worker.hello.engine_pid for worker in workers if worker.hello is not None]
        if self.attach_control.state is not AttachState.OPEN and (
            self._starts.missing_devices or len(known_pids) < len(workers)
        ):
            return
        self.advance(GenerationEvent.GATHERED)
        holder.advance(ChildEvent.BUILD, now + self.spec.load_timeout)
        self.attach_control.admit_greeted()
        self._actions.append(
            Send(holder.name, self.selftest_search.build_message(tuple(known_pids) if self.spec.is_sharing else ()))
        )

    def _attach(self, now: float) -> None:
        """Send the handle of the weights to waiting workers; trim the page store once all workers are READY."""
        # If the holder shares no weights, workers load only after it has exited and so released its own copy.
        if self.built is not None and (self._is_sharing or not self.processes.has(Role.HOLDER)):
            timeout_s = self.spec.load_timeout
            if self.built.is_template:
                # A forked worker has the built model already and only runs the self-test.
                timeout_s = min(timeout_s, self.spec.predict_timeout)
            self.attach_control.attach_next(_attach_order(self.built, self.spec.row_test), now, timeout_s)
        if self.is_complete and self.processes.is_all_ready:
            self.attach_control.trim_store(is_shared=self._is_sharing)

    # --- losses -------------------------------------------------------------------------------------------------

    def _on_process_failed(self, child: WorkerProcess, failure: ProcessFailed, now: float) -> None:
        if child.state in USABLE:
            loss = LossReason.from_failure(failure, child.state)
            self._stop(child, now)
            self._on_loss(child, loss, now)

    def _on_leaving(self, child: WorkerProcess, reason: str, now: float) -> None:
        del reason  # the client receives the reason in the reply
        if child.state is ChildState.READY:
            # The worker did not crash but announced its exit, so no delay of the next start is scheduled.
            self.processes.counters.on_lost()
            self._log.log(f"{child.name} exits: a failed predict may have damaged its model", child.name)
            self._stop(child, now)

    def _on_hung(self, child: WorkerProcess, reason: str, now: float, *, has_answered: bool) -> None:
        """Abort a hung child by a signal on which it logs its stacks."""
        previous_state = child.state
        self.processes.abort(child, now + ABORT_TIMEOUT_S)
        if previous_state in USABLE:
            child.loss = LossReason(reason, previous_state, has_answered=has_answered, has_timed_out=True)
            self._on_loss(child, child.loss, now, is_death=True)

    def _on_exit(self, child: WorkerProcess, loss: LossReason, exit_cause: ExitCause, now: float) -> None:
        if exit_cause.missing_file is not MissingFile.NONE and self.state is GenerationState.SERVING:
            self.attach_control.on_files_lost(exit_cause.detail)
        if loss.previous_state in USABLE:
            self._on_loss(child, loss, now, is_death=True)
        elif child.loss is not None and exit_cause.detail:
            # The loss of this child was handled before its exit. Log the loss again, because only now the end of the
            # child's log is known.
            self._log.log(str(FailureReason(child.loss.reason, child.name, exit_cause.detail)), child.name)
            if self.failure.child == child.name:
                self.failure = dataclasses.replace(self.failure, log_tail=exit_cause.detail)

    def _on_loss(self, child: WorkerProcess, loss: LossReason, now: float, *, is_death: bool = False) -> None:
        """Handle the loss of a child. `is_death`: whether the child exited unexpectedly or has to be killed."""
        state_before = self.state
        # In the self-test search, unsuitable inputs may crash the holder, so this loss is not counted as unexpected.
        is_tried = child.role is Role.HOLDER and bool(self.selftest_search.current_cases) and not loss.is_external
        if is_death and not is_tried:
            self.processes.count_death()
        if state_before in ACTIVE:
            self.processes.counters.on_lost()
        if child.role is Role.HOLDER:
            self._on_holder_lost(child, loss, now)
        if self.state is state_before:  # after a failure, the deployment logs this reason
            self._log.log(f"{child.name} lost: {loss.reason}", child.name)
        if child.role is Role.WORKER and self.state in ACTIVE:
            if self._starts.on_worker_lost(child, loss, now):
                was_ready = loss.previous_state is ChildState.READY
                prefix = "workers exit before they answer any request; the last one: " if was_ready else ""
                self.failure = FailureReason.from_loss(loss, child.name).with_prefix(prefix)
            if self._starts.backoff_delay_s:
                self._log.log(f"starting the next worker in {self._starts.backoff_delay_s:.1f} s")

    def _on_holder_lost(self, holder: WorkerProcess, loss: LossReason, now: float) -> None:
        tried_inputs = describe_cases(self.selftest_search.current_cases)
        if self.state is GenerationState.BUILDING and self.selftest_search.on_holder_lost(
            has_timed_out=loss.has_timed_out, is_external=loss.is_external
        ):
            self._log.log(
                f"the holder was lost while trying {tried_inputs} as self-test input: {loss.reason}", holder.name
            )
            self.advance(GenerationEvent.RETRY)
        elif self.built is None or holder.hello is None:
            may_succeed = loss.is_signaled and not (tried_inputs and not loss.is_external)
            consequence = f"; the holder was running the configured self-test, {tried_inputs}" if tried_inputs else ""
            retry_hint = RetryHint.after(loss, may_succeed=may_succeed)
            self.fail(FailureReason.from_loss(loss, holder.name, retry_hint, suffix=consequence), now)
        elif holder.name == self.attach_control.required_holder:
            consequence = "; the shared weights are invalid without the holder"
            self._invalidate(FailureReason(loss.reason, holder.name, suffix=consequence), now)
        else:
            self.attach_control.on_holder_lost()

    def _invalidate(self, cause: FailureReason, now: float) -> None:
        """Fail the generation and kill its processes, because results computed on its weights cannot be trusted."""
        self.attach_control.invalidate()
        # Children that are already stopping or aborted are killed, too; `fail` would let them finish.
        leaving = (ChildState.STOPPING, ChildState.ABORTED)
        self.processes.kill(*[child for child in self.children.values() if child.state in leaving])
        self.fail(cause, now)


def _attach_order(built: Built, row_test: RowTestSpec) -> Attach:
    return Attach(
        built.handle,
        built.selftest_cases,
        *row_test,
        built.row_support,
        built.rebuilds_per_shape,
        built.first_shapes,
        built.selftest_digest,
    )
