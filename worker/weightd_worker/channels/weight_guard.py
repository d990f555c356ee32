"""Checks that the shared weights of a worker are still valid, before it answers a request on a direct channel."""

from __future__ import annotations

import os
from typing import Optional, Tuple

# The beginning of /proc/PID/statm of a process without memory. A process loses its memory when it begins to exit,
# before the memory is freed.
_NO_MEMORY = b"0 "


class WeightGuard:
    """Watches the process and the file on which the shared weights of a worker depend.

    Args:
        holder: a descriptor of /proc/PID/statm of the process whose exit makes the weights invalid; None without one.
        store: a descriptor of the page store; None without one.
        fingerprint: the size in bytes and the modification time in ns of the valid page store.
    """

    def __init__(self, holder: Optional[int], store: Optional[int], fingerprint: Tuple[int, ...]) -> None:
        self._holder = holder
        self._store = store
        self._fingerprint = fingerprint

    def are_weights_valid(self) -> bool:
        """Return whether the holder has not begun to exit, and nothing has written to the page store."""
        try:
            if self._holder is not None and os.pread(self._holder, len(_NO_MEMORY), 0) == _NO_MEMORY:
                return False
            if self._store is None:
                return True
            status = os.fstat(self._store)
        except OSError:
            # The holder has exited, and its parent has read its exit status.
            return False
        return (status.st_size, status.st_mtime_ns) == self._fingerprint

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self._holder, self._store):
            if descriptor is not None:
                os.close(descriptor)
