"""The states of a generation, of its processes and of attach control, with all legal transitions.

The tables of this file list every legal transition. For any other pair of state and event, `advance` raises
`IllegalTransition`. Only `Machine.advance` changes a state, also when a daemon takes over a generation of the previous
daemon. A test compares the diagrams of docs/architecture.md with these tables.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

_log = logging.getLogger("weightd.generation")


class GenerationState(enum.Enum):
    """The state of a generation."""

    SNAPSHOTTING = "snapshotting"  # the model's files are copied and their digest is computed
    SPAWNING = "spawning"  # the holder and the workers, or the ranks, are started
    GATHERING = "gathering"  # the processes send HELLO with their pids
    BUILDING = "building"  # the holder builds the model and exports its weights; or ranks join and load their slices
    ATTACHING = "attaching"  # workers attach to the holder's weights or load their own; or ranks run the self-test
    RESUMING = "resuming"  # an earlier daemon has loaded the generation; its processes reconnect
    SERVING = "serving"  # at least one worker has been READY
    DRAINING = "draining"  # no new requests; the workers exit, then the holder
    GONE = "gone"  # all processes have exited after DRAINING
    FAILED = "failed"  # the processes are being ended or have exited; `GenerationView.failure` has the cause

    @property
    def display_name(self) -> str:
        """The state as users see it: RESUMING is shown as "attaching"."""
        return "attaching" if self is GenerationState.RESUMING else self.value


class GenerationEvent(enum.Enum):
    """An event that changes the state of a generation."""

    RESUME = "resume"
    SNAPSHOT_TAKEN = "snapshot taken"
    GREETED = "greeted"
    GATHERED = "gathered"
    RETRY = "retry"
    BUILT = "built"
    READY = "ready"
    DRAIN = "drain"
    EMPTY = "empty"
    FAIL = "fail"


class ChildState(enum.Enum):
    """The state of a process."""

    SPAWNED = "spawned"  # the process exists
    GREETED = "greeted"  # it has sent HELLO
    BUILDING = "building"  # holder: builds the model, exports the weights; rank: joins its group, loads its slice
    HOLDING = "holding"  # holder: keeps the weights alive; broker: lets ranks find each other
    JOINED = "joined"  # rank: has joined its group and loaded its slice
    ADMITTED = "admitted"  # worker: may attach
    ATTACHING = "attaching"  # worker: attaches to the weights or loads its own; rank: runs the self-test
    AWAITED = "awaited"  # worker, rank: was READY for an earlier daemon, and has to reconnect
    READY = "ready"  # worker: serves or is a spare; rank: has passed the self-test, and serves once all ranks have
    STOPPING = "stopping"  # has been ordered to exit
    ABORTED = "aborted"  # hung; the daemon has sent a signal on which the process logs its stacks and exits
    KILLED = "killed"  # the daemon has sent SIGKILL
    GONE = "gone"  # has exited and was reaped

    @property
    def display_name(self) -> str:
        """The state as users see it: some states of attaching and of exiting processes are shown as one."""
        return _DISPLAYED_AS.get(self, self).value


class ChildEvent(enum.Enum):
    """An event that changes the state of a process."""

    HOLD = "hold"
    AWAIT = "await"
    HELLO = "hello"
    BUILD = "build"
    BUILT = "built"
    JOINED = "joined"
    RUN_SELFTEST = "run selftest"
    ADMIT = "admit"
    ATTACH = "attach"
    ATTACHED = "attached"
    RECONNECTED = "reconnected"
    STOP = "stop"
    ABORT = "abort"
    KILL = "kill"
    EXIT = "exit"


class AttachState(enum.Enum):
    """Which workers may still attach to a generation's weights."""

    OPEN = "open"  # any worker
    FORK_ONLY = "fork only"  # only workers that are forked from the holder
    ORPHANED = "orphaned"  # none: the holder from which workers were forked is lost; the existing workers continue
    LISTED = "listed"  # workers that the holder knew at its build; the holder can be asked to allow another
    ALLOW_PENDING = "allow pending"  # as LISTED, while the daemon waits for the holder's reply
    CLOSED = "closed"  # only workers known at the build: the holder refused another worker or did not reply
    FILES_LOST = "files lost"  # none: the files that a worker loads have vanished; the existing workers continue
    FROZEN = "frozen"  # none: the holder is lost; the existing workers continue
    INVALID = "invalid"  # none: the weights are lost or changed, and the workers' results are discarded


