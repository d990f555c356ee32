"""Classification of failures: transient ones may disappear by themselves, permanent ones need an operator.

All code that loads a model uses this module, so that a kind of failure is treated alike everywhere. Transient are a
missing file (a file system may be mounted late), a full disk, exhausted descriptors, processes or memory, and a file
that changes while it is read. All other failures are permanent: an invalid model, a wrong configuration, missing
permissions.
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

# Texts of Python and C++ for errors without an errno.
_TRANSIENT_TEXTS = (
    *(os.strerror(each) for each in sorted(TRANSIENT_ERRNOS)),
    "can't start new thread",
    "bad_alloc",
    "MemoryError",
)


def is_transient(error: Optional[BaseException]) -> bool:
    """Return whether the cause of an exception may disappear by itself.

    An exception can declare it with an attribute `transient`. Otherwise its causes and contexts are considered, too.
    """
    while error is not None:
        if getattr(error, "transient", False) or isinstance(error, MemoryError):
            return True
        if isinstance(error, OSError):
            return error.errno in TRANSIENT_ERRNOS
        error = error.__cause__ or error.__context__
    return False


def mentions_transient(log_text: str) -> bool:
    """Return whether the last part of a process's log names a cause that may disappear by itself."""
    return any(each in log_text for each in _TRANSIENT_TEXTS)
