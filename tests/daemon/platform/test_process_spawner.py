"""Spawned processes get exactly the descriptors passed; the spawning thread shares none with the daemon."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from weightd_daemon.platform import process_spawner

LISTED = "import os; print(*sorted(os.listdir('/proc/self/fd'), key=int), os.getsid(0) == os.getpid())"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> set[threading.Thread]:
    """Let each test start without a spawning thread, as the daemon does; return the threads of earlier tests."""
    monkeypatch.setattr(process_spawner, "_spawners", [])
    return {each for each in threading.enumerate() if each.name == "spawning"}


def printed(*descriptors: int, program: str = LISTED, **options: Any) -> str:
    """Return the output of a program that gets these descriptors after 0, 1 and 2."""
    reader, writer = os.pipe()
    pid = process_spawner.spawn([sys.executable, "-c", program], os.environ, [0, writer, 2, *descriptors], **options)
    os.close(writer)
    with os.fdopen(reader, encoding="ascii") as file:
        text = file.read().strip()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return text


def open_descriptors(thread: object = "self") -> list[int]:
    """Return the descriptors of a thread of this process; the main thread has one more, for the directory."""
    return sorted(int(each.name) for each in Path(f"/proc/{thread}/fd").iterdir())


@pytest.mark.parametrize("refused", [(), ("unshare",)])
def test_spawning_thread_shares_no_descriptors(
    refused: tuple[str, ...], known: set[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing a shared descriptor, as a starting program does, could wait for a client's file system."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in refused:
        monkeypatch.setattr(libc, name, mock.Mock(return_value=-1))
    monkeypatch.setattr(ctypes, "CDLL", mock.Mock(return_value=libc))
    early = os.open(os.devnull, os.O_RDONLY)
    process_spawner.start_thread()
    late, count = os.open(os.devnull, os.O_RDONLY), len(open_descriptors())
    os.set_inheritable(late, True)
    # The last descriptor is the one for the listing itself.
    assert printed(early) == "0 1 2 3 4 True"
    assert printed(start_new_session=False) == "0 1 2 3 False"
    [thread] = {each for each in threading.enumerate() if each.name == "spawning"} - known
    own = open_descriptors(thread.native_id)
    assert own[:3] == [0, 1, 2]
    assert len(own) == 4
    assert len(open_descriptors()) == count
    os.close(early)
    os.close(late)


def test_keeps_descriptor_order_and_blocks_only_sigint() -> None:
    with socket.socket() as a, socket.socket(socket.AF_UNIX) as b:
        a.bind(("127.0.0.1", 0))
        b.bind(b"\0weightd-spawning-%d" % os.getpid())
        program = (
            "import signal, socket; print(*(socket.socket(fileno=each).getsockname() for each in (5, 3, 4))); "
            "print(*signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
        )
        names, blocked = printed(b.fileno(), a.fileno(), b.fileno(), program=program).splitlines()
        assert names == f"{b.getsockname()} {b.getsockname()} {a.getsockname()}"
    assert blocked == str(int(signal.SIGINT))


def test_warns_where_unshare_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(
        process_spawner, "_unshare", mock.Mock(side_effect=PermissionError(1, "Operation not permitted"))
    )
    # Other inheritable descriptors of this process come from the program that started the tests.
    assert printed().startswith("0 1 2 3")
    assert (
        "cannot give the spawner thread its own descriptor table ([Errno 1] Operation not permitted): "
        "closing a client's descriptor may delay the start of processes"
    ) in caplog.text


def test_forked_process_starts_its_own_thread() -> None:
    process_spawner.start_thread()
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        os._exit(printed() != "0 1 2 3 True")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_failed_thread_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    count, blocked = len(open_descriptors()), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(OSError, match="can't start new thread"):
            process_spawner.start_thread()
    assert (len(open_descriptors()), signal.pthread_sigmask(signal.SIG_BLOCK, ())) == (count, blocked)
    assert printed() == "0 1 2 3 True"
