from pathlib import Path

import pytest

from weightd.daemon.generations.states import CHILD, GENERATION, diagram

_DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "design.md"


@pytest.mark.parametrize("name", ["generation", "child"])
def test_the_diagram_is_the_table(name: str) -> None:
    table = "\n".join(diagram(GENERATION) if name == "generation" else diagram(CHILD))
    assert f"<!-- {name} -->\n```mermaid\n{table}\n```\n" in _DOCUMENT.read_text("utf-8")
