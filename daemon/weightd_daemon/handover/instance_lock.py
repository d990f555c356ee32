"""The instance lock, which lets only one daemon use a socket, and the paths that the daemon reserves with the lock.

These paths are the sockets for child processes and the private directory. All of them are derived from the path of the
daemon's socket. So daemons on different sockets never touch each other's files, and only the next daemon on the same
socket removes the files of a daemon that was killed.
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

# Maximum number of seconds to wait until a shim of an earlier daemon has killed all its processes. The kernel needs
# time to free their memory.
_EXIT_TIMEOUT_S = 30.0


@contextlib.contextmanager
def lock_instance(config: DaemonConfig, *, keep_private_dir: bool = False) -> Generator[None, None, None]:
    """Hold the instance lock and reserve the daemon's paths within the block; remove the paths afterwards.

    Args:
        config: the configuration, which contains the paths.
        keep_private_dir: whether a shim uses the private directory. If so, this function neither creates nor removes
            the directory.

    Raises:
        PathInUse: another daemon uses the same socket, or a path cannot be used.
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
    """Check whether the directories of the daemon can be created, before the instance lock is taken.

    Raises:
        PathInUse: a directory cannot be created.
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
        # The path may be a symbolic link to another disk. `stat` checks the directory to which the link points.
        check_not_replaceable(path, path.stat())
    except OSError as error:
        raise PathInUse(f"cannot make the directory {path}: {error.strerror}") from None


def _lock_path(config: DaemonConfig) -> Path:
    if config.socket.startswith("ipc://"):
        return Path(config.socket.removeprefix("ipc://") + ".lock")
    return Path(config.runtime_dir, f"{config.daemon_key}.lock")


@contextlib.contextmanager
def _hold_lock_file(path: Path) -> Generator[None, None, None]:
    """Hold a lock on a file within the block. The file contains the pid of the daemon that holds the lock."""
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
        # If the previous daemon has removed the file between `open` and `flock`, try again with a new file.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                break
        os.close(descriptor)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        # Remove the file before its lock is released: no other daemon holds the lock yet, so this is not the file of
        # another daemon.
        path.unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def _private_directory(path: Path) -> Generator[None, None, None]:
    """Create an empty private directory, and remove it after the block."""
    make_private_directory(path)
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)


def make_private_directory(path: Path) -> None:
    """Create an empty private directory, after removing the directory of a daemon that was killed.

    Raises:
        PathInUse: the directory cannot be created, other users could replace it, or processes of an earlier daemon do
            not exit.
    """
    _make_cache_dir(path.parent)
    try:
        have_exited = wait_until_exited(path, _EXIT_TIMEOUT_S)
    except OSError as error:
        raise PathInUse(f"cannot make the directory {path}: {error.strerror}") from None
    if not have_exited:
        raise PathInUse(
            f"{path}: the processes of a previous weightd are running after {_EXIT_TIMEOUT_S:g} s; kill them, as by"
            " systemctl kill --signal=KILL weightd"
        )
    shutil.rmtree(path, ignore_errors=True)
    make_directory(path, mode=0o700)
