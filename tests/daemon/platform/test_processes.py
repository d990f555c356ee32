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
from unittest import mock

import pytest

from testkit.waiting import until
from weightd_daemon.platform import process_spawner
from weightd_daemon.platform.memory import read_process_memory
from weightd_daemon.platform.processes import ChildProcess, adopt, is_alive, kill, log_tail, reap, start

SLEEP = ["sleep", "1000"]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "child.log"


@pytest.fixture
def sleeper(log: Path) -> Iterator[ChildProcess]:
    process = start(SLEEP, log)
    yield process
    with contextlib.suppress(OSError):  # the test has reaped it
        os.fstat(process.pidfd)
        kill(process)
        reap(process)


def ended(process: ChildProcess, seconds: float = 30.0) -> bool:
    """Whether the pidfd becomes readable in time."""
    poll = select.poll()
    poll.register(process.pidfd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def test_a_child_has_a_session_of_its_own_and_is_born_deaf_to_the_terminal(sleeper: ChildProcess) -> None:
    """It is in the daemon's process group for a moment, which may be that of a Ctrl-C."""
    blocked = Path(f"/proc/{sleeper.pid}/status").read_text("ascii").partition("\nSigBlk:\t")[2].split()[0]
    assert signal.SIGINT in {number for number in signal.Signals if int(blocked, 16) >> (number - 1) & 1}
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert os.getsid(sleeper.pid) == sleeper.pid
    assert str(Path(f"/proc/{sleeper.pid}/fd/0").readlink()).startswith("/memfd:weightd-order")


def test_a_child_lives_until_it_has_exited_whatever_the_number_of_its_descriptor(sleeper: ChildProcess) -> None:
    pidfd = fcntl.fcntl(sleeper.pidfd, fcntl.F_DUPFD_CLOEXEC, 1024)
    twin = dataclasses.replace(sleeper, pidfd=pidfd)
    assert not ended(sleeper, 0)
    assert [is_alive(sleeper), is_alive(twin), read_process_memory(sleeper.pid) is None] == [True, True, False]
    kill(sleeper)
    assert ended(sleeper)
    assert [is_alive(sleeper), is_alive(twin), read_process_memory(sleeper.pid)] == [False, False, None]
    kill(sleeper)  # which is harmless
    assert reap(sleeper) == -signal.SIGKILL
    assert [is_alive(sleeper), read_process_memory(sleeper.pid)] == [False, None]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(sleeper.pidfd)
    os.close(pidfd)


# Its main thread has exited, and another one keeps the process from being gone: as if it took long to give memory back.
GOING = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_child_that_is_about_to_be_gone_lives_no_more(log: Path) -> None:
    process = start([sys.executable, "-c", GOING], log)
    try:
        until(lambda: not is_alive(process), "its main thread exits")
        assert not ended(process, 0)
    finally:
        kill(process)
        reap(process)


def test_a_child_that_was_not_started_here_is_adopted_and_nobody_else(log: Path) -> None:
    with subprocess.Popen(SLEEP) as other:
        process = adopt(other.pid, log)
        assert (is_alive(process), process.log) == (True, log)
        kill(process)
        assert ended(process)
        assert reap(process) == -signal.SIGKILL
    with pytest.raises(ChildProcessError):
        adopt(os.getpid(), log)


def test_a_child_lives_though_nobody_can_look(sleeper: ChildProcess) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        assert is_alive(sleeper)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_child_may_have_any_name(tmp_path: Path, log: Path) -> None:
    program = tmp_path / "a) S 4 4"
    program.symlink_to("/bin/sleep")
    process = start([str(program), "1000"], log)
    try:
        comm = Path(f"/proc/{process.pid}/comm")
        until(lambda: ") S 4 4" in comm.read_text("ascii"), "the program runs")
        assert is_alive(process)
    finally:
        kill(process)
        reap(process)


def test_status_outputs_and_environment(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "2")
    log.write_text("before\n")
    for environment, words in (({"A": "1"}, "before | 1 | err"), (None, "before | 1 | err | 2 | err")):
        process = start(["sh", "-c", "echo $A; echo err >&2; exit 7"], log, environment)
        assert ended(process)
        assert (reap(process), log_tail(process)) == (7, words)
    log.unlink()
    assert log_tail(process) == ""


@pytest.mark.parametrize(("program", "number"), [("/nonexistent/python", errno.ENOENT), ("/", errno.EACCES)])
def test_what_cannot_be_started(program: str, number: int, log: Path) -> None:
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        start([program], log)
    assert caught.value.errno == number


def test_a_child_that_cannot_be_watched_is_not_left_running(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    real = process_spawner.spawn

    def spawn(*arguments: Any, **settings: Any) -> int:
        started.append(real(*arguments, **settings))
        return started[-1]

    monkeypatch.setattr(process_spawner, "spawn", spawn)
    monkeypatch.setattr(os, "pidfd_open", mock.Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
    with pytest.raises(OSError, match="Too many open files"):
        start(SLEEP, log)
    [pid] = started
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_neither_is_one_that_was_forked_by_another(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(SLEEP) as child:
        monkeypatch.setattr(os, "pidfd_open", mock.Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
        with pytest.raises(OSError, match="Too many open files"):
            adopt(child.pid, log)
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)


# --- last words -----------------------------------------------------------------------------------------------------


def words_of(sleeper: ChildProcess, content: bytes) -> str:
    sleeper.log.write_bytes(content)
    return log_tail(sleeper)


def test_last_words_are_the_last_lines_on_one(sleeper: ChildProcess) -> None:
    assert words_of(sleeper, b"") == ""
    assert words_of(sleeper, b"one\n\n  two   three\t4 \n\n") == "one | two three 4"
    assert words_of(sleeper, b"".join(b"line %d\n" % each for each in range(10))) == " | ".join(
        f"line {each}" for each in range(4, 10)
    )
    assert words_of(sleeper, b"\xff\xfe bad\r\nlines\x0bin\x0cit") == "\ufffd\ufffd bad | lines | in | it"


def test_last_words_begin_with_the_limit_that_they_tell_of(sleeper: ChildProcess) -> None:
    words = words_of(sleeper, b"Traceback\nRuntimeError: can't start new thread\n")
    assert words.startswith("cannot start a process or thread: ")
    assert words.endswith("; original error: Traceback | RuntimeError: can't start new thread")


@pytest.mark.parametrize("unit", [b"x", "é".encode(), b"word ", b"\n", b"line\n"])
def test_last_words_are_bounded(sleeper: ChildProcess, unit: bytes) -> None:
    assert len(words_of(sleeper, unit * 1_000_000)) <= 4096
    assert words_of(sleeper, unit * 1_000_000 + b"\nthe cause\n").endswith("the cause")
