"""Properties of the tables: what they say of each state, not what each row of them is."""

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

NOBODY: frozenset[enum.Enum] = frozenset()

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


def reached(table: Table, start: enum.Enum, *, without: Collection[enum.Enum] = ()) -> set[Any]:
    """The states that can be reached from one, not through others."""
    found = {start}
    while more := {after for (state, _), after in table.items() if state in found and after not in without} - found:
        found |= more
    return found


@TABLES
def test_every_state_is_reached_every_event_happens_and_every_state_leads_to_an_end(
    table: Table, start: enum.Enum, events: type[enum.Enum], final: set[enum.Enum]
) -> None:
    assert reached(table, start) == set(type(start))
    assert {event for _, event in table} == set(events)
    assert {state for state in type(start) if not any(state is source for source, _ in table)} == final
    assert all(reached(table, state) & final for state in type(start))


@TABLES
def test_what_is_not_listed_raises_and_changes_nothing(
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
def test_an_event_leads_to_one_state_and_does_not_happen_twice(
    table: Table, start: enum.Enum, events: type[enum.Enum], final: set[enum.Enum]
) -> None:
    del start, final
    for event in events:
        after = {table[state, event] for state in before(table, event)}
        assert len(after) == 1
        assert not after & before(table, event)


def test_the_groups_are_what_the_tables_do() -> None:
    assert (
        before(GENERATION_TRANSITIONS, GenerationEvent.DRAIN)
        == before(GENERATION_TRANSITIONS, GenerationEvent.FAIL)
        == states.ACTIVE
    )
    assert set(GenerationState) - states.ACTIVE == {GenerationState.DRAINING, *states.ENDED}
    assert {GenerationState.SERVING} == states.ACTIVE - states.LOADING
    assert before(CHILD_TRANSITIONS, ChildEvent.EXIT) == states.ALIVE == set(ChildState) - {ChildState.GONE}
    assert before(CHILD_TRANSITIONS, ChildEvent.STOP) == states.USABLE
    # Who is got rid of is treated worse and worse, and counts no more.
    assert before(CHILD_TRANSITIONS, ChildEvent.ABORT) == {*states.USABLE, ChildState.STOPPING}
    assert before(CHILD_TRANSITIONS, ChildEvent.KILL) == {*states.USABLE, ChildState.STOPPING, ChildState.ABORTED}
    assert before(ATTACH_TRANSITIONS, AttachEvent.INVALIDATE) == set(AttachState) - {AttachState.INVALID}


@pytest.mark.parametrize(
    ("table", "start", "through", "goals"),
    [
        # Nothing is started before there is a snapshot, and nobody serves who has not built what the holder has.
        (GENERATION_TRANSITIONS, GenerationState.SNAPSHOTTING, {GenerationState.GATHERING}, {GenerationState.BUILDING}),
        (GENERATION_TRANSITIONS, GenerationState.SPAWNING, {GenerationState.ATTACHING}, {GenerationState.SERVING}),
        (GENERATION_TRANSITIONS, GenerationState.SNAPSHOTTING, {GenerationState.DRAINING}, {GenerationState.GONE}),
        (CHILD_TRANSITIONS, ChildState.GREETED, {ChildState.ADMITTED, ChildState.JOINED}, {ChildState.ATTACHING}),
        (CHILD_TRANSITIONS, ChildState.GREETED, {ChildState.ATTACHING}, {ChildState.READY}),
        # Nobody attaches to what is not built; a broker has nothing to build.
        (CHILD_TRANSITIONS, ChildState.GREETED, {ChildState.BUILDING}, {ChildState.JOINED}),
        # Whether another one is let in is the holder's to say.
        (ATTACH_TRANSITIONS, AttachState.OPEN, {AttachState.ALLOW_PENDING}, {AttachState.CLOSED}),
        # And there is no way back at all.
        (GENERATION_TRANSITIONS, GenerationState.SERVING, NOBODY, states.LOADING),
        (GENERATION_TRANSITIONS, GenerationState.DRAINING, NOBODY, states.ACTIVE),
        (CHILD_TRANSITIONS, ChildState.HOLDING, NOBODY, {ChildState.READY, ChildState.ADMITTED, ChildState.BUILDING}),
        (CHILD_TRANSITIONS, ChildState.STOPPING, NOBODY, states.USABLE),
        (CHILD_TRANSITIONS, ChildState.KILLED, NOBODY, {ChildState.STOPPING, ChildState.ABORTED}),
        (ATTACH_TRANSITIONS, AttachState.FORK_ONLY, NOBODY, {AttachState.OPEN, AttachState.LISTED, AttachState.FROZEN}),
        (ATTACH_TRANSITIONS, AttachState.CLOSED, NOBODY, {AttachState.OPEN, AttachState.FORK_ONLY, AttachState.LISTED}),
        (ATTACH_TRANSITIONS, AttachState.FROZEN, NOBODY, {AttachState.OPEN, AttachState.LISTED, AttachState.CLOSED}),
    ],
    ids=lambda each: each.name if isinstance(each, enum.Enum) else "",
)
def test_there_is_no_way_round_and_none_back(
    table: Table, start: enum.Enum, through: Collection[enum.Enum], goals: set[enum.Enum]
) -> None:
    assert goals <= reached(table, start) or not through
    assert not goals & reached(table, start, without=through)


def test_what_is_written_down_of_who_may_attach_is_what_can_still_be_so_for_the_next_daemon() -> None:
    assert {AttachState(each) for each in PERSISTED_STATES} == set(AttachState) - {
        AttachState.ALLOW_PENDING,
        AttachState.INVALID,
    }


def test_people_are_not_told_of_states_that_are_ours() -> None:
    ours = {state.value: state.display_name for kind in (GenerationState, ChildState) for state in kind}
    assert {state: told for state, told in ours.items() if state != told} == {
        "resuming": "attaching",
        "admitted": "greeted",
        "awaited": "attaching",
        "aborted": "stopping",
        "killed": "stopping",
    }
