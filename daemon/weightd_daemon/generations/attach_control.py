"""The access to a generation's weights: which workers may attach and when, and whether the weights are valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weightd_daemon.generations.actions import Action, Role, Send
from weightd_daemon.generations.process import FOREVER, GenerationProcesses, WorkerProcess
from weightd_daemon.generations.progress import ProgressLogger
from weightd_daemon.generations.states import (
    ATTACH_CLOSED,
    ATTACH_TRANSITIONS,
    AttachEvent,
    AttachState,
    ChildEvent,
    ChildState,
    Machine,
)
from weightd_protocol.messages.worker import AllowAttach, Attach, AttachAllowed, TrimStore

# The time within which a holder must reply to AllowAttach; it has nothing else to do.
ALLOW_TIMEOUT_S = 10.0

# The events by which a resuming daemon reaches each persisted state.
_RESTORE_EVENTS: Mapping[AttachState, tuple[AttachEvent, ...]] = {
    AttachState.OPEN: (),
    AttachState.FORK_ONLY: (AttachEvent.FORK,),
    AttachState.ORPHANED: (AttachEvent.FORK, AttachEvent.ORPHAN),
    AttachState.LISTED: (AttachEvent.FIX_PIDS,),
    AttachState.CLOSED: (AttachEvent.FIX_PIDS, AttachEvent.REQUEST_ALLOW, AttachEvent.REFUSE),
    AttachState.FILES_LOST: (AttachEvent.LOSE_FILES,),
    AttachState.FROZEN: (AttachEvent.FIX_PIDS, AttachEvent.LOSE_HOLDER),
}

# The states that can be persisted. A pending request to the holder cannot, because its result would be lost.
PERSISTED_STATES = tuple(state.value for state in _RESTORE_EVENTS)


class AttachControl(Machine[AttachState, AttachEvent]):
    """Controls which workers attach to the weights of one generation.

    Args:
        label: the label of the generation.
        processes: the children of the generation.
        emit: receives the actions.
        logger: the logger of the generation.
        attach_limit: returns how many workers may attach at the same time; at least one.

    Attributes:
        closed_reason: why no more workers may attach, in the states CLOSED, ORPHANED and FILES_LOST.
        required_holder: the name of the holder without which the weights are invalid; "" if they do not depend on one.
        deadline: until when the holder may answer a request to allow a process (monotonic seconds).
    """

    def __init__(
        self,
        label: str,
        processes: GenerationProcesses,
        emit: Callable[[Action], None],
        logger: ProgressLogger,
        attach_limit: Callable[[], int],
    ) -> None:
        super().__init__(ATTACH_TRANSITIONS, AttachState.OPEN, label, logger.log_extra())
        self._attach_limit = attach_limit
        self.closed_reason = ""
        self.required_holder = ""
        self.deadline = FOREVER
        self._requested_worker = ""
        # Whether a process may have attached since the page store was last trimmed.
        self._should_trim = False
        self._processes = processes
        self._emit = emit
        self._logger = logger

    @property
    def is_fork_only(self) -> bool:
        """Whether workers are forked from the holder."""
        return self.state is AttachState.FORK_ONLY

    @property
    def is_attach_closed(self) -> bool:
        """Whether lost workers cannot be replaced."""
        return self.state in ATTACH_CLOSED

    @property
    def is_frozen(self) -> bool:
        """Whether the workers continue without their holder."""
        return self.state is AttachState.FROZEN

    @property
    def is_valid(self) -> bool:
        """Whether the weights are valid, as far as that is known."""
        return self.state is not AttachState.INVALID

    def can_trust_answers(self, is_alive: Callable[[str], bool]) -> bool:
        """Return whether answers may be passed on: not if the weights are invalid or the required holder is exiting."""
        return self.state is not AttachState.INVALID and (not self.required_holder or is_alive(self.required_holder))

    # --- events -------------------------------------------------------------------------------------------------

    def require(self, holder: WorkerProcess, *, can_outlive_holder: bool) -> None:
        """Record the holder of shared weights as required if the weights become invalid without it."""
        must_outlive = holder.hello is not None and holder.hello.sharing_traits.holder_must_outlive
        if must_outlive and not can_outlive_holder:
            self.required_holder = holder.name

    def on_hello(self, *, has_fixed_pids: bool) -> None:
        """Handle the HELLO of a process.

        Workers may attach at once, unless the engine must know at the build which pids will attach (`has_fixed_pids`).
        """
        if self.state is AttachState.OPEN and has_fixed_pids:
            self.advance(AttachEvent.FIX_PIDS)
        if self.state in (AttachState.OPEN, AttachState.FORK_ONLY):
            self.admit_greeted()

    def admit_greeted(self) -> None:
        """Allow all workers that are up to attach: the engine allows any, or the build order lists them."""
        for worker in self._processes.usable(Role.WORKER):
            if worker.state is ChildState.GREETED:
                worker.advance(ChildEvent.ADMIT)

    def on_built(self, *, is_shared: bool, is_template: bool = False) -> None:
        """Record that the holder has built; if it shares nothing, any worker may load."""
        self._should_trim = True
        if is_template:
            self.advance(AttachEvent.FORK)
        elif not is_shared and self.state is not AttachState.OPEN:
            self.advance(AttachEvent.UNSHARE)
            self.admit_greeted()

    def on_attached(self) -> None:
        """Record that a worker has attached."""
        self._should_trim = True

    def on_allowed(self, allowed: AttachAllowed) -> None:
        """Handle the holder's reply to the request to allow a process that it did not know at its build."""
        if self.state is not AttachState.ALLOW_PENDING:
            return
        worker = self._processes.children.get(self._requested_worker)
        if allowed.error:
            self._close_attach(AttachEvent.REFUSE, allowed.error)
            return
        self.advance(AttachEvent.ALLOW)
        if worker is not None and worker.state is ChildState.GREETED:
            worker.advance(ChildEvent.ADMIT)

    def on_holder_lost(self) -> None:
        """Close the access if attaching or forking needs the holder; the existing workers continue."""
        if self.is_fork_only:
            self._close_attach(AttachEvent.ORPHAN, "the template has exited, and workers can only be forked from it")
        elif self.state in (AttachState.LISTED, AttachState.ALLOW_PENDING, AttachState.CLOSED):
            self.advance(AttachEvent.LOSE_HOLDER)

    def on_files_lost(self, reason: str) -> None:
        """Close the access, because files that a worker loads have vanished; the existing workers continue."""
        if self.is_valid and not self.is_attach_closed:
            self._close_attach(AttachEvent.LOSE_FILES, reason)

    def invalidate(self) -> None:
        """Record that results computed on the weights cannot be trusted any more."""
        if self.is_valid:
            self.advance(AttachEvent.INVALIDATE)

    def tick(self, now: float) -> None:
        """Close the access if the holder has not replied in time."""
        if now >= self.deadline:
            self._close_attach(AttachEvent.REFUSE, f"the holder has not replied for {ALLOW_TIMEOUT_S:g} s")

    # --- actions ------------------------------------------------------------------------------------------------

    def attach_next(self, order: Attach, now: float, timeout_s: float) -> None:
        """Order further workers to attach, each within `timeout_s` seconds, up to the limit of simultaneous attaches.

        Each attach loads the model before it shares, so the limit bounds the peak of memory. Workers of the previous
        daemon that may still reconnect take precedence.
        """
        waiting = ChildState.ADMITTED, ChildState.GREETED
        if not self._processes.count(*waiting) or self._processes.count(ChildState.AWAITED):
            return
        free_count = self._attach_limit() - self._processes.count(ChildState.ATTACHING)
        for worker in self._processes.usable(Role.WORKER):
            if free_count <= 0:
                return
            if worker.state is ChildState.GREETED:
                self._request_allow(worker, now)
            elif worker.state is ChildState.ADMITTED:
                worker.advance(ChildEvent.ATTACH, now + timeout_s)
                self._emit(Send(worker.name, order))
                free_count -= 1

    def stop_unattachable(self, now: float) -> None:
        """Stop workers that can never attach, because they only take memory."""
        unattachable_states = [
            ChildState.SPAWNED,
            ChildState.GREETED,
            *([ChildState.ADMITTED] if self.is_frozen else []),
        ]
        for worker in self._processes.usable(Role.WORKER) if self.is_attach_closed else []:
            if worker.state in unattachable_states:
                self._processes.stop(worker, now)

    def trim_store(self, *, is_shared: bool) -> None:
        """Order a process to release the pages of the store that only attaching needs, because no attach is due.

        The order goes to the holder or, without one, to a worker that shares the weights.
        """
        if self._should_trim:
            self._should_trim = False
            workers = self._processes.usable(Role.WORKER) if is_shared and not self.is_frozen else []
            for each in (self._processes.usable(Role.HOLDER) or workers)[:1]:
                self._emit(Send(each.name, TrimStore()))

    def _request_allow(self, worker: WorkerProcess, now: float) -> None:
        holder = self._processes.holder
        if self.state is AttachState.LISTED and holder is not None and worker.hello is not None:
            self.advance(AttachEvent.REQUEST_ALLOW)
            self._requested_worker, self.deadline = worker.name, now + ALLOW_TIMEOUT_S
            self._emit(Send(holder.name, AllowAttach((worker.hello.engine_pid,))))

    def _close_attach(self, event: AttachEvent, reason: str) -> None:
        self.advance(event)
        self.closed_reason = reason
        self._logger.log(f"workers that exit are not replaced before the next generation: {reason}")

    # --- persistence --------------------------------------------------------------------------------------------

    @property
    def persisted_state(self) -> str:
        """The value from which the next daemon can `restore` the state."""
        state = AttachState.LISTED if self.state is AttachState.ALLOW_PENDING else self.state
        return str(state.value)

    def restore(self, persisted_state: str, closed_reason: str) -> None:
        """Restore the state that the previous daemon has persisted."""
        for event in _RESTORE_EVENTS[AttachState(persisted_state)]:
            self.advance(event)
        self.closed_reason = closed_reason

    def advance(self, event: AttachEvent) -> None:
        """Change the state, which ends any pending request to the holder."""
        super().advance(event)
        self._requested_worker, self.deadline = "", FOREVER
