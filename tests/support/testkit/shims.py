"""Helpers of the tests of the shim."""

from __future__ import annotations

import os
import select

LIMIT_S = 60.0

FORKING = """
import os, time
from weightd_worker.forking import clone
pid = clone()
if pid:
    print(pid, flush=True)
time.sleep(1000)
"""
"""Forks a child whose parent is the parent of this process, as a fork server does, and reports its pid."""


def ended(pid: int, seconds: float = LIMIT_S) -> bool:
    """Return whether a child of this process or of its shim exits within `seconds`."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True  # the call has reaped the child
    try:
        return bool(select.select([pidfd], [], [], seconds)[0])
    finally:
        os.close(pidfd)
