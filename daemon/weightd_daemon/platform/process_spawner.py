"""Starts processes from a thread that has no descriptors of clients.

When a process runs a program, the kernel closes the descriptors that the program does not inherit. A client may have
sent one whose close never ends, of a file system of its own: the new process would wait for that before it began, and
so would a daemon that waited for it. A thread can have a table of descriptors of its own. The one here makes its table
when the daemon starts, before there are clients, and only ever gets what a new process is to inherit.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

_log = logging.getLogger("weightd")

# unshare(2), and close_range(2), which has one number on all architectures: container engines refuse the first one.
_CLONE_FILES = 0x400
_CLOSE_RANGE, _CLOSE_RANGE_UNSHARE = 436, 2
_MAX_DESCRIPTOR = 0xFFFFFFFF

_STDERR = 2

# What Python ignores a child would ignore, too.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class _Order(NamedTuple):
    """A process to be started; its descriptors come over the socket."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    descriptor_count: int
    start_new_session: bool


class _Spawner:
    """The thread, and this process's end of the socket that passes descriptors to it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._orders: SimpleQueue[_Order] = SimpleQueue()
        self._results: SimpleQueue[int | BaseException] = SimpleQueue()
        self._socket, theirs = socket.socketpair()
        ours, number = self._socket.fileno(), theirs.detach()
        # A handler of signals writes to a descriptor that the thread does not have.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with _gc_disabled():
                threading.Thread(target=self._run, args=(ours, number), name="spawning", daemon=True).start()
                failure = self._results.get()
        except RuntimeError as error:
            self._socket.close()
            os.close(number)
            raise OSError(errno.EAGAIN, str(error)) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        if failure:
            _log.warning("new processes may wait for descriptors of clients: unshare: %s", failure)
        else:
            os.close(number)

    def spawn(self, order: _Order, descriptors: Sequence[int]) -> int:
        """Start a process; return its pid."""
        with self._lock, _gc_disabled():
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


# The one of this process; a process that it forks has no such thread.
_spawners: list[_Spawner] = []
_start_lock = threading.Lock()


def start_thread() -> None:
    """Start the thread, unless this process has it: it should be there before there are clients.

    Raises:
        OSError: there cannot be another thread, or no descriptors are left.
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
    """Start a process with SIGINT blocked, see `process_start.sigint_blocked`; return its pid.

    Args:
        argv: the command.
        environment: all of it.
        descriptors: of this process; the new one has them as 0, 1 and so on, and no others.
        start_new_session: whether it has a session of its own.

    Raises:
        OSError: it cannot be started.
    """
    start_thread()
    return _spawners[0].spawn(_Order(argv, environment, len(descriptors), start_new_session), descriptors)


def _spawn(link: socket.socket, order: _Order) -> int:
    received = array.array("i")
    # Not `recv_fds`: Python 3.11 ignores its flags.
    _, messages, _, _ = link.recvmsg(
        1, socket.CMSG_LEN(order.descriptor_count * received.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for _, _, content in messages:
        received.frombytes(content)
    try:
        if len(received) < order.descriptor_count:
            # The kernel has dropped some.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return os.posix_spawnp(
            order.argv[0],
            [*order.argv],
            order.environment,
            # None is overwritten before it is copied: the kernel has given them in ascending order, past these numbers.
            file_actions=[(os.POSIX_SPAWN_DUP2, each, number) for number, each in enumerate(received)],
            setsid=order.start_new_session,
            setsigmask=[signal.SIGINT],
            setsigdef=_IGNORED_BY_PYTHON,
        )
    finally:
        for each in received:
            os.close(each)


def _unshare() -> None:
    """Give this thread a table of descriptors of its own, a copy of that of the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Beyond all descriptors: nothing is closed.
    nothing = ctypes.c_uint(_MAX_DESCRIPTOR)
    if libc.unshare(_CLONE_FILES) and libc.syscall(_CLOSE_RANGE, nothing, nothing, _CLOSE_RANGE_UNSHARE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def _gc_disabled() -> Generator[None, None, None]:
    """Collect no garbage in the block: a file that the thread finalized would stay open in this process."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
