"""Forks this process. A forked process shares memory with it, and starts work only after the daemon has its pid.

Forked processes are siblings of this process, not children (``CLONE_PARENT``): their parent is the daemon or its shim.
So the daemon or the shim is notified when a forked process exits. A forked process dies when its parent exits, but
survives the exit of this process.

The function `clone` runs the interpreter's fork hooks, as `os.fork` does. It does not run the handlers that libraries
register by pthread_atfork(3), and the kernel instead of the C library updates the C library's copy of the thread id.
This is sufficient for a process with one thread.

The imports of this process may have changed its signal handlers, working directory and other state. A forked process
keeps the imported modules, but has its state reset (`ProcessState`).
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
from weightd_worker import exit_codes
from weightd_worker.engines.engine import Engine
from weightd_worker.pagesharing.libc import libc, unsupported_reason


class InheritedModel(NamedTuple):
    """The built model that a worker inherits when it is forked from a template.

    Attributes:
        engine: the engine that has built the model in the template.
        sha256: the digest of the model's files.
        shared_bytes: the size of the built model in bytes, which the fork shares.
    """

    engine: Engine
    sha256: str
    shared_bytes: int


MakeChildMain = Callable[[Sequence[str], Optional[InheritedModel]], Callable[[], int]]
"""Function that takes the arguments of a new process and the model that it inherits, if any, and returns the main
function of this process. The main function returns the exit status.

It is called before the fork, so that the memory that it allocates is shared with processes that are forked later. It
raises SystemExit if the arguments are invalid.
"""

ReportForked = Callable[[Forked], bool]
"""Function that reports to the daemon which process was forked, or why not. It returns False if the report was lost."""


class Forker:
    """Forks this process on the daemon's orders.

    Args:
        process_state: the state to which forked processes are reset.
        make_child_main: makes the main function of a forked process.
    """

    def __init__(self, process_state: ProcessState, make_child_main: MakeChildMain) -> None:
        self._process_state = process_state
        self._make_child_main = make_child_main

    def cannot_fork_reason(self) -> str:
        """Return why this process cannot be forked now, or "" if it can."""
        return cannot_fork_reason()

    def freeze_memory(self) -> None:
        """Prepare the memory of this process for sharing with forked processes. Call it after the last import or build.

        The garbage collector writes to each object that it examines, and each written page is copied in the forked
        process. So this method excludes all existing objects from garbage collection. It also returns free memory to
        the kernel, because pages of free memory are no longer shared once a forked process uses them.

        Raises:
            OSError: the working directory of this process no longer exists (`ProcessState.restore`).
        """
        self._process_state.restore()
        gc.collect()
        if not unsupported_reason():
            libc().trim_heap()
        gc.freeze()

    def fork(self, order: Fork, report: ReportForked, inherited_model: Optional[InheritedModel] = None) -> None:
        """Fork a process and report its pid, or report why the fork failed.

        In the new process, this method never returns, but runs the main function and exits.
        """
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
            # The new process waits for the byte that is sent here. If this process exits, or cannot report the new
            # process to the daemon, it sends no byte, and the new process exits.
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
                # The forking process has sent no byte, but the daemon may have received the report nevertheless. If
                # this process dies by SIGKILL, the daemon knows that this process has not failed by itself, and starts
                # another one.
                os.kill(os.getpid(), signal.SIGKILL)
            self._process_state.initialize_child(order.log)
            return child_main()

        exit_codes.run_and_exit(delayed_main)


def _flush_output() -> None:
    """Flush all output buffers. Otherwise this process and the forked process would both write the buffered data."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)


_FIRST_OTHER_FD = 3
_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)

# Number of random 32-bit words with which numpy's random generator is seeded after a fork.
_SEED_WORDS = 8


