"""A child does not outlive the daemon, not even after SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends.

    Args:
        parent: the pid that is expected to be the parent.

    Raises:
        SystemExit: the parent is another process already: it has died, or a wrapper stands between.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the call above took effect: then no signal would ever come.
    if os.getppid() != parent:
        raise SystemExit(f"expected to be a child of {parent}, but the parent is {os.getppid()}")
