"""A key of the configuration that is parsed, and documented, and read by nobody.

In a copy of the sources each key has another name, and mypy tells who misses it: exactly, by type, so that a reader of
`request.timeout` is none of `ModelConfig.timeout`. Whoever adds a key has nothing to do here. A key that is planted in
the copy, and that nobody reads, shows each time that one would be found.
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

# Who takes the keys of a table: those of MindSpore Lite travel as JSON to a worker, whose class has the same.
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
    CONFIG / "tenants.py": ("TenantConfig",),
    OPTIONS: ("Options",),
}
# Tables that are keys of others. Those keys keep their names, or mypy does not know what is within; whoever reads a key
# within reads them, too.
INNER = ("BatchingConfig", "SplitConfig", "GroupConfig", "RanksConfig", "TenantConfig")

MISSED = re.compile(r'^(?P<file>.+?):(?P<line>\d+): error: "(?P<table>\w+)" has no attribute "(?P<key>\w+)"', re.M)


class Copy(NamedTuple):
    """The source with hidden keys, what they were, and the lines that are a table."""

    source: str
    keys: set[tuple[str, str]]
    lines: set[int]


def hide(path: Path) -> Copy:
    """Plant a key in each table, and rename all of them; line numbers stay."""
    lines = (ROOT / path).read_text("utf-8").splitlines()
    for table in tables(path, lines):
        lines[(keys_of(table)[-1].end_lineno or 0) - 1] += "; planted: int = 0"
    names: set[tuple[str, str]] = set()
    own: set[int] = set()
    for table in tables(path, lines):
        own.update(range(table.lineno, (table.end_lineno or 0) + 1))
        # The planted one shares its line with another, which must not be shifted.
        for key in reversed(keys_of(table)):
            if any(inner in ast.unparse(key.annotation) for inner in INNER):
                continue
            line = lines[key.lineno - 1]
            lines[key.lineno - 1] = f"{line[: key.col_offset]}hidden_{line[key.col_offset :]}"
            names.add((table.name, ast.unparse(key.target)))
    return Copy("\n".join(lines), names, own)


def tables(path: Path, lines: list[str]) -> list[ast.ClassDef]:
    body = ast.parse("\n".join(lines)).body
    return [each for each in body if isinstance(each, ast.ClassDef) and each.name in TABLES[path]]


def keys_of(table: ast.ClassDef) -> list[ast.AnnAssign]:
    return [each for each in table.body if isinstance(each, ast.AnnAssign)]


def missed(copies: dict[Path, Copy], directory: Path) -> Iterator[tuple[str, str]]:
    """Who misses a key: (table, key). In the file of the table only what the table itself does counts as reading."""
    # What `make check` has found out is taken from a copy of its cache, for the renamed keys must not get into it.
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
    for match in MISSED.finditer(done.stdout):
        path = Path(match["file"])
        if match["table"] not in TABLES.get(path, ()) or int(match["line"]) in copies[path].lines:
            yield match["table"], match["key"]


@pytest.mark.timeout(600)  # mypy where there is no cache
def test_every_key_is_read(tmp_path: Path) -> None:
    copies = {path: hide(path) for path in TABLES}
    keys = {key for copy in copies.values() for key in copy.keys}
    assert len(keys) > 36
    read = set(missed(copies, tmp_path))
    planted = {(table, "planted") for names in TABLES.values() for table in names}
    assert keys - read == planted, "these keys are parsed, and read by nobody"