class ProcessState:
    """Signal handlers, signal mask, umask, working directory, OOM score and nice value when the object is made.

    `restore` resets the state before a fork, so that a forked process need not do so. A forked process writes to as
    little memory as possible, because each page that it writes becomes private.

    Attributes:
        oom_score: the OOM score of the daemon, which this process has inherited; None if it cannot be read.
        nice: the nice value of the daemon.
    """

    def __init__(self) -> None:
        self.oom_score = process_attributes.current_score()
        self.nice = process_attributes.current_nice()
        handlers = {number: signal.getsignal(number) for number in range(1, signal.NSIG)}
        # The handler is None if Python has not installed it, or if no signal has this number. Such a handler cannot be
        # restored.
        self._handlers = {number: each for number, each in handlers.items() if each is not None}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._umask = os.umask(0o77)
        os.umask(self._umask)
        self._directory = _current_directory()

    def restore(self) -> None:
        """Reset this process to the stored state. Processes that are forked later inherit this state.

        Raises:
            OSError: the working directory no longer exists.
        """
        os.umask(self._umask)
        if self._directory is not None and self._directory != _current_directory():
            os.chdir(self._directory)
        # Disable faulthandler first, because only faulthandler itself can remove its native signal handlers.
        faulthandler.disable()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._handlers.items():
            if number not in _UNCATCHABLE:
                signal.signal(number, handler)
        faulthandler.enable()
        tempfile.tempdir = None

    def initialize_child(self, log: str) -> None:
        """Set up a new process after the fork, and redirect its output to the file `log`.

        Raises:
            OSError: the log file cannot be opened.
        """
        os.setsid()
        _redirect_output(log)
        # Seed numpy's generator with new random numbers. Python's own modules random and tempfile reseed themselves.
        np.random.seed(np.frombuffer(os.urandom(4 * _SEED_WORDS), np.uint32))
        # Put temporary files beside the log, as in a spawned process, so that the daemon removes them with the log.
        os.environ["TMPDIR"] = os.path.dirname(log)  # noqa: PTH120 - a path object takes memory


def _redirect_output(log: str) -> None:
    """Open /dev/null as stdin and the file `log` as stdout and stderr, and close every other descriptor."""
    null = os.open(os.devnull, os.O_RDWR)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if number >= _FIRST_OTHER_FD:
            # The list includes the descriptor with which the directory was listed. It is already closed.
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
    """Return why this process cannot be forked now, or "" if it can.

    A process with several threads must not be forked, because only one thread would continue in the new process.

    Args:
        tasks: the directory in which the kernel lists this process's threads.
    """
    if sys.platform != "linux" or sys.maxsize <= 2**32 or platform.machine() not in _SYS_CLONE:
        return f"cannot fork: expected {' or '.join(_SYS_CLONE)} under Linux, got {platform.machine()}"
    if not _tid_address():
        return "cannot fork: the kernel does not report the address of the C library's thread id"
    # Use no path object, because making one writes to memory. In a forked process, the written pages become private.
    other_threads = [each for each in os.listdir(tasks) if each != str(os.getpid())]  # noqa: PTH208
    if not other_threads:
        return ""
    names = sorted(_thread_name(Path(tasks, each)) for each in other_threads)
    return f"cannot fork: expected one thread, got {len(names)} more: {', '.join(names)}"


def clone() -> int:
    """Fork this process. Return the pid of the new process in this process, and 0 in the new process.

    Call it only if `cannot_fork_reason` returns "".

    Raises:
        OSError: the kernel cannot create a process.
    """
    address = _tid_address()
    libc = ctypes.PyDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    arguments = (_SYS_CLONE[platform.machine()], _FLAGS, 0, 0, address, address)
    # The address of the thread id is passed twice because the order of the last two arguments, tls and child_tid,
    # depends on the architecture. With these flags the kernel ignores tls.
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
    """Return the address at which the C library stores the thread id (set_tid_address(2)), or 0 if it is unknown."""
    address = ctypes.c_void_p()
    failed = ctypes.CDLL(None).prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    return 0 if failed else address.value or 0


def _thread_name(task: Path) -> str:
    try:
        return (task / "comm").read_text("utf-8", "replace").strip()
    except OSError:
        # The thread has exited since the directory was listed.
        return "?"
