"""What a process begins with, so that one that is forked later begins with the same.

An import may do anything to the process that it is done in. A forked process keeps what it has imported, and of all
else that it would inherit nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
from typing import Optional

import numpy as np

from weightd_common import process_attributes

_FIRST_OTHER_FD = 3

_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)

# 32-bit words of the state that numpy draws from.
_SEED_WORDS = 8


class ProcessState:
    """Signals, directory, OOM score and the like, as they are when this is made.

    A process that is forked does as little as can be: each page that it changes it has for itself.

    Attributes:
        oom_score: the daemon's.
    """

    def __init__(self) -> None:
        self.oom_score = process_attributes.current_score()
        handlers = {number: signal.getsignal(number) for number in range(1, signal.NSIG)}
        # None: it is not Python's, or no signal.
        self._handlers = {number: each for number, each in handlers.items() if each is not None}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._umask = os.umask(0o77)
        os.umask(self._umask)
        self._directory = _current_directory()

    def restore(self) -> None:
        """Have this process be so again, whatever imports have done to it: and so is each that is forked from now on.

        Raises:
            OSError: the directory is gone.
        """
        os.umask(self._umask)
        if self._directory is not None and self._directory != _current_directory():
            os.chdir(self._directory)
        # Its handlers are not Python's: it takes them away itself.
        faulthandler.disable()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._handlers.items():
            if number not in _UNCATCHABLE:
                signal.signal(number, handler)
        faulthandler.enable()
        tempfile.tempdir = None

    def initialize_child(self, log: str) -> None:
        """Begin in this process, which was just forked, as a new one does that writes to this log.

        Raises:
            OSError: there is no such log.
        """
        os.setsid()
        _redirect_output(log)
        # `random` does so itself, and so do the names of temporary files.
        np.random.seed(np.frombuffer(os.urandom(4 * _SEED_WORDS), np.uint32))
        # As of one that is spawned: they go with its log.
        os.environ["TMPDIR"] = os.path.dirname(log)  # noqa: PTH120 - a path object takes memory


def _redirect_output(log: str) -> None:
    """Have nothing open but the log, and nothing for stdin."""
    null = os.open(os.devnull, os.O_RDWR)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if number >= _FIRST_OTHER_FD:
            # The directory that was listed is closed already.
            with contextlib.suppress(OSError):
                os.close(number)


def _current_directory() -> Optional[str]:
    try:
        return os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        return None
