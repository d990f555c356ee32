"""The shim and its client, with small real child processes."""

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

# A child that dies with its shim and reports when it is set up to.
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
def start_shim(directory: Path) -> Iterator[Callable[..., ShimClient]]:
    made: list[tuple[int, int]] = []

    def start(*others: Path) -> ShimClient:
        shim = client.start_shim(directory, *others)
        made.append((shim.pid, os.pidfd_open(shim.pid)))
        return shim

    yield start
    for pid, pidfd in made:
        # A shim whose client has closed the connection, or has been killed, exits with its children.
        if not select.select([pidfd], [], [], LIMIT_S)[0]:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the test may have waited for it
            os.waitpid(pid, 0)
        os.close(pidfd)


@pytest.fixture
def shim(start_shim: Callable[..., ShimClient]) -> Iterator[ShimClient]:
    made = start_shim()
    yield made
    if made.descriptor >= 0:  # otherwise the test has closed it
        made.close()


def launch(argv: list[str], log: Path) -> ProcessSpec:
    return ProcessSpec("c", argv, [], log, {"PATH": PATH})


def exited(child: ChildProcess) -> int | None:
    assert select.select([child.pidfd], [], [], LIMIT_S)[0]
    return reap(child)


def dependent_child(shim: ShimClient, fifo: Path) -> ChildProcess:
    """Start a child that dies with its shim, and wait until it is set up to."""
    os.mkfifo(fifo)
    read = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        child = shim.start(ProcessSpec("d", [sys.executable, "-c", _DEPENDENT, str(shim.pid)], [], fifo, environment))
        assert select.select([read], [], [], LIMIT_S)[0]
        assert os.read(read, 100) == b"ready\n"
    finally:
        os.close(read)
    return child


# --- children -------------------------------------------------------------------------------------------------------


def test_reports_exit_statuses_and_appends_to_logs(shim: ShimClient, tmp_path: Path) -> None:
    scripts = {"exit 0": 0, "exit 7": 7, "kill -9 $$": -9, "kill -ABRT $$": -6}
    log = tmp_path / "log"
    statuses = {
        each: exited(shim.start(launch(["sh", "-c", f"echo out; echo err >&2; {each}"], log))) for each in scripts
    }
    assert statuses == scripts
    assert log.read_text() == 4 * "out\nerr\n"
    assert log.stat().st_mode & 0o777 == 0o600
    assert shim.surviving_processes() == []


def child_with_fork(shim: ShimClient, log: Path) -> tuple[ChildProcess, int]:
    """Return a child of the shim and the pid of the process that the child has forked."""
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    os.mkfifo(log)
    read = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    try:
        child = shim.start(ProcessSpec("forks", [sys.executable, "-c", FORKING], [], log, environment))
        assert select.select([read], [], [], LIMIT_S)[0]
        return child, int(os.read(read, 100))
    finally:
        os.close(read)


def test_adopts_forked_process(shim: ShimClient, tmp_path: Path) -> None:
    parent, pid = child_with_fork(shim, tmp_path / "fifo")
    child = shim.adopt("forked", pid, tmp_path / "log")
    kill(parent)
    assert exited(parent) == -9
    assert shim.surviving_processes() == [(pid, "forked", tmp_path / "log")]
    kill(child, signal.SIGTERM)
    assert exited(child) == -15
    assert shim.surviving_processes() == []


def test_does_not_adopt_processes_of_others(shim: ShimClient, tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError):
        shim.adopt("mine", os.getpid(), tmp_path / "log")
    assert shim.surviving_processes() == []


