"""How long models took is written for the next daemon; whatever lies there instead ends nobody."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from weightd.daemon.continuity import paces
from weightd.daemon.models.pace import Pace
from weightd.daemon.observe.loading import MOST_PACES
from weightd.protocol import limits

PACES = {"m": Pace(10**9, 12.5, 40.0), "n": Pace(0, 1.0)}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "key.paces"
    assert paces.read(path) == {}
    (tmp_path / "key.paces.new").write_text("of a daemon that was killed")
    for written in ({}, PACES):
        paces.write(path, written)
        assert paces.read(path) == written
    assert [*tmp_path.iterdir()] == [path]
    assert path.stat().st_mode & 0o777 == 0o600


def test_as_much_as_is_remembered_is_read(tmp_path: Path) -> None:
    longest = Pace(limits.MAX_COUNT, 1e6 / 7, 1e6 / 7)
    many = {f"{number:0{limits.MAX_MODEL_NAME_BYTES}}": longest for number in range(MOST_PACES)}
    paces.write(tmp_path / "p", many)
    assert paces.read(tmp_path / "p") == many


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "[" * 100_000,
        "{",
        '{"m": 1}',
        '{"m": {}}',
        '{"m": {"nbytes": 1, "load_s": -1}}',
        '{"m": {"nbytes": 1, "load_s": NaN}}',
        json.dumps({"m": "x" * 300_000}),
    ],
)
def test_what_is_something_else_is_forgotten(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "p"
    path.write_text(content)
    with caplog.at_level(logging.WARNING, "weightd"):
        assert paces.read(path) == {}
    assert [
        each.message.startswith(f"how long models took to load is forgotten: {path}: ") for each in caplog.records
    ] == [True]


def test_what_is_no_file_is_forgotten(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link"):
        assert paces.read(tmp_path / name) == {}
    paces.write(tmp_path / "none" / "p", PACES)
