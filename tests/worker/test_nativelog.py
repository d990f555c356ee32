"""Tests of the native log: the cause of a failure is read from file descriptor 2 if that is a file."""

from __future__ import annotations

import contextlib
import importlib
import os
import pty
import re
import time
from pathlib import Path
from typing import Any, Callable, ContextManager, Pattern

import pytest

from weightd_worker import nativelog
from weightd_worker.nativelog import NativeLog

NativeLogFile = Callable[[], ContextManager[Path]]

engine_module: Any = importlib.import_module("weightd_worker.engines.mindspore_lite.model")
GLOG_ERROR: Pattern[str] = engine_module._GLOG_ERROR

LOG = NativeLog(re.compile(r"^E (?P<text>.*)$"))
NOISE = b"I nothing to see here\n" * 50_000
GARBAGE = bytes(range(256)) * 64


class Cause(Exception):
    """The exception into which a RuntimeError is converted."""


def fail(log: NativeLog, error: Exception, written: bytes) -> None:
    with log.translate_errors(Cause):
        with contextlib.suppress(OSError):  # The descriptor may be closed.
            os.write(2, written)
        raise error


def cause_of(written: bytes, error: str = "failed!", log: NativeLog = LOG) -> str:
    with pytest.raises(Cause) as info:
        fail(log, RuntimeError(error), written)
    assert info.value.__cause__ is None
    assert info.value.__suppress_context__
    return str(info.value)


@pytest.mark.parametrize(
    ("written", "cause"),
    [
        (b"I fine\nE  the root \nW hm\nE its caller\n", "failed!: the root | its caller"),
        (b"I fine\n", "failed!"),
        # Repeated lines appear once, and only the first four are used.
        (b"".join(b"E %c\n" % each for each in b"aabacdef"), "failed!: a | b | c | d"),
        (b"E cut o", "failed!: cut o"),
        # Only the end of a huge log is read.
        (b"E too early\n" + NOISE + b"E the root\n", "failed!: the root"),
        (GARBAGE + b"\nE \xff\xfe root\x00\n" + GARBAGE, "failed!: \ufffd\ufffd root\x00"),
    ],
)
def test_error_lines_become_the_cause(written: bytes, cause: str, native_log: NativeLogFile) -> None:
    with native_log() as log:
        os.write(2, b"E of something before\n")
        assert cause_of(written) == cause
        log.unlink()  # A file without a name is readable, too.
        assert cause_of(written) == cause


def test_joins_lines_of_exception(native_log: NativeLogFile) -> None:
    with native_log():
        assert cause_of(b"E why\n", error="  build\n failed! ") == "build failed!: why"


def test_success_and_other_errors_pass(native_log: NativeLogFile) -> None:
    with native_log() as log:
        with LOG.translate_errors(Cause):
            os.write(2, b"E only a complaint\n")
        with pytest.raises(ValueError, match=r"^mine$"):
            fail(LOG, ValueError("mine"), b"E no matter\n")
        assert log.read_text() == "E only a complaint\nE no matter\n"


@pytest.mark.parametrize("piece", [b"[", b"[ERROR] [", b"[ERROR] a:1", b":1", b"]", b"[ERROR] [x:1] y] "])
def test_glog_pattern_is_fast_on_hostile_lines(native_log: NativeLogFile, piece: bytes) -> None:
    with native_log():
        begin = time.process_time()
        cause_of(b"[ERROR] " + piece * (60 * 1024 // len(piece)) + b"\n", log=NativeLog(GLOG_ERROR))
        assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "[ERROR] ME(2,7f86,python):2026-11-20-10:14:56.1.821 [lite/src/x_y.cc:48] PreProcess] InferShape fail!",
            "InferShape fail!",
        ),
        ("[CRITICAL] LITE(1,2,python):2026 [a/b.cc:277] operator()] parameter is nullptr.", "parameter is nullptr."),
        ("[ERROR] ME(1,2,python):2026 [a/b.cc:7] the old form has no function", "the old form has no function"),
        ("[ERROR] ME(1,2,p):2026 [a/b.cc:7] Run] shape [1,4] of [x:0] is wrong", "shape [1,4] of [x:0] is wrong"),
        ("[WARNING] ME(1,2,python):2026 [a/b.cc:7] Run] never mind", None),
        ("an [ERROR] ME(1,2,python):2026 [a/b.cc:7] Run] in the middle", None),
        ("ERROR weightd.worker: [a/b.cc:7] Run] of our own", None),
    ],
)
def test_parses_lines_of_mindspore_lite(line: str, text: Any) -> None:
    match = GLOG_ERROR.match(line)
    assert (match and match.group("text")) == text


def test_truncates_only_large_logs(native_log: NativeLogFile) -> None:
    with native_log() as log:
        os.write(2, b"x" * 4 * 1024 * 1024)
        nativelog.truncate_if_too_large()
        assert log.stat().st_size == 4 * 1024 * 1024
        os.write(2, b"y")
        nativelog.truncate_if_too_large()
        assert log.stat().st_size == 0
        assert cause_of(b"E still works\n") == "failed!: still works"
        assert log.read_bytes() == b"E still works\n"


@pytest.mark.parametrize("what", ["pipe", "terminal", "null", "closed"])
def test_no_cause_unless_stderr_is_a_file(what: str, native_log: NativeLogFile) -> None:
    ours, theirs = pty.openpty() if what == "terminal" else os.pipe()
    null = os.open(os.devnull, os.O_WRONLY)
    with native_log():
        if what == "closed":
            os.close(2)
        else:
            os.dup2(null if what == "null" else theirs, 2)
        cause = cause_of(b"E why\n")
        nativelog.truncate_if_too_large()
    for each in (ours, theirs, null):
        os.close(each)
    assert cause == "failed!"
