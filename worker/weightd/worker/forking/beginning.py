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
from pathlib import Path
from typing import Optional

import numpy as np

from weightd.shared import oom

_FIRST_OTHER = 3

_UNCHANGEABLE = (signal.SIGKILL, signal.SIGSTOP)


class Beginning:
    """Signals, directory and the like, as they are when this is made; `weightd.shared.oom` calls the score so.

    Attributes:
        score: the daemon's.
    """

    def __init__(self) -> None:
        self.score = oom.inherited()
        handlers = {number: signal.getsignal(number) for number in range(1, signal.NSIG)}
        # None: it is not Python's, or no signal.
        self._handlers = {number: each for number, each in handlers.items() if each is not None}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._umask = os.umask(0o77)
        os.umask(self._umask)
        self._directory = _directory()

    def again(self, log: str) -> None:
        """Begin in this process, which was just forked, as a new one does that writes to this log.

        Raises:
            OSError: there is no such log.
        """
        os.setsid()
        os.umask(self._umask)
        if self._directory is not None and self._directory != _directory():
            os.chdir(str(self._directory))
        self._restore_signals()
        _open_anew(log)
        # `random` does so itself, and so do the names of temporary files.
        np.random.seed()
        # As of one that is spawned: they go with its log.
        os.environ["TMPDIR"] = str(Path(log).parent)
        tempfile.tempdir = None

    def _restore_signals(self) -> None:
        # The handlers of faulthandler are not Python's: it takes them away itself.
        faulthandler.disable()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._handlers.items():
            if number not in _UNCHANGEABLE:
                signal.signal(number, handler)


def _open_anew(log: str) -> None:
    """Have nothing open but the log, and nothing for stdin."""
    null = os.open(os.devnull, os.O_RDWR)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for number in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        if number >= _FIRST_OTHER:
            # The directory that was listed is closed already.
            with contextlib.suppress(OSError):
                os.close(number)


def _directory() -> Optional[Path]:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None
