"""The life of a unit: processes that live and die together.

These are the ranks of a model that is cut, and their broker if they need one; or the one process of several models.
Plain decisions, as in `generation`. Two promises: nobody is given a request unless every rank is there and has shown
that it computes rightly; and when one is lost all are killed in the same step, and none is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weightd_common.devices import CPU
from weightd_daemon.generations import rank_consistency, rank_failures
from weightd_daemon.generations.actions import Role, Send
from weightd_daemon.generations.base import HELLO_TIMEOUT_S, GenerationBase, hello_mismatch
from weightd_daemon.generations.process import FOREVER, LossReason, WorkerProcess
from weightd_daemon.generations.progress import FailureReason, RetryHint
from weightd_daemon.generations.rank_table import RankProcesses, broker_name, rank_name
from weightd_daemon.generations.spec import GenerationSpec, ModelSource, RankGroupSpec, SelfTestSpec
from weightd_daemon.generations.states import ACTIVE, USABLE, ChildEvent, ChildState, GenerationEvent, GenerationState
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_protocol.messages.ranks import JoinedGroup, JoinGroup, RunSelfTest, SelfTestDone
from weightd_protocol.messages.worker import Built, Hello, ProcessFailed


class RankGroup(GenerationBase):
    """The life of a unit.

    Args:
        label: its name, as in `GenerationView`.
        spec: what is configured, with `group_spec`.
        device: of which deployment it is. Where each rank runs its terms say.
        source: what it loads.
        number: the one in its label.

    Attributes:
        models: what it has loaded: one model, or each of its members.
        step: the last one that its ranks have run for the daemon before this one; 0 for none.
    """

    processes: RankProcesses
    _processes_type = RankProcesses

    def __init__(
        self, label: str, spec: GenerationSpec, device: str = CPU, source: ModelSource | None = None, number: int = 1
    ) -> None:
        super().__init__(label, spec, device, source, number)
        if spec.rank_group is None:
            raise ValueError(f"{label}: expected terms of ranks, got those of workers")
        self.group_spec: RankGroupSpec = spec.rank_group
        self.models: tuple[Built, ...] = ()
        self.step = 0
        self._slice_digests: tuple[str, ...] = ()
        self._rank_names = [rank_name(label, rank) for rank in range(self.group_spec.size)]
        self._joined: dict[str, JoinedGroup] = {}
        self._selftests: dict[int, SelfTestDone] = {}
        self._reconnect_steps: dict[str, int] = {}
        # What it has failed of may only follow from what is not known yet.
        self._is_consequential = False

    # --- events -------------------------------------------------------------------------------------------------

    def on_resumed(self) -> None:
        """It was made of what an earlier daemon has written down; it serves once all ranks are `on_reconnected`."""
        super().on_resumed()
        expected = {*self._rank_names, *([broker_name(self.label)] if self.group_spec.has_broker else [])}
        if {*self.children} != expected:
            self._end_group(
                FailureReason(f"expected {', '.join(sorted(expected))}, got {', '.join(sorted(self.children))}")
            )

    def on_snapshot_taken(
        self, sha256: str, now: float, selftest: SelfTestSpec | None = None, slice_digests: tuple[str, ...] = ()
    ) -> None:
        """The snapshot exists: start all processes, the broker first.

        `slice_digests` are those of the ranks' slices.
        """
        del selftest  # it is configured, with the right answer
        if self.state is not GenerationState.SNAPSHOTTING:
            return
        self.sha256, self._slice_digests = sha256, slice_digests or (sha256,) * self.group_spec.size
        self._machine.advance(GenerationEvent.SNAPSHOT_TAKEN)
        deadline = now + max(HELLO_TIMEOUT_S, self.spec.load_timeout)
        if self.group_spec.has_broker:
            self.counters.on_started()
            self.processes.start(Role.BROKER, broker_name(self.label), CPU, deadline)
        for name, device in zip(self._rank_names, self.group_spec.devices, strict=True):
            self.counters.on_started()
            self.processes.start(Role.RANK, name, device, deadline)
        self._log_progress()

    def on_hello(self, name: str, hello: Hello, now: float) -> None:
        """A process is up; when all are, they are to find each other, and to load."""
        child = self._expect_message(name, ChildState.SPAWNED, "hello", now)
        if child is None:
            return
        mismatch = self._hello_mismatch(child, hello)
        if mismatch:
            self._on_loss(child, LossReason(mismatch, child.state))
            return
        child.hello = hello
        child.advance(ChildEvent.HELLO)
        if self.state is GenerationState.SPAWNING:
            self._machine.advance(GenerationEvent.GREETED)
        if self.processes.count(ChildState.GREETED) == len(self.children):
            self._join_group(now)
        self._log_progress()

    def on_joined(self, name: str, joined: JoinedGroup, now: float) -> None:
        """A rank is in the group, and has loaded; when all have, they are to run the self-test."""
        child = self._expect_message(name, ChildState.BUILDING, "joined_group", now)
        if child is None:
            return
        self._joined[name] = joined
        child.advance(ChildEvent.JOINED)
        if len(self._joined) == self.group_spec.size:
            self._run_selftest(now)
        self._log_progress()

    def on_selftest_done(self, name: str, selftest: SelfTestDone, now: float) -> None:
        """A rank has run the self-test, and found its answer right; when all have, they serve."""
        child = self._expect_message(name, ChildState.ATTACHING, "selftest_done", now)
        if child is None:
            return
        if not self.group_spec.is_sliced and len(selftest.members) != self.group_spec.model_count:
            reason = f"expected self-tests of {self.group_spec.model_count} models, got {len(selftest.members)}"
            self._on_loss(child, LossReason(reason, child.state))
            return
        self._selftests[self._rank_names.index(name)] = selftest
        child.ready_at = now
        child.advance(ChildEvent.ATTACHED)
        if len(self._selftests) == self.group_spec.size:
            unverified = (
                rank_consistency.unverified_rank(self._selftests, self.group_spec) if self.group_spec.is_sliced else ""
            )
            if unverified:
                self._end_group(FailureReason(unverified))
                return
            self._set_models(rank_consistency.verified_models(self.models, self._selftests, self.group_spec))
            if self.models[0].row_support is not None:
                self._progress_logger.log_row_test(self.models[0], is_exact=self.spec.row_test.is_exact)
            self._start_serving()
        self._log_progress()

    def on_reconnected(self, name: str, now: float, step: int = 0) -> None:
        """A rank that was READY for the daemon before this one is connected; all have to have run the same `step`."""
        child = self._expect_message(name, ChildState.AWAITED, "reconnected", now)
        if child is None:
            return
        self._reconnect_steps[name] = step
        child.ready_at = now
        child.advance(ChildEvent.RECONNECTED)
        if len(self._reconnect_steps) == self.group_spec.size:
            if len({*self._reconnect_steps.values()}) > 1:
                steps = ", ".join(f"{each} the step {self._reconnect_steps[each]}" for each in self._rank_names)
                self._end_group(FailureReason(f"the ranks are out of step: the last that was run is of {steps}"))
                return
            self.step = step
            self._start_serving()
        self._log_progress()

    def on_unexpected_message(self, name: str, message_name: str, now: float) -> None:
        """A process says what none of a unit says, or not now."""
        child = self.children.get(name)
        if child is not None and child.state in USABLE:
            self._on_loss(child, LossReason(f"unexpected message {message_name}", child.state))

    def on_process_failed(self, name: str, failure: ProcessFailed, now: float) -> None:
        """A process says that it cannot do what it is for."""
        child = self._find_unkilled(name)
        if child is not None:
            loss = LossReason(
                failure.reason,
                child.state,
                is_out_of_memory=failure.is_out_of_memory,
                is_transient=failure.is_transient,
            )
            self._on_loss(child, loss, is_consequential=rank_failures.is_peer_failure_text(failure.reason))

    def on_leaving(self, name: str, now: float, reason: str = "") -> None:
        """A predict of a rank has failed: what the others have sent for it would be taken for the next one's."""
        child = self._find_unkilled(name)
        if child is not None:
            loss_reason = f"a predict failed: {reason}" if reason else "a predict failed"
            self._on_loss(child, LossReason(loss_reason, child.state), is_consequential=True)

    def on_hung(self, name: str, reason: str, now: float, *, has_answered: bool = False) -> None:
        """A rank does not answer any more, be it that it waits for another one."""
        del has_answered
        child = self._find_unkilled(name)
        if child is not None:
            self._on_loss(child, LossReason(reason, child.state, has_timed_out=True), is_consequential=True)

    def on_exit(self, name: str, exit_cause: ExitCause, now: float, *, has_answered: bool = False) -> None:
        """A process has exited and has been waited for."""
        child = self.children.get(name)
        if child is None:
            return
        was, have_met = child.state, bool(self.models)
        self.processes.on_exit(child)
        is_consequential = rank_failures.is_peer_failure_exit(child.role, exit_cause, has_connected=have_met)
        # A broker may end by itself when its ranks have left.
        if was in USABLE and not (self.state is GenerationState.DRAINING and exit_cause.status == 0):
            is_port_taken = was is ChildState.HOLDING and rank_failures.is_port_taken(
                exit_cause, has_connected=have_met
            )
            is_transient = exit_cause.is_transient
            loss = LossReason(
                str(exit_cause),
                was,
                has_answered=has_answered,
                is_signaled=exit_cause.is_killed,
                is_out_of_memory=is_port_taken,
                is_transient=is_transient,
            )
            self._on_loss(child, loss, is_consequential=is_consequential)
        elif was is ChildState.KILLED:
            self._on_killed_exit(
                child, exit_cause, is_independent=rank_failures.is_independent_exit(exit_cause) and not is_consequential
            )
        elif exit_cause.status != 0:
            # The others may wait for it in what they still compute.
            self.processes.kill_all()
        self._wind_down(now)

    def drain(self, now: float, *, timeout_s: float = 0.0) -> None:
        """No new work: ranks finish what they have, and leave, then the broker. Who loads finishes nothing."""
        self._limit_stop_deadlines(now, timeout_s)
        if self.state in ACTIVE:
            was_serving = self.state is GenerationState.SERVING
            self._machine.advance(GenerationEvent.DRAIN)
            if not was_serving:
                self.processes.kill_all()
        self._wind_down(now)

    def tick(self, now: float) -> None:
        """Time has passed: who has taken too long ends all."""
        for child in list(self.children.values()):
            if now >= child.deadline and child.state is not ChildState.KILLED:
                loss = LossReason(f"{child.state.display_name} took too long", child.state, has_timed_out=True)
                self._on_loss(child, loss, is_consequential=True)

    # --- how it stands ------------------------------------------------------------------------------------------

    @property
    def slots(self) -> Mapping[str, tuple[str, ...]]:
        """The one slot, of all ranks in their order, while it takes requests."""
        return self.processes.slots

    @property
    def is_complete(self) -> bool:
        """Whether it serves: it has all ranks, or none."""
        return self.state is GenerationState.SERVING

    @property
    def has_all_workers(self) -> bool:
        """Whether all ranks are READY."""
        return self.is_complete

    @property
    def should_be_replaced(self) -> bool:
        """Never: what has lost a rank has failed."""
        return False

    @property
    def progress(self) -> str:
        """What it is doing now, for people."""
        size, ready = self.group_spec.size, self.processes.count(ChildState.READY)
        match self.state:
            case GenerationState.SPAWNING | GenerationState.GATHERING:
                hello_count = sum(child.hello is not None for child in self.children.values())
                return f"spawned, {hello_count}/{size + self.group_spec.has_broker} processes up"
            case GenerationState.BUILDING:
                return f"loading, {len(self._joined)}/{size} ranks have joined"
            case GenerationState.ATTACHING | GenerationState.RESUMING:
                return f"attaching {ready}/{size}"
            case _:
                return self.state.display_name

    @property
    def _missing_devices(self) -> tuple[str, ...]:
        """Nobody: none is started for another one."""
        return ()

    # --- decisions ----------------------------------------------------------------------------------------------

    def _find_unkilled(self, name: str) -> WorkerProcess | None:
        """The process, unless it is being killed."""
        child = self.children.get(name)
        return child if child is not None and child.state is not ChildState.KILLED else None

    def _expect_message(self, name: str, state: ChildState, message_name: str, now: float) -> WorkerProcess | None:
        """The process, if it is its turn to say this; whoever else says it does not know where it is."""
        child = self.children.get(name)
        if child is None or child.state is state:
            return child
        self.on_unexpected_message(name, message_name, now)
        return None

    def _hello_mismatch(self, child: WorkerProcess, hello: Hello) -> str:
        if child.role is Role.BROKER:
            return hello_mismatch(hello, hello.sha256)
        rank = self._rank_names.index(child.name)
        return hello_mismatch(hello, self._slice_digests[rank]) or (
            rank_consistency.rank_mismatch(hello, rank) if self.group_spec.is_sliced else ""
        )

    def _join_group(self, now: float) -> None:
        """All are up: where they say the same of the model, they are let in, all at once."""
        slices = {
            each.name: each.hello.slice for each in self.processes.usable_ranks if each.hello and each.hello.slice
        }
        mismatch = rank_consistency.signature_mismatch(slices) if self.group_spec.is_sliced else ""
        if mismatch:
            self._end_group(FailureReason(mismatch))
            return
        self._machine.advance(GenerationEvent.GATHERED)
        deadline = now + max(self.spec.load_timeout, self.group_spec.connect_timeout)
        for child in list(self.children.values()):
            is_rank = child.role is Role.RANK
            child.advance(ChildEvent.BUILD if is_rank else ChildEvent.HOLD, deadline if is_rank else FOREVER)
            self._actions.append(Send(child.name, JoinGroup()))

    def _run_selftest(self, now: float) -> None:
        """All have: their first predict is where they meet, so they begin it at once."""
        mismatch = rank_consistency.signature_mismatch(self._joined)
        model_count = len(self._joined[self._rank_names[0]].members)
        if not self.group_spec.is_sliced and model_count != self.group_spec.model_count:
            mismatch = f"expected {self.group_spec.model_count} models in one process, got {model_count}"
        if mismatch:
            self._end_group(FailureReason(mismatch))
            return
        self._machine.advance(GenerationEvent.BUILT)
        self._set_models(rank_consistency.loaded_models(self._joined[self._rank_names[0]], self.group_spec))
        order = RunSelfTest(self.spec.row_test.max_rows, self.spec.row_test.sizes)
        for child in self.processes.usable_ranks:
            # Beside the time in which all have to come, the self-test itself takes some.
            child.advance(ChildEvent.RUN_SELFTEST, now + self.group_spec.connect_timeout + self.spec.predict_timeout)
            self._actions.append(Send(child.name, order))

    def _set_models(self, models: tuple[Built, ...]) -> None:
        self.models, self.built = models, models[0]

    def _start_serving(self) -> None:
        self._machine.advance(GenerationEvent.READY)
        self.processes.add_slot()

    def _wind_down(self, now: float) -> None:
        """Ranks leave and are waited for; then the broker."""
        if self.state is GenerationState.DRAINING:
            for child in self.processes.usable_ranks or ([] if self._has_ranks else list(self.children.values())):
                if child.state in USABLE:
                    self.processes.stop(child, now + self._stop_timeout_s)
            if not self.children:
                self._machine.advance(GenerationEvent.EMPTY)
        self._log_progress()

    @property
    def _has_ranks(self) -> bool:
        return any(child.role is Role.RANK for child in self.children.values())

    # --- what is lost -------------------------------------------------------------------------------------------

    def _on_loss(self, child: WorkerProcess, loss: LossReason, *, is_consequential: bool = False) -> None:
        """One is of no use any more: all end."""
        if loss.previous_state in USABLE:
            self.deaths += 1
            self.counters.on_death()
        retry_hint = self._retry_hint(loss, is_consequential=is_consequential)
        cause = FailureReason(
            loss.reason, child.name, retry_hint=retry_hint, is_transient=loss.is_transient or loss.is_out_of_memory
        )
        if self.state in ACTIVE:
            self._is_consequential = is_consequential
            self._end_group(cause)
        else:
            self._progress_logger.log(f"{child.name} lost: {loss.reason}", child.name)
            self.processes.kill_all()

    def _retry_hint(self, loss: LossReason, *, is_consequential: bool) -> RetryHint:
        if loss.is_out_of_memory:
            return RetryHint.WAIT_FOR_MEMORY
        return (
            RetryHint.MAY_SUCCEED
            if loss.is_signaled or (is_consequential and not loss.has_timed_out)
            else RetryHint.SAME_FAILURE
        )

    def _on_killed_exit(self, child: WorkerProcess, exit_cause: ExitCause, *, is_independent: bool) -> None:
        """One that was killed has ended; it may have done so before, and have been what the others have died of."""
        if self._failure_reason.child == child.name:
            self._failure_reason = replace(
                self._failure_reason, log_tail=exit_cause.detail or self._failure_reason.log_tail
            )
        elif self._is_consequential and is_independent:
            # By another signal than the one that the daemon has sent.
            self._failure_reason = replace(
                self._failure_reason,
                reason=str(replace(exit_cause, initiator=ExitInitiator.UNKNOWN)),
                child=child.name,
                log_tail="",
            )
            self._is_consequential = False
            self._progress_logger.log(f"the first that was lost is {self._failure_reason}", child.name)

    def _fail(self, cause: FailureReason, now: float) -> None:
        del now  # nobody has time to finish
        self._end_group(cause)

    def _end_group(self, cause: FailureReason) -> None:
        """It cannot go on: no rank is of use without the others, and what they still say is of no worth."""
        if self.state not in ACTIVE:
            return
        if self.state is not GenerationState.SNAPSHOTTING:
            self.counters.on_lost(self.group_spec.size + self.group_spec.has_broker)
        self._failure_reason = cause
        self.attach_control.invalidate()
        self._machine.advance(GenerationEvent.FAIL)
        self.processes.kill_all()
        self._log_progress()
