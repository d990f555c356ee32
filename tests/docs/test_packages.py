"""The package diagram of docs/architecture.md, compared with the import contracts in pyproject.toml and the code."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def packages() -> dict[str, Path]:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = config["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return {Path(folder).name: ROOT / folder for folder in folders}


@pytest.fixture(scope="module")
def diagram() -> set[tuple[str, str]]:
    text = (ROOT / "docs/architecture.md").read_text()
    graph = text.split("## Packages", 1)[1].split("```mermaid", 1)[1].split("```", 1)[0]
    return {(above, below) for above, below in re.findall(r"(\w+) --> (\w+)", graph)}


@pytest.fixture(scope="module")
def layers() -> dict[str, int]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [contract] = [each for each in contracts if each["type"] == "layers" and "containers" not in each]
    return {name: level for level, line in enumerate(contract["layers"]) for name in re.findall(r"\w+", line)}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_diagram_matches_imports(packages: dict[str, Path], diagram: set[tuple[str, str]]) -> None:
    edges = {
        (package, name)
        for package, folder in packages.items()
        for path in folder.rglob("*.py")
        for name in imported(path)
        if name in packages and name != package
    }
    assert diagram == edges


def test_contract_allows_edges_of_diagram(diagram: set[tuple[str, str]], layers: dict[str, int]) -> None:
    assert {edge for edge in diagram if layers[edge[0]] >= layers[edge[1]]} == set()


def test_contract_has_all_packages(packages: dict[str, Path], layers: dict[str, int]) -> None:
    assert set(layers) == set(packages)
