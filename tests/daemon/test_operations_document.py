"""docs/operations.md and docs/tenants.md match the code: exit statuses, configurations, log events, files."""

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
DOCS = REPOSITORY / "docs"
TEXT = (DOCS / "operations.md").read_text("utf-8")
PAGES = {"operations.md": TEXT, "tenants.md": (DOCS / "tenants.md").read_text("utf-8")}
BLOCKS = [block for text in PAGES.values() for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)]
LEVELS = {"err", "warning", "info"}  # the names that journalctl -p accepts


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a page."""
    return {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in text.splitlines()}


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table of a section, without its head."""
    section = re.split(r"\n##+ ", TEXT.partition(f"# {heading}\n")[2])[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_exit_statuses_are_documented() -> None:
    assert [int(row[0]) for row in rows("Exit statuses")] == sorted(exit_codes.MEANINGS)


@pytest.mark.parametrize("block", BLOCKS)
def test_configurations_are_valid(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Examples use more cores than this host may have.
    monkeypatch.setattr(os, "sched_getaffinity", mock.Mock(return_value=set(range(16))))
    # They also name users, groups and keys that do not exist here.
    for name in ("find_user_id", "find_group_id", "read_public_key"):
        monkeypatch.setattr(tenants, name, str)
    monkeypatch.setattr(listeners, "read_secret", str)
    content = tomllib.loads(block)
    content.setdefault("models", {"mlp": {"path": "mlp.onnx"}})  # a block may show tables of one kind only
    config.parse(content, Path("/etc/weightd"))


def test_commands_exist() -> None:
    named = set(re.findall(r"(?:^|`|bin/)weightd (\w+)", TEXT, re.MULTILINE))
    assert {"check", "doctor"} <= named <= {command.name for command in read_parser(parser()).commands}


def test_log_events_have_level_meaning_and_action() -> None:
    events = rows("Log events")
    assert len(events) >= 25
    for _, levels, meaning, action in events:
        assert set(levels.split(", ")) <= LEVELS
        assert meaning
        assert action


@pytest.mark.parametrize("text_part", [row[0].strip("`") for row in rows("Log events")])
def test_log_events_are_logged(text_part: str) -> None:
    sources = [path.read_text("utf-8") for name in ("daemon", "worker") for path in (REPOSITORY / name).glob("**/*.py")]
    assert any(text_part in source for source in sources)


@pytest.mark.parametrize("text", PAGES.values(), ids=PAGES)
def test_files_exist(text: str) -> None:
    for name in re.findall(r"examples/([\w./@-]+\.conf)", text):
        assert (REPOSITORY / "systemd" / "examples" / name).is_file()
    for name in re.findall(r"\]\((?!#|https?:)([^)#]+)", text):
        assert (DOCS / name).is_file()


@pytest.mark.parametrize("text", PAGES.values(), ids=PAGES)
def test_anchors_exist(text: str) -> None:
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors(text)
    for name, anchor in re.findall(r"\]\(([\w-]+\.md)#([^)]+)\)", text):
        assert anchor in anchors((DOCS / name).read_text("utf-8"))


@pytest.mark.parametrize("path", [*DOCS.glob("*.md"), REPOSITORY / "README.md"], ids=lambda path: path.name)
def test_links_from_other_pages_have_an_anchor(path: Path) -> None:
    for name, anchor in re.findall(r"\]\((?:docs/)?(operations\.md|tenants\.md)#([^)]+)\)", path.read_text("utf-8")):
        assert anchor in anchors(PAGES[name])


@pytest.mark.parametrize("text", PAGES.values(), ids=PAGES)
def test_lines_are_short_except_in_tables(text: str) -> None:
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize(("name", "most"), [("operations.md", 5600), ("tenants.md", 2000)])
def test_pages_are_short(name: str, most: int) -> None:
    assert len(PAGES[name].split()) <= most
