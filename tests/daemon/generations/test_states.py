from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from weightd.daemon.generations import states
from weightd.daemon.generations.states import (
    CHILD,
    GENERATION,
    ChildEvent,
    ChildState,
    GenerationEvent,
    GenerationState,
    IllegalTransition,
    advance,
    diagram,
)

Table = Mapping[tuple[Any, Any], Any]

# Written down a second time, on purpose: a slip in the table is not repeated here.
GENERATION_LISTED = """
    PINNING    PINNED    SPAWNING
    SPAWNING   GREETED   GATHERING
    GATHERING  GATHERED  BUILDING
    BUILDING   RETRY     GATHERING
    BUILDING   BUILT     ATTACHING
    ATTACHING  READY     SERVING
    PINNING    DRAIN     DRAINING
    SPAWNING   DRAIN     DRAINING
    GATHERING  DRAIN     DRAINING
    BUILDING   DRAIN     DRAINING
    ATTACHING  DRAIN     DRAINING
    SERVING    DRAIN     DRAINING
    PINNING    FAIL      FAILED
    SPAWNING   FAIL      FAILED
    GATHERING  FAIL      FAILED
    BUILDING   FAIL      FAILED
    ATTACHING  FAIL      FAILED
    SERVING    FAIL      FAILED
    DRAINING   EMPTY     GONE
"""
CHILD_LISTED = """
    SPAWNED    HELLO     GREETED
    GREETED    BUILD     BUILDING
    BUILDING   BUILT     HOLDING
    GREETED    ATTACH    ATTACHING
    ATTACHING  ATTACHED  READY
    SPAWNED    STOP      STOPPING
    GREETED    STOP      STOPPING
    BUILDING   STOP      STOPPING
    HOLDING    STOP      STOPPING
    ATTACHING  STOP      STOPPING
    READY      STOP      STOPPING
    SPAWNED    EXIT      GONE
    GREETED    EXIT      GONE
    BUILDING   EXIT      GONE
    HOLDING    EXIT      GONE
    ATTACHING  EXIT      GONE
    READY      EXIT      GONE
    STOPPING   EXIT      GONE
"""


def listed(text: str) -> dict[tuple[str, str], str]:
    rows = [line.split() for line in text.strip().splitlines()]
    return {(state, event): after for state, event, after in rows}


def product(kind: type[enum.Enum], events: type[enum.Enum]) -> list[Any]:
    pairs = itertools.product(kind, events)
    return [pytest.param(state, event, id=f"{state.name}-{event.name}") for state, event in pairs]


@pytest.mark.parametrize(("state", "event"), product(GenerationState, GenerationEvent))
def test_a_generation_advances_as_listed_and_not_otherwise(state: GenerationState, event: GenerationEvent) -> None:
    _check(GENERATION, listed(GENERATION_LISTED), state, event)


@pytest.mark.parametrize(("state", "event"), product(ChildState, ChildEvent))
def test_a_child_advances_as_listed_and_not_otherwise(state: ChildState, event: ChildEvent) -> None:
    _check(CHILD, listed(CHILD_LISTED), state, event)


def _check(table: Table, expected: Mapping[tuple[str, str], str], state: enum.Enum, event: enum.Enum) -> None:
    after = expected.get((state.name, event.name))
    if after is None:
        with pytest.raises(IllegalTransition, match=f"^{event.name} in {state.name}$"):
            advance(table, state, event)
    else:
        assert advance(table, state, event).name == after


@pytest.mark.parametrize(
    ("table", "start", "terminal"),
    [
        pytest.param(GENERATION, GenerationState.PINNING, states.ENDED, id="generation"),
        pytest.param(CHILD, ChildState.SPAWNED, {ChildState.GONE}, id="child"),
    ],
)
def test_every_state_is_reached_and_only_terminal_ones_have_no_way_out(
    table: Table, start: enum.Enum, terminal: frozenset[enum.Enum]
) -> None:
    reached = {start}
    while True:
        more = {after for (state, _), after in table.items() if state in reached} - reached
        if not more:
            break
        reached |= more
    assert reached == set(type(start))
    assert {state for state in type(start) if not any(state is source for source, _ in table)} == terminal


def test_every_state_leads_to_an_end() -> None:
    for table, ends in ((GENERATION, states.ENDED), (CHILD, frozenset({ChildState.GONE}))):
        ending: set[Any] = set(ends)
        for _ in range(20):
            ending |= {state for (state, _), after in table.items() if after in ending}
        assert ending >= {state for pair in table.items() for state in (pair[0][0], pair[1])}


def test_the_groups_are_consistent() -> None:
    assert set(GenerationState) - states.ACTIVE == {GenerationState.DRAINING, *states.ENDED}
    assert not states.ACTIVE & states.ENDED
    assert {GenerationState.SERVING} == states.ACTIVE - states.LOADING
    assert set(ChildState) - states.ALIVE == {ChildState.GONE}
    assert {ChildState.STOPPING} == states.ALIVE - states.COUNTED
    # What a group promises is what the tables do.
    assert {state for state, event in GENERATION if event is GenerationEvent.DRAIN} == states.ACTIVE
    assert {state for state, event in GENERATION if event is GenerationEvent.FAIL} == states.ACTIVE
    assert {state for state, event in CHILD if event is ChildEvent.STOP} == states.COUNTED
    assert {state for state, event in CHILD if event is ChildEvent.EXIT} == states.ALIVE


def test_the_diagram_has_a_line_for_each_pair() -> None:
    lines = list(diagram(CHILD))
    assert lines[0] == "stateDiagram-v2"
    assert "    SPAWNED --> GREETED: HELLO" in lines
    assert len(lines) == 1 + len(CHILD)
