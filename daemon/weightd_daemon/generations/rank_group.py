"""A rank group: a generation whose processes start and stop together.

Its processes are the ranks of a divided model, with a broker if the ranks need one, or the single process that serves
several models. A rank group guarantees that no request is dispatched before every rank has passed the self-test. When
one process is lost, all processes are killed at once: a lost process is never replaced alone.
"""

from __future__ import annotations

from dataclasses import replace

from weightd_common.devices import CPU
from weightd_daemon.generations import rank_checks
from weightd_daemon.generations.actions import Role, Send
from weightd_daemon.generations.base import HELLO_TIMEOUT_S, GenerationBase, GenerationSetup, hello_mismatch
from weightd_daemon.generations.process import FOREVER, LossReason, WorkerProcess
from weightd_daemon.generations.progress import FailureReason, RetryHint
from weightd_daemon.generations.spec import RankGroupSpec, SelfTestSpec
from weightd_daemon.generations.states import (
    ACTIVE,
    ALIVE,
    USABLE,
    ChildEvent,
    ChildState,
    GenerationEvent,
    GenerationState,
)
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_protocol.codec import type_name
from weightd_protocol.messages.ranks import JoinedGroup, JoinGroup, RunSelfTest, SelfTestDone
from weightd_protocol.messages.worker import Built, ChildMessage, Hello, ProcessFailed


