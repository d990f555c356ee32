"""The log on stderr and in the journal."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from weightd_common.log_text import add_priority, is_connected_to_journal, to_one_line
from weightd_daemon.platform import log_setup
from weightd_daemon.platform.log_setup import Journal, JournalHandler, LineFormatter, print_error, subject_extra

PLAIN = LineFormatter("%(asctime)s %(levelname)-7s %(message)s")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def record(level: int, text: str, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    trace = (type(error), error, error.__traceback__) if error is not None else None
    return logging.LogRecord("weightd", level, __file__, 1, text, arguments, trace)


# --- one line ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("m.1: serving", "m.1: serving"),
        ("INFO    two  blanks", "INFO    two  blanks"),
        ("first\nsecond", "first | second"),
        ("\n first \r\n\n\t second\x0b\u2028third \n", "first | second | third"),
        ("a\tb", "a b"),
        ("\x1b[2J\x07\xa0\udcff", "\\x1b[2J\\x07\\xa0\\udcff"),
        ("größe 模型", "größe 模型"),
        ("", ""),
        ("\n", ""),
    ],
)
def test_escapes_text_to_one_line(text: str, line: str) -> None:
    assert to_one_line(text) == line


@pytest.mark.parametrize(("journal", "prefix"), [(True, "<3>"), (False, "")])
def test_error_is_one_escaped_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, journal: bool, prefix: str
) -> None:
    monkeypatch.setattr(log_setup, "is_connected_to_journal", mock.Mock(return_value=journal))
    print_error("model.onnx: x\x1b[31m\nweightd: good")
    assert capsys.readouterr().err == f"{prefix}weightd: model.onnx: x\\x1b[31m | weightd: good\n"


def test_client_text_cannot_forge_log_lines() -> None:
    forged = record(logging.WARNING, "request %s is in quarantine", "7\n2026-01-01 00:00:00,000 ERROR   all is lost")
    assert re.fullmatch(
        r"[-0-9]{10} [:,0-9]{12} WARNING request 7 \| 2026-01-01 00:00:00,000 ERROR   all is lost is in quarantine",
        PLAIN.format(forged),
    )


# --- the journal ------------------------------------------------------------------------------------------------


@pytest.fixture
def journal_socket(tmp_path: Path) -> Iterator[socket.socket]:
    """Return the journal's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "journal"))
        made.settimeout(20.0)
        yield made


def read_entry(journal_socket: socket.socket) -> dict[str, str]:
    """Return the next entry, read as the journal reads it: from the datagram or from the memory file passed with it."""
    raw, descriptors, _, _ = socket.recv_fds(journal_socket, 1 << 20, 1)
    for descriptor in descriptors:
        assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
        with os.fdopen(descriptor, "rb") as file:
            file.seek(0)
            raw = file.read()
    fields: dict[str, str] = {}
    while raw:
        line, _, raw = raw.partition(b"\n")
        name, mark, value = line.partition(b"=")
        if not mark:
            size = int.from_bytes(raw[:8], "little")
            value, raw = raw[8 : 8 + size], raw[9 + size :]
        fields[name.decode()] = value.decode()
    return fields


@pytest.fixture
def journal(journal_socket: socket.socket) -> Iterator[JournalHandler]:
    handler = JournalHandler(Journal(journal_socket.getsockname()))
    yield handler
    handler.close()


@pytest.mark.parametrize(
    ("level", "priority", "of", "fields"),
    [
        (logging.CRITICAL, 3, {}, {}),
        (logging.ERROR, 3, {}, {}),
        (logging.WARNING, 4, subject_extra("m"), {"MODEL": "m"}),
        (logging.INFO + 5, 6, subject_extra("m", 2, "m.2.w1"), {"MODEL": "m", "GENERATION": "2", "CHILD": "m.2.w1"}),
        (logging.DEBUG, 7, {}, {}),
    ],
)
def test_entry_has_priority_and_subject_fields(
    journal: JournalHandler,
    journal_socket: socket.socket,
    level: int,
    priority: int,
    of: dict[str, object],
    fields: dict[str, str],
) -> None:
    event = record(level, "%s\n%s", "a", "b")
    event.__dict__.update(of)
    journal.handle(event)
    # The journal adds the time.
    entry = {"MESSAGE": "a | b", "PRIORITY": str(priority), "SYSLOG_IDENTIFIER": "weightd"}
    assert read_entry(journal_socket) == {**entry, **fields}


