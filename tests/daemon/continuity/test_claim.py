from __future__ import annotations

import errno
import fcntl
import logging
import os
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

from weightd.daemon.children.launchers.keeper import link
from weightd.daemon.children.launchers.keeper.link import Keeper
from weightd.daemon.config.daemon import DaemonConfig
from weightd.daemon.continuity.claim import claim, make_private
from weightd.daemon.host.directories import ClaimError

# A daemon reduced to its claim: has what it claims, listens, leaves a file, and waits for the end of stdin.
_DAEMON = """
import socket, sys
from weightd.daemon.continuity.claim import claim
from weightd.daemon.config.daemon import DaemonConfig
config = DaemonConfig(*sys.argv[1:])
with claim(config):
    listeners = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for listener, path in zip(listeners, [str(config.children_socket), config.socket[len("ipc://"):]]):
        listener.bind(path)
        listener.listen()
    (config.private_dir / "left").mkdir()
    (config.private_dir / "left" / "behind").touch()
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def root() -> Iterator[Path]:
    # Short: the path of a socket has at most 107 bytes.
    path = Path(tempfile.mkdtemp(prefix="wd-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def config(root: Path) -> DaemonConfig:
    return DaemonConfig(f"ipc://{root}/run/weightd.sock", f"{root}/run", f"{root}/cache")


def tree(root: Path) -> set[str]:
    """The files below, without directories."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


def other_daemon(config: DaemonConfig) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _DAEMON, config.socket, config.runtime_dir, config.cache_dir]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    daemon = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert daemon.stdout is not None
    assert daemon.stdout.readline() == "ready\n"
    return daemon


def stale_socket(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def test_it_has_its_paths_and_leaves_none_behind(root: Path, config: DaemonConfig) -> None:
    with claim(config):
        assert tree(root) == {"run/weightd.sock.lock"}
        assert (root / "run/weightd.sock.lock").read_text() == f"{os.getpid()}\n"
        assert stat.S_IMODE(config.private_dir.stat().st_mode) == 0o700
        stale_socket(config.children_socket)
        stale_socket(root / "run/weightd.sock")
        (config.private_dir / "x").touch()
    assert tree(root) == set()
    assert not config.private_dir.exists()


def test_it_leaves_nothing_behind_when_it_ends_in_an_error(root: Path, config: DaemonConfig) -> None:
    def fail() -> None:
        stale_socket(config.children_socket)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), claim(config):
        fail()
    assert tree(root) == set()
    assert not config.private_dir.exists()


def test_it_can_be_had_again_and_again(config: DaemonConfig) -> None:
    for _ in range(3):
        with claim(config):
            pass


def test_two_daemons_on_one_socket(root: Path, config: DaemonConfig) -> None:
    with other_daemon(config) as first:
        before = tree(root)
        with pytest.raises(ClaimError) as caught, claim(config):
            pass
        lock = root / "run/weightd.sock.lock"
        assert str(caught.value) == f"weightd is running already on this socket, as pid {first.pid} ({lock})"
        assert tree(root) == before
        first.communicate("")
        assert first.returncode == 0
    assert tree(root) == set()
    with claim(config):
        pass


def test_another_name_of_the_same_socket_is_the_same_socket(root: Path, config: DaemonConfig) -> None:
    twin = DaemonConfig(f"ipc://{root}/run/./weightd.sock", config.runtime_dir, config.cache_dir)
    with (
        claim(config),
        pytest.raises(ClaimError, match=f"running already on this socket, as pid {os.getpid()} "),
        claim(twin),
    ):
        pass


def test_two_daemons_on_two_sockets_share_directories(root: Path, config: DaemonConfig) -> None:
    other = DaemonConfig(f"ipc://{root}/run/other.sock", config.runtime_dir, config.cache_dir)
    with claim(config):
        (config.private_dir / "mine").touch()
        with claim(other):
            (other.private_dir / "theirs").touch()
        assert (config.private_dir / "mine").exists()
    assert tree(root) == set()


