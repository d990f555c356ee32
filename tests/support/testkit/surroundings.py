"""Runs a command in the environment of an unusual parent, old kernel or container: ``HOW[,HOW...] COMMAND...``.

ignored     SIGCHLD and SIGTERM are ignored
blocked     every signal is blocked
ENOSYS      system calls newer than Linux 4.19 fail
EPERM       pidfd_open and pidfd_send_signal fail, as with the profile of an old container engine
subreaper   the process adopts orphans, like PID 1 of a container
orphan=ARG  the process has a child that it did not start: ``sleep ARG``
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import sys
from typing import List

_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2

# From linux/bpf_common.h and linux/seccomp.h.
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000

# The same numbers on all machines: the first system call of Linux 5.1, and one of 5.3.
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434
_FIRST_AFTER_4_19 = _PIDFD_SEND_SIGNAL


def command(how: str) -> List[str]:
    """Return the command prefix for this environment."""
    return [sys.executable, "-S", __file__, how]


def no_call_after_4_19() -> None:
    """Hide system calls newer than Linux 4.19 from this process and its descendants."""
    _filter((_IF_AT_LEAST, 0, 1, _FIRST_AFTER_4_19), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS))


def no_pidfds() -> None:
    """Deny pidfds to this process and its descendants."""
    _filter(
        (_IF_EQUAL, 1, 0, _PIDFD_OPEN),
        (_IF_EQUAL, 0, 1, _PIDFD_SEND_SIGNAL),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    )


def _filter(*rules: tuple[int, int, int, int]) -> None:
    # The number of the system call is the first word of struct seccomp_data.
    program = [(_LOAD, 0, 0, 0), *rules, (_RETURN, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    whole = struct.pack("@HP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, whole, 0, 0):
        raise OSError(ctypes.get_errno(), "the filter cannot be installed")


def _have_orphan(argument: str) -> None:
    child = os.fork()
    if not child:
        if not os.fork():
            os.execvp("sleep", ["sleep", argument])
        os._exit(0)
    os.waitpid(child, 0)


def main() -> None:
    """Execute the command."""
    for how in sys.argv[1].split(","):
        if how == "ignored":
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        elif how == "blocked":
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        elif how == errno.errorcode[errno.ENOSYS]:
            no_call_after_4_19()
        elif how == errno.errorcode[errno.EPERM]:
            no_pidfds()
        elif how == "subreaper":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        elif how.startswith("orphan="):
            _have_orphan(how.partition("=")[2])
        else:
            raise ValueError(how)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
