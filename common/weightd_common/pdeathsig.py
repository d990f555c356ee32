"""What a child has of its parent: it does not outlive it, not even after SIGKILL, and leaves Ctrl-C to it."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import contextmanager
from typing import Generator, Sequence

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
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


def die_with_named_parent(words: Sequence[str]) -> None:
    """Do so for the process that a command line names by ``--parent PID``, if it does: what follows may take long.

    Imports take a second in which a process may be stopped; one that has not asked for this outlives its parent then.

    Raises:
        SystemExit: as `die_with_parent`.
    """
    parent_pids = [after for word, after in zip(words, words[1:]) if word == "--parent" and after.isdigit()]
    if parent_pids:
        die_with_parent(int(parent_pids[-1]))


@contextmanager
def sigint_blocked() -> Generator[None, None, None]:
    """Have the processes that are started in the block born with SIGINT blocked, until `signals.reset`.

    A terminal sends it to the whole process group, and a child is in that of its parent until it has a session of its
    own: a Ctrl-C in that moment would kill it. What comes for this process is not lost, but waits for the block's end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
