"""The states of a generation and of its processes, and every legal change between them.

Two rules: all legality is in the two tables of this file, and an unlisted pair of state and event raises.
The diagrams of docs/design.md are drawn from these tables (``python -m weightd.daemon.generations.states``).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import TypeVar


class GenerationState(enum.Enum):
    """Where a generation is in its life."""

    PINNING = "pinning"  # the model's files are copied and digested
    SPAWNING = "spawning"  # holder and workers start
    GATHERING = "gathering"  # they say HELLO with their pids
    BUILDING = "building"  # the holder builds the model and exports its weights
    ATTACHING = "attaching"  # workers build on these weights, one after another
    SERVING = "serving"  # at least one worker has been READY
    DRAINING = "draining"  # no new work; workers leave, then the holder
    GONE = "gone"  # nothing is left
    FAILED = "failed"  # nothing is left but the cause


class GenerationEvent(enum.Enum):
    """What happens to a generation."""

    PINNED = "pinned"
    GREETED = "greeted"
    GATHERED = "gathered"
    RETRY = "retry"
    BUILT = "built"
    READY = "ready"
    DRAIN = "drain"
    EMPTY = "empty"
    FAIL = "fail"


class ChildState(enum.Enum):
    """Where a holder or a worker is in its life."""

    SPAWNED = "spawned"  # the process exists
    GREETED = "greeted"  # it has said HELLO
    BUILDING = "building"  # holder: builds and exports
    HOLDING = "holding"  # holder: keeps the weights alive
    ATTACHING = "attaching"  # worker: builds on the holder's weights
    READY = "ready"  # worker: takes requests
    STOPPING = "stopping"  # told to leave, or given up
    GONE = "gone"  # exited and waited for


class ChildEvent(enum.Enum):
    """What happens to a holder or a worker."""

    HELLO = "hello"
    BUILD = "build"
    BUILT = "built"
    ATTACH = "attach"
    ATTACHED = "attached"
    STOP = "stop"
    EXIT = "exit"


# Before it serves, a generation needs its holder; these are the states that lead there.
LOADING = frozenset(
    {
        GenerationState.PINNING,
        GenerationState.SPAWNING,
        GenerationState.GATHERING,
        GenerationState.BUILDING,
        GenerationState.ATTACHING,
    }
)
ACTIVE = LOADING | {GenerationState.SERVING}
ENDED = frozenset({GenerationState.GONE, GenerationState.FAILED})

# A child that the generation counts on: alive, and not on its way out.
COUNTED = frozenset(
    {
        ChildState.SPAWNED,
        ChildState.GREETED,
        ChildState.BUILDING,
        ChildState.HOLDING,
        ChildState.ATTACHING,
        ChildState.READY,
    }
)
ALIVE = COUNTED | {ChildState.STOPPING}

GENERATION: Mapping[tuple[GenerationState, GenerationEvent], GenerationState] = {
    (GenerationState.PINNING, GenerationEvent.PINNED): GenerationState.SPAWNING,
    (GenerationState.SPAWNING, GenerationEvent.GREETED): GenerationState.GATHERING,
    (GenerationState.GATHERING, GenerationEvent.GATHERED): GenerationState.BUILDING,
    (GenerationState.BUILDING, GenerationEvent.RETRY): GenerationState.GATHERING,
    (GenerationState.BUILDING, GenerationEvent.BUILT): GenerationState.ATTACHING,
    (GenerationState.ATTACHING, GenerationEvent.READY): GenerationState.SERVING,
    **{(state, GenerationEvent.DRAIN): GenerationState.DRAINING for state in GenerationState if state in ACTIVE},
    **{(state, GenerationEvent.FAIL): GenerationState.FAILED for state in GenerationState if state in ACTIVE},
    (GenerationState.DRAINING, GenerationEvent.EMPTY): GenerationState.GONE,
}

CHILD: Mapping[tuple[ChildState, ChildEvent], ChildState] = {
    (ChildState.SPAWNED, ChildEvent.HELLO): ChildState.GREETED,
    (ChildState.GREETED, ChildEvent.BUILD): ChildState.BUILDING,
    (ChildState.BUILDING, ChildEvent.BUILT): ChildState.HOLDING,
    (ChildState.GREETED, ChildEvent.ATTACH): ChildState.ATTACHING,
    (ChildState.ATTACHING, ChildEvent.ATTACHED): ChildState.READY,
    **{(state, ChildEvent.STOP): ChildState.STOPPING for state in ChildState if state in COUNTED},
    **{(state, ChildEvent.EXIT): ChildState.GONE for state in ChildState if state in ALIVE},
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


def diagram(table: Mapping[tuple[S, E], S]) -> Iterator[str]:
    """Yield the lines of a Mermaid state diagram of `table`."""
    yield "stateDiagram-v2"
    for (state, event), after in table.items():
        yield f"    {state.name} --> {after.name}: {event.name}"


if __name__ == "__main__":
    print("\n".join([*diagram(GENERATION), "", *diagram(CHILD)]))
