"""What an operator, and the journal, read on stderr."""

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


# --- a line -----------------------------------------------------------------------------------------------------


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
def test_foreign_text_is_one_line_without_tricks(text: str, line: str) -> None:
    assert to_one_line(text) == line


@pytest.mark.parametrize(("journal", "prefix"), [(True, "<3>"), (False, "")])
def test_a_complaint_is_one_line_without_tricks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, journal: bool, prefix: str
) -> None:
    monkeypatch.setattr(log_setup, "is_connected_to_journal", mock.Mock(return_value=journal))
    print_error("model.onnx: x\x1b[31m\nweightd: good")
    assert capsys.readouterr().err == f"{prefix}weightd: model.onnx: x\\x1b[31m | weightd: good\n"


def test_who_asks_cannot_forge_an_event() -> None:
    forged = record(logging.WARNING, "request %s is in quarantine", "7\n2026-01-01 00:00:00,000 ERROR   all is lost")
    assert re.fullmatch(
        r"[-0-9]{10} [:,0-9]{12} WARNING request 7 \| 2026-01-01 00:00:00,000 ERROR   all is lost is in quarantine",
        PLAIN.format(forged),
    )


# --- the journal ------------------------------------------------------------------------------------------------


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    """A journal's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "journal"))
        made.settimeout(20.0)
        yield made


def heard(listening: socket.socket) -> dict[str, str]:
    """The next entry, read as the journal reads it: from the datagram, or from a file in memory that came with it."""
    raw, descriptors, _, _ = socket.recv_fds(listening, 1 << 20, 1)
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
def journal(listening: socket.socket) -> Iterator[JournalHandler]:
    handler = JournalHandler(Journal(listening.getsockname()))
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
def test_an_entry_says_how_severe_it_is_and_what_it_is_about(
    journal: JournalHandler,
    listening: socket.socket,
    level: int,
    priority: int,
    of: dict[str, object],
    fields: dict[str, str],
) -> None:
    event = record(level, "%s\n%s", "a", "b")
    event.__dict__.update(of)
    journal.handle(event)
    # The time is the journal's.
    entry = {"MESSAGE": "a | b", "PRIORITY": str(priority), "SYSLOG_IDENTIFIER": "weightd"}
    assert heard(listening) == {**entry, **fields}


@pytest.mark.parametrize("size", [1, 10_000_000])
def test_an_event_is_one_entry_however_long(journal: JournalHandler, listening: socket.socket, size: int) -> None:
    try:
        raise OSError("first\nsecond=" + "x" * size)
    except OSError as error:
        journal.handle(record(logging.ERROR, "it fails", error=error))
    lines = heard(listening)["MESSAGE"].split("\n")
    assert lines[:2] == ["it fails", "Traceback (most recent call last):"]
    assert lines[-2:] == ["OSError: first", "second=" + "x" * size]


def test_a_journal_that_is_gone_is_told_by_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = JournalHandler(Journal(str(tmp_path / "gone")))
    handler.handle(record(logging.ERROR, "it fails"))
    handler.close()
    assert capsys.readouterr() == ("", "<3>it fails\n")
    assert add_priority("a\n\nb", 6) == "<6>a\n<6>\n<6>b"


def test_only_the_descriptor_that_the_variable_means_is_the_journal(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as file:
        status = os.fstat(file.fileno())
        meant = f"{status.st_dev}:{status.st_ino}"
        assert is_connected_to_journal({"JOURNAL_STREAM": meant}, file.fileno())
        for other in ("", "x", meant + "1", f"{status.st_dev}:", f"{status.st_ino}:{status.st_dev}"):
            assert not is_connected_to_journal({"JOURNAL_STREAM": other}, file.fileno())
        assert not is_connected_to_journal({}, file.fileno())
        closed = file.fileno()
    assert not is_connected_to_journal({"JOURNAL_STREAM": meant}, closed)


# --- the command --------------------------------------------------------------------------------------------------


def stderr_of(program: list[str], log: Path, *, journal: bool) -> str:
    """What a program writes to a stderr that is, or is not, said to be the journal."""
    with log.open("w") as file:
        status = os.fstat(file.fileno())
        stream = f"{status.st_dev}:{status.st_ino}" if journal else "1:1"
        subprocess.run(program, stderr=file, env={**ENVIRONMENT, "JOURNAL_STREAM": stream}, timeout=60, check=False)
    return log.read_text()


def test_a_command_says_why_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "missing"
    program = [sys.executable, "-m", "weightctl", "--socket", f"ipc://{path}", "reload"]
    said = stderr_of(program, tmp_path / "log", journal=True)
    assert re.fullmatch(rf"<3>UNAVAILABLE: no daemon at {re.escape(str(path))}: .*\n", said)


PROGRAM = """
import logging, sys
from weightd_daemon.platform import log_setup
log_setup.ADDRESS = sys.argv[-1]
log_setup.set_up(logging.INFO)
logging.getLogger("weightd").info("serving")
logging.getLogger("weightd").debug("unseen")
raise RuntimeError("nobody\\ncatches this")
"""


def test_the_journal_gets_events_and_a_crash(tmp_path: Path, listening: socket.socket) -> None:
    program = [sys.executable, "-c", PROGRAM, listening.getsockname()]
    assert stderr_of(program, tmp_path / "log", journal=True) == ""
    first, crash = heard(listening), heard(listening)
    assert (first["MESSAGE"], first["PRIORITY"], crash["PRIORITY"]) == ("serving", "6", "3")
    assert crash["MESSAGE"].startswith("weightd fails\nTraceback (most recent call last):\n")
    assert crash["MESSAGE"].endswith("RuntimeError: nobody\ncatches this")


def test_elsewhere_all_is_as_ever(tmp_path: Path) -> None:
    lines = stderr_of([sys.executable, "-c", PROGRAM], tmp_path / "log", journal=False).splitlines()
    assert re.fullmatch(r"[-0-9]{10} [:,0-9]{12} INFO    serving", lines[0])
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-2:] == ["RuntimeError: nobody", "catches this"]
