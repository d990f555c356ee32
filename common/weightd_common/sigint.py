"""Ctrl-C where it would print where Python was, or be lost."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import Any, Generator

_REDELIVERY_DELAY_S = 0.01
_REDELIVERY_INTERVAL_S = 1.0


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
