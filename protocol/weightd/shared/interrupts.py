"""Ctrl-C where it would print where Python was, or be lost."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import Any, Generator

_SOON_S = 0.01
_LATE_S = 1.0


@contextlib.contextmanager
def silent_while_importing() -> Generator[None, None, None]:
    """Let SIGINT end the process without a word: Python would print where it was in its imports, which take a while.

    Afterwards it is Python's KeyboardInterrupt again. Where somebody ignores it, it stays ignored.
    """
    python_handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if python_handles:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    if python_handles:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def never_lost() -> Generator[None, None, None]:
    """Have a KeyboardInterrupt that somebody swallows come again, until the block ends with it.

    pyzmq looks for signals where it cannot raise: Python then prints the exception, and the program goes on. Python 3.7
    does not tell of that: there it comes again each second, if the block has not ended.
    """
    with _told() if sys.version_info >= (3, 8) else _each_second():
        yield


@contextlib.contextmanager
def _told() -> Generator[None, None, None]:
    before, printing = sys.unraisablehook, sys.excepthook

    def swallowed(told: Any) -> None:
        if issubclass(told.exc_type, KeyboardInterrupt):
            # Not from here, where it would be swallowed, too.
            again = threading.Timer(_SOON_S, os.kill, (os.getpid(), signal.SIGINT))
            again.daemon = True
            again.start()
        else:
            before(told)

    def printed(kind: Any, error: Any, trace: Any) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            printing(kind, error, trace)

    sys.unraisablehook, sys.excepthook = swallowed, printed
    try:
        yield
    finally:
        sys.unraisablehook, sys.excepthook = before, printing


@contextlib.contextmanager
def _each_second() -> Generator[None, None, None]:
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupted(number: int, frame: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, _LATE_S, _LATE_S)
        raise KeyboardInterrupt

    alarmed = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, alarmed)
