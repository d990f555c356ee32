"""The check of prose: the phrases that it counts, and its ceilings."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests import voice


def _phrases(path: str, text: str) -> list[tuple[int, str]]:
    return [(each.line, each.phrase) for each in voice.phrases(path, text)]


def test_reads_docstrings_comments_and_long_literals() -> None:
    source = '"""One line.\n\nThe client\nis told."""\nx = 1  # nobody\nlog(f"{x} is told so")\ny = "is told"\n'
    assert sorted(_phrases("m.py", source)) == [(3, "is told"), (5, "nobody"), (6, "is told")]


def test_joins_adjacent_comment_lines() -> None:
    assert _phrases("m.py", "# The client is\n# told.\n\n# A plain comment.\n") == [(1, "is told")]


def test_reads_markdown_without_code() -> None:
    page = "# Title\n\nThe client is\ntold.\n\n```sh\necho nobody\n```\n\n| who asks | nobody |\n"
    assert sorted(_phrases("p.md", page)) == [(3, "is told"), (10, "nobody"), (10, "who asks")]


@pytest.mark.parametrize(
    "text",
    [
        "The client that sends it waits.",
        "The user who started it.",
        "What does it cost?",
        "So long as it runs.",
        "whole",
    ],
)
def test_accepts_plain_english(text: str) -> None:
    assert _phrases("p.md", text) == []


def test_reports_replaced_terms() -> None:
    (found,) = voice.phrases("p.md", "The desk dispatches.")
    assert (found.phrase, found.advice) == ("desk", "dispatcher")


def test_groups_files_by_folder() -> None:
    paths = ("README.md", "daemon/weightd_daemon/a.py", "tests/voice.py", "tests/e2e/ascend/a.py")
    assert [voice.folder(each) for each in paths] == ["README.md", "daemon", "tests", "tests/e2e"]


def test_counts_above_and_below_ceilings_are_errors() -> None:
    errors = list(voice.excesses({"a": 2, "b": 1, "c": 3}, {"a": 1, "b": 2, "c": 3}))
    assert [each.partition(";")[0] for each in errors] == [
        "a: expected at most 1 phrases, got 2",
        "b: 1 phrases, ceiling 2",
    ]


def test_bounds_of_pages_are_exact() -> None:
    assert list(voice.oversize(voice.README_LINES, voice.DOCS_WORDS, 0)) == []
    assert list(voice.oversize(1, voice.DOCS_WORDS + 5, voice.DOCS_WORDS + 5)) == []
    assert list(voice.oversize(voice.README_LINES + 1, voice.DOCS_WORDS + 1, 0)) == [
        "README.md: expected at most 120 lines, got 121",
        "docs: expected at most 40000 words, got 40001",
    ]


def test_lowers_ceilings_but_never_raises_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(voice, "ROOT", tmp_path)
    monkeypatch.setattr(voice, "CEILINGS", tmp_path / "ceilings.json")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "README.md").write_text("Nobody.\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "page.md").write_text("The client is told.\n")
    voice.CEILINGS.write_text(json.dumps({"docs_words": 50_000, "phrases": {"README.md": 3}}))
    assert voice.main(["--lower"]) == 1
    assert json.loads(voice.CEILINGS.read_text()) == {"docs_words": voice.DOCS_WORDS, "phrases": {"README.md": 1}}
    assert capsys.readouterr().out.startswith("a: expected at most 0 phrases, got 1;")
    (tmp_path / "a" / "page.md").write_text("The daemon notifies the client.\n")
    assert voice.main([]) == 0
