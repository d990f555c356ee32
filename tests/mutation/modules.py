"""Modules that `make mutants` mutates, and the tests that belong to each."""

from __future__ import annotations

import fnmatch
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).with_name("cosmic-ray.toml")


def config() -> dict[str, Any]:
    """Return the configuration of cosmic-ray."""
    table: dict[str, Any] = tomllib.loads(CONFIG.read_text("utf-8"))["cosmic-ray"]
    return table


def modules() -> list[Path]:
    """Return the modules, as seen from the repository.

    Raises:
        FileNotFoundError: the list names a file or directory that does not exist.
    """
    found: list[Path] = []
    for name in config()["module-path"]:
        path = REPOSITORY / name
        if not path.exists():
            raise FileNotFoundError(f"{CONFIG.name}: module-path: {name} does not exist")
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    excluded = config()["excluded-modules"]
    return [
        each.relative_to(REPOSITORY) for each in found if not any(fnmatch.fnmatch(str(each), glob) for glob in excluded)
    ]


def tests_of(module: Path) -> list[Path]:
    """Return the test files of a module: first those with its name, then those beside them.

    The directories under tests/ mirror the packages. If the module's directory has no tests, the nearest directory
    above with tests is used.
    """
    package = (REPOSITORY / module).parent
    while (package.parent / "__init__.py").exists():
        package = package.parent
    inner = module.parent.relative_to(package.relative_to(REPOSITORY))
    # A source root with several packages has a test directory for each; otherwise there is one for the root.
    several = len(list(package.parent.glob("*/__init__.py"))) > 1
    top = REPOSITORY / "tests" / (package.name.removeprefix("weightd_") if several else module.parts[0])
    for directory in (top / inner, *(top / each for each in inner.parents)):
        if files := sorted(directory.glob("test_*.py")):
            named = [each for each in files if f"{each.stem}_".startswith(f"test_{module.stem}_")]
            return [each.relative_to(REPOSITORY) for each in dict.fromkeys([*named, *files])]
    return []
