"""The controlling terminal of a program, and the handling of its signals SIGHUP and SIGINT.

The kernel and the shell send SIGHUP when a terminal closes, and a foreground program then exits. A server with a
configuration file reads the file again on SIGHUP, so it must distinguish the two cases.

Ctrl-C sends SIGINT. A library may swallow the resulting KeyboardInterrupt, so this module delivers it again.
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

# Indexes of fields after the process name, see proc_pid_stat(5).
_GROUP, _TERMINAL, _FOREGROUND_GROUP = 2, 4, 5

_REDELIVERY_DELAY_S = 0.01
_REDELIVERY_INTERVAL_S = 1.0


def ends_on_hangup() -> bool:
    """Return whether SIGHUP should end this process. It should not if SIGHUP is ignored, as under `nohup`.

    Call it before the process installs a handler.
    """
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


class Terminal:
    """The controlling terminal that this process had when this object was created.

    A background process of a shell may outlive the terminal and receive reload requests later. So only a process that
    was started in the foreground, with SIGHUP not ignored, ends with its terminal.

    Args:
        stat: the status file of this process.
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
    """Deliver a swallowed KeyboardInterrupt again, until it ends the block.

    pyzmq checks for signals in places where it cannot raise: Python then prints the exception, and the program
    continues. Python 3.7 does not report that, so there the signal is repeated every second until the block has ended.
    """
    with _redelivering_by_hook() if sys.version_info >= (3, 8) else _redelivering_by_timer():
        yield


@contextlib.contextmanager
def _redelivering_by_hook() -> Generator[None, None, None]:
    previous_hook, previous_excepthook = sys.unraisablehook, sys.excepthook

    def on_unraisable(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # Not from here, where the exception would be swallowed as well.
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
