"""Checks that the code uses every configuration key.

The test renames all keys in a copy of the configuration classes and runs mypy. Each key in use causes an error. Because
mypy knows the types, `request.timeout` does not count as a use of `ModelConfig.timeout`. The test also adds an unused
key to each class, and verifies that it detects these keys. New keys need no change here.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Classes that hold the keys of each table. A worker receives the MindSpore Lite options as JSON, so its class counts.
CONFIG = Path("daemon/weightd_daemon/config")
OPTIONS = Path("worker/weightd_worker/engines/mindspore_lite/model.py")
TABLES = {
    CONFIG / "batching.py": ("BatchingConfig", "SplitConfig"),
    CONFIG / "daemon.py": ("DaemonConfig",),
    CONFIG / "devices.py": ("DeviceConfig",),
    CONFIG / "groups.py": ("GroupConfig",),
    CONFIG / "listeners.py": ("ListenerConfig",),
    CONFIG / "model.py": ("ModelConfig",),
    CONFIG / "ranks.py": ("RanksConfig",),
    CONFIG / "repository.py": ("RepositoryConfig",),
    CONFIG / "tenants.py": ("TenantConfig",),
    OPTIONS: ("Options",),
}
# Tables inside other tables. Their own keys in the outer table keep their names, because mypy would otherwise lose the
# types of the inner tables. Code that uses an inner key uses the outer key as well.
INNER = ("BatchingConfig", "SplitConfig", "GroupConfig", "RanksConfig", "TenantConfig")

MISSING_ATTRIBUTE = re.compile(
    r'^(?P<file>.+?):(?P<line>\d+): error: "(?P<table>\w+)" has no attribute "(?P<key>\w+)"', re.M
)


class RenamedSource(NamedTuple):
    """Source with renamed keys, the original keys, and the line numbers of the table classes."""

    source: str
    keys: set[tuple[str, str]]
    lines: set[int]


def rename_keys(path: Path) -> RenamedSource:
    """Add an unused key to each table and rename all keys, without changing line numbers."""
    lines = (ROOT / path).read_text("utf-8").splitlines()
    for table in tables(path, lines):
        lines[(keys_of(table)[-1].end_lineno or 0) - 1] += "; planted: int = 0"
    names: set[tuple[str, str]] = set()
    own: set[int] = set()
    for table in tables(path, lines):
        own.update(range(table.lineno, (table.end_lineno or 0) + 1))
        # Go backwards, because the added key shares its line with another key, whose column must not move.
        for key in reversed(keys_of(table)):
            if any(inner in ast.unparse(key.annotation) for inner in INNER):
                continue
            line = lines[key.lineno - 1]
            lines[key.lineno - 1] = f"{line[: key.col_offset]}hidden_{line[key.col_offset :]}"
            names.add((table.name, ast.unparse(key.target)))
    return RenamedSource("\n".join(lines), names, own)


def tables(path: Path, lines: list[str]) -> list[ast.ClassDef]:
    body = ast.parse("\n".join(lines)).body
    return [each for each in body if isinstance(each, ast.ClassDef) and each.name in TABLES[path]]


def keys_of(table: ast.ClassDef) -> list[ast.AnnAssign]:
    return [each for each in table.body if isinstance(each, ast.AnnAssign)]


def find_used_keys(copies: dict[Path, RenamedSource], directory: Path) -> Iterator[tuple[str, str]]:
    """Yield (table, key) for each key in use. In the table's own file only code of the table itself counts as a use."""
    # Work on a copy of the mypy cache of `make check`, so that the renamed keys do not enter the cache.
    cache = directory / "cache"
    if (ROOT / ".mypy_cache").exists():
        shutil.copytree(ROOT / ".mypy_cache", cache, ignore_dangling_symlinks=True)
    command = [sys.executable, "-m", "mypy", f"--cache-dir={cache}", "--no-error-summary"]
    for path, copy in copies.items():
        shadow = directory / str(path).replace("/", "-")
        shadow.write_text(copy.source, "utf-8")
        command += ["--shadow-file", str(path), str(shadow)]
    done = subprocess.run(
        [*command, "daemon", str(OPTIONS.parent)], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    for match in MISSING_ATTRIBUTE.finditer(done.stdout):
        path = Path(match["file"])
        if match["table"] not in TABLES.get(path, ()) or int(match["line"]) in copies[path].lines:
            yield match["table"], match["key"]


@pytest.mark.timeout(600)  # a mypy run without a cache takes minutes
def test_every_key_is_used(tmp_path: Path) -> None:
    copies = {path: rename_keys(path) for path in TABLES}
    keys = {key for copy in copies.values() for key in copy.keys}
    assert len(keys) > 36
    read = set(find_used_keys(copies, tmp_path))
    planted = {(table, "planted") for names in TABLES.values() for table in names}
    assert keys - read == planted, "these keys are parsed but never used"
