"""Who may still attach to the weights of a generation, how they are let, and whether the weights count at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weightd.daemon.generations.actions import Action, Role, Send
from weightd.daemon.generations.child import FOREVER, Child, Roster
from weightd.daemon.generations.states import (
    ACCESS,
    SHUT,
    AccessEvent,
    AccessState,
    ChildEvent,
    ChildState,
    Machine,
)
from weightd.protocol.messages.children import Allow, Allowed, Attach, Settle

# A holder that holds has nothing else to do than to let a process attach.
ALLOW_TIMEOUT_S = 10.0

# How each state that is written down is reached by who takes it over: by the events that have led there.
_EVENTS: Mapping[AccessState, tuple[AccessEvent, ...]] = {
    AccessState.OPEN: (),
    AccessState.HEIRS: (AccessEvent.INHERIT,),
    AccessState.ORPHANED: (AccessEvent.INHERIT, AccessEvent.ORPHAN),
    AccessState.LISTED: (AccessEvent.FIX,),
    AccessState.CLOSED: (AccessEvent.FIX, AccessEvent.ASK, AccessEvent.REFUSE),
    AccessState.STRIPPED: (AccessEvent.STRIP,),
    AccessState.FROZEN: (AccessEvent.FIX, AccessEvent.LOSE),
}

# What is written down of who may attach. What has been asked is not: nobody would know what becomes of it.
RECORDED = tuple(state.value for state in _EVENTS)


class Access:
    """To the weights of one generation.

    Args:
        label: of the generation.
        roster: its children.
        want: takes what is to be done.
        tell: tells something to who runs it.
        extra: of its records in the log.

    Attributes:
        why: nobody is let in any more, where it is CLOSED or ORPHANED.
        guard: the holder without which the weights are invalid; "" where they need none.
        deadline: until when the holder may think about whom it was asked to let in (monotonic seconds).
    """

    def __init__(
        self,
        label: str,
        roster: Roster,
        want: Callable[[Action], None],
        tell: Callable[[str], None],
        extra: Mapping[str, Any],
    ) -> None:
        self.why = ""
        self.guard = ""
        self.deadline = FOREVER
        self._asked = ""
        # Something may have attached since what only attaching needs was given back.
        self._unsettled = False
        self._machine = Machine(ACCESS, AccessState.OPEN, label, extra)
        self._roster = roster
        self._want = want
        self._tell = tell

    @property
    def state(self) -> AccessState:
        """Who may attach."""
        return self._machine.state

    @property
    def is_open(self) -> bool:
        """Whether anybody may attach."""
        return self.state is AccessState.OPEN

    @property
    def has_heirs(self) -> bool:
        """Whether workers are forked of the holder."""
        return self.state is AccessState.HEIRS

    @property
    def is_shut(self) -> bool:
        """Whether lost workers cannot be replaced."""
        return self.state in SHUT

    @property
    def is_frozen(self) -> bool:
        """Whether the workers go on without their holder."""
        return self.state is AccessState.FROZEN

    @property
    def is_valid(self) -> bool:
        """Whether the weights are, as far as it is known."""
        return self.state is not AccessState.INVALID

    def trusts(self, holder_lives: Callable[[str], bool]) -> bool:
        """Return whether an answer can be passed on: not if the memory it came from may be invalid by now."""
        return self._machine.state is not AccessState.INVALID and (not self.guard or holder_lives(self.guard))

    # --- what happens -------------------------------------------------------------------------------------------

    def greeted(self, *, is_fixed: bool) -> None:
        """Somebody is up. Where it `is_fixed`, the engine must know at the build who will attach."""
        if self.is_open and is_fixed:
            self._advance(AccessEvent.FIX)
        if self.is_open or self.has_heirs:
            self._admit_greeted()

    def listed(self) -> None:
        """The holder builds, and is told who is up."""
        self._admit_greeted()

    def built(self, *, is_shared: bool, is_template: bool = False) -> None:
        """The holder has built. If it has nothing to share, nobody depends on it."""
        self._unsettled = True
        if is_template:
            self._advance(AccessEvent.INHERIT)
        elif not is_shared and not self.is_open:
            self._advance(AccessEvent.UNSHARE)
            self._admit_greeted()

    def attached(self) -> None:
        """A worker has."""
        self._unsettled = True

    def allowed(self, allowed: Allowed) -> None:
        """The holder has been asked to let one more process attach, one that it did not know at its build."""
        if self.state is not AccessState.ASKING:
            return
        asked = self._roster.children.get(self._asked)
        if allowed.error:
            self._shut(AccessEvent.REFUSE, allowed.error)
            return
        self._advance(AccessEvent.ALLOW)
        if asked is not None and asked.state is ChildState.GREETED:
            asked.advance(ChildEvent.ADMIT)

    def holder_lost(self) -> None:
        """Where it need not know who attaches, that goes on without it. Whom it has forked has all that it needs."""
        if self.has_heirs:
            self._shut(AccessEvent.ORPHAN, "the template is lost, of which they would be forked")
        elif self.state in (AccessState.LISTED, AccessState.ASKING, AccessState.CLOSED):
            self._advance(AccessEvent.LOSE)

    def files_lost(self, why: str) -> None:
        """What lost workers would need to load has vanished: those that are there go on."""
        if self.is_valid and not self.is_shut:
            self._shut(AccessEvent.STRIP, why)

    def invalidate(self) -> None:
        """What is computed on the weights may be anything from now on."""
        if self.is_valid:
            self._advance(AccessEvent.INVALIDATE)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if now >= self.deadline:
            self._shut(AccessEvent.REFUSE, f"the holder has not answered for {ALLOW_TIMEOUT_S:g} s")

    # --- what is done -------------------------------------------------------------------------------------------

    def attach_next(self, order: Attach, now: float, patience: float, at_once: Callable[[], int]) -> None:
        """Let further workers attach, each for `patience` seconds, but no more of them `at_once` than that says.

        Each attach loads the model before it shares, so this bounds the peak of memory. Who is awaited goes first.
        """
        waiting = ChildState.ADMITTED, ChildState.GREETED
        if not self._roster.count(*waiting) or self._roster.count(ChildState.AWAITED):
            return
        room = at_once() - self._roster.count(ChildState.ATTACHING)
        for worker in self._roster.counted(Role.WORKER):
            if room <= 0:
                return
            if worker.state is ChildState.GREETED:
                self._ask_for(worker, now)
            elif worker.state is ChildState.ADMITTED:
                worker.advance(ChildEvent.ATTACH, now + patience)
                self._want(Send(worker.name, order))
                room -= 1

    def dismiss_uninvited(self, deadline: float) -> None:
        """A process that can never attach only takes memory."""
        uninvited = [ChildState.SPAWNED, ChildState.GREETED, *([ChildState.ADMITTED] if self.is_frozen else [])]
        for worker in self._roster.counted(Role.WORKER) if self.is_shut else []:
            if worker.state in uninvited:
                self._roster.stop(worker, deadline)

    def settle(self, *, is_shared: bool) -> None:
        """No attach is due: what only attaching needed is given back, by the holder or its heir."""
        if self._unsettled:
            self._unsettled = False
            heirs = self._roster.counted(Role.WORKER) if is_shared and not self.is_frozen else []
            for each in (self._roster.counted(Role.HOLDER) or heirs)[:1]:
                self._want(Send(each.name, Settle()))

    def _ask_for(self, worker: Child, now: float) -> None:
        holder = self._roster.holder
        if self.state is AccessState.LISTED and holder is not None and worker.hello is not None:
            self._advance(AccessEvent.ASK)
            self._asked, self.deadline = worker.name, now + ALLOW_TIMEOUT_S
            self._want(Send(holder.name, Allow((worker.hello.pid,))))

    def _shut(self, event: AccessEvent, why: str) -> None:
        self._advance(event)
        self.why = why
        self._tell(f"lost workers are not replaced, they wait for the next generation: {why}")

    def _admit_greeted(self) -> None:
        for worker in self._roster.counted(Role.WORKER):
            if worker.state is ChildState.GREETED:
                worker.advance(ChildEvent.ADMIT)

    # --- one daemon after another -------------------------------------------------------------------------------

    @property
    def record(self) -> str:
        """What the next daemon has to know to `restore` it."""
        state = AccessState.LISTED if self.state is AccessState.ASKING else self.state
        return str(state.value)

    def restore(self, record: str, why: str) -> None:
        """Go on with what an earlier daemon has written down."""
        for event in _EVENTS[AccessState(record)]:
            self._advance(event)
        self.why = why

    def _advance(self, event: AccessEvent) -> None:
        self._machine.advance(event)
        self._asked, self.deadline = "", FOREVER
