"""The system call: another process like this one, as a child of this one's parent.

The parent is who started this process: it learns of the end of the new one, and ends it with itself, while this one
may be gone. What `os.fork` does before and after is done, too. Of the C library's part there are handlers that
libraries have it call, which are about their threads, and the number that it keeps of its thread, which the kernel
puts right: a process with one thread needs no more.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from pathlib import Path

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
