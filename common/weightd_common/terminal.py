"""The terminal that a program runs in, and what its signals, SIGHUP and SIGINT, mean to the program.

The kernel and the shell send SIGHUP when a terminal closes. A program in the foreground ends then. A server with a
configuration file reads the file again on SIGHUP, so it has to tell the two apart.

Ctrl-C is SIGINT. A library may swallow the KeyboardInterrupt that Python makes of it, so it is delivered again.
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

# Fields after the name of the process, see proc_pid_stat(5).
_GROUP, _TERMINAL, _FOREGROUND_GROUP = 2, 4, 5

_REDELIVERY_DELAY_S = 0.01
_REDELIVERY_INTERVAL_S = 1.0


def ends_on_hangup() -> bool:
    """Return whether SIGHUP should end this process: `nohup` starts a program with SIGHUP ignored.

    To be called before the process installs a handler.
    """
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


class Terminal:
    """The controlling terminal of this process, as it was when this object was made.

    A process in the background of a shell may outlive the terminal and be asked for a reload later, so only a process
    that was started in the foreground, with SIGHUP not ignored, ends with its terminal.

    Args:
        stat: the file with the status of this process.
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
    # The name, in parentheses, may hold anything.
    return text[text.rindex(")") + 2 :].split()


@contextlib.contextmanager
def redelivering_interrupts() -> Generator[None, None, None]:
    """Have a KeyboardInterrupt that somebody swallows come again, until the block ends with it.

    pyzmq looks for signals where it cannot raise: Python then prints the exception, and the program goes on. Python 3.7
    does not tell of that: there it comes again each second, if the block has not ended.
    """
    with _redelivering_by_hook() if sys.version_info >= (3, 8) else _redelivering_by_timer():
        yield


@contextlib.contextmanager
def _redelivering_by_hook() -> Generator[None, None, None]:
    previous_hook, previous_excepthook = sys.unraisablehook, sys.excepthook

    def on_unraisable(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # Not from here, where it would be swallowed, too.
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
