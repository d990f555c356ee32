"""Ends of the logs of a model's processes, including exited processes, as long as the files exist.

Any process of the daemon's user may have replaced a log by something else, so only regular files are read. Each step
reads a bounded part of one file, so that the event loop can do other work in between.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from weightd_daemon.processes.files import GenerationFiles
from weightd_protocol import limits
from weightd_protocol.messages.events import Logs, LogsResponse, LogTail

# Limit of all logs in a response.
_MAX_BYTES = 1024 * 1024

# Limit of the entries that are read from a directory, where workers may exit again and again.
_MAX_ENTRIES = 2048

_SUFFIX = ".log"


class _Log(NamedTuple):
    path: Path
    generation: int


class LogTailReader:
    """Reader of the logs for one request, one file a step.

    Args:
        client: the client that sent the request.
        request: the request.
        generations: the files of the model's generations, by generation number.
    """

    def __init__(self, client: bytes, request: Logs, generations: Mapping[int, GenerationFiles]) -> None:
        self.client = client
        self.request = request
        found = sorted(_find_logs(request.process, generations), key=lambda each: _modified_at(each.path))
        self._remaining = found[-limits.MAX_LOGS :]
        self._omitted = len(found) - len(self._remaining)
        self._max_log_bytes = min(limits.MAX_LOG_BYTES, _MAX_BYTES // max(1, len(self._remaining)))
        self._tails: list[LogTail] = []

    def step(self) -> bool:
        """Read one log; return whether it was the last one."""
        if self._remaining:
            log = self._remaining.pop(0)
            tail = _read_tail(log, self.request.lines, self._max_log_bytes)
            self._tails += [] if tail is None else [tail]
        return not self._remaining

    @property
    def response(self) -> LogsResponse:
        """The response with the logs that were read."""
        return LogsResponse(self.request.id, tuple(self._tails), self._omitted)


def _find_logs(process: str, generations: Mapping[int, GenerationFiles]) -> Iterator[_Log]:
    for number, files in generations.items():
        for name in _log_names(process, files):
            yield _Log(files.log(name), number)


def _log_names(process: str, files: GenerationFiles) -> Iterable[str]:
    """Return the names of the processes that have, or may have, a log among these files."""
    if process:
        # The name must be a file in this directory.
        return [process] if "/" not in process and "\0" not in process else []
    try:
        with os.scandir(files.directory) as entries:
            names = [entry.name for entry, _ in zip(entries, range(_MAX_ENTRIES), strict=False)]
    except OSError:
        return []
    # No process has an empty or unprintable name, and a response could not carry such a name.
    return [
        name.removesuffix(_SUFFIX)
        for name in names
        if name.endswith(_SUFFIX) and name != _SUFFIX and name.isprintable()
    ]


def _modified_at(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _read_tail(log: _Log, lines: int, max_bytes: int) -> LogTail | None:
    """Return the end of a log; None if the file is missing or not a regular file."""
    try:
        descriptor = os.open(log.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return None
            start = max(0, status.st_size - max_bytes)
            content = os.pread(descriptor, max_bytes, start)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    name = log.path.name.removesuffix(_SUFFIX)
    text = _last_lines(content, lines, max_bytes, is_truncated=start > 0)
    return LogTail(name, log.generation, status.st_size, max(0.0, status.st_mtime), text)


def _last_lines(content: bytes, lines: int, max_bytes: int, *, is_truncated: bool) -> str:
    """Return the last lines; the beginning of the first one may be missing if the lines exceed the limit."""
    text = content.decode("utf-8", "replace")
    kept: Sequence[str] = text.splitlines(keepends=True)
    if is_truncated and len(kept) > 1:
        kept = kept[1:]
    raw = "".join(kept[-lines:]).encode()
    # The decoder replaces each invalid byte by a character of three bytes, so the text can exceed the limit.
    return raw[max(0, len(raw) - max_bytes) :].decode("utf-8", "ignore")
