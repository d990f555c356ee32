"""State diagrams and file paths of docs/architecture.md match the code."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weightd_daemon.generations.states import ATTACH_TRANSITIONS, CHILD_TRANSITIONS, GENERATION_TRANSITIONS, diagram
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
}


@pytest.mark.parametrize(("name", "table"), _TABLES.items())
def test_diagram_matches_the_transitions(name: str, table: Mapping[tuple[Any, Any], Any]) -> None:
    lines = "\n".join(diagram(table))
    assert f"<!-- {name} -->\n```mermaid\n{lines}\n```\n" in _DOCUMENT.read_text("utf-8")


def test_named_modules_exist() -> None:
    named = set(re.findall(r"`([a-z0-9_./]+(?:\.py|/))`", _DOCUMENT.read_text("utf-8")))
    roots = (_ROOT, _ROOT / "daemon/weightd_daemon")
    assert len(named) > 50
    assert sorted(name for name in named if not any((root / name).exists() for root in roots)) == []
