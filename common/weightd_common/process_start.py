"""The first things that each program of weightd does, before it imports what takes long.

A program sets the signals that its parent has ignored or blocked back to their defaults, forks if it is the init of a
container, dies with its parent if it is a child, and leaves no memory in core dumps. Small helper processes import this
module, too, so it imports nothing large: ctypes only where a function needs it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
from typing import Any, Generator, List, Optional, Sequence, Set

# Shells and nohup(1) ignore these on purpose for the programs that they start in the background.
_INHERITED = frozenset(
    (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
)

# Python itself ignores these in every process.
_IGNORED_BY_PYTHON = frozenset((signal.SIGPIPE, signal.SIGXFSZ))

# prctl(2)
_PR_SET_PDEATHSIG = 1
_PR_GET_CHILD_SUBREAPER = 37

# An init passes on all but these: a fault of the process itself, and the two that nobody can catch.
_NOT_FORWARDED = {
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS),
    *(signal.SIGKILL, signal.SIGSTOP),
}

# sd_listen_fds(3), sd_watchdog_enabled(3): the process that they are meant for.
_PID_VARIABLES = ("LISTEN_PID", "WATCHDOG_PID")

_FIRST_INHERITED_DESCRIPTOR = 3
_SIGNAL_EXIT_BASE = 128

_COREDUMP_FILTER = "/proc/self/coredump_filter"


def reset_signals(*ignored: signal.Signals) -> None:
    """Set ignored signals back to their default action, and block none. Call it first, in the main thread.

    A parent that ignores SIGCHLD would otherwise have the kernel discard the exit statuses of this process's children,
    and one that blocks SIGTERM would make this process deaf to it. SIGHUP, SIGINT, SIGQUIT and the signals of job
    control stay ignored if they are: nohup(1) and shells ask for that.

    Args:
        ignored: this process ignores these signals from now on, including those that are pending.
    """
    # Before they are unblocked: ignoring a signal discards it where it is pending.
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    kept = {*ignored, *_INHERITED, *_IGNORED_BY_PYTHON}
    for each in range(1, signal.NSIG):
        if each not in kept and signal.getsignal(each) is signal.SIG_IGN:
            signal.signal(each, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def disable_core_dumps(file: str = _COREDUMP_FILTER) -> None:
    """Have this process, and each that it starts, leave no core file, and no memory in any other core dump.

    A limit of 0 prevents a core file. The kernel ignores the limit where core(5) has the dump piped to a program or
    sent to a socket, and not every such program heeds it: the filter of the process leaves all memory out of any dump.
    Both are soft: for debugging they can be raised from outside, with prlimit(1) and in /proc/PID/coredump_filter.

    Args:
        file: the filter of this process, see core(5).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    # A kernel without core dumps has no such file.
    with contextlib.suppress(OSError), open(file, "w", encoding="ascii") as coredump_filter:  # noqa: PTH123
        coredump_filter.write("0\n")


@contextlib.contextmanager
def silent_while_importing() -> Generator[None, None, None]:
    """Let SIGINT end the process without a word: Python would print where it was in its imports, which take a while.

    Afterwards it is Python's KeyboardInterrupt again. Where somebody ignores it, it stays ignored.
    """
    python_handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if python_handles:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    if python_handles:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def gc_disabled() -> Generator[None, None, None]:
    """Collect no garbage while the block imports modules: they stay, and looking at them takes an eighth of the time.

    Later collections do not look at what was imported, either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends.

    Args:
        parent: the pid that is expected to be the parent.

    Raises:
        SystemExit: the parent is another process already: it has died, or a wrapper stands between.
    """
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the call above took effect: then no signal would ever come.
    if os.getppid() != parent:
        raise SystemExit(f"expected to be a child of {parent}, but the parent is {os.getppid()}")


def die_with_named_parent(words: Sequence[str]) -> None:
    """Call `die_with_parent` with the process that a command line names by ``--parent PID``, if it names one.

    To be called before imports: they take a second, and a process whose parent ends meanwhile would outlive it.

    Raises:
        SystemExit: as `die_with_parent`.
    """
    parent_pids = [after for word, after in zip(words, words[1:]) if word == "--parent" and after.isdigit()]
    if parent_pids:
        die_with_parent(int(parent_pids[-1]))


@contextlib.contextmanager
def sigint_blocked() -> Generator[None, None, None]:
    """Have the processes that are started in the block born with SIGINT blocked, until `reset_signals`.

    A terminal sends it to the whole process group, and a child is in that of its parent until it has a session of its
    own: a Ctrl-C in that moment would kill it. What comes for this process is not lost, but waits for the block's end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve_as_init() -> None:
    """Become the child of an init if this process is one: PID 1, or a child subreaper (prctl(2)). Else do nothing.

    Orphans of the whole container become children of such a process, which has to reap them, and the kernel ignores
    every signal to PID 1 that it does not handle. So this process forks. The parent stays behind: it reaps, passes on
    signals, and ends with the status of the child. This function returns in the child. Call it after `reset_signals`,
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
    import ctypes  # noqa: PLC0415 - see above

    is_subreaper = ctypes.c_int()
    _libc().prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(is_subreaper), 0, 0, 0)
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


def _libc() -> Any:
    import ctypes  # noqa: PLC0415 - see above

    return ctypes.CDLL(None, use_errno=True)
