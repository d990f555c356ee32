"""The terminal that a program runs in, and what SIGHUP means to the program.

The kernel and the shell send SIGHUP when a terminal closes. A program in the foreground ends then. A server with a
configuration file reads the file again on SIGHUP, so it has to tell the two apart.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import List

_STAT = Path("/proc/self/stat")

# Fields after the name of the process, see proc_pid_stat(5).
_GROUP, _TERMINAL, _FOREGROUND_GROUP = 2, 4, 5


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
