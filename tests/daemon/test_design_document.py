from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weightd_daemon.generations.states import ATTACH_TRANSITIONS, CHILD_TRANSITIONS, GENERATION_TRANSITIONS, diagram
from weightd_daemon.models.deployment_state import DEPLOYMENT_TRANSITIONS
from weightd_daemon.models.readiness import MODEL_PHASE_TRANSITIONS

_DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "design.md"
_TABLES = {
    "generation": GENERATION_TRANSITIONS,
    "child": CHILD_TRANSITIONS,
    "attach": ATTACH_TRANSITIONS,
    "deployment": DEPLOYMENT_TRANSITIONS,
    "phase": MODEL_PHASE_TRANSITIONS,
}


@pytest.mark.parametrize(("name", "table"), _TABLES.items())
def test_the_diagram_is_the_table(name: str, table: Mapping[tuple[Any, Any], Any]) -> None:
    lines = "\n".join(diagram(table))
    assert f"<!-- {name} -->\n```mermaid\n{lines}\n```\n" in _DOCUMENT.read_text("utf-8")
