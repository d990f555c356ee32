"""Directories that are the daemon's: made where they are missing, refused where another user could exchange them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from weightd_protocol.errors import WeightdError


class PathInUse(WeightdError):
    """The daemon cannot have a path for itself; the text says which, and who has it."""


def make_directory(path: Path, mode: int) -> None:
    """Make the directory where it is missing; refuse one that another user could exchange.

    Raises:
        PathInUse: it cannot be made, or it is a link, or it belongs to another user, or everybody may exchange what is
            in it.
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
    """Refuse a directory in which every user may remove what is there and put something else in its place.

    Raises:
        PathInUse: this is one.
    """
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise PathInUse(
            f"{path}: every user may remove what is there and put something else in its place: expected mode "
            f"{stat.S_IMODE(status.st_mode) & ~stat.S_IWOTH:04o}, or the sticky bit; chmod o-w, or +t"
        )