def test_what_a_killed_daemon_left_is_removed(root: Path, config: DaemonConfig) -> None:
    with other_daemon(config) as killed:
        killed.send_signal(signal.SIGKILL)
    assert len(tree(root)) == 4
    with claim(config):
        assert tree(root) == {"run/weightd.sock.lock"}
        assert (root / "run/weightd.sock.lock").read_text() == f"{os.getpid()}\n"
    assert tree(root) == set()


def test_a_longer_pid_in_an_old_lock_is_overwritten(root: Path, config: DaemonConfig) -> None:
    lock = root / "run/weightd.sock.lock"
    lock.parent.mkdir()
    lock.write_text("123456789012345\n")
    with claim(config):
        assert lock.read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("which", ["clients", "children"])
def test_a_file_that_is_no_socket_is_left_alone(root: Path, config: DaemonConfig, which: str) -> None:
    path = root / "run/weightd.sock" if which == "clients" else config.children_socket
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(ClaimError) as caught, claim(config):
        pass
    assert str(caught.value) == f"{path}: expected a socket or nothing there, and will not remove what is there"
    assert path.read_text() == "precious"
    assert tree(root) == {str(path.relative_to(root))}
    assert not config.private_dir.exists()


def test_a_file_that_has_taken_the_sockets_place_is_left_alone(root: Path, config: DaemonConfig) -> None:
    with claim(config):
        (root / "run/weightd.sock").write_text("precious")
    assert tree(root) == {"run/weightd.sock"}


def test_a_socket_on_which_another_program_listens_is_left_alone(root: Path, config: DaemonConfig) -> None:
    path = root / "run/weightd.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(ClaimError) as caught, claim(config):
            pass
    assert str(caught.value) == f"{path}: another program listens there"
    assert path.is_socket()


def test_a_tcp_address_has_its_lock_in_the_runtime_directory(root: Path, config: DaemonConfig) -> None:
    tcp = DaemonConfig("tcp://127.0.0.1:5555", config.runtime_dir, config.cache_dir)
    with claim(tcp):
        assert tree(root) == {f"run/{tcp.key}.lock"}
        with pytest.raises(ClaimError, match="running already on this socket"), claim(tcp):
            pass
    assert tree(root) == set()


def test_the_private_directory_is_emptied_before(config: DaemonConfig) -> None:
    config.private_dir.mkdir(parents=True)
    (config.private_dir / "old").touch()
    with claim(config):
        assert list(config.private_dir.iterdir()) == []


@pytest.mark.parametrize("which", ["runtime", "private"])
def test_a_link_in_a_directorys_place_is_refused(root: Path, config: DaemonConfig, which: str) -> None:
    link = Path(config.runtime_dir) if which == "runtime" else config.private_dir
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(elsewhere)
    with pytest.raises(ClaimError) as caught, claim(config):
        pass
    assert str(caught.value) == f"{link}: expected a directory of this user, not a link or another user's"
    assert tree(root) - {str(link.relative_to(root))} == {"elsewhere/precious"}


def test_a_lock_that_is_a_link_is_refused(root: Path, config: DaemonConfig) -> None:
    (root / "run").mkdir()
    (root / "precious").write_text("precious")
    (root / "run/weightd.sock.lock").symlink_to(root / "precious")
    with pytest.raises(ClaimError, match="cannot open the lock"), claim(config):
        pass
    assert (root / "precious").read_text() == "precious"


@pytest.mark.parametrize("which", ["run", "cache"])
def test_a_directory_in_which_everybody_may_exchange_files_is_refused(
    root: Path, config: DaemonConfig, which: str
) -> None:
    directory = root / which
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(ClaimError) as caught, claim(config):
        pass
    assert str(caught.value) == (
        f"{directory}: every user may remove what is there and put something else in its place: expected mode 0775, or "
        "the sticky bit; chmod o-w, or +t"
    )
    directory.chmod(0o1777)
    with claim(config):
        pass


