"""Forks processes that share the loaded memory of this one. Each starts work only after the daemon knows its pid.

The parent of a forked process is the parent of this one (``CLONE_PARENT``): the daemon or its shim. So the parent is
notified when the process exits, and the process dies with the parent, even if this process has exited before.

`clone` runs the interpreter's fork hooks, as `os.fork` does. It does not run the handlers that libraries register with
the C library for their threads, and leaves the C library's copy of the thread id to the kernel. A process with one
thread needs no more.

An import may change anything in its process. A forked process keeps the imported modules, and resets the rest of its
state (`ProcessState`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import platform
import signal
import sys
import tempfile
from pathlib import Path
from typing import Callable, NamedTuple, NoReturn, Optional, Sequence

import numpy as np

from weightd_common import process_attributes
from weightd_protocol.codec import clip
from weightd_protocol.messages.worker import Fork, Forked
from weightd_worker import exit_codes, process_memory
from weightd_worker.engines.engine import Engine
from weightd_worker.pagesharing.libc import libc, unsupported_reason


class InheritedModel(NamedTuple):
    """The built model that a worker inherits from the template that it was forked from.

    Attributes:
        engine: an engine that has built the model.
        sha256: the digest of the model's files.
        shared_bytes: the size in bytes of the memory that is shared by the fork.
    """

    engine: Engine
    sha256: str
    shared_bytes: int


MakeChildMain = Callable[[Sequence[str], Optional[InheritedModel]], Callable[[], int]]
"""Returns the main function of a child with these arguments and this inherited model. The function returns the exit
status.

It runs before the fork, so that later forked processes share its memory. It raises SystemExit if the arguments are
invalid.
"""

ReportForked = Callable[[Forked], bool]
"""Reports to the daemon. Returns False if the report was lost."""


class Forker:
    """Forks this process.

    Args:
        process_state: the state of this process.
        make_child_main: makes the main function of a forked process.
    """

    def __init__(self, process_state: ProcessState, make_child_main: MakeChildMain) -> None:
        self._process_state = process_state
        self._make_child_main = make_child_main

    def cannot_fork_reason(self) -> str:
        """Return why this process cannot be forked now, or "" if it can."""
        return cannot_fork_reason()

    def freeze_memory(self) -> None:
        """Prepare this process's memory for sharing, once everything to be shared is loaded.

        Without this, the garbage collector would write to each object that it examines and so unshare its page, and
        forked processes would share free memory only until they use it.

        Raises:
            OSError: from `ProcessState.restore`.
        """
        self._process_state.restore()
        gc.collect()
        if not unsupported_reason():
            libc().trim_heap()
        process_memory.drop_unchanged_pages()
        gc.freeze()

    def fork(self, order: Fork, report: ReportForked, inherited_model: Optional[InheritedModel] = None) -> None:
        """Fork a process and report its pid, or report why that failed. In the new process this never returns."""
        reason = self.cannot_fork_reason()
        if not reason:
            try:
                self._fork(order, report, self._make_child_main(order.arguments, inherited_model))
            except OSError as error:
                reason = f"cannot fork: {error.strerror}"
            except SystemExit:
                reason = f"cannot fork: invalid arguments: {' '.join(order.arguments)}"
        if reason:
            report(Forked(order.name, 0, clip(reason)))

    def _fork(self, order: Fork, report: ReportForked, child_main: Callable[[], int]) -> None:
        read_fd, write_fd = os.pipe()
        try:
            _flush_output()
            pid = clone()
            if not pid:
                self._run_child(order, child_main, read_fd, write_fd)
            # The child waits for a byte, and exits if this process ends or cannot report it to the daemon.
            if report(Forked(order.name, pid)):
                with contextlib.suppress(BrokenPipeError):
                    os.write(write_fd, b"\0")
        finally:
            os.close(read_fd)
            os.close(write_fd)

    def _run_child(self, order: Fork, child_main: Callable[[], int], read_fd: int, write_fd: int) -> NoReturn:
        def delayed_main() -> int:
            os.close(write_fd)
            if not os.read(read_fd, 1):
                # A daemon that has received the report sees by SIGKILL that the child did not fail by itself, and
                # starts another one.
                os.kill(os.getpid(), signal.SIGKILL)
            self._process_state.initialize_child(order.log)
            return child_main()

        exit_codes.run_and_exit(delayed_main)


def _flush_output() -> None:
    """Flush all output buffers: otherwise each process would write the buffered data."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)


_FIRST_OTHER_FD = 3
_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)

# Number of 32-bit words that seed numpy's generator.
_SEED_WORDS = 8


