"""Native log on stderr, the only place where the library reports reasons of failures."""

from __future__ import annotations

import os
import threading
import time


def _log(level: str, source_file: str, function: str, text: str) -> None:
    """Write one line; `source_file` is the vendor's file and line relative to mindspore-lite/src/."""
    seconds = time.time()
    clock = time.strftime("%Y-%m-%d-%H:%M:%S", time.gmtime(seconds))
    fraction = f"{int(seconds * 1e6) % 1_000_000:06d}"
    head = f"[{level}] ME({os.getpid()},{threading.get_ident():x},python):"
    when = f"{clock}.{fraction[:3]}.{fraction[3:]}"
    os.write(2, f"{head}{when} [mindspore-lite/src/{source_file}] {function}] {text}\n".encode())


def error(source_file: str, function: str, text: str) -> None:
    """Write one line of an error."""
    _log("ERROR", source_file, function, text)


def warning(source_file: str, function: str, text: str) -> None:
    """Write one line of a warning."""
    _log("WARNING", source_file, function, text)
