"""Start, adopt, watch and reap small real processes."""

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
    with contextlib.suppress(OSError):  # the test may have reaped the process
        os.fstat(process.pidfd)
        kill(process)
        reap(process)


def has_exited(process: ChildProcess, seconds: float = 30.0) -> bool:
    """Wait until the pidfd is readable."""
    poll = select.poll()
    poll.register(process.pidfd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def test_child_has_a_new_session_and_blocks_sigint(sleeper: ChildProcess) -> None:
    """Ctrl-C can reach a new child, which is in the daemon's process group for a moment."""
    blocked = Path(f"/proc/{sleeper.pid}/status").read_text("ascii").partition("\nSigBlk:\t")[2].split()[0]
    assert signal.SIGINT in {number for number in signal.Signals if int(blocked, 16) >> (number - 1) & 1}
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert os.getsid(sleeper.pid) == sleeper.pid
    assert str(Path(f"/proc/{sleeper.pid}/fd/0").readlink()).startswith("/memfd:weightd-order")


def test_is_alive_until_exit_with_any_descriptor_number(sleeper: ChildProcess) -> None:
    pidfd = fcntl.fcntl(sleeper.pidfd, fcntl.F_DUPFD_CLOEXEC, 1024)
    twin = dataclasses.replace(sleeper, pidfd=pidfd)
    assert not has_exited(sleeper, 0)
    assert [is_alive(sleeper), is_alive(twin), read_process_memory(sleeper.pid) is None] == [True, True, False]
    kill(sleeper)
    assert has_exited(sleeper)
    assert [is_alive(sleeper), is_alive(twin), read_process_memory(sleeper.pid)] == [False, False, None]
    kill(sleeper)  # has no effect on a zombie
    assert reap(sleeper) == -signal.SIGKILL
    assert [is_alive(sleeper), read_process_memory(sleeper.pid)] == [False, None]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(sleeper.pidfd)
    os.close(pidfd)


# The main thread exits while another one keeps the process, like a process that is slow to release its memory.
EXITING = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_exiting_child_is_not_alive(log: Path) -> None:
    process = start([sys.executable, "-c", EXITING], log)
    try:
        until(lambda: not is_alive(process), "the main thread has exited")
        assert not has_exited(process, 0)
    finally:
        kill(process)
        reap(process)


def test_adopts_only_children_of_this_process(log: Path) -> None:
    with subprocess.Popen(SLEEP) as other:
        process = adopt(other.pid, log)
        assert (is_alive(process), process.log) == (True, log)
        kill(process)
        assert has_exited(process)
        assert reap(process) == -signal.SIGKILL
    with pytest.raises(ChildProcessError):
        adopt(os.getpid(), log)


def test_is_alive_without_free_descriptors(sleeper: ChildProcess) -> None:
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


def test_child_name_may_contain_any_characters(tmp_path: Path, log: Path) -> None:
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


def test_reports_status_output_and_environment(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "2")
    log.write_text("before\n")
    for environment, text in (({"A": "1"}, "before | 1 | err"), (None, "before | 1 | err | 2 | err")):
        process = start(["sh", "-c", "echo $A; echo err >&2; exit 7"], log, environment)
        assert has_exited(process)
        assert (reap(process), log_tail(process)) == (7, text)
    log.unlink()
    assert log_tail(process) == ""


@pytest.mark.parametrize(("program", "number"), [("/nonexistent/python", errno.ENOENT), ("/", errno.EACCES)])
def test_reports_program_that_cannot_start(program: str, number: int, log: Path) -> None:
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        start([program], log)
    assert caught.value.errno == number


def test_kills_child_that_cannot_be_watched(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_kills_adopted_child_that_cannot_be_watched(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(SLEEP) as child:
        monkeypatch.setattr(os, "pidfd_open", mock.Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
        with pytest.raises(OSError, match="Too many open files"):
            adopt(child.pid, log)
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)


# --- the end of the log ---------------------------------------------------------------------------------------------


def tail_of(sleeper: ChildProcess, content: bytes) -> str:
    sleeper.log.write_bytes(content)
    return log_tail(sleeper)


def test_log_tail_joins_the_last_lines(sleeper: ChildProcess) -> None:
    assert tail_of(sleeper, b"") == ""
    assert tail_of(sleeper, b"one\n\n  two   three\t4 \n\n") == "one | two three 4"
    assert tail_of(sleeper, b"".join(b"line %d\n" % each for each in range(10))) == " | ".join(
        f"line {each}" for each in range(4, 10)
    )
    assert tail_of(sleeper, b"\xff\xfe bad\r\nlines\x0bin\x0cit") == "\ufffd\ufffd bad | lines | in | it"


def test_log_tail_begins_with_the_limit_hint(sleeper: ChildProcess) -> None:
    text = tail_of(sleeper, b"Traceback\nRuntimeError: can't start new thread\n")
    assert text.startswith("cannot start a process or thread: ")
    assert text.endswith("; original error: Traceback | RuntimeError: can't start new thread")


@pytest.mark.parametrize("unit", [b"x", "é".encode(), b"word ", b"\n", b"line\n"])
def test_log_tail_is_bounded(sleeper: ChildProcess, unit: bytes) -> None:
    assert len(tail_of(sleeper, unit * 1_000_000)) <= 4096
    assert tail_of(sleeper, unit * 1_000_000 + b"\nthe cause\n").endswith("the cause")
