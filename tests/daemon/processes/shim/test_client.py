"""Real shims with real children, small ones."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit import memory
from testkit.shims import FORKING, LIMIT_S, ended
from testkit.stopping import stopped
from weightd_daemon.platform.processes import ChildProcess, kill, reap
from weightd_daemon.processes.shim import client, process
from weightd_daemon.processes.shim.client import ShimClient, ShimLost, wait_until_exited
from weightd_daemon.processes.spec import ProcessSpec, SurvivingProcess

MIB = 1024 * 1024
SLEEP = ["sleep", "1000"]
PATH = os.environ.get("PATH", os.defpath)

# Dies with its shim, and says when it would.
_DEPENDENT = """
import sys, time
from weightd_common.process_start import die_with_parent
die_with_parent(int(sys.argv[1]))
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "private"
    made.mkdir()
    return made


@pytest.fixture
def start_keeper(directory: Path) -> Iterator[Callable[..., ShimClient]]:
    made: list[tuple[int, int]] = []

    def start(*others: Path) -> ShimClient:
        keeper = client.start_shim(directory, *others)
        made.append((keeper.pid, os.pidfd_open(keeper.pid)))
        return keeper

    yield start
    for pid, pidfd in made:
        # Whoever has let go of it, or has killed it: it ends, and its children with it.
        if not select.select([pidfd], [], [], LIMIT_S)[0]:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the test has waited for it
            os.waitpid(pid, 0)
        os.close(pidfd)


@pytest.fixture
def keeper(start_keeper: Callable[..., ShimClient]) -> Iterator[ShimClient]:
    made = start_keeper()
    yield made
    if made.descriptor >= 0:  # else the test has let go of it
        made.close()


def launch(argv: list[str], log: Path) -> ProcessSpec:
    return ProcessSpec("c", argv, [], log, {"PATH": PATH})


def exited(child: ChildProcess) -> int | None:
    assert select.select([child.pidfd], [], [], LIMIT_S)[0]
    return reap(child)


def dependent(keeper: ShimClient, fifo: Path) -> ChildProcess:
    """A child that dies with its shim; it is ready to."""
    os.mkfifo(fifo)
    read = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        child = keeper.start(
            ProcessSpec("d", [sys.executable, "-c", _DEPENDENT, str(keeper.pid)], [], fifo, environment)
        )
        assert select.select([read], [], [], LIMIT_S)[0]
        assert os.read(read, 100) == b"ready\n"
    finally:
        os.close(read)
    return child


# --- children -------------------------------------------------------------------------------------------------------


def test_an_exit_status_is_told_and_a_log_is_continued(keeper: ShimClient, tmp_path: Path) -> None:
    scripts = {"exit 0": 0, "exit 7": 7, "kill -9 $$": -9, "kill -ABRT $$": -6}
    log = tmp_path / "log"
    told = {
        each: exited(keeper.start(launch(["sh", "-c", f"echo out; echo err >&2; {each}"], log))) for each in scripts
    }
    assert told == scripts
    assert log.read_text() == 4 * "out\nerr\n"
    assert log.stat().st_mode & 0o777 == 0o600
    assert keeper.surviving_processes() == []


def sibling(keeper: ShimClient, log: Path) -> tuple[ChildProcess, int]:
    """A child of the shim, and the pid of another one that it has forked."""
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    os.mkfifo(log)
    read = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    try:
        child = keeper.start(ProcessSpec("forks", [sys.executable, "-c", FORKING], [], log, environment))
        assert select.select([read], [], [], LIMIT_S)[0]
        return child, int(os.read(read, 100))
    finally:
        os.close(read)


def test_what_a_child_has_forked_is_adopted(keeper: ShimClient, tmp_path: Path) -> None:
    parent, pid = sibling(keeper, tmp_path / "fifo")
    child = keeper.adopt("forked", pid, tmp_path / "log")
    kill(parent)
    assert exited(parent) == -9
    assert keeper.surviving_processes() == [(pid, "forked", tmp_path / "log")]
    kill(child, signal.SIGTERM)
    assert exited(child) == -15
    assert keeper.surviving_processes() == []


def test_what_is_no_child_is_not_adopted(keeper: ShimClient, tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError):
        keeper.adopt("mine", os.getpid(), tmp_path / "log")
    assert keeper.surviving_processes() == []


