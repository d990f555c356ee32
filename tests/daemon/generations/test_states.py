"""Properties of the transition tables, rather than their individual rows."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from weightd_daemon.generations import states
from weightd_daemon.generations.attach_control import PERSISTED_STATES
from weightd_daemon.generations.states import (
    ATTACH_TRANSITIONS,
    CHILD_TRANSITIONS,
    GENERATION_TRANSITIONS,
    AttachEvent,
    AttachState,
    ChildEvent,
    ChildState,
    GenerationEvent,
    GenerationState,
    IllegalTransition,
    Machine,
)

Table = Mapping[tuple[Any, Any], Any]

IMPOSSIBLE: frozenset[enum.Enum] = frozenset()

TABLES = pytest.mark.parametrize(
    ("table", "start", "events", "final"),
    [
        pytest.param(
            GENERATION_TRANSITIONS, GenerationState.SNAPSHOTTING, GenerationEvent, states.ENDED, id="generation"
        ),
        pytest.param(CHILD_TRANSITIONS, ChildState.SPAWNED, ChildEvent, {ChildState.GONE}, id="child"),
        pytest.param(ATTACH_TRANSITIONS, AttachState.OPEN, AttachEvent, {AttachState.INVALID}, id="access"),
    ],
)


def before(table: Table, event: enum.Enum) -> set[Any]:
    return {state for state, each in table if each is event}


def reachable(table: Table, start: enum.Enum, *, without: Collection[enum.Enum] = ()) -> set[Any]:
    """Return the states that can be reached from `start` without passing through `without`."""
    found = {start}
    while more := {after for (state, _), after in table.items() if state in found and after not in without} - found:
        found |= more
    return found


@TABLES
def test_all_states_and_events_are_used_and_end_is_reachable(
    table: Table, start: enum.Enum, events: type[enum.Enum], final: set[enum.Enum]
) -> None:
    assert reachable(table, start) == set(type(start))
    assert {event for _, event in table} == set(events)
    assert {state for state in type(start) if not any(state is source for source, _ in table)} == final
    assert all(reachable(table, state) & final for state in type(start))


@TABLES
def test_illegal_transition_raises_and_keeps_state(
    table: Table, start: enum.Enum, events: type[enum.Enum], final: set[enum.Enum]
) -> None:
    del final
    for state, event in itertools.product(type(start), events):
        machine: Machine[Any, Any] = Machine(table, state, "m.1", {})
        if (state, event) in table:
            machine.advance(event)
            assert machine.state is table[state, event]
        else:
            with pytest.raises(IllegalTransition, match=f"^{event.name} in {state.name}$"):
                machine.advance(event)
            assert machine.state is state


@TABLES
def test_each_event_leads_to_one_state(
    table: Table, start: enum.Enum, events: type[enum.Enum], final: set[enum.Enum]
) -> None:
    del start, final
    for event in events:
        after = {table[state, event] for state in before(table, event)}
        assert len(after) == 1
        assert not after & before(table, event)


def test_state_groups_match_tables() -> None:
    assert (
        before(GENERATION_TRANSITIONS, GenerationEvent.DRAIN)
        == before(GENERATION_TRANSITIONS, GenerationEvent.FAIL)
        == states.ACTIVE
    )
    assert set(GenerationState) - states.ACTIVE == {GenerationState.DRAINING, *states.ENDED}
    assert {GenerationState.SERVING} == states.ACTIVE - states.LOADING
    assert before(CHILD_TRANSITIONS, ChildEvent.EXIT) == states.ALIVE == set(ChildState) - {ChildState.GONE}
    assert before(CHILD_TRANSITIONS, ChildEvent.STOP) == states.USABLE
    # The daemon may only escalate: stop, then abort, then kill.
    assert before(CHILD_TRANSITIONS, ChildEvent.ABORT) == {*states.USABLE, ChildState.STOPPING}
    assert before(CHILD_TRANSITIONS, ChildEvent.KILL) == {*states.USABLE, ChildState.STOPPING, ChildState.ABORTED}
    assert before(ATTACH_TRANSITIONS, AttachEvent.INVALIDATE) == set(AttachState) - {AttachState.INVALID}


@pytest.mark.parametrize(
    ("table", "start", "through", "goals"),
    [
        # Processes start only after the snapshot, and workers serve only after they have attached.
        (GENERATION_TRANSITIONS, GenerationState.SNAPSHOTTING, {GenerationState.GATHERING}, {GenerationState.BUILDING}),
        (GENERATION_TRANSITIONS, GenerationState.SPAWNING, {GenerationState.ATTACHING}, {GenerationState.SERVING}),
        (GENERATION_TRANSITIONS, GenerationState.SNAPSHOTTING, {GenerationState.DRAINING}, {GenerationState.GONE}),
        (CHILD_TRANSITIONS, ChildState.GREETED, {ChildState.ADMITTED, ChildState.JOINED}, {ChildState.ATTACHING}),
        (CHILD_TRANSITIONS, ChildState.GREETED, {ChildState.ATTACHING}, {ChildState.READY}),
        # Workers attach only after the build; only a broker joins without a build.
        (CHILD_TRANSITIONS, ChildState.GREETED, {ChildState.BUILDING}, {ChildState.JOINED}),
        # Attaching closes only after the holder was asked to admit a worker.
        (ATTACH_TRANSITIONS, AttachState.OPEN, {AttachState.ALLOW_PENDING}, {AttachState.CLOSED}),
        # These transitions are impossible in any number of steps.
        (GENERATION_TRANSITIONS, GenerationState.SERVING, IMPOSSIBLE, states.LOADING),
        (GENERATION_TRANSITIONS, GenerationState.DRAINING, IMPOSSIBLE, states.ACTIVE),
        (
            CHILD_TRANSITIONS,
            ChildState.HOLDING,
            IMPOSSIBLE,
            {ChildState.READY, ChildState.ADMITTED, ChildState.BUILDING},
        ),
        (CHILD_TRANSITIONS, ChildState.STOPPING, IMPOSSIBLE, states.USABLE),
        (CHILD_TRANSITIONS, ChildState.KILLED, IMPOSSIBLE, {ChildState.STOPPING, ChildState.ABORTED}),
        (
            ATTACH_TRANSITIONS,
            AttachState.FORK_ONLY,
            IMPOSSIBLE,
            {AttachState.OPEN, AttachState.LISTED, AttachState.FROZEN},
        ),
        (
            ATTACH_TRANSITIONS,
            AttachState.CLOSED,
            IMPOSSIBLE,
            {AttachState.OPEN, AttachState.FORK_ONLY, AttachState.LISTED},
        ),
        (
            ATTACH_TRANSITIONS,
            AttachState.FROZEN,
            IMPOSSIBLE,
            {AttachState.OPEN, AttachState.LISTED, AttachState.CLOSED},
        ),
    ],
    ids=lambda each: each.name if isinstance(each, enum.Enum) else "",
)
def test_states_that_must_be_passed_or_cannot_return(
    table: Table, start: enum.Enum, through: Collection[enum.Enum], goals: set[enum.Enum]
) -> None:
    assert goals <= reachable(table, start) or not through
    assert not goals & reachable(table, start, without=through)


def test_persisted_attach_states() -> None:
    assert {AttachState(each) for each in PERSISTED_STATES} == set(AttachState) - {
        AttachState.ALLOW_PENDING,
        AttachState.INVALID,
    }


def test_internal_states_have_display_names() -> None:
    display_names = {state.value: state.display_name for kind in (GenerationState, ChildState) for state in kind}
    assert {state: display_name for state, display_name in display_names.items() if state != display_name} == {
        "resuming": "attaching",
        "admitted": "greeted",
        "awaited": "attaching",
        "aborted": "stopping",
        "killed": "stopping",
    }
