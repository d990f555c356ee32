"""Stores the usage counters in a file, so that they survive restarts of the daemon.

The next daemon continues from the stored counters, whether or not it takes over processes. The file has one JSON object
per line: for each tenant's account, each model, the daemon, the load time and the memory of each model, and each
version that was loaded. The last line contains the number of the lines before it. The daemon replaces the file
periodically and when it exits. If the daemon is killed, the counts since the last write are lost. An invalid file is
ignored.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from weightd_daemon.platform.event_loop import Timer
from weightd_protocol import limits
from weightd_protocol.schema import FieldError, decode, label, plain

_log = logging.getLogger("weightd.counters")

INTERVAL_S = 10.0

# Number of records that are encoded in one turn of the event loop. Encoding them takes a millisecond or two.
_MAX_RECORDS_PER_STEP = 128

# Maximum number of lines in the file. Each tenant and the operator have one account for each model and one without a
# model. The other lines are for the daemon, the models, their load times and needs, including removed models, and the
# versions that were loaded.
_MAX_LINES = (limits.MAX_TENANTS + 1) * (limits.MAX_MODELS + 1) + 5 * limits.MAX_MODELS + 1
_MAX_BYTES = 2048 * _MAX_LINES


class CounterStoreError(Exception):
    """The content of the counter file is invalid."""


class CounterRecord(Protocol):
    """A record of one counted object, such as a model."""

    @property
    def key(self) -> str:
        """A key that is unique among the records of its type."""
        ...


class CounterSource(Protocol):
    """Objects of one type whose counters are stored, for example all models."""

    def records(self) -> Iterator[Any]:
        """Yield a record of each object. Events that happen during the iteration may be missing from the records."""
        ...

    def restore(self, records: Sequence[Any]) -> object:
        """Continue counting from these records, which the previous daemon has stored."""


class CounterEntry(NamedTuple):
    """A source of records, and the class of these records."""

    source: CounterSource
    record_type: type[Any]


class CounterStore:
    """Restores the counters from a file, and writes them to the file periodically.

    Args:
        path: the path of the file, in a directory that belongs to the daemon.
        entries: the sources to store and restore, by the key of the JSON objects in the file.
        call_soon: calls a function in the next turn of the event loop.

    Attributes:
        timer: starts the periodic writes.
    """

    def __init__(
        self, path: Path, entries: Mapping[str, CounterEntry], call_soon: Callable[[Callable[[], object]], object]
    ) -> None:
        self.path = path
        self.timer = Timer(self._on_timer)
        self._entries = entries
        self._call_soon = call_soon
        self._is_open = False
        self._has_logged_error = False
        self._last_content = ""
        self._lines: list[str] = []
        self._remaining: Iterator[tuple[str, Any]] = iter(())

    def open(self, now: float) -> None:
        """Restore the sources from the file, if it exists and is valid, and begin to write the file periodically."""
        self._is_open = True
        self.timer.set(now + INTERVAL_S)
        try:
            records = read(self.path, {word: each.record_type for word, each in self._entries.items()})
        except FileNotFoundError:
            return
        except (OSError, CounterStoreError) as error:
            _log.warning("all counters restart at zero: %s: %s", self.path, getattr(error, "strerror", error))
            return
        for word, each in self._entries.items():
            each.source.restore(records[word])

    def close(self) -> None:
        """Write the file for the last time."""
        if self._is_open:
            self._begin_write()
            while not self._write_step():
                pass

    def _on_timer(self, now: float) -> None:
        self.timer.set(now + INTERVAL_S)
        self._begin_write()
        self._call_soon(self._continue_write)

    def _begin_write(self) -> None:
        self._lines = []
        self._remaining = ((word, record) for word, each in self._entries.items() for record in each.source.records())

    def _continue_write(self) -> None:
        if not self._write_step():
            self._call_soon(self._continue_write)

    def _write_step(self) -> bool:
        """Encode the next records. After the last one, replace the file if a counter has changed, and return True."""
        for number, (word, record) in enumerate(self._remaining, 1):
            self._lines.append(json.dumps({word: plain(record)}))
            if number == _MAX_RECORDS_PER_STEP:
                return False
        lines, self._lines = self._lines, []
        content = "".join(f"{line}\n" for line in [*lines, json.dumps({"lines": len(lines)})])
        # Unchanged counters are not written, so that an idle disk can sleep.
        if content != self._last_content:
            self._replace_file(content)
        return True

    def _replace_file(self, content: str) -> None:
        new_path = self.path.with_name(f"{self.path.name}.new")
        try:
            # The directory may be missing, because an operator may have removed the whole cache directory.
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Remove a file that a killed daemon may have left at this path.
            with contextlib.suppress(FileNotFoundError):
                new_path.unlink()
            with os.fdopen(os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(content)
            new_path.replace(self.path)
        except OSError as error:
            if not self._has_logged_error:
                _log.warning("cannot write the counters: %s: %s", self.path, error.strerror)
            self._has_logged_error = True
        else:
            self._has_logged_error = False
            self._last_content = content


def read(path: Path, record_types: Mapping[str, type[Any]]) -> dict[str, list[Any]]:
    """Return the records in the file at `path`, by the key of their JSON objects.

    Args:
        path: the path of the file.
        record_types: the class of the records, by key.

    Raises:
        OSError: the file cannot be read.
        CounterStoreError: the file is invalid or incomplete.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
            raise CounterStoreError(f"expected a file of at most {_MAX_BYTES} bytes")
        lines = file.read(_MAX_BYTES).splitlines()
    *values, last = [*map(_parse_json, lines)] or [None]
    if last != {"lines": len(values)}:
        raise CounterStoreError(f"expected a last line with the number of lines, {len(values)}")
    records: dict[str, dict[str, Any]] = {word: {} for word in record_types}
    for value in values:
        word, record = _parse_record(value, record_types)
        # Reject two records of the same object, because both would be added to its counters.
        if record.key in records[word]:
            raise CounterStoreError(f"expected each {word} once, got {record.key!r} twice")
        records[word][record.key] = record
    return {word: [*each.values()] for word, each in records.items()}


def _parse_record(value: Any, record_types: Mapping[str, type[Any]]) -> tuple[str, CounterRecord]:
    fields = cast("dict[str, Any]", value) if type(value) is dict else {}
    kind = next(iter(fields), "")
    if len(fields) != 1 or kind not in record_types:
        raise CounterStoreError(f"expected a line with one of {', '.join(record_types)}, got {label(kind)}")
    try:
        return kind, decode(record_types[kind], fields[kind])
    except FieldError as error:
        raise CounterStoreError(str(error.at(f".{kind}"))) from None


def _parse_json(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CounterStoreError(f"not JSON: {error}") from None
