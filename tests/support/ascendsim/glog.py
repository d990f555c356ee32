"""The native log, on stderr: the only place where the library says why something failed.

GLOG_v is read once, when the library is imported: 0 debug, 1 info, 2 warning (the default), 3 error, 4 nothing.
"""

from __future__ import annotations

import os
import threading
import time

INFO, WARNING, ERROR = 1, 2, 3
_NAMES = {INFO: "INFO", WARNING: "WARNING", ERROR: "ERROR"}
_DEFAULT = 2


def _level() -> int:
    try:
        return int(os.environ.get("GLOG_v", ""))  # noqa: SIM112 - its name
    except ValueError:
        return _DEFAULT


_LEVEL = _level()


def log(level: int, place: str, function: str, text: str) -> None:
    """Write one line; `place` is the vendor's file and line, below mindspore-lite/src/."""
    if level < _LEVEL:
        return
    seconds = time.time()
    clock = time.strftime("%Y-%m-%d-%H:%M:%S", time.gmtime(seconds))
    fraction = f"{int(seconds * 1e6) % 1_000_000:06d}"
    head = f"[{_NAMES[level]}] ME({os.getpid()},{threading.get_ident():x},python):"
    when = f"{clock}.{fraction[:3]}.{fraction[3:]}"
    os.write(2, f"{head}{when} [mindspore-lite/src/{place}] {function}] {text}\n".encode())


def error(place: str, function: str, text: str) -> None:
    """Write one line of an error."""
    log(ERROR, place, function, text)


def warning(place: str, function: str, text: str) -> None:
    """Write one line of a warning."""
    log(WARNING, place, function, text)


def info(place: str, function: str, text: str) -> None:
    """Write one line that hardly anybody sees."""
    log(INFO, place, function, text)
