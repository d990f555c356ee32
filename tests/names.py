"""Rejects names that weightd has replaced by standard terms: `python -m tests.names`, part of `make check`.

Checks every identifier of the product, the benchmarks and the tools, and every string that is a name: configuration
keys, fields and tags of messages, names and labels of metrics, JSON keys, command-line options, column headings. Each
is split into words. CONTRIBUTING.md has the naming rule, the glossary of docs/architecture.md the terms.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "client", "cluster", "common", "ctl", "daemon", "gateway", "protocol", "tools", "worker")

# Replaced terms and their standard terms. They are not allowed as a word of any identifier.
WORDS = {
    "asker": "response sink", "askers": "response sink", "blame": "fault isolation", "canaries": "self-test",
    "canary": "self-test", "company": "isolation level", "coroner": "exit classifier", "crew": "process events",
    "crowd": "clients", "desk": "dispatcher", "desks": "dispatcher", "doorkeeper": "connection limiter",
    "doorman": "connection limiter", "fleet": "model registry", "footing": "memory footprint", "gate": "ZeroMQ proxy",
    "gates": "ZeroMQ proxy", "guest": "connection", "guests": "connection", "heard": "on_message",
    "heir": "fork target",
    "heirs": "fork target", "herald": "notifier", "household": "shared process", "households": "shared process",
    "job": "batch", "jobs": "batch", "keeper": "shim", "lane": "channel", "lanes": "channel", "ledger": "counter store",
    "mishap": "counter", "mishaps": "counter", "nursery": "fork coordinator", "outlook": "retry hint",
    "peephole": "memory reader", "roster": "process table", "seat": "slot", "seats": "slot", "seldom": "rate limit",
    "shelf": "model store", "stray": "orphan", "strays": "orphan", "suspects": "offenders", "tallies": "counters",
    "tally": "counters", "tell": "notify", "teller": "progress logger", "tells": "notify", "told": "notified",
    "upkeep": "housekeeping", "verb": "command", "verbs": "command", "whoever": "client", "wish": "key action",
}  # fmt: skip

# Not allowed as a whole name of a module, class, function, attribute, key or column; allowed as part of a longer name.
NAMES = {
    "accord", "asked", "asks", "claim", "cut", "cuts", "evidence", "figures", "happened", "house", "knock", "life",
    "looks",
    "mates", "meeting", "nowhere", "piece", "pieces", "pinning", "places", "presence", "proof", "questions", "room",
    "rooms", "said", "somebody", "standing", "survey", "symptoms", "totals", "trial", "trials", "tries",
}  # fmt: skip

_IDENTIFIER = re.compile(r"-{0,2}[A-Za-z_][A-Za-z0-9_.-]*")
_COLUMN = re.compile(r"[A-Z][A-Z0-9/ ]+(?: [a-z%]{1,3})?")
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


class Found(NamedTuple):
    """A replaced term in a file."""

    path: Path
    line: int
    name: str
    hint: str


def words(name: str) -> set[str]:
    """Return the words of a name in any style: snake, camel, kebab or dotted."""
    return {word.lower() for word in _WORD.findall(name)}


# Methods of the standard library.
_ALLOWED = {"tell"}


def hint(name: str) -> str:
    """Return the standard term for a replaced one in a name, or ""."""
    if name in _ALLOWED:
        return ""
    for word in sorted(words(name)):
        if word in WORDS:
            return f"use {WORDS[word]!r}, not {word!r}"
    return f"{name!r} is too general: see CONTRIBUTING.md" if name.strip("_-").lower() in NAMES else ""


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each identifier, and of each string that is a name."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield line, node.name
        elif isinstance(node, (ast.arg, ast.keyword)):
            yield line, node.arg or ""
        elif isinstance(node, ast.alias):
            yield line, node.asname or node.name.rpartition(".")[2]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.strip()
            if _IDENTIFIER.fullmatch(text) or _COLUMN.fullmatch(text):
                yield line, text


def main() -> int:
    """Print each replaced name on a line; return the exit status."""
    found = []
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        listed = [(1, path.stem), *names(ast.parse(path.read_text()))]
        found += [Found(path, line, name, text) for line, name in listed if (text := hint(name))]
    for each in found:
        sys.stdout.write(f"{each.path.relative_to(ROOT)}:{each.line}: {each.name}: {each.hint}\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
