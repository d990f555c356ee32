from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.handover.instance_lock import lock_instance, make_private_directory
from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.processes.shim import client
from weightd_daemon.processes.shim.client import ShimClient

# Locks the instance, listens, creates a file, and waits for the end of stdin.
_DAEMON_SCRIPT = """
import socket, sys
from weightd_daemon.handover.instance_lock import lock_instance
from weightd_daemon.config.daemon import DaemonConfig
config = DaemonConfig(*sys.argv[1:])
with lock_instance(config), socket.socket(socket.AF_UNIX) as listener:
    listener.bind(str(config.children_socket))
    listener.listen()
    (config.private_dir / "left").mkdir()
    (config.private_dir / "left" / "behind").touch()
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def root() -> Iterator[Path]:
    # The path of a socket has at most 107 bytes, so the prefix is short.
    path = Path(tempfile.mkdtemp(prefix="wd-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def config(root: Path) -> DaemonConfig:
    return DaemonConfig(f"ipc://{root}/run/weightd.sock", f"{root}/run", f"{root}/cache")


def tree(root: Path) -> set[str]:
    """Return all paths below `root` except directories."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


def other_daemon(config: DaemonConfig) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _DAEMON_SCRIPT, config.socket, config.runtime_dir, config.cache_dir]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    daemon = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert daemon.stdout is not None
    assert daemon.stdout.readline() == "ready\n"
    return daemon


