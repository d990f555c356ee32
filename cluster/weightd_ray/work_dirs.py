"""Working directories of replicas on this host, one each. A new replica removes the directories of killed replicas.

::

    BASE/lock           locked while a directory is created, or abandoned ones are removed
    BASE/work/NAME/     directory of a replica: configuration and sockets of its daemon, and its cache
    BASE/work/NAME/lock locked as long as the supervisor or its daemon lives
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

from weightd_daemon.platform.directories import make_directory

_MODE = 0o700


class WorkDir(NamedTuple):
    """A working directory of one replica.

    Attributes:
        path: the path of the directory.
        lock_fd: descriptor of the lock; while a process holds the lock, the directory is not removed.
    """

    path: Path
    lock_fd: int


@contextlib.contextmanager
def work_dir(base: Path) -> Generator[WorkDir, None, None]:
    """Create a working directory for the duration of the block; first remove the directories of killed replicas.

    Raises:
        ClaimError: `base` cannot be used, or other users could replace this directory.
        OSError: the directory cannot be created.
    """
    parent = base / "work"
    make_directory(base, _MODE)
    make_directory(parent, _MODE)
    with file_lock(base / "lock"):
        _remove_abandoned(parent)
        path = Path(tempfile.mkdtemp(prefix="", dir=parent))
        lock_fd = _open_lock(path / "lock")
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
    try:
        yield WorkDir(path, lock_fd)
    finally:
        # The lock is held until the directory is removed, so that no other process removes it at the same time.
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock_fd)


@contextlib.contextmanager
def file_lock(path: Path) -> Generator[None, None, None]:
    """Hold a lock file exclusively within the `with` block; first wait until no other process holds the file.

    Raises:
        OSError: the file cannot be created.
    """
    descriptor = _open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _remove_abandoned(parent: Path) -> None:
    """Remove directories whose lock is free. The caller holds BASE/lock, so that no directory is being created."""
    for each in parent.iterdir():
        try:
            lock_fd = _open_lock(each / "lock")
        except OSError:
            # The lock cannot be opened, because the entry is not a working directory, or because its replica is just
            # removing it. Remove the remaining files.
            shutil.rmtree(each, ignore_errors=True)
            continue
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(each, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock_fd)
