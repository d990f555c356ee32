"""Tells failures that may go away by themselves from those that stay until somebody acts.

Everything that loads a model asks here, so that one kind of failure is treated alike wherever it happens. Transient are
a missing file (a file system may be mounted late), a full disk, exhausted descriptors, processes or memory, and a file
that changes while it is read. Permanent is the rest: an invalid model, a wrong configuration, missing permissions.
"""

from __future__ import annotations

import errno
import os
from typing import Optional

TRANSIENT_ERRNOS = frozenset(
    {
        errno.EAGAIN,
        errno.EDQUOT,
        errno.EHOSTDOWN,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENODEV,
        errno.ENOENT,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.ENOTCONN,
        errno.ENOTDIR,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)

# What Python and C++ say instead of an errno.
_TRANSIENT_TEXTS = (
    *(os.strerror(each) for each in sorted(TRANSIENT_ERRNOS)),
    "can't start new thread",
    "bad_alloc",
    "MemoryError",
)


def is_transient(error: Optional[BaseException]) -> bool:
    """Return whether the cause of an exception may go away by itself.

    An exception may say so with an attribute `transient`. Else the exceptions while which it was raised count, too.
    """
    while error is not None:
        if getattr(error, "transient", False) or isinstance(error, MemoryError):
            return True
        if isinstance(error, OSError):
            return error.errno in TRANSIENT_ERRNOS
        error = error.__cause__ or error.__context__
    return False


def mentions_transient(log_text: str) -> bool:
    """Return whether the last words of a process's log name a cause that may go away by itself."""
    return any(each in log_text for each in _TRANSIENT_TEXTS)
