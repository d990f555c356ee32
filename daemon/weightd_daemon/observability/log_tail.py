"""Reader of the last lines of the logs of a model's processes, also of exited processes whose log files still exist.

Only regular files are read, because any process of the daemon's user can replace a log by another kind of file. A
response takes several steps, so that the event loop can do other work in between; each step reads a limited part of one
file.
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

# Maximum size in bytes of all logs in a response.
_MAX_BYTES = 1024 * 1024

# Maximum number of entries that are read from a log directory. Workers that exit again and again may leave many logs.
_MAX_ENTRIES = 2048

_SUFFIX = ".log"


class _Log(NamedTuple):
    path: Path
    generation: int


class LogTailReader:
    """Reader of the logs for one request. Each step reads one file.

    Args:
        client: the key of the client that sent the request.
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
        """Read the next log; return whether all logs have been read."""
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
    """Return the names of the processes whose logs are to be read: `process`, or all if `process` is empty."""
    if process:
        # The name comes from a client. It must not lead to another directory.
        return [process] if "/" not in process and "\0" not in process else []
    try:
        with os.scandir(files.directory) as entries:
            names = [entry.name for entry, _ in zip(entries, range(_MAX_ENTRIES), strict=False)]
    except OSError:
        return []
    # Skip empty and unprintable names: no process has such a name, and a response could not contain it.
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
    """Return the last `lines` lines of a log; if they exceed `max_bytes`, their beginning is cut off."""
    text = content.decode("utf-8", "replace")
    kept: Sequence[str] = text.splitlines(keepends=True)
    if is_truncated and len(kept) > 1:
        kept = kept[1:]
    raw = "".join(kept[-lines:]).encode()
    # The decoder has replaced each invalid byte by a character of three bytes, so the text may exceed the limit again.
    return raw[max(0, len(raw) - max_bytes) :].decode("utf-8", "ignore")