def stale_socket(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def refused(config: DaemonConfig) -> str:
    """Return the error of a failed lock."""
    with pytest.raises(PathInUse) as caught, lock_instance(config):
        pass
    return str(caught.value)


@pytest.mark.parametrize("fails", [False, True])
def test_instance_creates_and_removes_its_paths(root: Path, config: DaemonConfig, fails: bool) -> None:
    lock = root / "run/weightd.sock.lock"
    lock.parent.mkdir()
    lock.write_text("123456789012345\n")  # longer than a pid
    config.private_dir.mkdir(parents=True)
    (config.private_dir / "old").touch()
    with contextlib.suppress(ZeroDivisionError), lock_instance(config):
        assert tree(root) == {"run/weightd.sock.lock"}
        assert lock.read_text() == f"{os.getpid()}\n"
        assert stat.S_IMODE(config.private_dir.stat().st_mode) == 0o700
        stale_socket(config.children_socket)
        (config.private_dir / "x").touch()
        if fails:
            raise ZeroDivisionError
    assert tree(root) == set()
    assert not config.private_dir.exists()


@pytest.mark.parametrize("killed", [False, True])
def test_second_daemon_on_same_socket_is_rejected(root: Path, config: DaemonConfig, killed: bool) -> None:
    with other_daemon(config) as first:
        before = tree(root)
        lock = root / "run/weightd.sock.lock"
        assert refused(config) == f"weightd is running already on this socket, as pid {first.pid} ({lock})"
        assert tree(root) == before
        if killed:
            first.send_signal(signal.SIGKILL)
    # The next daemon removes the files of a killed daemon.
    assert len(tree(root)) == (3 if killed else 0)
    with lock_instance(config):
        assert tree(root) == {"run/weightd.sock.lock"}
    assert tree(root) == set()


@pytest.mark.parametrize("address", ["ipc://{}/run/./weightd.sock", "tcp://127.0.0.1:5555"])
def test_other_name_of_same_socket_is_rejected(root: Path, config: DaemonConfig, address: str) -> None:
    twin = dataclasses.replace(config, socket=address.format(root))
    first = config if address.startswith("ipc") else twin
    with lock_instance(first):
        # The lock of a TCP address is in the runtime directory.
        assert tree(root) == {"run/weightd.sock.lock" if first is config else f"run/{twin.daemon_key}.lock"}
        assert f"running already on this socket, as pid {os.getpid()} " in refused(twin)
    assert tree(root) == set()


def test_daemons_on_different_sockets_share_directories(root: Path, config: DaemonConfig) -> None:
    other = dataclasses.replace(config, socket=f"ipc://{root}/run/other.sock")
    with lock_instance(config):
        (config.private_dir / "mine").touch()
        with lock_instance(other):
            (other.private_dir / "theirs").touch()
        assert (config.private_dir / "mine").exists()
    assert tree(root) == set()


def test_regular_file_at_socket_path_is_kept(root: Path, config: DaemonConfig) -> None:
    path = config.children_socket
    path.parent.mkdir()
    path.write_text("precious")
    assert refused(config) == f"{path}: expected a socket or no file; weightd does not remove other files"
    assert tree(root) == {str(path.relative_to(root))}
    assert not config.private_dir.exists()
    path.unlink()
    with lock_instance(config):
        path.write_text("precious")  # replaces the socket
    assert path.read_text() == "precious"


def test_socket_of_other_program_is_kept(config: DaemonConfig) -> None:
    path = config.children_socket
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert refused(config) == f"{path}: another program listens on this path"
    assert path.is_socket()


@pytest.mark.parametrize("which", ["runtime", "private", "lock"])
def test_symbolic_links_are_rejected(root: Path, config: DaemonConfig, which: str) -> None:
    places = {"runtime": root / "run", "private": config.private_dir, "lock": root / "run/weightd.sock.lock"}
    place = places[which]
    place.parent.mkdir(exist_ok=True)
    (root / "elsewhere").mkdir()
    (root / "elsewhere/precious").write_text("precious")
    place.symlink_to(root / "elsewhere" / ("precious" if which == "lock" else ""))
    begin = "cannot open the lock" if which == "lock" else f"{place}: expected a directory of this user, not a link"
    assert refused(config).startswith(begin)
    assert (root / "elsewhere/precious").read_text() == "precious"
    assert tree(root) - {str(place.relative_to(root))} == {"elsewhere/precious"}


@pytest.mark.parametrize("which", ["run", "cache"])
def test_world_writable_directory_is_rejected(root: Path, config: DaemonConfig, which: str) -> None:
    directory = root / which
    directory.mkdir()
    directory.chmod(0o777)
    assert re.match(rf"{directory}: every user can remove .*: expected mode 0775, or the sticky bit", refused(config))
    directory.chmod(0o1777)
    with lock_instance(config):
        pass


def test_directories_are_private_with_any_umask(root: Path, config: DaemonConfig) -> None:
    before = os.umask(0)
    try:
        with lock_instance(config):
            assert {stat.S_IMODE((root / each).stat().st_mode) for each in ("run", "cache")} == {0o755}
    finally:
        os.umask(before)


@pytest.mark.parametrize("step", ["weightd_daemon.handover.instance_lock.wait_until_exited", "pathlib.Path.unlink"])
def test_permission_error_has_one_line(config: DaemonConfig, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def denied(path: Path, *_: object, **__: object) -> None:
        if path in (config.private_dir, config.children_socket):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    stale_socket(config.children_socket)
    monkeypatch.setattr(step, denied)
    assert refused(config).endswith(": Permission denied")


# --- private directory of a shim ------------------------------------------------------------------------------------


def test_directory_of_running_shim_is_kept(root: Path, config: DaemonConfig) -> None:
    with lock_instance(config, keep_private_dir=True):
        # The private directory is created later, once it is known whether a shim runs.
        assert not config.private_dir.exists()
    config.private_dir.mkdir(parents=True)
    (config.private_dir / "pages").touch()
    stale_socket(config.children_socket)
    with lock_instance(config, keep_private_dir=True):
        assert tree(root) == {"run/weightd.sock.lock", f"cache/{config.daemon_key}/pages"}
    assert tree(root) == {f"cache/{config.daemon_key}/pages"}


@pytest.fixture
def shim(config: DaemonConfig) -> Iterator[ShimClient]:
    config.private_dir.mkdir(parents=True)
    (config.private_dir / "left").touch()
    made = client.start_shim(config.private_dir)
    yield made
    if made.descriptor >= 0:  # otherwise the test has closed it
        made.close()
    os.waitpid(made.pid, 0)


def test_directory_of_shim_that_does_not_exit_is_rejected(
    config: DaemonConfig, shim: ShimClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightd_daemon.handover.instance_lock._EXIT_TIMEOUT_S", 0.05)
    why = f"{config.private_dir}: the processes of a previous weightd are running after 0.05 s; kill them"
    assert refused(config).startswith(why)
    assert (config.private_dir / "left").exists()


def test_private_directory_is_created_after_shim_exits(
    config: DaemonConfig, shim: ShimClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(_: float) -> None:
        if shim.descriptor >= 0:
            shim.close()

    # The shim exits only while the function waits for it.
    monkeypatch.setattr(time, "sleep", sleep)
    with caplog.at_level(logging.INFO, "weightd"):
        make_private_directory(config.private_dir)
    assert [each.getMessage() for each in caplog.records] == ["waiting for the processes of the previous daemon to end"]
    assert list(config.private_dir.iterdir()) == []
    assert stat.S_IMODE(config.private_dir.stat().st_mode) == 0o700


def test_lock_file_removed_during_lock_is_locked_again(config: DaemonConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = Path(config.socket.removeprefix("ipc://") + ".lock")
    real, others = fcntl.flock, iter([lambda: lock.replace(f"{lock}.old")])

    def flock(descriptor: int, how: int) -> None:
        next(others, lambda: None)()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_instance(config):
        assert lock.read_text() == f"{os.getpid()}\n"