def test_whatever_the_umask_is_nobody_else_may_write(root: Path, config: DaemonConfig) -> None:
    before = os.umask(0)
    try:
        with claim(config):
            assert {stat.S_IMODE((root / each).stat().st_mode) for each in ("run", "cache")} == {0o755}
    finally:
        os.umask(before)


@pytest.mark.parametrize("step", ["weightd.daemon.continuity.claim.wait_until_gone", "pathlib.Path.unlink"])
def test_another_users_files_are_an_error_of_one_line(
    config: DaemonConfig, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def denied(path: Path, *_: object, **__: object) -> None:
        if path in (config.private_dir, config.children_socket):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    stale_socket(config.children_socket)
    monkeypatch.setattr(step, denied)
    with pytest.raises(ClaimError, match=r": Permission denied$"), claim(config):
        pass


# --- what is a service manager's, or a keeper's ---------------------------------------------------------------------


def test_a_socket_that_is_somebody_elses_is_left_alone(root: Path, config: DaemonConfig) -> None:
    path = root / "run/weightd.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(path))
        listener.listen()
        with claim(config, listening=True):
            stale_socket(config.children_socket)
            assert tree(root) == {"run/weightd.sock", "run/weightd.sock.lock", f"run/{config.key}.sock"}
            with pytest.raises(ClaimError, match="running already on this socket"), claim(config, listening=True):
                pass
        assert tree(root) == {"run/weightd.sock"}
        client.connect(str(path))


def test_a_directory_that_is_a_keepers_is_left_alone(root: Path, config: DaemonConfig) -> None:
    with claim(config, kept=True):
        # It is not made, either: that is done when it is known that there is no keeper.
        assert not config.private_dir.exists()
    config.private_dir.mkdir(parents=True)
    (config.private_dir / "pages").touch()
    stale_socket(config.children_socket)
    with claim(config, kept=True):
        assert tree(root) == {"run/weightd.sock.lock", f"cache/{config.key}/pages"}
    assert tree(root) == {f"cache/{config.key}/pages"}


@pytest.fixture
def keeper(config: DaemonConfig) -> Iterator[Keeper]:
    config.private_dir.mkdir(parents=True)
    (config.private_dir / "left").touch()
    made = link.start(config.private_dir)
    yield made
    if made.descriptor >= 0:  # else the test has let go of it
        made.close()
    os.waitpid(made.pid, 0)


def test_a_directory_whose_keeper_does_not_end_is_refused(
    config: DaemonConfig, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightd.daemon.continuity.claim._PATIENCE_S", 0.05)
    text = (
        f"{config.private_dir}: the processes of an earlier weightd have not ended within 0.05 s; kill them, as by "
        "systemctl kill --signal=KILL weightd"
    )
    with pytest.raises(ClaimError) as caught:
        make_private(config.private_dir)
    assert str(caught.value) == text
    assert (config.private_dir / "left").exists()
    with pytest.raises(ClaimError, match="have not ended"), claim(config):
        pass


def test_a_private_directory_is_made_once_its_keeper_has_ended(
    config: DaemonConfig, keeper: Keeper, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(_: float) -> None:
        if keeper.descriptor >= 0:
            keeper.close()

    # Only when somebody waits for it.
    monkeypatch.setattr(time, "sleep", sleep)
    with caplog.at_level(logging.INFO, "weightd"):
        make_private(config.private_dir)
    assert [each.getMessage() for each in caplog.records] == [
        "waiting for the processes of the daemon before this one to end"
    ]
    assert list(config.private_dir.iterdir()) == []
    assert stat.S_IMODE(config.private_dir.stat().st_mode) == 0o700


def test_a_lock_that_was_removed_before_it_was_had_is_nobodys(
    config: DaemonConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = Path(config.socket.removeprefix("ipc://") + ".lock")
    real, others = fcntl.flock, iter([lambda: lock.replace(f"{lock}.old")])

    def flock(descriptor: int, how: int) -> None:
        next(others, lambda: None)()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with claim(config):
        assert lock.read_text() == f"{os.getpid()}\n"