def test_kills_unadopted_forks_before_a_handover(shim: ShimClient, tmp_path: Path) -> None:
    parent, pid = child_with_fork(shim, tmp_path / "fifo")
    shim.kill_orphans()
    assert [each.pid for each in shim.surviving_processes()] == [parent.pid]
    os.kill(parent.pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_kills_unadopted_forks_of_one_process_only(shim: ShimClient, tmp_path: Path) -> None:
    (parent, pid), (other, other_fork) = (child_with_fork(shim, tmp_path / name) for name in ("first", "second"))
    kill(parent)
    shim.kill_orphans_of(parent.pid)
    assert [each.pid for each in shim.surviving_processes()] == [parent.pid, other.pid]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    os.kill(other_fork, 0)


def test_unadopted_forks_exit_with_the_shim(shim: ShimClient, tmp_path: Path) -> None:
    _, pid = child_with_fork(shim, tmp_path / "fifo")
    stray = os.pidfd_open(pid)
    shim.close()
    try:
        assert select.select([stray], [], [], LIMIT_S)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(stray, signal.SIGKILL)
        os.close(stray)


def test_child_belongs_to_the_shim_and_inherits_nothing(shim: ShimClient, directory: Path, tmp_path: Path) -> None:
    child = shim.start(launch(SLEEP, tmp_path / "log"))
    assert os.getsid(child.pid) == child.pid != os.getsid(shim.pid) == shim.pid
    status = dict(line.split(":\t") for line in Path(f"/proc/{child.pid}/status").read_text().splitlines())
    assert status["PPid"] == str(shim.pid)
    assert not any(int(status["SigIgn"], 16) >> (each - 1) & 1 for each in (signal.SIGPIPE, signal.SIGXFSZ))
    targets: set[str] = set()
    for each in Path(f"/proc/{child.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a library that the child was loading
            targets.add(str(each.readlink()))
    own = {str(Path(f"/proc/{shim.pid}/fd/{each}").readlink()) for each in (process.SOCKET_FD, process.LOCK_FD)}
    assert str(directory) in own
    assert str(tmp_path / "log") in targets
    assert any(each.startswith("/memfd:weightd-order") for each in targets)
    assert not targets & own
    kill(child, signal.SIGTERM)  # ignored by the shim but not by its children
    assert exited(child) == -signal.SIGTERM


def test_child_gets_exactly_the_given_environment(
    shim: ShimClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS", "1")
    environment = {"TMPDIR": str(tmp_path), "ODD": 'é\udcff"\n', "A": "a" * 75_000, "B": "b" * 75_000}
    argv = [sys.executable, "-S", "-c", "import os; print(ascii(dict(os.environ)))"]
    assert exited(shim.start(ProcessSpec("c", argv, [], tmp_path / "log", environment))) == 0
    printed = ast.literal_eval((tmp_path / "log").read_text())
    assert {name: printed.get(name) for name in (*environment, "OURS")} == {**environment, "OURS": None}


def test_next_daemon_takes_over_unreaped_children(shim: ShimClient, tmp_path: Path) -> None:
    lives, dead, gone = (tmp_path / name for name in ("lives", "dead", "gone"))
    first = shim.start(ProcessSpec("lives", SLEEP, [], lives, {"PATH": PATH}))
    second = shim.start(ProcessSpec("dead", ["sh", "-c", "exit 3"], [], dead, {"PATH": PATH}))
    assert exited(shim.start(ProcessSpec("gone", ["true"], [], gone, {"PATH": PATH}))) == 0
    assert select.select([second.pidfd], [], [], LIMIT_S)[0]
    following = ShimClient(os.dup(shim.descriptor))
    shim.close()
    assert following.pid == shim.pid
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


def test_replies_to_a_dead_daemon_do_not_reach_the_next(shim: ShimClient) -> None:
    with socket.socket(fileno=os.dup(shim.descriptor)) as dead:
        for request in ('{"id": 1, "children": true}\n', '{"id": 2, "reap": 1}\n', "17\n", '{"id": 3, "sta'):
            dead.sendall(request.encode())
    following = ShimClient(os.dup(shim.descriptor))
    assert (following.pid, following.surviving_processes()) == (shim.pid, [])
    following.close()


# --- errors ---------------------------------------------------------------------------------------------------------


def test_error_names_the_file_that_failed(shim: ShimClient, tmp_path: Path) -> None:
    for program, log, named in (
        ("/nonexistent/python", "log", "/nonexistent/python"),
        ("no-such-program", "log", "no-such-program"),
        ("/", "log", "/"),
        ("true", "", str(tmp_path)),
        ("true", "missing/log", f"{tmp_path}/missing/log"),
    ):
        with pytest.raises((FileNotFoundError, PermissionError, IsADirectoryError)) as caught:
            shim.start(launch([program], tmp_path / log))
        assert caught.value.filename == named
    assert shim.surviving_processes() == []


def test_only_children_of_the_shim_can_be_watched(shim: ShimClient, tmp_path: Path) -> None:
    with pytest.raises(ShimLost, match=f"^process {os.getpid()} exited with its shim$"):
        shim.watch(SurvivingProcess(os.getpid(), "stranger", tmp_path / "log"))
    assert shim.surviving_processes() == []
    child = shim.start(launch(["true"], tmp_path / "log"))
    assert exited(child) == 0
    with pytest.raises(ShimLost, match=f"^process {child.pid} exited with its shim$"):
        shim.watch(SurvivingProcess(child.pid, "c", tmp_path / "log"))


def test_kills_child_that_cannot_be_watched(shim: ShimClient, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files") as caught:
            shim.start(launch(SLEEP, tmp_path / "log"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not isinstance(caught.value, ShimLost)
    assert shim.surviving_processes() == []


# --- exit -----------------------------------------------------------------------------------------------------------


def test_shim_without_clients_removes_everything(
    start_shim: Callable[..., ShimClient], directory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "children.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    (directory / "m.1").mkdir()
    (directory / "m.1" / "pages").touch()
    (directory / "elsewhere").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "precious").touch()
    shim = start_shim(path, tmp_path / "nothing")
    # The directory is removed last, so waiting for the lock on it waits for the whole cleanup.
    arguments = Path(f"/proc/{shim.pid}/cmdline").read_text().split("\0")
    assert arguments[-4:] == [str(path), str(tmp_path / "nothing"), str(directory), ""]
    children = [shim.start(launch(SLEEP, directory / "m.1" / "log")) for _ in range(3)]
    duplicate = os.dup(shim.descriptor)
    shim.close()
    assert not ended(children[0].pid, 0.1)
    following = ShimClient(duplicate)
    assert [each.pid for each in following.surviving_processes()] == [each.pid for each in children]
    following.close()
    assert ended(shim.pid)
    assert os.waitpid(shim.pid, 0)[1] == 0
    assert all(ended(child.pid, 0) for child in children)
    assert (directory.exists(), path.exists()) == (False, False)
    assert (tmp_path / "kept" / "precious").exists()
    for child in children:
        os.close(child.pidfd)


@pytest.mark.parametrize("answered", [False, True])
def test_survives_a_daemon_that_does_not_read_replies(
    start_shim: Callable[..., ShimClient], directory: Path, answered: bool
) -> None:
    shim = start_shim()
    with socket.socket(fileno=os.dup(shim.descriptor)) as daemon:
        if not answered:
            os.kill(shim.pid, signal.SIGSTOP)
        daemon.send(json.dumps({"id": 1, "children": True}).encode() + b"\n")
        assert not answered or select.select([daemon], [], [], LIMIT_S)[0]
    shim.close()
    os.kill(shim.pid, signal.SIGCONT)
    assert os.waitpid(shim.pid, 0)[1] == 0
    assert not directory.exists()


@pytest.mark.parametrize(("seconds", "status"), [(LIMIT_S, 0), (0.1, signal.SIGKILL)])
def test_stop_waits_for_the_exit_then_kills(
    start_shim: Callable[..., ShimClient], directory: Path, seconds: float, status: int
) -> None:
    shim = start_shim()
    os.kill(shim.pid, signal.SIGSTOP)
    if not status:
        threading.Timer(0.3, os.kill, (shim.pid, signal.SIGCONT)).start()
    shim.stop(seconds)
    # The shim is still exiting: the kernel closes its socket first.
    assert os.waitpid(shim.pid, 0) == (shim.pid, status)
    assert directory.exists() is bool(status)


def test_hung_shim_times_out_and_recovers(shim: ShimClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_TIMEOUT_S", 0.2)
    vars(shim)["_socket"].settimeout(0.1)
    os.kill(shim.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(ShimLost, match=r"^the shim does not answer: timed out$"):
        ShimClient(os.dup(shim.descriptor))
    assert 0.2 <= time.monotonic() - began < 5.0
    with pytest.raises(ShimLost, match="timed out"):
        shim.surviving_processes()
    os.kill(shim.pid, signal.SIGCONT)
    vars(shim)["_socket"].settimeout(LIMIT_S)
    assert shim.surviving_processes() == []


def test_kills_children_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shim_process = process.Shim()
    pids = [
        shim_process.handle_request(
            {"start": str(number), "argv": SLEEP, "stdin": "", "log": "log", "environment": {}}
        )["pid"]
        for number in range(3)
    ]
    killed: list[int] = []
    real = os.kill

    def note(pid: int, number: int) -> None:
        # Each process must have exited before the next one is killed.
        assert all(not Path(f"/proc/{each}").exists() for each in killed)
        killed.append(pid)
        real(pid, number)

    monkeypatch.setattr(os, "kill", note)
    # This process has other children, which must not be killed.
    monkeypatch.setattr(process, "find_orphans", set(pids).difference)
    shim_process.kill_all()
    assert killed == pids[::-1]


def test_ignores_signals_that_stop_a_service(
    start_shim: Callable[..., ShimClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked: list[bool] = []
    spawn = os.posix_spawnp

    def spawned(*arguments: Any, **options: Any) -> int:
        blocked.append(signal.SIGINT in options["setsigmask"])
        return spawn(*arguments, **options)

    monkeypatch.setattr(os, "posix_spawnp", spawned)
    shim = start_shim()
    assert blocked == [True]
    # Children of the shim do not inherit the blocked signal.
    assert "SigBlk:\t0000000000000000" in Path(f"/proc/{shim.pid}/status").read_text("ascii")
    # The shim also ignores the signals that stop a service.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(shim.pid, number)
        assert shim.surviving_processes() == []
    shim.close()


# --- lock and size --------------------------------------------------------------------------------------------------


def test_one_shim_per_directory(start_shim: Callable[..., ShimClient], directory: Path, tmp_path: Path) -> None:
    assert wait_until_exited(directory, 0.0)
    assert wait_until_exited(tmp_path / "missing", 0.0)
    shim = start_shim()
    with pytest.raises(OSError, match="another shim uses the directory"):
        start_shim()
    assert not wait_until_exited(directory, 0.05)
    assert shim.surviving_processes() == []
    shim.close()


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_directory_is_free_after_the_shim_exits(
    start_shim: Callable[..., ShimClient], directory: Path, tmp_path: Path, how: str
) -> None:
    shim = start_shim()
    child = dependent_child(shim, tmp_path / "log")
    assert not select.select([child.pidfd], [], [], 0)[0]
    if how == "killed":
        os.kill(shim.pid, signal.SIGKILL)
        with pytest.raises(ShimLost, match=r"^the shim does not answer: ."):
            shim.start(launch(["true"], tmp_path / "other"))
    shim.kill() if how == "killed" else shim.close()
    assert wait_until_exited(directory, LIMIT_S)
    assert ended(shim.pid)
    assert exited(child) is None  # the exit status died with the shim
    assert directory.exists() is (how == "killed")


def test_shim_uses_little_memory(shim: ShimClient) -> None:
    pss = memory.pss(shim.pid)
    rollup = Path(f"/proc/{shim.pid}/smaps_rollup").read_text()
    dirty = next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Private_Dirty:"))
    assert pss < 12 * MIB
    assert dirty < 8 * MIB


def test_timeouts_exclude_suspension_of_the_client(
    start_shim: Callable[..., ShimClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_TIMEOUT_S", 1.0)
    shim = start_shim()
    os.kill(shim.pid, signal.SIGSTOP)
    with stopped(1.7, shim.pid):
        assert shim.surviving_processes() == []
    os.kill(shim.pid, signal.SIGSTOP)
    with stopped(1.7, shim.pid):
        shim.stop(1.0)
    assert os.waitpid(shim.pid, 0) == (shim.pid, 0)
