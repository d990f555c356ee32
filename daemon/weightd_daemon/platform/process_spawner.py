"""Process spawner: a thread that starts processes and has no descriptors of clients.

When a new process runs its program, the kernel first closes the descriptors that the program does not inherit. If a
client has sent a descriptor of a file on a file system that never answers, this close blocks. Then the process does not
start, and the daemon, which waits for the start, blocks, too. So a thread with its own descriptor table starts all
processes. The thread creates the table when the daemon starts, before any client connects, and later receives only the
descriptors that new processes inherit.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from weightd_common.process_start import gc_paused

_log = logging.getLogger("weightd")

# Flag of unshare(2); system call number and flag of close_range(2), which replaces unshare(2) where a container engine
# refuses it. The system call number is the same on all architectures.
_CLONE_FILES = 0x400
_CLOSE_RANGE, _CLOSE_RANGE_UNSHARE = 436, 2
_MAX_DESCRIPTOR = 0xFFFFFFFF

_STDERR = 2

# Python ignores these signals, and started programs would inherit this. They start with the default actions instead.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class _Order(NamedTuple):
    """Request to start a process. The descriptors that the process inherits are sent over the spawner's socket."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    descriptor_count: int
    start_new_session: bool


class _Spawner:
    """Handle of the spawner thread, with the daemon's end of the socket over which the thread receives descriptors."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._orders: SimpleQueue[_Order] = SimpleQueue()
        self._results: SimpleQueue[int | BaseException] = SimpleQueue()
        self._socket, theirs = socket.socketpair()
        ours, number = self._socket.fileno(), theirs.detach()
        # Block all signals in the thread: Python's signal handler writes to the wake-up descriptor, which is not in the
        # thread's descriptor table.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            # A garbage collection in the spawner thread would close the descriptor of an object with an open file only
            # in the thread's own table.
            with gc_paused():
                threading.Thread(target=self._run, args=(ours, number), name="spawning", daemon=True).start()
                failure = self._results.get()
        except RuntimeError as error:
            self._socket.close()
            os.close(number)
            raise OSError(errno.EAGAIN, str(error)) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        if failure:
            _log.warning(
                "cannot give the spawner thread its own descriptor table (%s): closing a client's descriptor may delay "
                "the start of processes",
                failure,
            )
        else:
            os.close(number)

    def spawn(self, order: _Order, descriptors: Sequence[int]) -> int:
        """Start a process; return its pid."""
        with self._lock, gc_paused():
            socket.send_fds(self._socket, [b"\0"], descriptors)
            self._orders.put(order)
            result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def _run(self, ours: int, theirs: int) -> None:
        try:
            _unshare()
        except OSError as error:
            self._results.put(error)
        else:
            for entry in list(Path("/proc/thread-self/fd").iterdir()):
                descriptor = int(entry.name)
                if descriptor > _STDERR and descriptor != theirs:
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
            self._results.put(0)
        link = socket.socket(fileno=theirs)
        while True:
            order = self._orders.get()
            try:
                self._results.put(_spawn(link, order))
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                self._results.put(error)


# The spawner of this process, if it has been started. A forked process inherits this list, but not the spawner thread,
# so it starts its own spawner.
_spawners: list[_Spawner] = []
_start_lock = threading.Lock()


def start_thread() -> None:
    """Start the spawner thread of this process, if it is not running. Call this before any client connects.

    Raises:
        OSError: the thread cannot be started, or no descriptors are left.
    """
    with _start_lock:
        if not _spawners or _spawners[0].pid != os.getpid():
            _spawners[:] = [_Spawner()]


def spawn(
    argv: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Sequence[int],
    *,
    start_new_session: bool = True,
) -> int:
    """Start a process with SIGINT blocked (see `process_start.sigint_blocked`), and return its pid.

    Args:
        argv: the command.
        environment: the complete environment of the process.
        descriptors: descriptors of this process. The new process gets them with the numbers 0, 1, ..., and no others.
        start_new_session: whether the new process becomes the leader of a new session.

    Raises:
        OSError: the process cannot be started.
    """
    start_thread()
    return _spawners[0].spawn(_Order(argv, environment, len(descriptors), start_new_session), descriptors)


def _spawn(link: socket.socket, order: _Order) -> int:
    received = array.array("i")
    # `recv_fds` is not used, because Python 3.11 ignores its argument `flags`.
    _, messages, _, _ = link.recvmsg(
        1, socket.CMSG_LEN(order.descriptor_count * received.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for _, _, content in messages:
        received.frombytes(content)
    try:
        if len(received) < order.descriptor_count:
            # The kernel has dropped descriptors, because this process has reached its limit of descriptors.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return os.posix_spawnp(
            order.argv[0],
            [*order.argv],
            order.environment,
            # The descriptors are copied to 0, 1, ... in order. No copy overwrites a descriptor that is copied later,
            # because the received numbers are ascending and above the targets.
            file_actions=[(os.POSIX_SPAWN_DUP2, each, number) for number, each in enumerate(received)],
            setsid=order.start_new_session,
            setsigmask=[signal.SIGINT],
            setsigdef=_IGNORED_BY_PYTHON,
        )
    finally:
        for each in received:
            os.close(each)


def _unshare() -> None:
    """Give this thread a private copy of the process's descriptor table."""
    libc = ctypes.CDLL(None, use_errno=True)
    # close_range(2) with this flag gives the thread its own table, too. The range begins above all descriptors, so it
    # closes none.
    nothing = ctypes.c_uint(_MAX_DESCRIPTOR)
    if libc.unshare(_CLONE_FILES) and libc.syscall(_CLOSE_RANGE, nothing, nothing, _CLOSE_RANGE_UNSHARE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
