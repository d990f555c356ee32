"""Forks processes that share all that was loaded before: each is reported before it does anything, then starts as new.

The parent of a new process is the parent of this one, the daemon: it learns of the end of the new process, and ends it
with itself, while this one may be gone. What `os.fork` does before and after is done, too. Of the C library's part
there are handlers that libraries have it call, which are about their threads, and the number that it keeps of its
thread, which the kernel puts right: a process with one thread needs no more.

An import may do anything to the process that it is done in. A forked process keeps what it has imported, and of all
else that it would inherit nothing (`ProcessState`).
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
    """What a process has of the one that it was forked from: an engine that has built the model.

    Attributes:
        engine: the engine.
        sha256: names the content that it has built.
        shared_bytes: how many of its memory are shared so.
    """

    engine: Engine
    sha256: str
    shared_bytes: int


MakeChildMain = Callable[[Sequence[str], Optional[InheritedModel]], Callable[[], int]]
"""Returns what lives the life of a child with these arguments, and with what is made already, up to its exit status.

What can be found out before the fork a process has in common with those that are forked later. Raises SystemExit where
the arguments are wrong.
"""

ReportForked = Callable[[Forked], bool]
"""Tells the daemon; returns whether it can have heard."""


class Forker:
    """Forks this process.

    Args:
        process_state: of this process.
        make_child_main: what the new ones do.
    """

    def __init__(self, process_state: ProcessState, make_child_main: MakeChildMain) -> None:
        self._process_state = process_state
        self._make_child_main = make_child_main

    def cannot_fork_reason(self) -> str:
        """Return why this process cannot be forked now, "" if it can."""
        return cannot_fork_reason()

    def freeze_memory(self) -> None:
        """Make what is in memory fit to be shared: to be called when all is there that others are to have.

        A collection of garbage writes to each object that it looks at, and free memory would be shared until used.

        Raises:
            OSError: as `ProcessState.restore`.
        """
        self._process_state.restore()
        gc.collect()
        if not unsupported_reason():
            libc().trim_heap()
        process_memory.drop_unchanged_pages()
        gc.freeze()

    def fork(self, order: Fork, report: ReportForked, inherited_model: Optional[InheritedModel] = None) -> None:
        """Make the process, and tell of it, or why there is none. In that process this does not return."""
        reason = self.cannot_fork_reason()
        if not reason:
            try:
                self._fork(order, report, self._make_child_main(order.arguments, inherited_model))
            except OSError as error:
                reason = f"cannot fork: {error.strerror}"
            except SystemExit:
                reason = f"cannot fork: wrong arguments: {' '.join(order.arguments)}"
        if reason:
            report(Forked(order.name, 0, clip(reason)))

    def _fork(self, order: Fork, report: ReportForked, child_main: Callable[[], int]) -> None:
        read_fd, write_fd = os.pipe()
        try:
            _flush_output()
            pid = clone()
            if not pid:
                self._run_child(order, child_main, read_fd, write_fd)
            # It waits for a byte. Without it, because this process ends or nobody hears of it, it leaves.
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
                # Its end is not its own doing: where the daemon was told of it, another one is made.
                os.kill(os.getpid(), signal.SIGKILL)
            self._process_state.initialize_child(order.log)
            return child_main()

        exit_codes.run_and_exit(delayed_main)


def _flush_output() -> None:
    """What is buffered would be written by each process that has the buffer."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)


_FIRST_OTHER_FD = 3
_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)

# 32-bit words of the state that numpy draws from.
_SEED_WORDS = 8


class ProcessState:
    """Signals, directory, OOM score and the like, as they are when this is made.

    A process that is forked does as little as can be: each page that it changes it has for itself.

    Attributes:
        oom_score: the daemon's.
    """

    def __init__(self) -> None:
        self.oom_score = process_attributes.current_score()
        handlers = {number: signal.getsignal(number) for number in range(1, signal.NSIG)}
        # None: it is not Python's, or no signal.
        self._handlers = {number: each for number, each in handlers.items() if each is not None}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._umask = os.umask(0o77)
        os.umask(self._umask)
        self._directory = _current_directory()

    def restore(self) -> None:
        """Have this process be so again, whatever imports have done to it: and so is each that is forked from now on.

        Raises:
            OSError: the directory is gone.
        """
        os.umask(self._umask)
        if self._directory is not None and self._directory != _current_directory():
            os.chdir(self._directory)
        # Its handlers are not Python's: it takes them away itself.
        faulthandler.disable()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._handlers.items():
            if number not in _UNCATCHABLE:
                signal.signal(number, handler)
        faulthandler.enable()
        tempfile.tempdir = None

    def initialize_child(self, log: str) -> None:
        """Begin in this process, which was just forked, as a new one does that writes to this log.

        Raises:
            OSError: there is no such log.
        """
        os.setsid()
        _redirect_output(log)
        # `random` does so itself, and so do the names of temporary files.
        np.random.seed(np.frombuffer(os.urandom(4 * _SEED_WORDS), np.uint32))
        # As of one that is spawned: they go with its log.
        os.environ["TMPDIR"] = os.path.dirname(log)  # noqa: PTH120 - a path object takes memory


def _redirect_output(log: str) -> None:
    """Have nothing open but the log, and nothing for stdin."""
    null = os.open(os.devnull, os.O_RDWR)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if number >= _FIRST_OTHER_FD:
            # The directory that was listed is closed already.
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
    """Return why this process cannot be forked now, "" if it can: of several threads one only would live on.

    Args:
        tasks: where the kernel shows them.
    """
    if sys.platform != "linux" or sys.maxsize <= 2**32 or platform.machine() not in _SYS_CLONE:
        return f"cannot fork: expected {' or '.join(_SYS_CLONE)} under Linux, got {platform.machine()}"
    if not _tid_address():
        return "cannot fork: the kernel does not tell where the C library has the number of its thread"
    # Of path objects, and all that they touch, each process that is forked would have a copy.
    other_threads = [each for each in os.listdir(tasks) if each != str(os.getpid())]  # noqa: PTH208
    if not other_threads:
        return ""
    names = sorted(_thread_name(Path(tasks, each)) for each in other_threads)
    return f"cannot fork: expected one thread, got {len(names)} more: {', '.join(names)}"


def clone() -> int:
    """Return the pid of the new process, and 0 in that process. To be called where there is no `cannot_fork_reason`.

    Raises:
        OSError: there is none.
    """
    address = _tid_address()
    libc = ctypes.PyDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    arguments = (_SYS_CLONE[platform.machine()], _FLAGS, 0, 0, address, address)
    # The two machines do not have the last two in the same order; of the other one nothing is read.
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
    """Where the C library has the number of the thread: the kernel was told when the thread began."""
    address = ctypes.c_void_p()
    failed = ctypes.CDLL(None).prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    return 0 if failed else address.value or 0


def _thread_name(task: Path) -> str:
    try:
        return (task / "comm").read_text("utf-8", "replace").strip()
    except OSError:
        # It has ended meanwhile: the next look will find it gone.
        return "?"
