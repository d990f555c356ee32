"""Rejects code that outgrows the bounds of this project: `python -m tests.structure`, part of `make check`.

A reader shall be able to hold a file, a class and a package in mind. Whatever passes a bound is split by
responsibility. Attributes of records (classes whose fields are declared, and which set none themselves) are not
counted: those mirror a message or a table of the configuration.
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

# The public API: one method for each thing that a caller can do.
WIDE_CLASSES = frozenset({"client/weightd/client.py: Client", "client/weightd/aio.py: AsyncClient"})


def methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions of a class; properties and magic methods are among them."""
    return [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the attributes that a class has of its own; none of a record's."""
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
    """Yield what is too large in one module: the file itself, and its classes."""
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
    """Yield the packages below a folder that have too many modules."""
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
