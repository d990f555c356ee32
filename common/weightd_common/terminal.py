"""The controlling terminal of a program, and the handling of its signals SIGHUP and SIGINT.

SIGHUP has two meanings. The kernel and the shell send it when a terminal closes, and a foreground program should then
exit. An operator sends it to let a server read its configuration file again. This module distinguishes the two cases.

Ctrl-C sends SIGINT, for which Python raises KeyboardInterrupt. A library may swallow this exception, so this module
sends SIGINT again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Generator, List

_STAT = Path("/proc/self/stat")

# Indexes of the fields of /proc/PID/stat that follow the process name, see proc_pid_stat(5).
_GROUP, _TERMINAL, _FOREGROUND_GROUP = 2, 4, 5

_REDELIVERY_DELAY_S = 0.01
_REDELIVERY_INTERVAL_S = 1.0


def ends_on_hangup() -> bool:
    """Return whether SIGHUP should end this process; False if the parent ignores SIGHUP, as `nohup` does.

    Call this function before the process installs its own handler for SIGHUP.
    """
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


class Terminal:
    """The controlling terminal that this process had when this object was created.

    Only a process that was started in the foreground, with SIGHUP not ignored, should end when its terminal closes. A
    process in the background of a shell may outlive the terminal, and a SIGHUP that it receives later is a reload
    request.

    Args:
        stat: the path of the status file of this process in /proc.
    """

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        fields = _fields(stat)
        is_foreground = fields[_TERMINAL] != "0" and fields[_FOREGROUND_GROUP] == fields[_GROUP]
        self._ends_with_terminal = is_foreground and ends_on_hangup()

    def has_closed(self) -> bool:
        """Return whether the process should end because its terminal has closed."""
        return self._ends_with_terminal and _fields(self._stat)[_TERMINAL] == "0"


def _fields(stat: Path) -> List[str]:
    text = stat.read_text("utf-8", "replace")
    # The process name, in parentheses, may contain any character.
    return text[text.rindex(")") + 2 :].split()


@contextlib.contextmanager
def redelivering_interrupts() -> Generator[None, None, None]:
    """Send SIGINT again if a library has swallowed the KeyboardInterrupt, until the exception ends the block.

    pyzmq handles signals in places from which it cannot raise an exception: Python then prints the KeyboardInterrupt
    there, and the program continues. Python 3.8 and later report this to `sys.unraisablehook`. Python 3.7 does not, so
    after a SIGINT this function sends another signal every second until the block has ended.
    """
    with _redelivering_by_hook() if sys.version_info >= (3, 8) else _redelivering_by_timer():
        yield


@contextlib.contextmanager
def _redelivering_by_hook() -> Generator[None, None, None]:
    previous_hook, previous_excepthook = sys.unraisablehook, sys.excepthook

    def on_unraisable(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # An exception raised in this hook would be swallowed as well, so a timer sends SIGINT after the hook.
            again = threading.Timer(_REDELIVERY_DELAY_S, os.kill, (os.getpid(), signal.SIGINT))
            again.daemon = True
            again.start()
        else:
            previous_hook(unraisable)

    def on_exception(kind: Any, error: Any, trace: Any) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            previous_excepthook(kind, error, trace)

    sys.unraisablehook, sys.excepthook = on_unraisable, on_exception
    try:
        yield
    finally:
        sys.unraisablehook, sys.excepthook = previous_hook, previous_excepthook


@contextlib.contextmanager
def _redelivering_by_timer() -> Generator[None, None, None]:
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def on_sigint(number: int, frame: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, _REDELIVERY_INTERVAL_S, _REDELIVERY_INTERVAL_S)
        raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.signal(signal.SIGINT, on_sigint)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, previous_handler)
