"""Directories of the daemon: created if missing, rejected if another user could replace their content."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from weightd_protocol.errors import WeightdError


class PathInUse(WeightdError):
    """The daemon cannot start, because it cannot use a path or another resource that the text names."""


def make_directory(path: Path, mode: int) -> None:
    """Create a directory if it is missing; reject it if another user could replace it or its entries.

    Raises:
        PathInUse: the directory cannot be created or written to, it is a link, its owner is neither this process's user
            nor root, or every user may replace its entries.
    """
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise PathInUse(f"cannot make the directory {path}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.getuid(), 0):
        raise PathInUse(f"{path}: expected a directory of this user, not a link or another user's")
    if not os.access(path, os.W_OK | os.X_OK):
        raise PathInUse(f"{path}: this user cannot write there; set runtime_dir and cache_dir, or run as another user")
    check_not_replaceable(path, status)


def check_not_replaceable(path: Path, status: os.stat_result) -> None:
    """Reject a directory in which every user may replace the entries.

    Raises:
        PathInUse: every user may write to the directory, and it has no sticky bit.
    """
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise PathInUse(
            f"{path}: every user can remove and replace the files in this directory: expected mode "
            f"{stat.S_IMODE(status.st_mode) & ~stat.S_IWOTH:04o}, or the sticky bit; chmod o-w, or +t"
        )
