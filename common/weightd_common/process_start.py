"""First steps of each program of weightd, before the slow imports.

A program restores the default actions of signals that its parent has ignored or blocked, forks if it is the init of a
container, sets up to die with its parent if it is a child, and excludes its memory from core dumps. Small helper
processes import this module as well, so it imports nothing large: ctypes only in the functions that need it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
from typing import Any, Generator, List, Optional, Sequence, Set

# Shells and nohup(1) deliberately ignore these signals for programs in the background.
_INHERITED = frozenset(
    (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
)

# Python itself ignores these signals in every process.
_IGNORED_BY_PYTHON = frozenset((signal.SIGPIPE, signal.SIGXFSZ))

# prctl(2)
_PR_SET_PDEATHSIG = 1
_PR_GET_CHILD_SUBREAPER = 37

# An init forwards all signals except faults of the process itself and the two that cannot be caught.
_NOT_FORWARDED = {
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS),
    *(signal.SIGKILL, signal.SIGSTOP),
}

# The variables that name the process they are meant for, see sd_listen_fds(3) and sd_watchdog_enabled(3).
_PID_VARIABLES = ("LISTEN_PID", "WATCHDOG_PID")

_FIRST_INHERITED_DESCRIPTOR = 3
_SIGNAL_EXIT_BASE = 128

_COREDUMP_FILTER = "/proc/self/coredump_filter"


def reset_signals(*ignored: signal.Signals) -> None:
    """Restore the default action of ignored signals and unblock all signals. Call it first, in the main thread.

    If a parent ignores SIGCHLD, the kernel would otherwise discard the exit statuses of this process's children. If a
    parent blocks SIGTERM, this process would never receive it. SIGHUP, SIGINT, SIGQUIT and the job-control signals stay
    ignored if they are: nohup(1) and shells rely on that.

    Args:
        ignored: signals that this process ignores from now on, including pending ones.
    """
    # Before the signals are unblocked, because ignoring a signal discards pending instances.
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    kept = {*ignored, *_INHERITED, *_IGNORED_BY_PYTHON}
    for each in range(1, signal.NSIG):
        if each not in kept and signal.getsignal(each) is signal.SIG_IGN:
            signal.signal(each, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def disable_core_dumps(file: str = _COREDUMP_FILTER) -> None:
    """Prevent core files of this process and its children, and exclude their memory from all other core dumps.

    A limit of 0 prevents a core file. If core(5) pipes dumps to a program or sends them to a socket, the kernel ignores
    the limit, and not every such program respects it; the process's filter excludes all memory from any dump. Both
    settings can be raised from outside for debugging, with prlimit(1) and in /proc/PID/coredump_filter.

    Args:
        file: the filter of this process, see core(5).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    # A kernel without support for core dumps does not have this file.
    with contextlib.suppress(OSError), open(file, "w", encoding="ascii") as coredump_filter:  # noqa: PTH123
        coredump_filter.write("0\n")


@contextlib.contextmanager
def silent_while_importing() -> Generator[None, None, None]:
    """Let SIGINT end the process silently. Python would print a traceback into its imports, which take a while.

    After the block, SIGINT raises KeyboardInterrupt again. A signal that is ignored stays ignored.
    """
    python_handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if python_handles:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    if python_handles:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def gc_disabled() -> Generator[None, None, None]:
    """Disable the garbage collector while the block imports modules, which saves an eighth of the import time.

    Later collections skip the imported objects as well, because they live as long as the process.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent exits.

    Args:
        parent: the pid of the expected parent.

    Raises:
        SystemExit: the process has another parent, because the expected one has died or has started it through a
            wrapper.
    """
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the call above took effect, in which case no signal would ever arrive.
    if os.getppid() != parent:
        raise SystemExit(f"expected to be a child of {parent}, but the parent is {os.getppid()}")


def die_with_named_parent(words: Sequence[str]) -> None:
    """Call `die_with_parent` with the pid that follows ``--parent`` on a command line, if it is given.

    Call it before the imports: they take a second, and the process would survive if its parent exited in that time.

    Raises:
        SystemExit: as `die_with_parent`.
    """
    parent_pids = [after for word, after in zip(words, words[1:]) if word == "--parent" and after.isdigit()]
    if parent_pids:
        die_with_parent(int(parent_pids[-1]))


@contextlib.contextmanager
def sigint_blocked() -> Generator[None, None, None]:
    """Start processes in the block with SIGINT blocked, until they call `reset_signals`.

    A terminal sends SIGINT to the whole process group, to which a child belongs until it creates a session: Ctrl-C
    would kill it in that time. SIGINT for this process is delivered after the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve_as_init() -> None:
    """Fork if this process is an init: PID 1, or a child subreaper (prctl(2)). Otherwise do nothing.

    Orphans of the whole container become children of an init, which must reap them, and the kernel ignores every signal
    to PID 1 that has no handler. The parent therefore becomes a supervisor: it reaps, forwards signals, and exits with
    the status of the child. The function returns in the child. Call it after `reset_signals`, while the process has one
    thread.

    Raises:
        SystemExit: the process cannot fork.
    """
    if os.getpid() != 1 and not _is_subreaper():
        return
    forwarded = set(signal.Signals) - _NOT_FORWARDED
    # Blocked before the fork, so that no signal is lost.
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
            # This process must never continue as the program, whatever happens.
            os._exit(status)
    die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name in _PID_VARIABLES:
        if os.environ.get(name) == str(parent):
            os.environ[name] = str(os.getpid())


def _is_subreaper() -> bool:
    import ctypes  # noqa: PLC0415 - see above

    is_subreaper = ctypes.c_int()
    _libc().prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(is_subreaper), 0, 0, 0)
    return bool(is_subreaper.value)


def _supervise(child: int, forwarded: Set[signal.Signals]) -> int:
    """Reap all children and forward signals until `child` has exited. Return the exit status for this process."""
    _close_inherited()
    while True:
        received = signal.sigwaitinfo(forwarded)
        if received.si_signo == signal.SIGCHLD:
            status = _reap(child)
            if status is not None:
                return status
        elif received.si_code <= 0 or received.si_signo == signal.SIGHUP:
            # A positive code means a key at the terminal. The child receives that signal itself, because it is in the
            # same process group. Only SIGHUP is sent to this process alone.
            os.kill(child, received.si_signo)


def _reap(child: int) -> Optional[int]:
    """Reap all processes that have exited. Return the exit status of `child` if it is one of them."""
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
    """Close inherited sockets and pipes, so that their other ends see the end of the child."""
    descriptors: List[str] = []
    # A container may lack /proc.
    with contextlib.suppress(OSError):
        descriptors = os.listdir("/proc/self/fd")  # noqa: PTH208
    for descriptor in map(int, descriptors):
        if descriptor >= _FIRST_INHERITED_DESCRIPTOR:
            # The descriptor of the listed directory is closed already.
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _libc() -> Any:
    import ctypes  # noqa: PLC0415 - see above

    return ctypes.CDLL(None, use_errno=True)