class ProcessState:
    """Signal handlers, signal mask, umask, directory and OOM score of this process when the object is made.

    A forked process changes as little as possible, because each page that it writes to becomes private.

    Attributes:
        oom_score: the OOM score of the daemon.
    """

    def __init__(self) -> None:
        self.oom_score = process_attributes.current_score()
        handlers = {number: signal.getsignal(number) for number in range(1, signal.NSIG)}
        # None: the handler was not installed by Python, or there is no signal of this number.
        self._handlers = {number: each for number, each in handlers.items() if each is not None}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._umask = os.umask(0o77)
        os.umask(self._umask)
        self._directory = _current_directory()

    def restore(self) -> None:
        """Reset this process, and so each process forked later, to this state, whatever imports have changed.

        Raises:
            OSError: the directory no longer exists.
        """
        os.umask(self._umask)
        if self._directory is not None and self._directory != _current_directory():
            os.chdir(self._directory)
        # faulthandler installs native handlers, which only it can remove.
        faulthandler.disable()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._handlers.items():
            if number not in _UNCATCHABLE:
                signal.signal(number, handler)
        faulthandler.enable()
        tempfile.tempdir = None

    def initialize_child(self, log: str) -> None:
        """Set up a process that was just forked, and direct its output to `log`.

        Raises:
            OSError: the log cannot be opened.
        """
        os.setsid()
        _redirect_output(log)
        # The modules random and tempfile reseed themselves after a fork.
        np.random.seed(np.frombuffer(os.urandom(4 * _SEED_WORDS), np.uint32))
        # Temporary files lie beside the log and are removed with it, as in a spawned process.
        os.environ["TMPDIR"] = os.path.dirname(log)  # noqa: PTH120 - a path object takes memory


def _redirect_output(log: str) -> None:
    """Open /dev/null as stdin and the log as stdout and stderr, and close every other descriptor."""
    null = os.open(os.devnull, os.O_RDWR)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if number >= _FIRST_OTHER_FD:
            # The descriptor by which the directory was listed is already closed.
            with contextlib.suppress(OSError):
                os.close(number)


def _current_directory() -> Optional[str]:
    try:
        return os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        return None


_PR_GET_TID_ADDRESS = 40
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT = 0x00008000
_CLONE_CHILD_CLEARTID = 0x00200000
_CLONE_CHILD_SETTID = 0x01000000
_FLAGS = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
_TASKS = "/proc/self/task"
_pythonapi = ctypes.pythonapi

for _function in (_pythonapi.PyOS_BeforeFork, _pythonapi.PyOS_AfterFork_Parent, _pythonapi.PyOS_AfterFork_Child):
    _function.restype = None


def cannot_fork_reason(tasks: str = _TASKS) -> str:
    """Return why this process cannot be forked now, or "" if it can: a fork keeps only one of several threads.

    Args:
        tasks: the directory in which the kernel lists the threads.
    """
    if sys.platform != "linux" or sys.maxsize <= 2**32 or platform.machine() not in _SYS_CLONE:
        return f"cannot fork: expected {' or '.join(_SYS_CLONE)} under Linux, got {platform.machine()}"
    if not _tid_address():
        return "cannot fork: the kernel does not report the address of the C library's thread id"
    # A path object would touch memory, and each forked process would then have a private copy of its pages.
    other_threads = [each for each in os.listdir(tasks) if each != str(os.getpid())]  # noqa: PTH208
    if not other_threads:
        return ""
    names = sorted(_thread_name(Path(tasks, each)) for each in other_threads)
    return f"cannot fork: expected one thread, got {len(names)} more: {', '.join(names)}"


def clone() -> int:
    """Fork this process: return the pid of the new process, and 0 in that process.

    The caller has checked that `cannot_fork_reason` returns "".

    Raises:
        OSError: the kernel has not made a process.
    """
    address = _tid_address()
    libc = ctypes.PyDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    arguments = (_SYS_CLONE[platform.machine()], _FLAGS, 0, 0, address, address)
    # The order of the last two arguments differs by architecture. The kernel ignores the one that is not child_tid.
    words = [ctypes.c_long(each) for each in arguments]
    _pythonapi.PyOS_BeforeFork()
    pid = int(libc.syscall(*words))
    if pid == 0:
        _pythonapi.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    _pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, os.strerror(error))
    return pid


def _tid_address() -> int:
    """Return the address where the C library stores its thread id (set_tid_address(2)), or 0 if it is not known."""
    address = ctypes.c_void_p()
    failed = ctypes.CDLL(None).prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    return 0 if failed else address.value or 0


def _thread_name(task: Path) -> str:
    try:
        return (task / "comm").read_text("utf-8", "replace").strip()
    except OSError:
        # The thread has exited in the meantime; the next check will not find it.
        return "?"
