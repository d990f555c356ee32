"""The cause of a native failure: what the library wrote to file descriptor 2, where that is a file."""

from __future__ import annotations

import importlib
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, ContextManager, List, Pattern

import pytest

from weightd.worker import nativelog
from weightd.worker.nativelog import NativeLog

NativeLogFile = Callable[[], ContextManager[Path]]

engine_module: Any = importlib.import_module("weightd.worker.engines.mindspore_lite.model")
GLOG_ERROR: Pattern[str] = engine_module._GLOG_ERROR

LOG = NativeLog(re.compile(r"^E (?P<text>.*)$"))


class Cause(Exception):
    """What a RuntimeError becomes."""


def write(text: Any) -> None:
    os.write(2, text if isinstance(text, bytes) else text.encode())


def fail(log: NativeLog, error: Exception, *lines: Any) -> None:
    with log.cause_of(Cause):
        for line in lines:
            write(line)
        raise error


def cause_of(*lines: Any, error: str = "failed!", log: NativeLog = LOG) -> str:
    with pytest.raises(Cause) as info:
        fail(log, RuntimeError(error), *lines)
    assert info.value.__cause__ is None
    assert info.value.__suppress_context__
    return str(info.value)


# --- stderr is a file -----------------------------------------------------------------------------------------


def test_the_error_lines_become_the_cause(native_log: NativeLogFile) -> None:
    with native_log():
        write("E of something before\n")
        assert cause_of("I fine\n", "E  the root \n", "W hm\n", "E its caller\n") == "failed!: the root | its caller"


def test_without_error_lines_the_text_stands_alone(native_log: NativeLogFile) -> None:
    with native_log():
        write("E of something before\n")
        assert cause_of("I fine\n") == "failed!"


def test_an_exception_of_several_lines_becomes_one(native_log: NativeLogFile) -> None:
    with native_log():
        assert cause_of("E why\n", error="  build\n failed! ") == "build failed!: why"


def test_lines_that_repeat_stand_once_and_the_first_four_are_enough(native_log: NativeLogFile) -> None:
    with native_log():
        lines = [f"E {text}\n" for text in "aabacdef"]
        assert cause_of(*lines) == "failed!: a | b | c | d"


def test_a_last_line_without_its_end_counts(native_log: NativeLogFile) -> None:
    with native_log():
        assert cause_of("E cut o") == "failed!: cut o"


def test_success_and_other_errors_pass(native_log: NativeLogFile) -> None:
    with native_log() as log:
        with LOG.cause_of(Cause):
            write("E only a complaint\n")
        with pytest.raises(ValueError, match=r"^mine$"):
            fail(LOG, ValueError("mine"), "E no matter\n")
        assert log.read_text() == "E only a complaint\nE no matter\n"


def test_of_a_huge_log_the_end_is_read_and_quickly(native_log: NativeLogFile) -> None:
    with native_log():
        noise = b"I nothing to see here\n" * 50_000
        begin = time.monotonic()
        assert cause_of("E too early\n", noise, "E the root\n") == "failed!: the root"
        assert time.monotonic() - begin < 5


def test_binary_garbage_does_no_harm(native_log: NativeLogFile) -> None:
    with native_log():
        garbage = bytes(range(256)) * 64
        assert cause_of(garbage, b"\nE \xff\xfe root\x00\n", garbage) == "failed!: \ufffd\ufffd root\x00"


@pytest.mark.parametrize("piece", [b"[", b"[ERROR] [", b"[ERROR] a:1", b":1", b"]", b"[ERROR] [x:1] y] "])
def test_a_long_hostile_line_does_not_keep_the_glog_pattern_busy(native_log: NativeLogFile, piece: bytes) -> None:
    with native_log():
        begin = time.monotonic()
        cause_of(b"[ERROR] ", piece * (60 * 1024 // len(piece)), b"\n", log=NativeLog(GLOG_ERROR))
        assert time.monotonic() - begin < 1


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
def test_lines_of_mindspore_lite(line: str, text: Any) -> None:
    match = GLOG_ERROR.match(line)
    assert (match and match.group("text")) == text


def test_the_log_is_emptied_only_when_it_is_large_and_goes_on_from_the_start(native_log: NativeLogFile) -> None:
    with native_log() as log:
        write("x" * 4 * 1024 * 1024)
        nativelog.bound()
        assert log.stat().st_size == 4 * 1024 * 1024
        write("y")
        nativelog.bound()
        assert log.stat().st_size == 0
        write("next\n")
        assert log.read_bytes() == b"next\n"
        assert cause_of("E still works\n") == "failed!: still works"


# --- stderr is something else: in a child, whose file descriptor 2 is its own ------------------------------------

_CHILD = """
import os, re, sys
from weightd.worker import nativelog
log = nativelog.NativeLog(re.compile(r"^E (?P<text>.*)$"))
if "closed" in sys.argv:
    os.close(2)
try:
    with log.cause_of(ValueError):
        if "closed" not in sys.argv:
            os.write(2, b"E why\\n")
        raise RuntimeError("failed!")
except ValueError as error:
    print(error, flush=True)
nativelog.bound()
"""


def child(stderr: Any, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command: List[str] = [sys.executable, "-c", _CHILD, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, env=environment, timeout=60, check=True)
    return done.stdout.decode().strip()


def test_a_child_reads_back_what_it_wrote_to_the_file_that_it_was_given(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as log:
        assert child(log) == "failed!: why"
    assert (tmp_path / "log").read_bytes() == b"E why\n"


def test_a_file_that_has_no_name_any_more_can_be_read_too(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as log:
        (tmp_path / "log").unlink()
        assert child(log) == "failed!: why"


def test_where_stderr_is_not_a_file_there_is_no_cause() -> None:
    assert child(subprocess.PIPE) == "failed!"
    assert child(subprocess.DEVNULL) == "failed!"
    assert child(subprocess.DEVNULL, "closed") == "failed!"


def test_where_stderr_is_a_terminal_there_is_no_cause() -> None:
    ours, theirs = pty.openpty()
    try:
        assert child(theirs) == "failed!"
        assert b"E why" in os.read(ours, 100)
    finally:
        os.close(ours)
        os.close(theirs)
