from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weightd.daemon.generations.states import ACCESS, CHILD, GENERATION, diagram
from weightd.daemon.models.stage import STAGE
from weightd.daemon.models.standing import PHASE

_DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "design.md"
_TABLES = {"generation": GENERATION, "child": CHILD, "access": ACCESS, "stage": STAGE, "phase": PHASE}


@pytest.mark.parametrize(("name", "table"), _TABLES.items())
def test_the_diagram_is_the_table(name: str, table: Mapping[tuple[Any, Any], Any]) -> None:
    lines = "\n".join(diagram(table))
    assert f"<!-- {name} -->\n```mermaid\n{lines}\n```\n" in _DOCUMENT.read_text("utf-8")
