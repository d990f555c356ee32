"""Who may still attach to the weights of a generation, how they are let, and whether the weights count at all."""

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

# A holder that holds has nothing else to do than to let a process attach.
ALLOW_TIMEOUT_S = 10.0

# How each state that is written down is reached by who takes it over: by the events that have led there.
_RESTORE_EVENTS: Mapping[AttachState, tuple[AttachEvent, ...]] = {
    AttachState.OPEN: (),
    AttachState.FORK_ONLY: (AttachEvent.FORK,),
    AttachState.ORPHANED: (AttachEvent.FORK, AttachEvent.ORPHAN),
    AttachState.LISTED: (AttachEvent.FIX_PIDS,),
    AttachState.CLOSED: (AttachEvent.FIX_PIDS, AttachEvent.REQUEST_ALLOW, AttachEvent.REFUSE),
    AttachState.FILES_LOST: (AttachEvent.LOSE_FILES,),
    AttachState.FROZEN: (AttachEvent.FIX_PIDS, AttachEvent.LOSE_HOLDER),
}

# What is written down of who may attach. What has been asked is not: nobody would know what becomes of it.
PERSISTED_STATES = tuple(state.value for state in _RESTORE_EVENTS)


class AttachControl(Machine[AttachState, AttachEvent]):
    """To the weights of one generation.

    Args:
        label: of the generation.
        processes: its children.
        emit: takes what is to be done.
        logger: of the generation.
        attach_limit: returns how many workers may attach at the same time; at least one.

    Attributes:
        closed_reason: nobody is let in any more, where it is CLOSED or ORPHANED.
        required_holder: the holder without which the weights are invalid; "" where they need none.
        deadline: until when the holder may think about whom it was asked to let in (monotonic seconds).
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
        # Something may have attached since what only attaching needs was given back.
        self._should_trim = False
        self._processes = processes
        self._emit = emit
        self._logger = logger

    @property
    def is_fork_only(self) -> bool:
        """Whether workers are forked of the holder."""
        return self.state is AttachState.FORK_ONLY

    @property
    def is_attach_closed(self) -> bool:
        """Whether lost workers cannot be replaced."""
        return self.state in ATTACH_CLOSED

    @property
    def is_frozen(self) -> bool:
        """Whether the workers go on without their holder."""
        return self.state is AttachState.FROZEN

    @property
    def is_valid(self) -> bool:
        """Whether the weights are, as far as it is known."""
        return self.state is not AttachState.INVALID

    def can_trust_answers(self, is_alive: Callable[[str], bool]) -> bool:
        """Return whether an answer can be passed on: not if the memory it came from may be invalid by now."""
        return self.state is not AttachState.INVALID and (not self.required_holder or is_alive(self.required_holder))

    # --- what happens -------------------------------------------------------------------------------------------

    def require(self, holder: WorkerProcess, *, can_outlive_holder: bool) -> None:
        """There is something to share; where it becomes invalid with its holder, no answer counts without that."""
        must_outlive = holder.hello is not None and holder.hello.sharing_traits.holder_must_outlive
        if must_outlive and not can_outlive_holder:
            self.required_holder = holder.name

    def on_hello(self, *, has_fixed_pids: bool) -> None:
        """Somebody is up. Where it `has_fixed_pids`, the engine must know at the build who will attach."""
        if self.state is AttachState.OPEN and has_fixed_pids:
            self.advance(AttachEvent.FIX_PIDS)
        if self.state in (AttachState.OPEN, AttachState.FORK_ONLY):
            self.admit_greeted()

    def admit_greeted(self) -> None:
        """Let those attach that are up: the engine lets anybody, or the holder builds, and is told of them."""
        for worker in self._processes.usable(Role.WORKER):
            if worker.state is ChildState.GREETED:
                worker.advance(ChildEvent.ADMIT)

    def on_built(self, *, is_shared: bool, is_template: bool = False) -> None:
        """The holder has built. If it has nothing to share, nobody depends on it."""
        self._should_trim = True
        if is_template:
            self.advance(AttachEvent.FORK)
        elif not is_shared and self.state is not AttachState.OPEN:
            self.advance(AttachEvent.UNSHARE)
            self.admit_greeted()

    def on_attached(self) -> None:
        """A worker has."""
        self._should_trim = True

    def on_allowed(self, allowed: AttachAllowed) -> None:
        """The holder has been asked to let one more process attach, one that it did not know at its build."""
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
        """Where it need not know who attaches, that goes on without it. Whom it has forked has all that it needs."""
        if self.is_fork_only:
            self._close_attach(AttachEvent.ORPHAN, "the template is lost, of which they would be forked")
        elif self.state in (AttachState.LISTED, AttachState.ALLOW_PENDING, AttachState.CLOSED):
            self.advance(AttachEvent.LOSE_HOLDER)

    def on_files_lost(self, reason: str) -> None:
        """What lost workers would need to load has vanished: those that are there go on."""
        if self.is_valid and not self.is_attach_closed:
            self._close_attach(AttachEvent.LOSE_FILES, reason)

    def invalidate(self) -> None:
        """What is computed on the weights may be anything from now on."""
        if self.is_valid:
            self.advance(AttachEvent.INVALIDATE)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if now >= self.deadline:
            self._close_attach(AttachEvent.REFUSE, f"the holder has not answered for {ALLOW_TIMEOUT_S:g} s")

    # --- what is done -------------------------------------------------------------------------------------------

    def attach_next(self, order: Attach, now: float, timeout_s: float) -> None:
        """Let further workers attach, each for `timeout_s` seconds, but no more at the same time than its limit.

        Each attach loads the model before it shares, so this bounds the peak of memory. Who is awaited goes first.
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
        """A process that can never attach only takes memory."""
        unattachable_states = [
            ChildState.SPAWNED,
            ChildState.GREETED,
            *([ChildState.ADMITTED] if self.is_frozen else []),
        ]
        for worker in self._processes.usable(Role.WORKER) if self.is_attach_closed else []:
            if worker.state in unattachable_states:
                self._processes.stop(worker, now)

    def trim_store(self, *, is_shared: bool) -> None:
        """No attach is due: what only attaching needed is given back, by the holder or its heir."""
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
        self._logger.log(f"lost workers are not replaced, they wait for the next generation: {reason}")

    # --- one daemon after another -------------------------------------------------------------------------------

    @property
    def persisted_state(self) -> str:
        """What the next daemon has to know to `restore` it."""
        state = AttachState.LISTED if self.state is AttachState.ALLOW_PENDING else self.state
        return str(state.value)

    def restore(self, persisted_state: str, closed_reason: str) -> None:
        """Go on with what an earlier daemon has written down."""
        for event in _RESTORE_EVENTS[AttachState(persisted_state)]:
            self.advance(event)
        self.closed_reason = closed_reason

    def advance(self, event: AttachEvent) -> None:
        """Change who may attach; what was asked of the holder until then is over."""
        super().advance(event)
        self._requested_worker, self.deadline = "", FOREVER
