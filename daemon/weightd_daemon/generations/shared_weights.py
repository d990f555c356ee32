"""The life of one weight copy of one model on one device.

Plain decisions: events and the clock go in, `Action`s come out. No process, socket or file is touched here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from weightd_daemon.generations.actions import Role, Send
from weightd_daemon.generations.base import HELLO_TIMEOUT_S, GenerationBase, hello_mismatch
from weightd_daemon.generations.process import LossReason, WorkerProcess
from weightd_daemon.generations.progress import FailureReason, RetryHint, UnmergedPrincipal
from weightd_daemon.generations.selftest_search import SelfTestSearch, describe_cases
from weightd_daemon.generations.spec import SelfTestSpec
from weightd_daemon.generations.states import (
    ACTIVE,
    LOADING,
    USABLE,
    ChildEvent,
    ChildState,
    GenerationEvent,
    GenerationState,
)
from weightd_daemon.platform.exit_cause import ExitCause, MissingFile
from weightd_protocol import limits
from weightd_protocol.codec import clip
from weightd_protocol.messages.worker import (
    AnnounceSelfTest,
    AttachAllowed,
    Attached,
    Built,
    ContinueSelfTest,
    Hello,
    ProcessFailed,
)

# What a child that hangs gets to write its stacks down.
ABORT_TIMEOUT_S = 2.0


class Generation(GenerationBase):
    """The life of a holder and its workers."""

    # --- events -------------------------------------------------------------------------------------------------

    def on_snapshot_taken(
        self, sha256: str, now: float, selftest: SelfTestSpec | None = None, slice_digests: tuple[str, ...] = ()
    ) -> None:
        """The snapshot exists: start the processes. `selftest` is what an earlier generation has found out of it."""
        del slice_digests  # of what is cut
        if self.state is not GenerationState.SNAPSHOTTING:
            return
        self.selftest_search = SelfTestSearch(selftest or self.spec.selftest, self.spec.row_test)
        self.sha256 = sha256
        self._machine.advance(GenerationEvent.SNAPSHOT_TAKEN)
        self._spawn(Role.HOLDER, now)
        self._reconcile(now)

    def on_hello(self, name: str, hello: Hello, now: float) -> None:
        """A child is up."""
        child = self.children.get(name)
        if child is None or child.state is not ChildState.SPAWNED:
            return
        mismatch = hello_mismatch(hello, self.sha256)
        if mismatch:
            self.on_process_failed(name, ProcessFailed(mismatch), now)
            return
        child.hello = hello
        child.advance(ChildEvent.HELLO)
        self.attach_control.on_hello(has_fixed_pids=self._is_sharing and hello.sharing_traits.pids_fixed_at_build)
        if self.state is GenerationState.SPAWNING:
            self._machine.advance(GenerationEvent.GREETED)
        self._reconcile(now)

    def on_announce_selftest(self, name: str, message: AnnounceSelfTest) -> None:
        """The holder runs its model on something that may be its end."""
        child = self.children.get(name)
        if child is not None and child.state is ChildState.BUILDING:
            self.selftest_search.on_announce_selftest(message)
            if message.cases:
                self._actions.append(Send(name, ContinueSelfTest()))

    def on_holder_built(self, name: str, built: Built, now: float) -> None:
        """The holder exports the weights."""
        child = self.children.get(name)
        if child is None or child.state is not ChildState.BUILDING or child.hello is None:
            return
        if self.spec.is_sharing and child.hello.sharing_traits.attach_rewrites_weights and not built.selftest_digest:
            # Nothing else shows that a worker computes on the right weights.
            reason = f"no self-test: {built.selftest_note}; name an input with the key selftest, or set sharing to off"
            self.selftest_search.current_cases = ()
            self.on_process_failed(name, ProcessFailed(clip(reason)), now)
            return
        if built.is_template and not (self.spec.can_fork_from_holder and self.attach_control.is_open):
            self.on_process_failed(
                name, ProcessFailed("it says that workers are to be forked of it, and was not asked for that"), now
            )
            return
        self.built = built
        self.selftest_search.on_built(built)
        if not built.selftest_digest:
            self._progress_logger.log(f"no self-test: {built.selftest_note}")
        self.require_holder(child)
        self.device_usage.on_built(built.device)
        child.shared_bytes = built.shared_bytes
        self._progress_logger.log_row_test(built, is_exact=self.spec.row_test.is_exact)
        if self.spec.is_sharing:
            self._progress_logger.log_built(built, name)
        child.advance(ChildEvent.BUILT)
        if self.state is GenerationState.BUILDING:
            self._machine.advance(GenerationEvent.BUILT)
            self.attach_control.on_built(is_shared=self._is_sharing, is_template=built.is_template)
        if not self._is_sharing:
            # It has told the signature and the self-test; its copy of the weights is of no use to anybody.
            self._stop(child, now)
        self._reconcile(now)

    def on_batch_mismatch(self, note: str, principals: Mapping[int, str] = MappingProxyType({})) -> None:
        """A worker has found that rows together are not what each is alone, though the holder had found them equal.

        Args:
            note: what differs.
            principals: the names of those whose rows differ, by their numbers; none: those of all may. From now on
                their requests share no batch, until there is another generation.
        """
        built = self.built
        new_principals = {number: name for number, name in principals.items() if number not in self.unmerged_principals}
        if principals and len(self.unmerged_principals) + len(new_principals) <= limits.MAX_TENANTS:
            if new_principals:
                self.unmerged_principals.update(
                    (number, UnmergedPrincipal(name, note)) for number, name in new_principals.items()
                )
                self.counters.on_batch_mismatch()
                self._progress_logger.log(
                    f"requests of {', '.join(new_principals.values())} are not batched any more: {note}"
                )
            return
        if built is not None and built.row_support is not None and built.row_support.is_equal:
            self.built = dataclasses.replace(
                built, row_support=dataclasses.replace(built.row_support, is_equal=False, note=note)
            )
            self.counters.on_batch_mismatch()
            self._progress_logger.log(f"requests are not batched any more: {note}")

    def require_holder(self, holder: WorkerProcess) -> None:
        """The holder holds; where the weights become invalid with it, no answer counts without it."""
        must_outlive = holder.hello is not None and holder.hello.sharing_traits.holder_must_outlive
        if must_outlive and self._is_sharing and not self.spec.can_outlive_holder:
            self.attach_control.required_holder = holder.name

    def on_allowed(self, name: str, allowed: AttachAllowed, now: float) -> None:
        """The holder has been asked to let one more process attach."""
        if name in self.children:
            self.attach_control.on_allowed(allowed)
            self._reconcile(now)

    def on_attached(self, name: str, attached: Attached, now: float) -> None:
        """A worker has built the model; it serves if it reproduces the self-test."""
        child = self.children.get(name)
        if child is None or child.state is not ChildState.ATTACHING or self.built is None:
            return
        if self.built.selftest_digest and attached.selftest_digest != self.built.selftest_digest:
            self.counters.on_selftest_failed()
            self.on_process_failed(
                name,
                ProcessFailed("the self-test answer differs from the holder's: the worker would answer wrongly"),
                now,
            )
            return
        child.note, child.shared_bytes = attached.note, attached.shared_bytes
        if self.spec.is_sharing:
            self._progress_logger.log_attached(self.built, attached, name)
            self.device_usage.on_attached(attached.device)  # else that was its weights too
        self._on_ready(child, ChildEvent.ATTACHED, now)

    def on_reconnected(self, name: str, now: float, step: int = 0) -> None:
        """A worker that was READY for the daemon before this one is connected."""
        del step  # of ranks
        child = self.children.get(name)
        if child is not None and child.state is ChildState.AWAITED:
            self._on_ready(child, ChildEvent.RECONNECTED, now)

    def on_process_failed(self, name: str, failure: ProcessFailed, now: float) -> None:
        """A child says that it cannot do what it is for."""
        child = self.children.get(name)
        if child is None or child.state not in USABLE:
            return
        loss = LossReason(
            failure.reason, child.state, is_out_of_memory=failure.is_out_of_memory, is_transient=failure.is_transient
        )
        self._stop(child, now)
        self._on_loss(child, loss, now)
        self._reconcile(now)

    def on_leaving(self, name: str, now: float, reason: str = "") -> None:
        """A worker's model may be spoilt: it must go, and a fresh process take its place."""
        del reason  # the client is told
        child = self.children.get(name)
        if child is None or child.state is not ChildState.READY:
            return
        # It leaves in order and by its own word: no reason to wait with the next one.
        self.counters.on_lost()
        self._progress_logger.log(f"{name} leaves: a predict failed and may have spoilt its model", name)
        self._stop(child, now)
        self._reconcile(now)

    def on_hung(self, name: str, reason: str, now: float, *, has_answered: bool = False) -> None:
        """A worker does not answer any more: it is ended, and replaced. `has_answered`: it had answered something."""
        child = self.children.get(name)
        if child is not None and child.state in (ChildState.READY, ChildState.STOPPING):
            self._abort(child, reason, now, has_answered=has_answered)
            self._reconcile(now)

    def on_store_lost(self, cause: str, now: float) -> None:
        """What the workers have mapped is not what the holder left there: whatever they compute may be wrong."""
        if self.state in ACTIVE and self.built is not None:
            self._invalidate(FailureReason(cause), now)

    def on_exit(self, name: str, exit_cause: ExitCause, now: float, *, has_answered: bool = False) -> None:
        """A child has exited and has been waited for. `has_answered`: it had answered some request."""
        child = self.children.get(name)
        if child is None:
            return
        previous_state = child.state
        self.processes.on_exit(child)
        if exit_cause.missing_file is not MissingFile.NONE and self._has_served:
            self.attach_control.on_files_lost(exit_cause.detail)
        if previous_state in USABLE:
            loss = LossReason(
                str(exit_cause),
                previous_state,
                has_answered=has_answered,
                is_signaled=exit_cause.is_killed,
                is_external=exit_cause.is_external,
                is_transient=exit_cause.is_transient,
            )
            self._on_death(child, loss, now)
        elif child.loss is not None and exit_cause.detail:
            # It was given up before it was dead: only now its log is complete.
            self._progress_logger.log(str(FailureReason(child.loss.reason, name, exit_cause.detail)), name)
            if self._failure_reason.child == name:
                self._failure_reason = dataclasses.replace(self._failure_reason, log_tail=exit_cause.detail)
        self._reconcile(now)

    def drain(self, now: float, *, timeout_s: float = 0.0) -> None:
        """No new work: wind down, workers first; to finish what they have, they may take `timeout_s` seconds more."""
        self._limit_stop_deadlines(now, timeout_s)
        if self.state in ACTIVE:
            self._machine.advance(GenerationEvent.DRAIN)
        self._reconcile(now)

    def tick(self, now: float) -> None:
        """Time has passed: kill what has taken too long, start what is due."""
        for child in list(self.children.values()):
            # Not those that an earlier one has taken along.
            if now >= child.deadline and child.state is ChildState.ABORTED:
                self.processes.kill(child)
            elif now >= child.deadline:
                self._abort(child, f"{child.state.display_name} took too long", now)
        if self.state in ACTIVE:
            self.attach_control.tick(now)
        self._reconcile(now)

    # --- decisions ----------------------------------------------------------------------------------------------

    def _reconcile(self, now: float) -> None:
        """Bring what is nearer to what should be; called after each event."""
        if self.state in ACTIVE:
            self.attach_control.stop_unattachable(now + self._stop_timeout_s)
        # One that is still on its way may become READY.
        if not self.processes.usable(Role.WORKER):
            if self._has_given_up:
                self._fail(self._failure_reason, now)
            elif self.attach_control.is_attach_closed:
                reason = "every worker is lost, and nobody can attach any more"
                self._fail(
                    self._failure_reason.with_prefix(f"{reason}; ")
                    if self._failure_reason.reason
                    else FailureReason(reason),
                    now,
                )
        if self.state in ACTIVE and self.state is not GenerationState.SNAPSHOTTING:
            self.processes.fill_slots(self.spec.workers)
            self._spawn_missing(now)
            self._build_if_gathered(now)
            # One without anything to share leaves first, and its own copy with it.
            if self.built is not None and (self._is_sharing or not self.processes.has_holder):
                self.attach_control.attach_next(
                    self.selftest_search.attach_message(self.built), now, self._attach_timeout_s, self.attach_limit
                )
            if self.is_complete and self.processes.is_all_ready:
                self.attach_control.trim_store(is_shared=self._is_sharing)
        elif self.state not in ACTIVE:
            self._wind_down(now)
        self._log_progress()

    def _spawn_missing(self, now: float) -> None:
        """Start what is missing."""
        if self._backoff.due_at <= now:
            for device in self._missing_devices:
                self._spawn(Role.WORKER, now, device)
        # One that a self-test has killed is waited for: no two of them hold the weights at once.
        if self.state is GenerationState.GATHERING and not self.processes.has_holder:
            self._spawn(Role.HOLDER, now)

    def _build_if_gathered(self, now: float) -> None:
        """Order the build once the pids that must be known are."""
        holder = self.processes.holder
        if self.state is not GenerationState.GATHERING or holder is None or holder.hello is None:
            return
        workers = self.processes.usable(Role.WORKER)
        known_pids = [worker.hello.engine_pid for worker in workers if worker.hello is not None]
        if not self.attach_control.is_open and (self._missing_devices or len(known_pids) < len(workers)):
            return
        self._machine.advance(GenerationEvent.GATHERED)
        holder.advance(ChildEvent.BUILD, now + self.spec.load_timeout)
        self.attach_control.on_build_started()
        self._actions.append(
            Send(holder.name, self.selftest_search.build_message(tuple(known_pids) if self.spec.is_sharing else ()))
        )

    def _wind_down(self, now: float) -> None:
        """Workers leave and are waited for; then the holder, whose memory they used."""
        workers = [child for child in self.children.values() if child.role is Role.WORKER]
        for child in workers or list(self.children.values()):
            if child.state in USABLE:
                self._stop(child, now)
        if not self.children and self.state is GenerationState.DRAINING:
            self._machine.advance(GenerationEvent.EMPTY)

    def _on_ready(self, child: WorkerProcess, event: ChildEvent, now: float) -> None:
        child.ready_at = now
        child.advance(event)
        self._backoff.on_ready()
        self._failure_reason = FailureReason()
        self.attach_control.on_attached()
        self.processes.fill_slots(self.spec.workers)
        if self.state in LOADING:
            self._machine.advance(GenerationEvent.READY)
        self._reconcile(now)

    def _spawn(self, role: Role, now: float, device: str = "") -> None:
        self.counters.on_started()
        template = self._template_name if role is Role.WORKER else ""
        deadline = now + max(HELLO_TIMEOUT_S, self.spec.load_timeout)
        self.processes.spawn(role, deadline, device or self.device, template)

    def _stop(self, child: WorkerProcess, now: float) -> None:
        if self.attach_control.is_valid:
            self.processes.stop(child, now + self._stop_timeout_s)
        else:
            self.processes.kill(child)

    # --- what is lost -------------------------------------------------------------------------------------------

    def _abort(self, child: WorkerProcess, reason: str, now: float, *, has_answered: bool = False) -> None:
        """End a child that hangs: first in a way that shows where it hangs."""
        previous_state = child.state
        self.processes.abort(child, now + ABORT_TIMEOUT_S)
        if previous_state in USABLE:
            child.loss = LossReason(reason, previous_state, has_answered=has_answered, has_timed_out=True)
            self._on_death(child, child.loss, now)

    def _on_death(self, child: WorkerProcess, loss: LossReason, now: float) -> None:
        """A child has ended, or has to be, without being asked to; that a try of the holder may cost it is known."""
        if not self._has_died_of_selftest(child, loss):
            self.deaths += 1
            self.counters.on_death()
        self._on_loss(child, loss, now)

    def _has_died_of_selftest(self, child: WorkerProcess, loss: LossReason) -> bool:
        return child.role is Role.HOLDER and bool(self.selftest_search.current_cases) and not loss.is_external

    def _on_loss(self, child: WorkerProcess, loss: LossReason, now: float) -> None:
        state_before = self.state
        if state_before in ACTIVE:
            self.counters.on_lost()
        if child.role is Role.HOLDER:
            self._on_holder_lost(child, loss, now)
        if self.state is state_before:  # else it has failed with this cause, which is told with what follows
            self._progress_logger.log(f"{child.name} lost: {loss.reason}", child.name)
        if child.role is Role.WORKER and self.state in ACTIVE:
            self._on_worker_lost(child, loss, now)

    def _on_worker_lost(self, child: WorkerProcess, loss: LossReason, now: float) -> None:
        cause = FailureReason(loss.reason, child.name, is_transient=loss.is_transient or loss.is_out_of_memory)
        if loss.previous_state is ChildState.READY:
            self._backoff.on_death(now - child.ready_at, now, has_answered=loss.has_answered)
            if self._backoff.delay_s and not self.attach_control.is_attach_closed:
                self._failure_reason = cause.with_prefix("workers die before they have answered anything; the last: ")
        else:
            self._failure_reason = cause
            if loss.previous_state is ChildState.AWAITED:
                # It was READY once: that it is not back says nothing about the next one.
                self._backoff.on_death(0.0, now, has_answered=True)
            elif loss.is_out_of_memory:
                self._backoff.on_out_of_memory(now, self.spec.memory_timeout_s)
            else:
                self._backoff.on_start_failed(now)
        if self._is_backing_off:
            self._progress_logger.log(f"the next worker is started in {self._backoff.delay_s:.1f} s")

    def _on_holder_lost(self, holder: WorkerProcess, loss: LossReason, now: float) -> None:
        tried_inputs, has_died_of_selftest = (
            describe_cases(self.selftest_search.current_cases),
            self._has_died_of_selftest(holder, loss),
        )
        if self.state is GenerationState.BUILDING and self.selftest_search.on_holder_lost(
            has_timed_out=loss.has_timed_out, is_external=loss.is_external
        ):
            self._progress_logger.log(
                f"the holder is lost while it tries {tried_inputs} as self-test input: {loss.reason}", holder.name
            )
            self._machine.advance(GenerationEvent.RETRY)
        elif self.built is None or holder.hello is None:
            retry_hint = (
                RetryHint.MAY_SUCCEED if loss.is_signaled and not has_died_of_selftest else RetryHint.SAME_FAILURE
            )
            consequence = f"; it ran the configured self-test, {tried_inputs}" if tried_inputs else ""
            retry_hint = RetryHint.WAIT_FOR_MEMORY if loss.is_out_of_memory else retry_hint
            is_transient = loss.is_transient or loss.is_out_of_memory
            cause = FailureReason(
                loss.reason, holder.name, suffix=consequence, retry_hint=retry_hint, is_transient=is_transient
            )
            self._fail(cause, now)
        elif holder.name == self.attach_control.required_holder:
            consequence = "; the shared weights are invalid without it"
            self._invalidate(FailureReason(loss.reason, holder.name, suffix=consequence), now)
        else:
            self.attach_control.on_holder_lost()

    def _invalidate(self, cause: FailureReason, now: float) -> None:
        """What the workers compute on may be anything from now on: they have no time to finish."""
        self.attach_control.invalidate()
        for child in self.children.values():
            # Those that were told to leave, too.
            if child.state in (ChildState.STOPPING, ChildState.ABORTED):
                self.processes.kill(child)
        self._fail(cause, now)

    def _fail(self, cause: FailureReason, now: float) -> None:
        if self.state in ACTIVE:
            self._failure_reason = cause
            self.counters.on_lost(sum(child.state in USABLE for child in self.children.values()))
            self._machine.advance(GenerationEvent.FAIL)
            self._reconcile(now)
