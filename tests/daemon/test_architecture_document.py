"""State diagrams and file paths of docs/architecture.md match the code."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weightd_daemon.channels.states import CHANNEL_TRANSITIONS
from weightd_daemon.generations.states import (
    ATTACH_TRANSITIONS,
    CHILD_TRANSITIONS,
    GENERATION_TRANSITIONS,
    ChildEvent,
    ChildState,
    diagram,
)
from weightd_daemon.models.deployment_state import DEPLOYMENT_TRANSITIONS
from weightd_daemon.models.readiness import MODEL_PHASE_TRANSITIONS
from weightd_daemon.models.residency.reservations import RESERVATION_TRANSITIONS

_ROOT = Path(__file__).resolve().parents[2]
_DOCUMENT = _ROOT / "docs" / "architecture.md"
_TABLES = {
    "generation": GENERATION_TRANSITIONS,
    "child": CHILD_TRANSITIONS,
    "attach": ATTACH_TRANSITIONS,
    "deployment": DEPLOYMENT_TRANSITIONS,
    "phase": MODEL_PHASE_TRANSITIONS,
    "reservation": RESERVATION_TRANSITIONS,
    "channel": CHANNEL_TRANSITIONS,
}


@pytest.mark.parametrize(("name", "table"), _TABLES.items())
def test_diagram_matches_the_transitions(name: str, table: Mapping[tuple[Any, Any], Any]) -> None:
    lines = "\n".join(diagram(table))
    assert f"<!-- {name} -->\n```mermaid\n{lines}\n```\n" in _DOCUMENT.read_text("utf-8")


def test_diagram_shows_an_event_of_most_states_as_a_note() -> None:
    table = {(state, ChildEvent.KILL): ChildState.KILLED for state in [*ChildState][:5]}
    names = [state.name for state, _ in table]
    assert [*diagram(table)][1:] == ["    note left of KILLED: KILL in every state except KILLED"]
    few = dict([*table.items()][1:])
    assert [*diagram(few)][1:] == [f"    {name} --> KILLED: KILL" for name in names[1:]]
    branching = {**table, (ChildState.KILLED, ChildEvent.KILL): ChildState.GONE}
    assert len([*diagram(branching)]) == 1 + len(branching)
    every = {**table, (ChildState.KILLED, ChildEvent.KILL): ChildState.KILLED}
    assert [*diagram(every)][1:] == ["    note left of KILLED: KILL in every state"]


def test_named_modules_exist() -> None:
    named = set(re.findall(r"`([a-z0-9_./]+(?:\.py|/))`", _DOCUMENT.read_text("utf-8")))
    roots = (_ROOT, _ROOT / "daemon/weightd_daemon")
    assert len(named) > 50
    assert sorted(name for name in named if not any((root / name).exists() for root in roots)) == []
