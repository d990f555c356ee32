"""Ctrl-C while a program is still imported."""

from __future__ import annotations

import contextlib
import signal
from typing import Generator


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
