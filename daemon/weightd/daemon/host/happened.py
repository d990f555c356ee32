"""What has happened, as far as it is logged at INFO or above: the last of it is kept for who asks the daemon itself.

The journal of the service manager has all of it, where there is one and one may read it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Generator

from weightd.daemon.host.logs import client_of, subject_of
from weightd.protocol.codec import clip
from weightd.protocol.messages.journal import Event, Events, EventsResponse
from weightd.shared.journal import flat

# A day of a service that is well; half an hour of one whose workers die all the time.
MOST = 2000
MOST_BYTES = 1024 * 1024

# What others have said in it is cut: the last words of a worker, the cause of a failure.
_TEXT_BYTES = 1024

# An event beside its texts, on the wire and, about, in memory.
_OVERHEAD_BYTES = 160

# Of an answer: less than MAX_HEADER_BYTES.
_ANSWER_BYTES = 56 * 1024

_SEVERITIES = ((logging.ERROR, "error"), (logging.WARNING, "warning"))

# The lines of accounts come at each interval, and would drive all else out.
_ROUTINE = "weightd.accounts"


_Source = tuple[bool, str]
"""Of an event: whether a client has caused it, and which, or the model that it is about."""


class Happened(logging.Handler):
    """Keeps the last events, so many and of so many bytes; their numbers go on from one daemon to the next.

    Beyond that the oldest event is dropped of the client, or the model, that has most of them: of clients while they
    have caused more than half of the events. So no client drives out events of others, or of the daemon itself.

    Args:
        most: of events.
        most_bytes: of all of them.
    """

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        super().__init__(logging.INFO)
        self._most = most
        self._most_bytes = most_bytes
        # By number, ascending; of some sources earlier ones have been dropped than of others.
        self._kept: dict[int, Event] = {}
        self._by_source: dict[_Source, deque[int]] = {}
        self._of_clients = 0
        self._nbytes = 0
        # The next daemon begins later than this one has logged a million events a second.
        self._first = self._next = time.time_ns() // 1000

    @contextlib.contextmanager
    def listening(self) -> Generator[None, None, None]:
        """Keep what is logged in the block."""
        log = logging.getLogger("weightd")
        log.addHandler(self)
        try:
            yield
        finally:
            log.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:  # noqa: D102
        if record.name == _ROUTINE and record.levelno < logging.WARNING:
            return
        model, generation, child = subject_of(record)
        event = Event(self._next, record.created, _severity(record.levelno), _text(record), model, generation, child)
        self._next += 1
        client = client_of(record)
        source = (False, model) if client is None else (True, client)
        self._kept[event.number] = event
        self._by_source.setdefault(source, deque()).append(event.number)
        self._of_clients += source[0]
        self._nbytes += _nbytes(event)
        while len(self._kept) > self._most or self._nbytes > self._most_bytes:
            self._drop()

    def answer(self, question: Events) -> EventsResponse:
        """Return what has happened after the event that the question names: the first of it, as much as fits."""
        # Beyond what there is: it is of a daemon whose clock was ahead.
        after = question.after if question.after < self._next else 0
        later = [event for number, event in self._kept.items() if number > after]
        told: list[Event] = []
        nbytes = looked = 0
        last = max(after, self._first - 1)
        for event in later:
            if question.model_name in ("", event.model):
                nbytes += _nbytes(event)
                if len(told) == question.limit or nbytes > _ANSWER_BYTES:
                    break
                told.append(event)
            looked += 1
            last = event.number
        if looked == len(later):
            last = self._next - 1
        missed = last - max(after, self._first - 1) - looked
        return EventsResponse(question.id, tuple(told), last, len(later) - looked, max(0, missed))

    def _drop(self) -> None:
        is_client = 2 * self._of_clients > len(self._kept)
        sources = [source for source in self._by_source if source[0] == is_client]
        source = max(sources, key=lambda each: len(self._by_source[each]))
        numbers = self._by_source[source]
        self._nbytes -= _nbytes(self._kept.pop(numbers.popleft()))
        self._of_clients -= is_client
        if not numbers:
            del self._by_source[source]


def _severity(level: int) -> str:
    return next((name for least, name in _SEVERITIES if level >= least), "info")


def _text(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    # Of a traceback the log has all.
    text = record.getMessage() if error is None else f"{record.getMessage()}: {type(error).__name__}: {error}"
    return clip(flat(text), _TEXT_BYTES)


def _nbytes(event: Event) -> int:
    return _OVERHEAD_BYTES + sum(len(each.encode()) for each in (event.text, event.model, event.child))
