"""Real processes, small ones."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.waiting import until
from weightd.daemon.host import processes
from weightd.daemon.host.memory import pss_bytes
from weightd.daemon.host.processes import Process, kill, last_words, lives, reap, start

SLEEP = ["sleep", "1000"]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "child.log"


@pytest.fixture
def sleeper(log: Path) -> Iterator[Process]:
    process = start(SLEEP, log)
    yield process
    with contextlib.suppress(OSError):  # the test has reaped it
        os.fstat(process.pidfd)
        kill(process)
        reap(process)


def ended(process: Process, seconds: float = 30.0) -> bool:
    """Whether the pidfd becomes readable in time."""
    poll = select.poll()
    poll.register(process.pidfd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def finished(argv: list[str], log: Path, **environment: str) -> tuple[int | None, str]:
    process = start(argv, log, {**os.environ, **(environment or {})})
    assert ended(process)
    return reap(process), last_words(process)


def test_the_pidfd_tells_when_a_child_has_exited(sleeper: Process) -> None:
    assert not ended(sleeper, 0)
    kill(sleeper)
    assert ended(sleeper)
    assert reap(sleeper) == -signal.SIGKILL
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(sleeper.pidfd)


def test_a_child_is_born_deaf_to_the_terminal_of_the_daemon(sleeper: Process) -> None:
    """It is in the daemon's process group for a moment, which may be that of a Ctrl-C."""
    blocked = Path(f"/proc/{sleeper.pid}/status").read_text("ascii").partition("\nSigBlk:\t")[2].split()[0]
    assert signal.SIGINT in {number for number in signal.Signals if int(blocked, 16) >> (number - 1) & 1}
    assert os.getsid(sleeper.pid) == sleeper.pid
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_child_lives_until_it_begins_to_exit(sleeper: Process) -> None:
    assert lives(sleeper)
    kill(sleeper)
    assert ended(sleeper)
    assert not lives(sleeper)
    reap(sleeper)
    assert not lives(sleeper)


# Its main thread has exited, and another one keeps the process from being gone: as if it took long to give memory back.
GOING = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_child_that_is_about_to_be_gone_lives_no_more(log: Path) -> None:
    process = start([sys.executable, "-c", GOING], log)
    try:
        until(lambda: not lives(process), "its main thread exits")
        assert not ended(process, 0)
    finally:
        kill(process)
        reap(process)


def test_a_child_lives_whatever_the_number_of_its_descriptor(sleeper: Process) -> None:
    pidfd = fcntl.fcntl(sleeper.pidfd, fcntl.F_DUPFD_CLOEXEC, 1024)
    try:
        assert lives(dataclasses.replace(sleeper, pidfd=pidfd))
        kill(sleeper)
        assert ended(sleeper)
        assert not lives(dataclasses.replace(sleeper, pidfd=pidfd))
    finally:
        os.close(pidfd)


def test_a_child_lives_though_nobody_can_look(sleeper: Process) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        assert lives(sleeper)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_child_may_have_any_name(tmp_path: Path, log: Path) -> None:
    program = tmp_path / "a) S 4 4"
    program.symlink_to("/bin/sleep")
    process = start([str(program), "1000"], log)
    try:
        comm = Path(f"/proc/{process.pid}/comm")
        until(lambda: ") S 4 4" in comm.read_text("ascii"), "the program runs")
        assert lives(process)
    finally:
        kill(process)
        reap(process)


def test_the_exit_status_and_both_outputs_are_kept(log: Path) -> None:
    assert finished(["sh", "-c", "echo out; echo err >&2; exit 7"], log) == (7, "out | err")


def test_a_log_is_continued(log: Path) -> None:
    log.write_text("before\n")
    assert finished(["echo", "after"], log)[1] == "before | after"


def test_the_environment_is_the_daemons_and_more(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "1")
    assert finished(["sh", "-c", "echo $OURS $THEIRS"], log, THEIRS="2")[1] == "1 2"
    monkeypatch.setenv("OURS", "3")
    assert finished(["sh", "-c", "echo $OURS $THEIRS"], log)[1] == "1 2 | 3"


def test_a_child_reads_nothing_and_has_its_own_session(sleeper: Process) -> None:
    assert os.getsid(sleeper.pid) == sleeper.pid
    assert Path(f"/proc/{sleeper.pid}/fd/0").readlink() == Path("/dev/null")


def test_killing_a_child_that_has_exited_is_harmless(log: Path) -> None:
    process = start(["true"], log)
    assert ended(process)
    kill(process)
    assert reap(process) == 0


@pytest.mark.parametrize(
    ("argv", "number"), [(["/nonexistent/python"], errno.ENOENT), (["/"], errno.EACCES)], ids=["missing", "directory"]
)
def test_what_cannot_be_started(argv: list[str], number: int, log: Path) -> None:
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        start(argv, log)
    assert caught.value.errno == number


def test_a_child_that_cannot_be_watched_is_not_left_running(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def popen(*arguments: Any, **settings: Any) -> subprocess.Popen[bytes]:
        child: Any = subprocess.Popen(*arguments, **settings)
        started.append(child)
        return started[-1]

    def pidfd_open(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(processes, "subprocess", _Subprocess(popen))
    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    with pytest.raises(OSError, match="Too many open files"):
        start(SLEEP, log)
    assert [each.returncode for each in started] == [-signal.SIGKILL]


class _Subprocess:
    """The module, with another Popen."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self, popen: Any) -> None:
        self.Popen = popen


# --- last words -----------------------------------------------------------------------------------------------------


def words_of(sleeper: Process, content: bytes) -> str:
    sleeper.log.write_bytes(content)
    return last_words(sleeper)


def test_last_words_are_the_last_lines_on_one(sleeper: Process) -> None:
    assert words_of(sleeper, b"") == ""
    assert words_of(sleeper, b"one\n\n  two   three\t4 \n\n") == "one | two three 4"
    assert words_of(sleeper, b"".join(b"line %d\n" % each for each in range(10))) == " | ".join(
        f"line {each}" for each in range(4, 10)
    )
    assert words_of(sleeper, b"\xff\xfe bad\r\nlines\x0bin\x0cit") == "\ufffd\ufffd bad | lines | in | it"


@pytest.mark.parametrize("unit", [b"x", "é".encode(), b"word ", b"\n", b"line\n"])
def test_last_words_are_bounded(sleeper: Process, unit: bytes) -> None:
    assert len(words_of(sleeper, unit * 1_000_000)) <= 4096
    assert words_of(sleeper, unit * 1_000_000 + b"\nthe cause\n").endswith("the cause")


def test_without_a_log_there_are_no_words(sleeper: Process) -> None:
    sleeper.log.unlink()
    assert last_words(sleeper) == ""


# --- memory ---------------------------------------------------------------------------------------------------------


def test_the_memory_of_a_process_is_told_while_it_lives(sleeper: Process) -> None:
    ours = pss_bytes(os.getpid())
    assert ours is not None
    assert ours > 1024 * 1024
    assert pss_bytes(sleeper.pid) is not None
    kill(sleeper)
    assert ended(sleeper)
    assert pss_bytes(sleeper.pid) is None
    reap(sleeper)
    assert pss_bytes(sleeper.pid) is None
