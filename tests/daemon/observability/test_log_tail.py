"""Tests of log tails: the reader reads a limited part of regular log files only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightd_daemon.observability import log_tail
from weightd_daemon.observability.log_tail import LogTailReader
from weightd_daemon.processes.files import GenerationFiles
from weightd_protocol import limits
from weightd_protocol.codec import encode
from weightd_protocol.messages.events import Logs, LogsResponse


def read(directory: Path, process: str = "", lines: int = 100) -> LogsResponse:
    """Run all steps and return the response."""
    reader = LogTailReader(
        b"c", Logs("1", "m", process, lines), {1: GenerationFiles(directory), 2: GenerationFiles(Path("/no"))}
    )
    for _ in range(limits.MAX_LOGS + 1):
        if reader.step():
            break
    return reader.response


def test_returns_last_lines_of_each_process_by_age(tmp_path: Path) -> None:
    (tmp_path / "pages").write_text("no log")
    for name, age in (("m.1.w1", 5), ("m.1.holder", 9), ("m.1.w2", 7)):
        path = tmp_path / f"{name}.log"
        path.write_text(f"{name}\nsecond\nthird\n")
        os.utime(path, (1000 - age, 1000 - age))
    answer = read(tmp_path, lines=2)
    assert [each.process for each in answer.logs] == ["m.1.holder", "m.1.w2", "m.1.w1"]
    assert {(each.text, each.generation) for each in answer.logs} == {("second\nthird\n", 1)}
    assert (answer.logs[0].size, answer.logs[0].changed_at, answer.omitted) == (24, 991.0, 0)
    [one] = read(tmp_path, "m.1.w1").logs
    assert one.text == "m.1.w1\nsecond\nthird\n"


@pytest.mark.parametrize("process", ["../m.1.w1", "none", "/etc/passwd", "m.1.w1\0", ".."])
def test_process_name_cannot_lead_to_other_file(tmp_path: Path, process: str) -> None:
    (tmp_path / "m.1.w1.log").write_text("outside")
    (tmp_path / "in").mkdir()
    assert read(tmp_path / "in", process).logs == ()


def test_ignores_irregular_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link.log").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "directory.log").mkdir()
    (tmp_path / "good.log").write_text("")
    for invalid_name in (b".log", b"\xff.log", b"a\nb.log"):
        (tmp_path / os.fsdecode(invalid_name)).write_text("")
    encode(read(tmp_path))
    assert [(each.process, each.text) for each in read(tmp_path).logs] == [("good", "")]
    assert read(tmp_path / "none").logs == ()


def test_omits_partial_first_line_except_long_one(tmp_path: Path) -> None:
    path = tmp_path / "m.1.w1.log"
    path.write_bytes(b"begun\n" + b"x" * (limits.MAX_LOG_BYTES - 5) + b"\nend\n")
    [one] = read(tmp_path).logs
    assert one.text == "end\n"
    path.write_bytes(b"begun\n" + b"\xff" * 3 * limits.MAX_LOG_BYTES)
    [one] = read(tmp_path).logs
    assert set(one.text) == {"\ufffd"}
    assert len(one.text.encode()) <= limits.MAX_LOG_BYTES


def test_returns_latest_logs_within_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(limits.MAX_LOGS + 3):
        path = tmp_path / f"{number}.log"
        path.write_bytes(b"\xff" * limits.MAX_LOG_BYTES)
        os.utime(path, (number, number))
    answer = read(tmp_path)
    assert (answer.omitted, answer.logs[0].process, len(answer.logs)) == (3, "3", limits.MAX_LOGS)
    assert sum(map(len, encode(answer, max_bytes=limits.MAX_STATUS_BYTES))) < 2 * 2**20
    monkeypatch.setattr(log_tail, "_MAX_ENTRIES", 5)
    assert len(read(tmp_path).logs) == 5
