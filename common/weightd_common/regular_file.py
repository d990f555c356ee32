"""Reads regular files of a bounded size.

A path that an operator or a client names may lead to a pipe, a device or an endless file. Opening a pipe waits for its
other end, so a daemon that opens one as a file may hang for ever.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Union

MAX_CONFIG_BYTES = 4 * 1024 * 1024
"""The most bytes of a configuration file: thousands of tables fit into far less."""


def open_regular(path: Union[str, Path]) -> BinaryIO:
    """Open a regular file for reading, without waiting.

    Raises:
        OSError: it cannot be opened, or is no regular file.
        ValueError: the path holds a NUL.
    """
    descriptor = os.open(str(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "expected a regular file, got a pipe, a socket or a device", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Union[str, Path], max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than `max_bytes`.
        ValueError: the path holds a NUL.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"expected a file of at most {max_bytes:,} bytes", str(path))
    return content
