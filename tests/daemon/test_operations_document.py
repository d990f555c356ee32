"""docs/operations.md is held to the code: its statuses, its configurations, its words of the log, its files."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
from tools.manual.commands import read_parser

from weightd_daemon import exit_codes
from weightd_daemon.cli import parser
from weightd_daemon.config import listeners, tenants
from weightd_daemon.config import load as config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = (REPOSITORY / "docs" / "operations.md").read_text("utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table of a section, without its head."""
    section = re.split(r"\n##+ ", TEXT.partition(f"# {heading}\n")[2])[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_each_exit_status_is_there() -> None:
    assert [int(row[0]) for row in rows("Exit statuses")] == sorted(exit_codes.MEANINGS)


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL))
def test_the_configurations_are_good(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A host on which a model has sets of cores has more of them than one that runs tests.
    monkeypatch.setattr(os, "sched_getaffinity", mock.Mock(return_value=set(range(16))))
    # And has users, groups and keys of its own.
    for name in ("find_user_id", "find_group_id", "read_public_key"):
        monkeypatch.setattr(tenants, name, str)
    monkeypatch.setattr(listeners, "read_secret", str)
    content = tomllib.loads(block)
    content.setdefault("models", {"mlp": {"path": "mlp.onnx"}})  # a block may show tables of another kind alone
    config.parse(content, Path("/etc/weightd"))


def test_each_command_of_weightd_exists() -> None:
    named = set(re.findall(r"(?:^|`|bin/)weightd (\w+)", TEXT, re.MULTILINE))
    assert {"check", "doctor"} <= named <= {command.name for command in read_parser(parser()).commands}


@pytest.mark.parametrize("words", [row[0].strip("`").strip() for row in rows("What to look for")])
def test_what_to_look_for_is_logged(words: str) -> None:
    sources = [path.read_text("utf-8") for path in (REPOSITORY / "daemon").glob("**/*.py")]
    assert any(words in source for source in sources)


def test_the_files_that_it_names_are_there() -> None:
    for name in re.findall(r"examples/([\w./@-]+\.conf)", TEXT):
        assert (REPOSITORY / "systemd" / "examples" / name).is_file()
    for name in re.findall(r"\]\((?!#|https?:)([^)#]+)", TEXT):
        assert (REPOSITORY / "docs" / name).is_file()


def test_the_links_within_lead_somewhere() -> None:
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in TEXT.splitlines()}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings


def test_lines_are_short_but_for_tables() -> None:
    assert [line for line in TEXT.splitlines() if len(line) > 120 and not line.startswith("|")] == []
