"""First steps of each program of weightd, before the slow imports.

A program restores the default actions of signals that its parent has ignored or blocked. It forks if it is the init
process of a container. If it is a child, it lets the kernel kill it when its parent exits. It excludes its memory from
core dumps. Small helper processes import this module as well, so the module imports nothing large, and ctypes only in
the functions that need it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
from typing import Any, Generator, List, Optional, Sequence, Set

# Signals that stay ignored if the parent ignores them: shells and nohup(1) do so deliberately for background programs.
_INHERITED = frozenset(
    (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
)

# Python itself ignores these signals in every process.
_IGNORED_BY_PYTHON = frozenset((signal.SIGPIPE, signal.SIGXFSZ))

# prctl(2)
_PR_SET_PDEATHSIG = 1
_PR_GET_CHILD_SUBREAPER = 37

# Signals that the init process does not forward to its child: faults of the init process itself, and the two signals
# that cannot be caught.
_NOT_FORWARDED = {
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS),
    *(signal.SIGKILL, signal.SIGSTOP),
}

# Environment variables of sd_listen_fds(3) and sd_watchdog_enabled(3) with the pid of the process that the service
# manager has started. After a fork, the child sets them to its own pid.
_PID_VARIABLES = ("LISTEN_PID", "WATCHDOG_PID")

_FIRST_INHERITED_DESCRIPTOR = 3
_SIGNAL_EXIT_BASE = 128

_COREDUMP_FILTER = "/proc/self/coredump_filter"


def reset_signals(*ignored: signal.Signals) -> None:
    """Restore the default action of ignored signals and unblock all signals.

    A program calls this function first, in its main thread, because it inherits ignored and blocked signals from its
    parent. With SIGCHLD ignored, the kernel would discard the exit statuses of the program's children. With SIGTERM
    blocked, the program would never receive it. SIGHUP, SIGINT, SIGQUIT and the job-control signals stay ignored if the
    parent ignores them, because nohup(1) and shells rely on that.

    Args:
        ignored: signals that this process ignores from now on. Pending instances are discarded.
    """
    # Ignoring a signal discards pending instances, so ignore signals before unblocking them.
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    kept = {*ignored, *_INHERITED, *_IGNORED_BY_PYTHON}
    for each in range(1, signal.NSIG):
        if each not in kept and signal.getsignal(each) is signal.SIG_IGN:
            signal.signal(each, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def disable_core_dumps(file: str = _COREDUMP_FILTER) -> None:
    """Prevent core files of this process and its children, and exclude their memory from all other core dumps.

    Core dumps would contain the model's weights and the data of requests. A size limit of 0 prevents core files. But if
    the system pipes core dumps to a program or sends them to a socket, see core(5), the kernel ignores the limit.
    Therefore the process's core dump filter also excludes all memory. For debugging, an operator can change both
    settings of the running process, with prlimit(1) and in /proc/PID/coredump_filter.

    Args:
        file: the path of this process's core dump filter.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    # A kernel without support for core dumps does not have this file.
    with contextlib.suppress(OSError), open(file, "w", encoding="ascii") as coredump_filter:  # noqa: PTH123
        coredump_filter.write("0\n")


@contextlib.contextmanager
def silent_while_importing() -> Generator[None, None, None]:
    """Let SIGINT kill the process silently in the block, which imports modules.

    Imports take a while, and Python would print a long traceback when the user presses Ctrl-C during the imports.
    After the block, SIGINT raises KeyboardInterrupt again. If SIGINT is ignored, it stays ignored.
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

    Afterwards `gc.freeze` excludes the imported objects from later collections, because they live as long as the
    process.
    """
    with gc_paused():
        try:
            yield
        finally:
            gc.freeze()


@contextlib.contextmanager
def gc_paused() -> Generator[None, None, None]:
    """Pause the garbage collector in the block, for example while the block allocates many objects that stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent exits.

    Args:
        parent: the pid of the expected parent.

    Raises:
        SystemExit: this process has another parent: the expected parent has exited, or it has started a wrapper program
            that started this process.
    """
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # If the parent exited before the prctl call, the kernel will never send the signal, so check the parent now.
    if os.getppid() != parent:
        raise SystemExit(f"expected to be a child of {parent}, but the parent is {os.getppid()}")


def die_with_named_parent(words: Sequence[str]) -> None:
    """Call `die_with_parent` with the pid after ``--parent`` on a command line; do nothing without this option.

    A program calls this function before its imports. These take about a second, and if the parent exited during the
    imports, the program would continue to run.

    Raises:
        SystemExit: as `die_with_parent`.
    """
    parent_pids = [after for word, after in zip(words, words[1:]) if word == "--parent" and after.isdigit()]
    if parent_pids:
        die_with_parent(int(parent_pids[-1]))


@contextlib.contextmanager
def sigint_blocked() -> Generator[None, None, None]:
    """Block SIGINT while the block starts child processes. The children inherit this and call `reset_signals` later.

    On Ctrl-C, a terminal sends SIGINT to the whole process group. A new child is still in this process's group until it
    creates a new session, and SIGINT would kill it in that time. A SIGINT for this process itself is delivered
    after the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve_as_init() -> None:
    """Fork if this process is an init process: PID 1, or a child subreaper (prctl(2)). Otherwise do nothing.

    An init process must reap all orphaned processes of its container, and the kernel ignores every signal to PID 1 for
    which PID 1 has no handler. Therefore the parent becomes a supervisor, which reaps orphans, forwards signals to the
    child, and exits with the status of the child. The child returns from this function and runs the program. Call the
    function after `reset_signals`, while the process has only one thread.

    Raises:
        SystemExit: the process cannot fork.
    """
    if os.getpid() != 1 and not _is_subreaper():
        return
    forwarded = set(signal.Signals) - _NOT_FORWARDED
    # The signals are blocked before the fork, so that none is lost before `_supervise` waits for them.
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
            # Only the child runs the program. The supervisor must exit here even after an exception.
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
    """Reap all children and forward signals to `child` until it has exited.

    Return the exit status with which this process should exit.
    """
    _close_inherited()
    while True:
        received = signal.sigwaitinfo(forwarded)
        if received.si_signo == signal.SIGCHLD:
            status = _reap(child)
            if status is not None:
                return status
        elif received.si_code <= 0 or received.si_signo == signal.SIGHUP:
            # A positive code shows that the kernel has sent the signal for a key such as Ctrl-C at the terminal. The
            # kernel has sent such a signal to the child as well, because the child is in the same process group. So of
            # these signals, forward only SIGHUP, which the kernel sends to this process alone.
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
    """Close inherited sockets and pipes. Otherwise the processes at their other ends could not see the child exit."""
    descriptors: List[str] = []
    # A container may lack /proc.
    with contextlib.suppress(OSError):
        descriptors = os.listdir("/proc/self/fd")  # noqa: PTH208
    for descriptor in map(int, descriptors):
        if descriptor >= _FIRST_INHERITED_DESCRIPTOR:
            # The list includes the descriptor with which the directory was listed. It is already closed.
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _libc() -> Any:
    import ctypes  # noqa: PLC0415 - see above

    return ctypes.CDLL(None, use_errno=True)
