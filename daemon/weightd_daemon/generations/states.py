"""The states of a generation, of its processes and of who may still attach, and every legal change between them.

Two rules: all legality is in the tables of this file, and an unlisted pair of state and event raises; and a state is
changed by `Machine.advance` alone, also where what an earlier daemon has loaded is taken over.
The diagrams of docs/architecture.md are drawn from these tables (``python -m weightd_daemon.generations.states``).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

_log = logging.getLogger("weightd.generation")


class GenerationState(enum.Enum):
    """Where a generation is in its life."""

    SNAPSHOTTING = "snapshotting"  # the model's files are copied and digested
    SPAWNING = "spawning"  # holder and workers start
    GATHERING = "gathering"  # they say HELLO with their pids
    BUILDING = "building"  # the holder builds the model and exports its weights; or ranks join, and load their slices
    ATTACHING = (
        "attaching"  # workers build on these weights, one after another; or ranks run the self-test, all at once
    )
    RESUMING = "resuming"  # an earlier daemon has loaded it; its workers come back
    SERVING = "serving"  # at least one worker has been READY
    DRAINING = "draining"  # no new work; workers leave, then the holder
    GONE = "gone"  # nothing is left
    FAILED = "failed"  # nothing is left but the cause

    @property
    def display_name(self) -> str:
        """The state for people, who are not told which daemon has loaded it."""
        return "attaching" if self is GenerationState.RESUMING else self.value


class GenerationEvent(enum.Enum):
    """What happens to a generation."""

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
    """Where a process is in its life."""

    SPAWNED = "spawned"  # the process exists
    GREETED = "greeted"  # it has said HELLO
    BUILDING = "building"  # holder: builds and exports; rank: joins its group, and loads
    HOLDING = "holding"  # holder: keeps the weights alive; broker: lets ranks find each other
    JOINED = "joined"  # rank: in its group, and loaded
    ADMITTED = "admitted"  # worker: the engine lets it attach
    ATTACHING = "attaching"  # worker: builds on the holder's weights; rank: runs the self-test
    AWAITED = "awaited"  # worker, rank: was READY for an earlier daemon, and is to come back
    READY = "ready"  # worker: takes requests; rank: has passed the self-test, and takes them once all have
    STOPPING = "stopping"  # told to leave
    ABORTED = "aborted"  # hangs: it is to write its stacks down, and to end of that
    KILLED = "killed"  # nothing is left but its exit
    GONE = "gone"  # exited and waited for

    @property
    def display_name(self) -> str:
        """The state for people, who are not told how a process is let in and got out."""
        return _DISPLAYED_AS.get(self, self).value


class ChildEvent(enum.Enum):
    """What happens to a process."""

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
    """Who may still attach to a generation's weights."""

    OPEN = "open"  # anybody
    FORK_ONLY = "fork only"  # who is forked of the holder
    ORPHANED = "orphaned"  # nobody: the holder is lost, of which workers were forked; they go on
    LISTED = "listed"  # whom the holder knew at its build; it can be asked to let another one in
    ALLOW_PENDING = "allow pending"  # the same; it has been asked
    CLOSED = "closed"  # the engine lets nobody in who was not there at the build
    FILES_LOST = "files lost"  # nobody: the files that they would load have vanished; the workers go on
    FROZEN = "frozen"  # nobody: the holder is lost, and the workers go on
    INVALID = "invalid"  # nobody: the weights are gone or changed, and no answer of a worker counts any more


class AttachEvent(enum.Enum):
    """What happens to who may attach."""

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


# Before it serves, a generation needs its holder; these are the states that lead there.
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

# What a daemon writes down of itself another one can go on with.
RESUMABLE = frozenset({GenerationState.RESUMING, GenerationState.SERVING})

# A child that the generation counts on: alive, and not on its way out.
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

# Lost workers cannot be replaced.
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
    """An event came in a state that does not list it: a defect of the caller."""


def advance(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """Return the state after `event`.

    Raises:
        IllegalTransition: the table does not list the pair.
    """
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"{event.name} in {state.name}") from None


class Machine(Generic[S, E]):
    """A state of a table.

    Args:
        table: of the legal changes.
        state: where it begins.
        name: whose state it is, for the log.
        extra: of each of its records.

    Attributes:
        name: of what has this state.
        state: the present one; only `advance` changes it.
    """

    def __init__(self, table: Mapping[tuple[S, E], S], state: S, name: str, extra: Mapping[str, Any]) -> None:
        self._table = table
        self.state = state
        self.name = name
        self._extra = extra

    def advance(self, event: E) -> None:
        """Change it.

        Raises:
            IllegalTransition: the table does not list the event in the present state.
        """
        before, self.state = self.state, advance(self._table, self.state, event)
        _log.debug("%s: %s -> %s", self.name, before.value, self.state.value, extra=self._extra)


def diagram(table: Mapping[tuple[S, E], S]) -> Iterator[str]:
    """Yield the lines of a Mermaid state diagram of `table`."""
    yield "stateDiagram-v2"
    for (state, event), after in table.items():
        yield f"    {state.name} --> {after.name}: {event.name}"
