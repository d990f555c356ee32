"""Exits of real processes, with and without pidfds."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest

from testkit.waiting import until
from weightd_daemon.platform import exit_watch


def refuse(number: int) -> mock.Mock:
    return mock.Mock(side_effect=OSError(number, os.strerror(number)))


@pytest.fixture(params=["pidfds", "ENOSYS", "EPERM", "old Python", "no signals by pidfd"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    how: str = request.param
    if how in ("ENOSYS", "EPERM"):
        monkeypatch.setattr(os, "pidfd_open", refuse(getattr(errno, how)))
    elif how == "old Python":
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.delattr(signal, "pidfd_send_signal")
    elif how == "no signals by pidfd":
        monkeypatch.setattr(signal, "pidfd_send_signal", refuse(errno.ENOSYS))
    return how


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def test_reports_exit_and_leaves_the_status(system: str, child: subprocess.Popen[bytes]) -> None:
    descriptor = exit_watch.watch_exit(child.pid)
    assert not os.get_inheritable(descriptor)
    assert not exit_watch.has_exited(descriptor)
    exit_watch.send_signal(descriptor, child.pid, signal.SIGTERM)
    until(lambda: exit_watch.has_exited(descriptor), f"the exit is reported: {system}")
    exit_watch.send_signal(descriptor, child.pid, signal.SIGKILL)  # has no effect on a zombie
    assert os.waitpid(child.pid, 0) == (child.pid, signal.SIGTERM)
    assert exit_watch.has_exited(descriptor)
    exit_watch.send_signal(descriptor, child.pid, signal.SIGKILL)
    os.close(descriptor)
    assert not [each for each in threading.enumerate() if each.name == f"exit of {child.pid}" and not _ends(each)]


def _ends(thread: threading.Thread) -> bool:
    thread.join(30)
    return not thread.is_alive()


def test_does_not_signal_a_reused_pid(
    system: str, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = exit_watch.watch_exit(child.pid)
    child.kill()
    # The process is reaped here, possibly before the watch sees the exit.
    child.wait()
    until(lambda: exit_watch.has_exited(descriptor), f"the exit is reported: {system}")
    monkeypatch.setattr(os, "kill", mock.Mock(side_effect=AssertionError))
    exit_watch.send_signal(descriptor, child.pid, signal.SIGKILL)
    os.close(descriptor)


def test_reports_exit_before_the_watch(system: str) -> None:
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        descriptor = exit_watch.watch_exit(child.pid)
        until(lambda: exit_watch.has_exited(descriptor), f"the exit is reported: {system}")
    assert child.returncode == 0
    os.close(descriptor)


def test_explains_missing_pidfds(system: str) -> None:
    expected = {
        "ENOSYS": "pidfd_open: Function not implemented",
        "EPERM": "pidfd_open: Operation not permitted",
        "old Python": "pidfd_open: this Python was compiled for Linux before 5.3",
    }
    assert exit_watch.unavailable_reason() == expected.get(system, "")


def test_descriptor_exhaustion_is_not_a_missing_pidfd(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pidfd_open", refuse(errno.EMFILE))
    with pytest.raises(OSError, match="Too many open files"):
        exit_watch.watch_exit(child.pid)


def test_closes_descriptors_if_no_thread_can_start(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(os, "pidfd_open", refuse(errno.ENOSYS))
    monkeypatch.setattr(threading.Thread, "start", full)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(BlockingIOError, match="can't start new thread"):
        exit_watch.watch_exit(child.pid)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
