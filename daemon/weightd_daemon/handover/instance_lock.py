"""What one daemon has to itself: its lock, its children's socket, its private directory.

Everything is named after the daemon's socket, so two daemons never touch each other's files, and what a killed
daemon has left behind is removed by the next one on the same socket, and by no other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Generator
from pathlib import Path

from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.platform.directories import PathInUse, check_not_replaceable, make_directory
from weightd_daemon.platform.listen import reserve_socket_path
from weightd_daemon.processes.shim.client import wait_until_exited

# What a shim takes to end every process; the kernel has their memory to give back.
_EXIT_TIMEOUT_S = 30.0


@contextlib.contextmanager
def lock_instance(config: DaemonConfig, *, keep_private_dir: bool = False) -> Generator[None, None, None]:
    """Have the daemon's paths to itself within the block, and leave none of them behind.

    Args:
        config: names them.
        keep_private_dir: the private directory is a shim's, who removes it.

    Raises:
        PathInUse: another daemon is on the same socket, or a path cannot be used.
    """
    make_directory(Path(config.runtime_dir), mode=0o755)
    lock = _lock_path(config)
    make_directory(lock.parent.resolve(), mode=0o755)
    with (
        _hold_lock_file(lock),
        contextlib.nullcontext() if keep_private_dir else _private_directory(config.private_dir),
        reserve_socket_path(config.children_socket),
        reserve_socket_path(config.channel_socket),
    ):
        yield


def check_directories(config: DaemonConfig) -> None:
    """Find out, before anything is claimed, whether its directories could be had.

    Raises:
        PathInUse: one could not.
    """
    make_directory(Path(config.runtime_dir), mode=0o755)
    _make_cache_dir(Path(config.cache_dir))
    private = config.private_dir
    is_new = not os.path.lexists(private)
    make_directory(private, mode=0o700)
    if is_new:
        with contextlib.suppress(OSError):
            private.rmdir()


def _make_cache_dir(path: Path) -> None:
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        # It may be a link, to where there is room.
        check_not_replaceable(path, path.stat())
    except OSError as error:
        raise PathInUse(f"cannot make the directory {path}: {error.strerror}") from None


def _lock_path(config: DaemonConfig) -> Path:
    if config.socket.startswith("ipc://"):
        return Path(config.socket.removeprefix("ipc://") + ".lock")
    return Path(config.runtime_dir, f"{config.daemon_key}.lock")


@contextlib.contextmanager
def _hold_lock_file(path: Path) -> Generator[None, None, None]:
    """Hold the lock file; its content is the pid of who holds it."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise PathInUse(f"cannot open the lock {path}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 32).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise PathInUse(f"weightd is running already on this socket, as pid {owner} ({path})") from None
        except OSError as error:
            os.close(descriptor)
            raise PathInUse(f"cannot lock {path}: {error.strerror}") from None
        # The holder before may have removed the file between our open and our lock: then it is nobody's lock.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                break
        os.close(descriptor)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        # Removed while it is still held: nobody else's lock can be hit.
        path.unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def _private_directory(path: Path) -> Generator[None, None, None]:
    """Have an empty directory that nobody else can read."""
    make_private_directory(path)
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)


def make_private_directory(path: Path) -> None:
    """Make an empty directory that nobody else can read, in the place of one that a killed daemon has left.

    Raises:
        PathInUse: it cannot be made, or everybody may exchange it, or processes of an earlier daemon do not end.
    """
    _make_cache_dir(path.parent)
    try:
        have_exited = wait_until_exited(path, _EXIT_TIMEOUT_S)
    except OSError as error:
        raise PathInUse(f"cannot make the directory {path}: {error.strerror}") from None
    if not have_exited:
        raise PathInUse(
            f"{path}: the processes of an earlier weightd have not ended within {_EXIT_TIMEOUT_S:g} s; kill them, as by"
            " systemctl kill --signal=KILL weightd"
        )
    shutil.rmtree(path, ignore_errors=True)
    make_directory(path, mode=0o700)
