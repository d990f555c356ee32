"""Decides which workers may attach to a generation's weights, and records when the weights become invalid."""

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
from weightd_protocol.messages.worker import Attach, TrimStore
from weightd_protocol.messages.worker_common import AllowAttach, AttachAllowed

# Seconds that the daemon waits for a holder's reply to `AllowAttach`. After that, no further worker can attach.
ALLOW_TIMEOUT_S = 10.0

# For each state that a state file may contain: the events that lead to the state from OPEN. `restore` replays them.
_RESTORE_EVENTS: Mapping[AttachState, tuple[AttachEvent, ...]] = {
    AttachState.OPEN: (),
    AttachState.FORK_ONLY: (AttachEvent.FORK,),
    AttachState.ORPHANED: (AttachEvent.FORK, AttachEvent.ORPHAN),
    AttachState.LISTED: (AttachEvent.FIX_PIDS,),
    AttachState.CLOSED: (AttachEvent.FIX_PIDS, AttachEvent.REQUEST_ALLOW, AttachEvent.REFUSE),
    AttachState.FILES_LOST: (AttachEvent.LOSE_FILES,),
    AttachState.FROZEN: (AttachEvent.FIX_PIDS, AttachEvent.LOSE_HOLDER),
}

# The values of the states that a state file may contain. ALLOW_PENDING is stored as LISTED: the holder replies to the
# daemon that has asked, so the next daemon has to ask again.
PERSISTED_STATES = tuple(state.value for state in _RESTORE_EVENTS)


