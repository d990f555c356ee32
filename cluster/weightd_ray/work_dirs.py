"""Directories of replicas on this host: each has one to itself, and what killed ones have left is removed.

::

    BASE/lock           held while a directory is made, or looked for what is left
    BASE/work/NAME/     that of a replica: configuration, sockets, and the cache of its daemon
    BASE/work/NAME/lock held as long as the replica, or its daemon, lives
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
    """A directory that is nobody else's.

    Attributes:
        path: of it.
        lock_fd: a descriptor; as long as a process has it, nobody removes the directory.
    """

    path: Path
    lock_fd: int


@contextlib.contextmanager
def work_dir(base: Path) -> Generator[WorkDir, None, None]:
    """Have a directory within the block, and leave nothing of it behind; remove what others have left first.

    Raises:
        ClaimError: `base` cannot be had, or others could exchange it.
        OSError: nothing can be made there.
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
        # Held to the end: nobody else removes it at the same time.
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock_fd)


@contextlib.contextmanager
def file_lock(path: Path) -> Generator[None, None, None]:
    """Have a lock file to oneself within the block; who has it is waited for.

    Raises:
        OSError: it cannot be made.
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
    """Remove the directories of which nobody holds the lock: who makes one holds that of all."""
    for each in parent.iterdir():
        try:
            lock_fd = _open_lock(each / "lock")
        except OSError:
            # Not one of these; or one that was removed, but for itself.
            shutil.rmtree(each, ignore_errors=True)
            continue
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(each, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock_fd)