class AttachEvent(enum.Enum):
    """An event that changes which workers may attach."""

    FIX_PIDS = "fix pids"
    FORK = "fork"
    ORPHAN = "orphan"
    UNSHARE = "unshare"
    REQUEST_ALLOW = "request allow"
    ALLOW = "allow"
    REFUSE = "refuse"
    LOSE_HOLDER = "lose holder"
    INVALIDATE = "invalidate"
    LOSE_FILES = "lose files"


# The states of a generation before it serves.
LOADING = frozenset(
    {
        GenerationState.SNAPSHOTTING,
        GenerationState.SPAWNING,
        GenerationState.GATHERING,
        GenerationState.BUILDING,
        GenerationState.ATTACHING,
        GenerationState.RESUMING,
    }
)
ACTIVE = LOADING | {GenerationState.SERVING}
ENDED = frozenset({GenerationState.GONE, GenerationState.FAILED})

# The states in which the next daemon can resume a generation.
RESUMABLE = frozenset({GenerationState.RESUMING, GenerationState.SERVING})

# The states of a process that is alive and has not been ordered to exit.
USABLE = frozenset(
    {
        ChildState.SPAWNED,
        ChildState.GREETED,
        ChildState.BUILDING,
        ChildState.HOLDING,
        ChildState.JOINED,
        ChildState.ADMITTED,
        ChildState.ATTACHING,
        ChildState.AWAITED,
        ChildState.READY,
    }
)
ALIVE = USABLE | {ChildState.STOPPING, ChildState.ABORTED, ChildState.KILLED}

# The states in which no further worker can attach, so that lost workers cannot be replaced.
ATTACH_CLOSED = frozenset({AttachState.ORPHANED, AttachState.CLOSED, AttachState.FILES_LOST, AttachState.FROZEN})

_DISPLAYED_AS = {
    ChildState.ADMITTED: ChildState.GREETED,
    ChildState.AWAITED: ChildState.ATTACHING,
    ChildState.ABORTED: ChildState.STOPPING,
    ChildState.KILLED: ChildState.STOPPING,
}

GENERATION_TRANSITIONS: Mapping[tuple[GenerationState, GenerationEvent], GenerationState] = {
    (GenerationState.SNAPSHOTTING, GenerationEvent.SNAPSHOT_TAKEN): GenerationState.SPAWNING,
    (GenerationState.SNAPSHOTTING, GenerationEvent.RESUME): GenerationState.RESUMING,
    (GenerationState.SPAWNING, GenerationEvent.GREETED): GenerationState.GATHERING,
    (GenerationState.SPAWNING, GenerationEvent.BUILT): GenerationState.ATTACHING,
    (GenerationState.GATHERING, GenerationEvent.GATHERED): GenerationState.BUILDING,
    (GenerationState.BUILDING, GenerationEvent.RETRY): GenerationState.GATHERING,
    (GenerationState.BUILDING, GenerationEvent.BUILT): GenerationState.ATTACHING,
    (GenerationState.ATTACHING, GenerationEvent.READY): GenerationState.SERVING,
    (GenerationState.RESUMING, GenerationEvent.READY): GenerationState.SERVING,
    **{(state, GenerationEvent.DRAIN): GenerationState.DRAINING for state in GenerationState if state in ACTIVE},
    **{(state, GenerationEvent.FAIL): GenerationState.FAILED for state in GenerationState if state in ACTIVE},
    (GenerationState.DRAINING, GenerationEvent.EMPTY): GenerationState.GONE,
}

CHILD_TRANSITIONS: Mapping[tuple[ChildState, ChildEvent], ChildState] = {
    (ChildState.SPAWNED, ChildEvent.HELLO): ChildState.GREETED,
    (ChildState.GREETED, ChildEvent.BUILD): ChildState.BUILDING,
    (ChildState.BUILDING, ChildEvent.BUILT): ChildState.HOLDING,
    (ChildState.BUILDING, ChildEvent.JOINED): ChildState.JOINED,
    (ChildState.JOINED, ChildEvent.RUN_SELFTEST): ChildState.ATTACHING,
    (ChildState.GREETED, ChildEvent.ADMIT): ChildState.ADMITTED,
    (ChildState.ADMITTED, ChildEvent.ATTACH): ChildState.ATTACHING,
    (ChildState.ATTACHING, ChildEvent.ATTACHED): ChildState.READY,
    (ChildState.SPAWNED, ChildEvent.HOLD): ChildState.HOLDING,
    (ChildState.GREETED, ChildEvent.HOLD): ChildState.HOLDING,
    (ChildState.SPAWNED, ChildEvent.AWAIT): ChildState.AWAITED,
    (ChildState.AWAITED, ChildEvent.RECONNECTED): ChildState.READY,
    **{(state, ChildEvent.STOP): ChildState.STOPPING for state in ChildState if state in USABLE},
    **{
        (state, ChildEvent.ABORT): ChildState.ABORTED for state in ChildState if state in USABLE | {ChildState.STOPPING}
    },
    **{(state, ChildEvent.KILL): ChildState.KILLED for state in ChildState if state in ALIVE - {ChildState.KILLED}},
    **{(state, ChildEvent.EXIT): ChildState.GONE for state in ChildState if state in ALIVE},
}

