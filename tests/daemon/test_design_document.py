from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weightd.daemon.generations.states import ACCESS, CHILD, GENERATION, diagram

_DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "design.md"


@pytest.mark.parametrize(("name", "table"), [("generation", GENERATION), ("child", CHILD), ("access", ACCESS)])
def test_the_diagram_is_the_table(name: str, table: Mapping[tuple[Any, Any], Any]) -> None:
    lines = "\n".join(diagram(table))
    assert f"<!-- {name} -->\n```mermaid\n{lines}\n```\n" in _DOCUMENT.read_text("utf-8")