class RankGroup(GenerationBase):
    """The life cycle of a rank group.

    Args:
        setup: the arguments of the generation; `setup.spec.rank_group` lists the device of each rank.

    Attributes:
        group_spec: the configuration of the rank group.
        models: the descriptions of the loaded models; empty until all ranks have loaded them.
        step: the last step that the ranks have run for the previous daemon; 0 for none.
    """

    _watched_states = ALIVE - {ChildState.KILLED}

    def __init__(self, setup: GenerationSetup) -> None:
        super().__init__(setup)
        label, rank_group = setup.label, setup.spec.rank_group
        if rank_group is None:
            raise ValueError(f"{label}: expected a specification of ranks, got one of workers")
        self.group_spec: RankGroupSpec = rank_group
        self.models: tuple[Built, ...] = ()
        self.step = 0
        self._slice_digests: tuple[str, ...] = ()
        self._rank_names = [rank_name(label, rank) for rank in range(self.group_spec.size)]
        self._joined: dict[str, JoinedGroup] = {}
        self._selftests: dict[int, SelfTestDone] = {}
        self._reconnect_steps: dict[str, int] = {}
        # Whether `failure` may be the consequence of another loss, which the daemon has not observed yet.
        self._is_consequential = False

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> str:
        """The current activity as a text for users, such as "loading, 1/2 ranks have joined"."""
        size = self.group_spec.size
        match self.state:
            case GenerationState.SPAWNING | GenerationState.GATHERING:
                hello_count = sum(child.hello is not None for child in self.children.values())
                return f"spawned, {hello_count}/{size + self.group_spec.has_broker} processes up"
            case GenerationState.BUILDING:
                return f"loading, {len(self._joined)}/{size} ranks have joined"
            case GenerationState.ATTACHING | GenerationState.RESUMING:
                return f"attaching {self.processes.count(ChildState.READY)}/{size}"
            case _:
                return self.state.display_name

    def built_model(self, index: int) -> Built | None:
        """Return the description of a model, by its index in the model group; None before the model has loaded."""
        return self.models[index] if index < len(self.models) else None

    # --- loading ------------------------------------------------------------------------------------------------

    def on_resumed(self) -> None:
        """Continue a rank group that an earlier daemon has loaded.

        The group serves once all ranks have reconnected at the same step. If a process is missing, the group fails.
        """
        super().on_resumed()
        expected = {*self._rank_names, *([broker_name(self.label)] if self.group_spec.has_broker else [])}
        if {*self.children} != expected:
            reason = f"expected {', '.join(sorted(expected))}, got {', '.join(sorted(self.children))}"
            self.fail(FailureReason(reason), 0.0)

    def _start_processes(self, now: float, selftest: SelfTestSpec | None, slice_digests: tuple[str, ...]) -> None:
        """Start all processes, the broker first."""
        del selftest  # not needed: a rank group only runs the configured self-test, with its known answers
        self._slice_digests = slice_digests or (self.sha256,) * self.group_spec.size
        deadline = now + max(HELLO_TIMEOUT_S, self.spec.load_timeout)
        if self.group_spec.has_broker:
            self.processes.start(broker_name(self.label), Role.BROKER, deadline, CPU)
        for name, device in zip(self._rank_names, self.group_spec.devices, strict=True):
            self.processes.start(name, Role.RANK, deadline, device)

    def _hello_mismatch(self, child: WorkerProcess, hello: Hello) -> str:
        if child.role is Role.BROKER:
            return hello_mismatch(hello, hello.sha256)
        rank = self._rank_names.index(child.name)
        return hello_mismatch(hello, self._slice_digests[rank]) or (
            rank_checks.rank_mismatch(hello, rank) if self.group_spec.is_sliced else ""
        )

    def _on_greeted(self, hello: Hello, now: float) -> None:
        """Once all processes have sent HELLO, order them to join the group and load the model."""
        del hello  # the HELLO message is stored in the child
        if self.processes.count(ChildState.GREETED) == len(self.children):
            self._join_group(now)

    def _on_load_message(self, child: WorkerProcess, message: ChildMessage, now: float) -> None:
        match child.state, message:
            case ChildState.BUILDING, JoinedGroup():
                self._joined[child.name] = message
                child.advance(ChildEvent.JOINED)
                if len(self._joined) == self.group_spec.size:
                    self._run_selftest(now)
            case ChildState.ATTACHING, SelfTestDone():
                self._on_selftest_done(child, message, now)
            case _:
                # After an unexpected message, the process may not be in the state that the daemon assumes, so the
                # process is given up.
                if child.state in USABLE:
                    self._lose(child, LossReason(f"unexpected message {type_name(message)}", child.state), now)

    def _join_group(self, now: float) -> None:
        """Order all processes at once to join the group; fail the group if their slices have different signatures."""
        ranks = self.processes.usable(Role.RANK)
        slices = {each.name: each.hello.slice for each in ranks if each.hello and each.hello.slice}
        mismatch = rank_checks.signature_mismatch(slices) if self.group_spec.is_sliced else ""
        if mismatch:
            self.fail(FailureReason(mismatch), now)
            return
        self.advance(GenerationEvent.GATHERED)
        deadline = now + max(self.spec.load_timeout, self.group_spec.connect_timeout)
        for child in list(self.children.values()):
            is_rank = child.role is Role.RANK
            child.advance(ChildEvent.BUILD if is_rank else ChildEvent.HOLD, deadline if is_rank else FOREVER)
            self._actions.append(Send(child.name, JoinGroup()))

    def _run_selftest(self, now: float) -> None:
        """Order all ranks at once to run the self-test: in its first predict, the ranks connect to each other."""
        mismatch = rank_checks.signature_mismatch(self._joined)
        model_count = len(self._joined[self._rank_names[0]].members)
        if not self.group_spec.is_sliced and model_count != self.group_spec.model_count:
            mismatch = f"expected {self.group_spec.model_count} models in one process, got {model_count}"
        if mismatch:
            self.fail(FailureReason(mismatch), now)
            return
        self.advance(GenerationEvent.BUILT)
        self._set_models(rank_checks.loaded_models(self._joined[self._rank_names[0]], self.group_spec))
        order = RunSelfTest(self.spec.row_test.max_rows, self.spec.row_test.sizes)
        for child in self.processes.usable(Role.RANK):
            # The ranks first connect to each other, and then run the self-test.
            child.advance(ChildEvent.RUN_SELFTEST, now + self.group_spec.connect_timeout + self.spec.predict_timeout)
            self._actions.append(Send(child.name, order))

    def _on_selftest_done(self, child: WorkerProcess, selftest: SelfTestDone, now: float) -> None:
        """Record that a rank has passed the self-test. The group serves once all ranks have passed."""
        if not self.group_spec.is_sliced and len(selftest.members) != self.group_spec.model_count:
            reason = f"expected self-tests of {self.group_spec.model_count} models, got {len(selftest.members)}"
            self._lose(child, LossReason(reason, child.state), now)
            return
        self._selftests[self._rank_names.index(child.name)] = selftest
        child.ready_at = now
        child.advance(ChildEvent.ATTACHED)
        if len(self._selftests) < self.group_spec.size:
            return
        unverified = rank_checks.unverified_rank(self._selftests, self.group_spec) if self.group_spec.is_sliced else ""
        if unverified:
            self.fail(FailureReason(unverified), now)
            return
        self._set_models(rank_checks.verified_models(self.models, self._selftests, self.group_spec))
        self._log.log_row_test(self.models[0], is_exact=self.spec.row_test.is_exact)
        self._start_serving()

    def _on_ready(self, child: WorkerProcess, step: int, now: float) -> None:
        """Serve once all ranks have reconnected; fail the group if their last steps differ."""
        self._reconnect_steps[child.name] = step
        if len(self._reconnect_steps) < self.group_spec.size:
            return
        if len({*self._reconnect_steps.values()}) > 1:
            steps = ", ".join(f"{each} at step {self._reconnect_steps[each]}" for each in self._rank_names)
            self.fail(FailureReason(f"the ranks have run different steps: {steps}"), now)
            return
        self.step = step
        self._start_serving()

    def _set_models(self, models: tuple[Built, ...]) -> None:
        self.models, self.built = models, models[0]

    def _start_serving(self) -> None:
        self.advance(GenerationEvent.READY)
        self.processes.add_joint_slot()

    # --- shutdown -----------------------------------------------------------------------------------------------

    def _reconcile(self, now: float) -> None:
        """Kill the processes of a failed group. Stop the processes of a draining group, the ranks before the broker."""
        ranks = self.processes.usable(Role.RANK)
        if self.state is GenerationState.FAILED:
            self.processes.kill(*self.children.values())
        elif self.state is GenerationState.DRAINING:
            if any(rank.state is not ChildState.READY for rank in ranks):
                # A group that has not loaded completely has no batches to finish, so its processes are killed at once.
                self.processes.kill(*self.children.values())
            for child in ranks or ([] if self.processes.has(Role.RANK) else list(self.children.values())):
                if child.state in USABLE:
                    self.processes.stop(child, now)
            if not self.children:
                self.advance(GenerationEvent.EMPTY)
        self._log_progress()

    def fail(self, reason: FailureReason, now: float) -> None:
        """Fail the group and discard its results, because no rank can work without the other ranks."""
        if self.state in ACTIVE:
            self.attach_control.invalidate()
        super().fail(reason, now)

    def _count_lost(self) -> None:
        if self.state is not GenerationState.SNAPSHOTTING:
            self.processes.counters.on_lost(self.group_spec.size + self.group_spec.has_broker)

    # --- losses -------------------------------------------------------------------------------------------------

    def _on_process_failed(self, child: WorkerProcess, failure: ProcessFailed, now: float) -> None:
        is_consequential = rank_checks.is_peer_failure_text(failure.reason)
        self._lose(child, LossReason.from_failure(failure, child.state), now, is_consequential=is_consequential)

    def _on_leaving(self, child: WorkerProcess, reason: str, now: float) -> None:
        """Fail the group, because ranks would take data of the failed predict for data of the next predict."""
        reason = f"a predict failed: {reason}" if reason else "a predict failed"
        self._lose(child, LossReason(reason, child.state), now, is_consequential=True)

    def _on_hung(self, child: WorkerProcess, reason: str, now: float, *, has_answered: bool) -> None:
        """Fail the group because a process hangs. The process may only be waiting for another process."""
        del has_answered
        self._lose(child, LossReason(reason, child.state, has_timed_out=True), now, is_consequential=True)

    def _on_exit(self, child: WorkerProcess, loss: LossReason, exit_cause: ExitCause, now: float) -> None:
        have_met, previous_state = bool(self.models), loss.previous_state
        is_consequential = rank_checks.is_peer_failure_exit(child.role, exit_cause, has_connected=have_met)
        # The exit of a usable process is a loss, with one exception: in a draining group, the broker may exit by itself
        # after its ranks have exited.
        if previous_state in USABLE and not (self.state is GenerationState.DRAINING and exit_cause.status == 0):
            is_listening = previous_state is ChildState.HOLDING
            if is_listening and rank_checks.is_port_taken(exit_cause, has_connected=have_met):
                # A port in use is handled like a lack of memory: another group is started, which gets another port.
                loss = replace(loss, is_out_of_memory=True)
            self._lose(child, loss, now, is_consequential=is_consequential)
        elif previous_state is ChildState.KILLED:
            self._on_killed_exit(
                child, exit_cause, is_independent=rank_checks.is_independent_exit(exit_cause) and not is_consequential
            )
        elif exit_cause.status != 0:
            # The remaining processes may be waiting in a predict for the process that has exited, and might wait
            # forever.
            self.processes.kill(*self.children.values())

    def _lose(self, child: WorkerProcess, loss: LossReason, now: float, *, is_consequential: bool = False) -> None:
        """Fail the group because a process is lost. If the group is shutting down already, kill its processes."""
        if loss.previous_state is ChildState.KILLED:
            return
        if loss.previous_state in USABLE:
            self.processes.count_death()
        if self.state in ACTIVE:
            self._is_consequential = is_consequential
            may_succeed = loss.is_signaled or (is_consequential and not loss.has_timed_out)
            retry_hint = RetryHint.after(loss, may_succeed=may_succeed)
            self.fail(FailureReason.from_loss(loss, child.name, retry_hint), now)
        else:
            self._log.log(f"{child.name} lost: {loss.reason}", child.name)
            self.processes.kill(*self.children.values())

    def _on_killed_exit(self, child: WorkerProcess, exit_cause: ExitCause, *, is_independent: bool) -> None:
        """Handle the exit of a process that the daemon has killed.

        If the process had exited by itself before (`is_independent`), it may be the cause of the failure.
        """
        if self.failure.child == child.name:
            self.failure = replace(self.failure, log_tail=exit_cause.detail or self.failure.log_tail)
        elif self._is_consequential and is_independent:
            # Do not name the daemon in the text, because its SIGKILL came after the exit.
            reason = str(replace(exit_cause, initiator=ExitInitiator.UNKNOWN))
            self.failure = replace(self.failure, reason=reason, child=child.name, log_tail="")
            self._is_consequential = False
            self._log.log(f"first failure: {self.failure}", child.name)


def rank_name(label: str, rank: int) -> str:
    """Return the name of a rank's process."""
    return f"{label}.rank{rank}"


def broker_name(label: str) -> str:
    """Return the name of a broker's process."""
    return f"{label}.broker"
