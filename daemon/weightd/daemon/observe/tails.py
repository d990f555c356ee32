"""The ends of what the processes of a model have written, of those that have ended, too, as long as their files are.

A process of the daemon's user may have put anything in the place of its log: what is no file is passed over, and of
what is one a bounded piece is read, one file at a time, so that the loop has its turns between two.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from weightd.daemon.children.files import GenerationFiles
from weightd.protocol import limits
from weightd.protocol.messages.journal import Logs, LogsResponse, LogTail

# Of all logs in an answer.
_MOST_BYTES = 1024 * 1024

# Of a directory in which workers die again and again.
_MOST_ENTRIES = 2048

_SUFFIX = ".log"


class _Log(NamedTuple):
    path: Path
    generation: int


class Tails:
    """Reads a log a step.

    Args:
        client: who asked.
        question: what it asked.
        generations: the files of those of the model, by their numbers.
    """

    def __init__(self, client: bytes, question: Logs, generations: Mapping[int, GenerationFiles]) -> None:
        self.client = client
        self.question = question
        found = sorted(_found(question.process, generations), key=lambda each: _changed(each.path))
        self._left = found[-limits.MAX_LOGS :]
        self._left_out = len(found) - len(self._left)
        self._most = min(limits.MAX_LOG_BYTES, _MOST_BYTES // max(1, len(self._left)))
        self._read: list[LogTail] = []

    def step(self) -> bool:
        """Read a log; return whether it was the last."""
        if self._left:
            log = self._left.pop(0)
            told = _tail(log, self.question.lines, self._most)
            self._read += [] if told is None else [told]
        return not self._left

    @property
    def answer(self) -> LogsResponse:
        """What was read."""
        return LogsResponse(self.question.id, tuple(self._read), self._left_out)


def _found(process: str, generations: Mapping[int, GenerationFiles]) -> Iterator[_Log]:
    for number, files in generations.items():
        for name in _names(process, files):
            yield _Log(files.log(name), number)


def _names(process: str, files: GenerationFiles) -> Iterable[str]:
    """The processes that have, or may have, a log there."""
    if process:
        # It names a file in this directory, or none.
        return [process] if "/" not in process and "\0" not in process else []
    try:
        with os.scandir(files.directory) as entries:
            names = [entry.name for entry, _ in zip(entries, range(_MOST_ENTRIES), strict=False)]
    except OSError:
        return []
    # No process has a name that is empty or no text: such a one could not be told.
    return [
        name.removesuffix(_SUFFIX)
        for name in names
        if name.endswith(_SUFFIX) and name != _SUFFIX and name.isprintable()
    ]


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _tail(log: _Log, lines: int, most: int) -> LogTail | None:
    """Return the end of a log; None where there is none, or something else."""
    try:
        descriptor = os.open(log.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                return None
            start = max(0, found.st_size - most)
            content = os.pread(descriptor, most, start)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    name = log.path.name.removesuffix(_SUFFIX)
    text = _last(content, lines, most, is_cut=start > 0)
    return LogTail(name, log.generation, found.st_size, max(0.0, found.st_mtime), text)


def _last(content: bytes, lines: int, most: int, *, is_cut: bool) -> str:
    """Return the last lines, of the first of which the beginning may be missing."""
    text = content.decode("utf-8", "replace")
    found: Sequence[str] = text.splitlines(keepends=True)
    if is_cut and len(found) > 1:
        found = found[1:]
    raw = "".join(found[-lines:]).encode()
    # What is no text takes three bytes for each of its own.
    return raw[max(0, len(raw) - most) :].decode("utf-8", "ignore")
