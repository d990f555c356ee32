"""The duties of PID 1: a container has no other init, and the program's process should not have these duties itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import List, Optional, Set

from weightd_common.pdeathsig import die_with_parent

_PR_GET_CHILD_SUBREAPER = 37

# A fault of this process itself; nobody can catch the last two.
_NOT_FORWARDED = {
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS),
    *(signal.SIGKILL, signal.SIGSTOP),
}

# sd_listen_fds(3), sd_watchdog_enabled(3): the process that they are meant for.
_PID_VARIABLES = ("LISTEN_PID", "WATCHDOG_PID")

_FIRST_INHERITED_DESCRIPTOR = 3
_SIGNAL_EXIT_BASE = 128


def serve_as_init() -> None:
    """Become the child of an init if this process is one: PID 1, or a child subreaper (prctl(2)). Else do nothing.

    Orphans of the whole container become children of such a process, which has to reap them, and the kernel ignores
    every signal to PID 1 that it does not handle. So this process forks. The parent stays behind: it reaps, passes on
    signals, and ends with the status of the child. This function returns in the child. Call it after `signals.reset`,
    while the process has one thread.

    Raises:
        SystemExit: the process cannot fork.
    """
    if os.getpid() != 1 and not _is_subreaper():
        return
    forwarded = set(signal.Signals) - _NOT_FORWARDED
    # Before the fork: no signal may be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError as error:
        raise SystemExit(f"cannot start a process: {error.strerror}") from None
    if child:
        status = _SIGNAL_EXIT_BASE
        try:
            status = _supervise(child, forwarded)
        finally:
            # Whatever happens, this process never goes on as the program.
            os._exit(status)
    die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name in _PID_VARIABLES:
        if os.environ.get(name) == str(parent):
            os.environ[name] = str(os.getpid())


def _is_subreaper() -> bool:
    is_subreaper = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(is_subreaper), 0, 0, 0)
    return bool(is_subreaper.value)


def _supervise(child: int, forwarded: Set[signal.Signals]) -> int:
    """Reap every child and pass on signals until `child` has ended; return the exit status for this process."""
    _close_inherited()
    while True:
        received = signal.sigwaitinfo(forwarded)
        if received.si_signo == signal.SIGCHLD:
            status = _reap(child)
            if status is not None:
                return status
        elif received.si_code <= 0 or received.si_signo == signal.SIGHUP:
            # A positive code: a key was pressed at the terminal, and the child received the signal itself, for it is in
            # the same process group. Only a hangup is for this process alone.
            os.kill(child, received.si_signo)


def _reap(child: int) -> Optional[int]:
    """Wait for every process that has exited; return the status of the child if it is one of them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid == child:
                found = _SIGNAL_EXIT_BASE + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return found


def _close_inherited() -> None:
    """Leave sockets and pipes to the child: whoever waits for their end waits for its end."""
    descriptors: List[str] = []
    # A container may be without /proc.
    with contextlib.suppress(OSError):
        descriptors = os.listdir("/proc/self/fd")  # noqa: PTH208
    for descriptor in map(int, descriptors):
        if descriptor >= _FIRST_INHERITED_DESCRIPTOR:
            # The directory that was listed is closed already.
            with contextlib.suppress(OSError):
                os.close(descriptor)