class AttachControl(Machine[AttachState, AttachEvent]):
    """Decides which workers may attach to the weights of one generation, and when.

    Args:
        label: the name of the generation, for the log.
        processes: the processes of the generation.
        emit: called with each action that the daemon has to perform.
        logger: logs the events of the generation.
        attach_limit: returns how many workers may attach at the same time; at least one.

    Attributes:
        closed_reason: why no further worker may attach; set in the states CLOSED, ORPHANED and FILES_LOST.
        required_holder: the name of the holder whose exit makes the weights invalid; "" if the weights remain valid.
        deadline: when the holder must have replied to `AllowAttach`, in monotonic seconds; infinity if the daemon waits
            for no reply.
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
        # Whether the holder has built or a worker has attached since the page store was last trimmed.
        self._should_trim = False
        self._processes = processes
        self._emit = emit
        self._logger = logger

    @property
    def is_fork_only(self) -> bool:
        """Whether new workers can only be forked from the holder."""
        return self.state is AttachState.FORK_ONLY

    @property
    def is_attach_closed(self) -> bool:
        """Whether no further worker can attach, so that lost workers cannot be replaced."""
        return self.state in ATTACH_CLOSED

    @property
    def is_frozen(self) -> bool:
        """Whether the holder is lost and the existing workers continue without it."""
        return self.state is AttachState.FROZEN

    @property
    def is_valid(self) -> bool:
        """Whether the weights are valid, as far as the daemon knows."""
        return self.state is not AttachState.INVALID

    def can_trust_answers(self, is_alive: Callable[[str], bool]) -> bool:
        """Return whether the daemon may send the workers' results to clients.

        The results must be discarded if the weights are invalid, or if the required holder has begun to exit.

        Args:
            is_alive: returns whether the process with this name has not begun to exit.
        """
        return self.state is not AttachState.INVALID and (not self.required_holder or is_alive(self.required_holder))

    # --- events -------------------------------------------------------------------------------------------------

    def require(self, holder: WorkerProcess, *, can_outlive_holder: bool) -> None:
        """Record `holder` as the required holder if the weights that it shares become invalid when it exits.

        Args:
            holder: the holder.
            can_outlive_holder: whether the configuration lets workers use the weights after the holder has exited.
        """
        must_outlive = holder.hello is not None and holder.hello.sharing_traits.holder_must_outlive
        if must_outlive and not can_outlive_holder:
            self.required_holder = holder.name

    def on_hello(self, *, has_fixed_pids: bool) -> None:
        """Handle the HELLO message of a process.

        A worker may attach at once, unless the engine has to know the pids of all workers when the holder builds
        (`has_fixed_pids`).
        """
        if self.state is AttachState.OPEN and has_fixed_pids:
            self.advance(AttachEvent.FIX_PIDS)
        if self.state in (AttachState.OPEN, AttachState.FORK_ONLY):
            self.admit_greeted()

    def admit_greeted(self) -> None:
        """Allow all workers that have sent HELLO to attach.

        Callers make sure that they may: the engine accepts any worker, `Build` lists their pids, or no weights are
        shared.
        """
        for worker in self._processes.usable(Role.WORKER):
            if worker.state is ChildState.GREETED:
                worker.advance(ChildEvent.ADMIT)

    def on_built(self, *, is_shared: bool, is_template: bool = False) -> None:
        """Handle the holder's report that it has built the model.

        Args:
            is_shared: whether the holder shares the weights. If not, every worker may load its own.
            is_template: whether workers are forked from the holder.
        """
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
        """Handle the holder's reply to `AllowAttach`, the request to accept a worker that was unknown at the build."""
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
        """Record the loss of the holder. If attaching needs the holder, no further worker attaches."""
        if self.is_fork_only:
            self._close_attach(AttachEvent.ORPHAN, "the template has exited, and workers can only be forked from it")
        elif self.state in (AttachState.LISTED, AttachState.ALLOW_PENDING, AttachState.CLOSED):
            self.advance(AttachEvent.LOSE_HOLDER)

    def on_files_lost(self, reason: str) -> None:
        """Let no further worker attach, because files that workers load have vanished. Existing workers continue."""
        if self.is_valid and not self.is_attach_closed:
            self._close_attach(AttachEvent.LOSE_FILES, reason)

    def invalidate(self) -> None:
        """Record that results computed on the weights cannot be trusted any more."""
        if self.is_valid:
            self.advance(AttachEvent.INVALIDATE)

    def tick(self, now: float) -> None:
        """Let no further worker attach if the holder has not replied to `AllowAttach` in time."""
        if now >= self.deadline:
            self._close_attach(AttachEvent.REFUSE, f"the holder has not replied for {ALLOW_TIMEOUT_S:g} s")

    # --- actions ------------------------------------------------------------------------------------------------

    def attach_next(self, order: Attach, now: float, timeout_s: float) -> None:
        """Order waiting workers to attach, up to the limit of simultaneous attaches.

        Each worker loads the model before it shares the weights, so the limit bounds the peak of memory. No worker
        attaches while a worker of the previous daemon may still reconnect. The daemon asks the holder before it lets a
        worker attach that the holder did not know at its build.

        Args:
            order: the order to attach, which contains the handle of the weights.
            now: the time (monotonic seconds).
            timeout_s: the seconds within which each worker must attach.
        """
        waiting_count = self._processes.count(ChildState.ADMITTED, ChildState.GREETED)
        if not waiting_count or self._processes.count(ChildState.AWAITED):
            return
        # The limit is at least one. It is read from several files, so do not read it for a single worker.
        attaching_count = self._processes.count(ChildState.ATTACHING)
        free_count = self._attach_limit() - attaching_count if waiting_count + attaching_count > 1 else 1
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
        """Stop workers that can never attach and only take memory."""
        unattachable_states = [
            ChildState.SPAWNED,
            ChildState.GREETED,
            *([ChildState.ADMITTED] if self.is_frozen else []),
        ]
        for worker in self._processes.usable(Role.WORKER) if self.is_attach_closed else []:
            if worker.state in unattachable_states:
                self._processes.stop(worker, now)

    def trim_store(self, *, is_shared: bool) -> None:
        """Order a process to release the pages of the page store that are only read when a worker attaches.

        Called when no worker has to attach. The order goes to the holder or, without a holder, to a worker that shares
        the weights.
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
        """The value for the state file, from which the next daemon can `restore` the state."""
        state = AttachState.LISTED if self.state is AttachState.ALLOW_PENDING else self.state
        return str(state.value)

    def restore(self, persisted_state: str, closed_reason: str) -> None:
        """Restore the state and the reason that the previous daemon has stored."""
        for event in _RESTORE_EVENTS[AttachState(persisted_state)]:
            self.advance(event)
        self.closed_reason = closed_reason

    def advance(self, event: AttachEvent) -> None:
        """Change the state by an event, and stop waiting for a reply to `AllowAttach`."""
        super().advance(event)
        self._requested_worker, self.deadline = "", FOREVER