ATTACH_TRANSITIONS: Mapping[tuple[AttachState, AttachEvent], AttachState] = {
    (AttachState.OPEN, AttachEvent.FIX_PIDS): AttachState.LISTED,
    (AttachState.OPEN, AttachEvent.FORK): AttachState.FORK_ONLY,
    (AttachState.FORK_ONLY, AttachEvent.ORPHAN): AttachState.ORPHANED,
    (AttachState.LISTED, AttachEvent.UNSHARE): AttachState.OPEN,
    (AttachState.LISTED, AttachEvent.REQUEST_ALLOW): AttachState.ALLOW_PENDING,
    (AttachState.ALLOW_PENDING, AttachEvent.ALLOW): AttachState.LISTED,
    (AttachState.ALLOW_PENDING, AttachEvent.REFUSE): AttachState.CLOSED,
    (AttachState.LISTED, AttachEvent.LOSE_HOLDER): AttachState.FROZEN,
    (AttachState.ALLOW_PENDING, AttachEvent.LOSE_HOLDER): AttachState.FROZEN,
    (AttachState.OPEN, AttachEvent.LOSE_FILES): AttachState.FILES_LOST,
    (AttachState.FORK_ONLY, AttachEvent.LOSE_FILES): AttachState.FILES_LOST,
    (AttachState.LISTED, AttachEvent.LOSE_FILES): AttachState.FILES_LOST,
    (AttachState.ALLOW_PENDING, AttachEvent.LOSE_FILES): AttachState.FILES_LOST,
    (AttachState.CLOSED, AttachEvent.LOSE_HOLDER): AttachState.FROZEN,
    **{(state, AttachEvent.INVALIDATE): AttachState.INVALID for state in AttachState if state != AttachState.INVALID},
}

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


class IllegalTransition(Exception):
    """The table of transitions does not list an event in the current state, which is a defect of the caller."""


def advance(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """Return the state that follows `state` after `event`.

    Raises:
        IllegalTransition: `table` does not list this pair of state and event.
    """
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"{event.name} in {state.name}") from None


class Machine(Generic[S, E]):
    """A state machine with a table of legal transitions.

    Args:
        table: the legal transitions.
        state: the initial state.
        name: the name of the generation or process whose state this is, for the log.
        extra: the `extra` of each log record.

    Attributes:
        name: the name of the generation or process whose state this is.
        state: the current state; only `advance` changes it.
    """

    def __init__(self, table: Mapping[tuple[S, E], S], state: S, name: str, extra: Mapping[str, Any]) -> None:
        self._table = table
        self.state = state
        self.name = name
        self._extra = extra

    def advance(self, event: E) -> None:
        """Change the state by an event.

        Raises:
            IllegalTransition: the table does not list the event in the current state.
        """
        before, self.state = self.state, advance(self._table, self.state, event)
        _log.debug("%s: %s -> %s", self.name, before.value, self.state.value, extra=self._extra)


def diagram(table: Mapping[tuple[S, E], S]) -> Iterator[str]:
    """Yield the lines of a Mermaid state diagram of `table`.

    An event that leads from most states, and at least five, to the same state is a note at that state.
    """
    states = [*dict.fromkeys([*(state for state, _ in table), *table.values()])]
    notes = dict[E, str]()
    for event in dict.fromkeys(event for _, event in table):
        before = {state for state, each in table if each is event}
        targets = {table[state, event] for state in before}
        if len(targets) == 1 and len(before) > max(4, len(states) / 2):
            others = ", ".join(each.name for each in states if each not in before)
            exception = f" except {others}" if others else ""
            notes[event] = f"    note left of {targets.pop().name}: {event.name} in every state{exception}"
    yield "stateDiagram-v2"
    for (state, event), after in table.items():
        if event not in notes:
            yield f"    {state.name} --> {after.name}: {event.name}"
    yield from notes.values()