def test_what_was_forked_and_not_adopted_is_ended_before_the_next_daemon_is_told(
    keeper: ShimClient, tmp_path: Path
) -> None:
    parent, pid = sibling(keeper, tmp_path / "fifo")
    keeper.kill_orphans()
    assert [each.pid for each in keeper.surviving_processes()] == [parent.pid]
    os.kill(parent.pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_of_one_that_has_ended_all_is_ended_that_it_had_forked_and_nothing_else(
    keeper: ShimClient, tmp_path: Path
) -> None:
    (parent, pid), (other, its) = (sibling(keeper, tmp_path / name) for name in ("first", "second"))
    kill(parent)
    keeper.kill_orphans_of(parent.pid)
    assert [each.pid for each in keeper.surviving_processes()] == [parent.pid, other.pid]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    os.kill(its, 0)


def test_with_the_keeper_that_ends_which_nobody_had_adopted(keeper: ShimClient, tmp_path: Path) -> None:
    _, pid = sibling(keeper, tmp_path / "fifo")
    stray = os.pidfd_open(pid)
    keeper.close()
    try:
        assert select.select([stray], [], [], LIMIT_S)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(stray, signal.SIGKILL)
        os.close(stray)


def test_a_child_is_the_keepers_and_inherits_nothing(keeper: ShimClient, directory: Path, tmp_path: Path) -> None:
    child = keeper.start(launch(SLEEP, tmp_path / "log"))
    assert os.getsid(child.pid) == child.pid != os.getsid(keeper.pid) == keeper.pid
    status = dict(line.split(":\t") for line in Path(f"/proc/{child.pid}/status").read_text().splitlines())
    assert status["PPid"] == str(keeper.pid)
    assert not any(int(status["SigIgn"], 16) >> (each - 1) & 1 for each in (signal.SIGPIPE, signal.SIGXFSZ))
    targets: set[str] = set()
    for each in Path(f"/proc/{child.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a library that it was loading
            targets.add(str(each.readlink()))
    own = {str(Path(f"/proc/{keeper.pid}/fd/{each}").readlink()) for each in (process.SOCKET_FD, process.LOCK_FD)}
    assert str(directory) in own
    assert str(tmp_path / "log") in targets
    assert any(each.startswith("/memfd:weightd-order") for each in targets)
    assert not targets & own
    kill(child, signal.SIGTERM)  # which the shim ignores, and its children do not
    assert exited(child) == -signal.SIGTERM


def test_the_environment_is_the_one_given_and_no_other(
    keeper: ShimClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS", "1")
    environment = {"TMPDIR": str(tmp_path), "ODD": 'é\udcff"\n', "A": "a" * 75_000, "B": "b" * 75_000}
    argv = [sys.executable, "-S", "-c", "import os; print(ascii(dict(os.environ)))"]
    assert exited(keeper.start(ProcessSpec("c", argv, [], tmp_path / "log", environment))) == 0
    said = ast.literal_eval((tmp_path / "log").read_text())
    assert {name: said.get(name) for name in (*environment, "OURS")} == {**environment, "OURS": None}


def test_children_that_have_not_been_waited_for_are_told_to_the_next_daemon(keeper: ShimClient, tmp_path: Path) -> None:
    lives, dead, gone = (tmp_path / name for name in ("lives", "dead", "gone"))
    first = keeper.start(ProcessSpec("lives", SLEEP, [], lives, {"PATH": PATH}))
    second = keeper.start(ProcessSpec("dead", ["sh", "-c", "exit 3"], [], dead, {"PATH": PATH}))
    assert exited(keeper.start(ProcessSpec("gone", ["true"], [], gone, {"PATH": PATH}))) == 0
    assert select.select([second.pidfd], [], [], LIMIT_S)[0]
    following = ShimClient(os.dup(keeper.descriptor))
    keeper.close()
    assert following.pid == keeper.pid
    children = [SurvivingProcess(first.pid, "lives", lives), SurvivingProcess(second.pid, "dead", dead)]
    assert following.surviving_processes() == children
    watched = [following.watch(child) for child in children]
    assert [each.log for each in watched] == [lives, dead]
    assert not select.select([watched[0].pidfd], [], [], 0)[0]
    assert exited(watched[1]) == 3
    kill(watched[0])
    assert exited(watched[0]) == -signal.SIGKILL
    assert following.surviving_processes() == []
    following.close()
    for each in (first, second):
        os.close(each.pidfd)


def test_an_answer_to_a_daemon_that_died_is_not_one_to_the_next(keeper: ShimClient) -> None:
    with socket.socket(fileno=os.dup(keeper.descriptor)) as dead:
        for request in ('{"id": 1, "children": true}\n', '{"id": 2, "reap": 1}\n', "17\n", '{"id": 3, "sta'):
            dead.sendall(request.encode())
    following = ShimClient(os.dup(keeper.descriptor))
    assert (following.pid, following.surviving_processes()) == (keeper.pid, [])
    following.close()


# --- what cannot be started -----------------------------------------------------------------------------------------


def test_what_cannot_be_started_is_named(keeper: ShimClient, tmp_path: Path) -> None:
    for program, log, named in (
        ("/nonexistent/python", "log", "/nonexistent/python"),
        ("no-such-program", "log", "no-such-program"),
        ("/", "log", "/"),
        ("true", "", str(tmp_path)),
        ("true", "missing/log", f"{tmp_path}/missing/log"),
    ):
        with pytest.raises((FileNotFoundError, PermissionError, IsADirectoryError)) as caught:
            keeper.start(launch([program], tmp_path / log))
        assert caught.value.filename == named
    assert keeper.surviving_processes() == []


def test_who_is_not_its_child_cannot_be_watched(keeper: ShimClient, tmp_path: Path) -> None:
    with pytest.raises(ShimLost, match=f"^process {os.getpid()} is gone with its shim$"):
        keeper.watch(SurvivingProcess(os.getpid(), "stranger", tmp_path / "log"))
    assert keeper.surviving_processes() == []
    child = keeper.start(launch(["true"], tmp_path / "log"))
    assert exited(child) == 0
    with pytest.raises(ShimLost, match=f"^process {child.pid} is gone with its shim$"):
        keeper.watch(SurvivingProcess(child.pid, "c", tmp_path / "log"))


def test_a_child_that_cannot_be_watched_is_not_left_running(keeper: ShimClient, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files") as caught:
            keeper.start(launch(SLEEP, tmp_path / "log"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not isinstance(caught.value, ShimLost)
    assert keeper.surviving_processes() == []


# --- its end --------------------------------------------------------------------------------------------------------


def test_once_nobody_holds_on_to_it_nothing_is_left(
    start_keeper: Callable[..., ShimClient], directory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "children.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    (directory / "m.1").mkdir()
    (directory / "m.1" / "pages").touch()
    (directory / "elsewhere").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "precious").touch()
    keeper = start_keeper(path, tmp_path / "nothing")
    # Its directory is the last that it removes: whoever waits for the lock on it waits for all of it.
    arguments = Path(f"/proc/{keeper.pid}/cmdline").read_text().split("\0")
    assert arguments[-4:] == [str(path), str(tmp_path / "nothing"), str(directory), ""]
    children = [keeper.start(launch(SLEEP, directory / "m.1" / "log")) for _ in range(3)]
    duplicate = os.dup(keeper.descriptor)
    keeper.close()
    assert not ended(children[0].pid, 0.1)
    following = ShimClient(duplicate)
    assert [each.pid for each in following.surviving_processes()] == [each.pid for each in children]
    following.close()
    assert ended(keeper.pid)
    assert os.waitpid(keeper.pid, 0)[1] == 0
    assert all(ended(child.pid, 0) for child in children)
    assert (directory.exists(), path.exists()) == (False, False)
    assert (tmp_path / "kept" / "precious").exists()
    for child in children:
        os.close(child.pidfd)


@pytest.mark.parametrize("answered", [False, True])
def test_a_daemon_that_does_not_read_its_answer_is_no_concern(
    start_keeper: Callable[..., ShimClient], directory: Path, answered: bool
) -> None:
    keeper = start_keeper()
    with socket.socket(fileno=os.dup(keeper.descriptor)) as daemon:
        if not answered:
            os.kill(keeper.pid, signal.SIGSTOP)
        daemon.send(json.dumps({"id": 1, "children": True}).encode() + b"\n")
        assert not answered or select.select([daemon], [], [], LIMIT_S)[0]
    keeper.close()
    os.kill(keeper.pid, signal.SIGCONT)
    assert os.waitpid(keeper.pid, 0)[1] == 0
    assert not directory.exists()


@pytest.mark.parametrize(("seconds", "status"), [(LIMIT_S, 0), (0.1, signal.SIGKILL)])
def test_who_ends_it_waits_until_it_has_ended_and_kills_it_then(
    start_keeper: Callable[..., ShimClient], directory: Path, seconds: float, status: int
) -> None:
    keeper = start_keeper()
    os.kill(keeper.pid, signal.SIGSTOP)
    if not status:
        threading.Timer(0.3, os.kill, (keeper.pid, signal.SIGCONT)).start()
    keeper.stop(seconds)
    # It is about to be gone: the kernel closes its socket first.
    assert os.waitpid(keeper.pid, 0) == (keeper.pid, status)
    assert directory.exists() is bool(status)


def test_one_that_hangs_is_lost_after_a_while_and_heard_again(
    keeper: ShimClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_TIMEOUT_S", 0.2)
    vars(keeper)["_socket"].settimeout(0.1)
    os.kill(keeper.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(ShimLost, match=r"^the shim does not answer: timed out$"):
        ShimClient(os.dup(keeper.descriptor))
    assert 0.2 <= time.monotonic() - began < 5.0
    with pytest.raises(ShimLost, match="timed out"):
        keeper.surviving_processes()
    os.kill(keeper.pid, signal.SIGCONT)
    vars(keeper)["_socket"].settimeout(LIMIT_S)
    assert keeper.surviving_processes() == []


def test_those_that_came_last_end_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    within = process.Shim()
    pids = [
        within.handle_request({"start": str(number), "argv": SLEEP, "stdin": "", "log": "log", "environment": {}})[
            "pid"
        ]
        for number in range(3)
    ]
    killed: list[int] = []
    real = os.kill

    def note(pid: int, number: int) -> None:
        # Each is gone before the next one is killed.
        assert all(not Path(f"/proc/{each}").exists() for each in killed)
        killed.append(pid)
        real(pid, number)

    monkeypatch.setattr(os, "kill", note)
    # This process has other children, too.
    monkeypatch.setattr(process, "find_orphans", set(pids).difference)
    within.kill_all()
    assert killed == pids[::-1]


def test_a_ctrl_c_that_comes_before_it_has_its_session_does_not_end_it(
    start_keeper: Callable[..., ShimClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked: list[bool] = []
    spawn = os.posix_spawnp

    def spawned(*arguments: Any, **options: Any) -> int:
        blocked.append(signal.SIGINT in options["setsigmask"])
        return spawn(*arguments, **options)

    monkeypatch.setattr(os, "posix_spawnp", spawned)
    keeper = start_keeper()
    assert blocked == [True]
    # Its children do not inherit that.
    assert "SigBlk:\t0000000000000000" in Path(f"/proc/{keeper.pid}/status").read_text("ascii")
    # The signals that end a service do not end it, either.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(keeper.pid, number)
        assert keeper.surviving_processes() == []
    keeper.close()


# --- its lock, its size ---------------------------------------------------------------------------------------------


def test_there_is_one_keeper_of_a_directory(
    start_keeper: Callable[..., ShimClient], directory: Path, tmp_path: Path
) -> None:
    assert wait_until_exited(directory, 0.0)
    assert wait_until_exited(tmp_path / "missing", 0.0)
    keeper = start_keeper()
    with pytest.raises(OSError, match="another shim has the directory"):
        start_keeper()
    assert not wait_until_exited(directory, 0.05)
    assert keeper.surviving_processes() == []
    keeper.close()


@pytest.mark.parametrize("how", ["killed", "let go"])
def test_the_directory_is_free_and_the_children_are_dead_once_the_keeper_is_gone(
    start_keeper: Callable[..., ShimClient], directory: Path, tmp_path: Path, how: str
) -> None:
    keeper = start_keeper()
    child = dependent(keeper, tmp_path / "log")
    assert not select.select([child.pidfd], [], [], 0)[0]
    if how == "killed":
        os.kill(keeper.pid, signal.SIGKILL)
        with pytest.raises(ShimLost, match=r"^the shim does not answer: ."):
            keeper.start(launch(["true"], tmp_path / "other"))
    keeper.kill() if how == "killed" else keeper.close()
    assert wait_until_exited(directory, LIMIT_S)
    assert ended(keeper.pid)
    assert exited(child) is None  # nobody knows how
    assert directory.exists() is (how == "killed")


def test_it_is_small(keeper: ShimClient) -> None:
    pss = memory.pss(keeper.pid)
    rollup = Path(f"/proc/{keeper.pid}/smaps_rollup").read_text()
    dirty = next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Private_Dirty:"))
    assert pss < 12 * MIB
    assert dirty < 8 * MIB


def test_the_time_in_which_this_process_is_stopped_does_not_count(
    start_keeper: Callable[..., ShimClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_TIMEOUT_S", 1.0)
    keeper = start_keeper()
    os.kill(keeper.pid, signal.SIGSTOP)
    with stopped(1.7, keeper.pid):
        assert keeper.surviving_processes() == []
    os.kill(keeper.pid, signal.SIGSTOP)
    with stopped(1.7, keeper.pid):
        keeper.stop(1.0)
    assert os.waitpid(keeper.pid, 0) == (keeper.pid, 0)