@pytest.mark.parametrize("size", [1, 10_000_000])
def test_long_event_is_one_entry(journal: JournalHandler, journal_socket: socket.socket, size: int) -> None:
    try:
        raise OSError("first\nsecond=" + "x" * size)
    except OSError as error:
        journal.handle(record(logging.ERROR, "it fails", error=error))
    lines = read_entry(journal_socket)["MESSAGE"].split("\n")
    assert lines[:2] == ["it fails", "Traceback (most recent call last):"]
    assert lines[-2:] == ["OSError: first", "second=" + "x" * size]


def test_falls_back_to_stderr_without_a_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = JournalHandler(Journal(str(tmp_path / "gone")))
    handler.handle(record(logging.ERROR, "it fails"))
    handler.close()
    assert capsys.readouterr() == ("", "<3>it fails\n")
    assert add_priority("a\n\nb", 6) == "<6>a\n<6>\n<6>b"


def test_journal_stream_must_match_the_descriptor(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as file:
        status = os.fstat(file.fileno())
        meant = f"{status.st_dev}:{status.st_ino}"
        assert is_connected_to_journal({"JOURNAL_STREAM": meant}, file.fileno())
        for other in ("", "x", meant + "1", f"{status.st_dev}:", f"{status.st_ino}:{status.st_dev}"):
            assert not is_connected_to_journal({"JOURNAL_STREAM": other}, file.fileno())
        assert not is_connected_to_journal({}, file.fileno())
        closed = file.fileno()
    assert not is_connected_to_journal({"JOURNAL_STREAM": meant}, closed)


# --- programs -----------------------------------------------------------------------------------------------------


def stderr_of(program: list[str], log: Path, *, journal: bool) -> str:
    """Return the output of a program to stderr, with or without a JOURNAL_STREAM that names it."""
    with log.open("w") as file:
        status = os.fstat(file.fileno())
        stream = f"{status.st_dev}:{status.st_ino}" if journal else "1:1"
        subprocess.run(program, stderr=file, env={**ENVIRONMENT, "JOURNAL_STREAM": stream}, timeout=60, check=False)
    return log.read_text()


def test_command_error_has_journal_priority(tmp_path: Path) -> None:
    path = tmp_path / "missing"
    program = [sys.executable, "-m", "weightctl", "--socket", f"ipc://{path}", "reload"]
    output = stderr_of(program, tmp_path / "log", journal=True)
    assert re.fullmatch(rf"<3>UNAVAILABLE: no daemon at {re.escape(str(path))}: .*\n", output)


PROGRAM = """
import logging, sys
from weightd_daemon.platform import log_setup
log_setup.ADDRESS = sys.argv[-1]
log_setup.set_up(logging.INFO)
logging.getLogger("weightd").info("serving")
logging.getLogger("weightd").debug("unseen")
raise RuntimeError("not\\ncaught")
"""


def test_journal_receives_events_and_tracebacks(tmp_path: Path, journal_socket: socket.socket) -> None:
    program = [sys.executable, "-c", PROGRAM, journal_socket.getsockname()]
    assert stderr_of(program, tmp_path / "log", journal=True) == ""
    first, crash = read_entry(journal_socket), read_entry(journal_socket)
    assert (first["MESSAGE"], first["PRIORITY"], crash["PRIORITY"]) == ("serving", "6", "3")
    assert crash["MESSAGE"].startswith("weightd failed\nTraceback (most recent call last):\n")
    assert crash["MESSAGE"].endswith("RuntimeError: not\ncaught")


def test_without_journal_writes_plain_lines(tmp_path: Path) -> None:
    lines = stderr_of([sys.executable, "-c", PROGRAM], tmp_path / "log", journal=False).splitlines()
    assert re.fullmatch(r"[-0-9]{10} [:,0-9]{12} INFO    serving", lines[0])
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-2:] == ["RuntimeError: not", "caught"]
