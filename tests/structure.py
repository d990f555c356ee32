"""Rejects code beyond the size limits of this project: `python -m tests.structure`, part of `make check`.

The limits keep each file, class and package easy to understand. Code beyond a limit should be split by responsibility.
Attributes of records (classes that only declare fields) do not count, because records mirror a message or a table of
the configuration.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("client", "cluster", "common", "ctl", "daemon", "gateway", "protocol", "worker")

FILE_LINES = 450
PACKAGE_MODULES = 20  # without __init__.py
CLASS_METHODS = 25
CLASS_ATTRIBUTES = 15

# The public API, with one method per operation.
WIDE_CLASSES = frozenset({"client/weightd/client.py: Client", "client/weightd/aio.py: AsyncClient"})


def methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the methods of a class, including properties and magic methods."""
    return [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the attributes that a class defines; the empty set for a record."""
    assigned = {
        each.attr
        for method in methods(node)
        for each in ast.walk(method)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
    return assigned | {each.id for each in fields if isinstance(each, ast.Name)} if assigned else set()


def excesses(name: str, source: str) -> Iterator[str]:
    """Yield a text for the file and for each class beyond its limits."""
    lines = source.count("\n")
    if lines > FILE_LINES:
        yield f"{name}: expected at most {FILE_LINES} lines, got {lines}"
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef) or f"{name}: {node.name}" in WIDE_CLASSES:
            continue
        counts = (
            ("methods", len(methods(node)), CLASS_METHODS),
            ("attributes", len(attributes(node)), CLASS_ATTRIBUTES),
        )
        for what, count, bound in counts:
            if count > bound:
                yield f"{name}:{node.lineno}: class {node.name}: expected at most {bound} {what}, got {count}"


def crowded(folder: Path) -> Iterator[str]:
    """Yield a text for each package below a folder with too many modules."""
    for package in sorted({path.parent for path in folder.rglob("*.py")}):
        count = sum(path.name != "__init__.py" for path in package.glob("*.py"))
        if count > PACKAGE_MODULES:
            yield f"{package.relative_to(ROOT)}: expected at most {PACKAGE_MODULES} modules, got {count}"


def main() -> int:
    """Print each excess on a line; return the exit status."""
    found: list[str] = []
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found += excesses(str(path.relative_to(ROOT)), path.read_text())
        found += crowded(ROOT / folder)
    sys.stdout.writelines(f"{each}\n" for each in found)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
