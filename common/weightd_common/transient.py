"""Classifies failures: transient failures may disappear by themselves, permanent failures require an operator.

All code that loads models uses this module, so that each kind of failure is treated in the same way everywhere.
Transient failures are: a missing file, because its file system may be mounted later; a full disk; a lack of
descriptors, processes or memory; and a file that changes while it is read. All other failures are permanent, such as an
invalid model, a wrong configuration or missing permissions.
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

# Texts in a process's log that show a transient failure: the messages of errno values, and the texts of Python and C++
# for lack of threads or memory.
_TRANSIENT_TEXTS = (
    *(os.strerror(each) for each in sorted(TRANSIENT_ERRNOS)),
    "can't start new thread",
    "bad_alloc",
    "MemoryError",
)


def is_transient(error: Optional[BaseException]) -> bool:
    """Return whether an exception describes a transient failure.

    An exception is transient if its attribute `transient` is true, if it is an OSError with a transient errno or a
    MemoryError, or if the exception that has caused it is transient.
    """
    while error is not None:
        if getattr(error, "transient", False) or isinstance(error, MemoryError):
            return True
        if isinstance(error, OSError):
            return error.errno in TRANSIENT_ERRNOS
        error = error.__cause__ or error.__context__
    return False


def mentions_transient(log_text: str) -> bool:
    """Return whether `log_text`, the last part of a process's log, mentions a transient failure."""
    return any(each in log_text for each in _TRANSIENT_TEXTS)
