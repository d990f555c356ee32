"""Descriptors that become readable when a process exits: pidfds, or pipes where the system has no pidfds."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal

# Errors of pidfd_open(2) on a system without pidfds: Linux before 5.3 and gVisor do not have the system call, and
# seccomp profiles of old container engines refuse it.
_NO_PIDFDS = frozenset((errno.ENOSYS, errno.EPERM, errno.EACCES))


def watch_exit(pid: int) -> int:
    """Return a descriptor that becomes readable when this process's child exits. The caller closes it.

    Where the system has no pidfds, the descriptor is the read end of a pipe, and a thread closes the write end when the
    child has exited. The child stays a zombie until the caller reaps it.

    Raises:
        ProcessLookupError: the process does not exist.
        OSError: no descriptor is left, or no thread can be started.
    """
    try:
        return _open_pidfd(pid)
    except OSError as error:
        if error.errno not in _NO_PIDFDS:
            raise
    return _open_exit_pipe(pid)


def unavailable_reason() -> str:
    """Return why this system has no pidfds; "" if it has them."""
    try:
        os.close(_open_pidfd(os.getpid()))
    except OSError as error:
        return f"pidfd_open: {error.strerror}"
    return ""


def send_signal(descriptor: int, pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has exited.

    A pidfd always refers to the same process. If the system has no pidfds, this function uses the pid, which no other
    process can get until the process's parent has reaped the process. The parent is this process or the shim. If the
    shim exits, the kernel kills its children.

    Args:
        descriptor: the process's descriptor from `watch_exit`.
        pid: the pid of the process.
        number: the signal to send.
    """
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        pass
    except (AttributeError, OSError):
        # The descriptor is a pipe, or a seccomp profile refuses the system call. So send the signal to the pid.
        if not has_exited(descriptor):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def has_exited(descriptor: int) -> bool:
    """Return whether the process of a descriptor from `watch_exit` has exited."""
    # Use poll(2), because select(2) cannot handle descriptor numbers above 1,023, which a daemon with many clients has.
    readable = select.poll()
    readable.register(descriptor, select.POLLIN)
    return bool(readable.poll(0))


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except AttributeError:
        raise OSError(errno.ENOSYS, "this Python was compiled for Linux before 5.3") from None


def _open_exit_pipe(pid: int) -> int:
    import threading  # noqa: PLC0415 - the shim stays smaller without it

    reader, writer = os.pipe()

    def wait() -> None:
        # Another thread may have reaped the child already.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(writer)

    try:
        threading.Thread(target=wait, name=f"exit of {pid}", daemon=True).start()
    except RuntimeError as error:
        os.close(reader)
        os.close(writer)
        raise OSError(errno.EAGAIN, str(error)) from None
    return reader
