"""What was counted, in a file from which the next daemon goes on, whoever it is that has its processes.

A line of JSON for each account of a tenant, each model, the daemon, and each model that has loaded, with how long that
took; the last one says how many there are. It is written anew now and then, and at the end: what was counted after
that is lost with a daemon that is killed. What is no such file is as good as none.
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

# At once, before the loop has its turn: a millisecond or two.
_MAX_RECORDS_PER_STEP = 128

# Accounts: one more than there are tenants operates, and one more than there are models is what is no model's. Beside
# them each model, the daemon, and how long models took to load, some of which are gone.
_MAX_LINES = (limits.MAX_TENANTS + 1) * (limits.MAX_MODELS + 1) + 4 * limits.MAX_MODELS + 1
_MAX_BYTES = 2048 * _MAX_LINES


class CounterStoreError(Exception):
    """What is in the file is not what one writes there."""


class CounterRecord(Protocol):
    """What is written down of one thing: a record."""

    @property
    def key(self) -> str:
        """What tells it from all others of its kind."""
        ...


class CounterSource(Protocol):
    """Things of one kind of which something is counted."""

    def records(self) -> Iterator[Any]:
        """Yield what is to be written down, a record of each thing. What is counted meanwhile may be in it, or not."""
        ...

    def restore(self, records: Sequence[Any]) -> object:
        """Go on from the records that were written down."""


class CounterEntry(NamedTuple):
    """A book, and of which type its records are."""

    source: CounterSource
    record_type: type[Any]


class CounterStore:
    """The file at `path`.

    Args:
        path: in a directory that is the daemon's own.
        entries: that are written, and go on from what is there; by the word that begins their lines.
        call_soon: has something called when all others have had their turn.

    Attributes:
        timer: call it when it is due.
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
        """Go on with what is there, and write from now on."""
        self._is_open = True
        self.timer.set(now + INTERVAL_S)
        try:
            records = read(self.path, {word: each.record_type for word, each in self._entries.items()})
        except FileNotFoundError:
            return
        except (OSError, CounterStoreError) as error:
            _log.warning("all counters begin anew: %s: %s", self.path, getattr(error, "strerror", error))
            return
        for word, each in self._entries.items():
            each.source.restore(records[word])

    def close(self) -> None:
        """Write for the last time."""
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
        """Return whether all is written."""
        for number, (word, record) in enumerate(self._remaining, 1):
            self._lines.append(json.dumps({word: plain(record)}))
            if number == _MAX_RECORDS_PER_STEP:
                return False
        lines, self._lines = self._lines, []
        content = "".join(f"{line}\n" for line in [*lines, json.dumps({"lines": len(lines)})])
        # A disk that sleeps may sleep on.
        if content != self._last_content:
            self._replace_file(content)
        return True

    def _replace_file(self, content: str) -> None:
        new_path = self.path.with_name(f"{self.path.name}.new")
        try:
            # Somebody may have removed all of the cache.
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # What an earlier daemon has left there may be anything.
            with contextlib.suppress(FileNotFoundError):
                new_path.unlink()
            with os.fdopen(os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(content)
            new_path.replace(self.path)
        except OSError as error:
            if not self._has_logged_error:
                _log.warning("the counters are not written: %s: %s", self.path, error.strerror)
            self._has_logged_error = True
        else:
            self._has_logged_error = False
            self._last_content = content


def read(path: Path, record_types: Mapping[str, type[Any]]) -> dict[str, list[Any]]:
    """Return the records that were written at `path`, by the word that begins their lines.

    Raises:
        OSError: it cannot be read.
        CounterStoreError: it is something else, or not whole.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
            raise CounterStoreError(f"expected a file of at most {_MAX_BYTES} bytes")
        lines = file.read(_MAX_BYTES).splitlines()
    *values, last = [*map(_parse_json, lines)] or [None]
    if last != {"lines": len(values)}:
        raise CounterStoreError(f"expected a last line that tells of {len(values)} lines")
    records: dict[str, dict[str, Any]] = {word: {} for word in record_types}
    for value in values:
        word, record = _parse_record(value, record_types)
        # Twice the same would be counted twice.
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
