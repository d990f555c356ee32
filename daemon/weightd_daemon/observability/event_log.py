"""What has happened, as far as it is logged at INFO or above: the last of it is kept for who asks the daemon itself.

The journal of the service manager has all of it, where there is one and one may read it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Generator

from weightd_common.log_text import to_one_line
from weightd_daemon.platform.log_setup import client_of, subject_of
from weightd_protocol.codec import clip
from weightd_protocol.messages.events import Event, Events, EventsResponse

# A day of a service that is well; half an hour of one whose workers die all the time.
MAX_EVENTS = 2000
MAX_BYTES = 1024 * 1024

# What others have said in it is cut: the last words of a worker, the cause of a failure.
_MAX_TEXT_BYTES = 1024

# An event beside its texts, on the wire and, about, in memory.
_OVERHEAD_BYTES = 160

# Of an answer: less than MAX_HEADER_BYTES.
_MAX_REPLY_BYTES = 56 * 1024

_SEVERITIES = ((logging.ERROR, "error"), (logging.WARNING, "warning"))

# The lines of accounts come at each interval, and would drive all else out.
_ROUTINE_LOGGER = "weightd.usage"


_Source = tuple[bool, str]
"""Of an event: whether a client has caused it, and which, or the model that it is about."""


class EventLog(logging.Handler):
    """Keeps the last events, so many and of so many bytes; their numbers go on from one daemon to the next.

    Beyond that the oldest event is dropped of the client, or the model, that has most of them: of clients while they
    have caused more than half of the events. So no client drives out events of others, or of the daemon itself.

    Args:
        max_events: of events.
        max_bytes: of all of them.
    """

    def __init__(self, max_events: int = MAX_EVENTS, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(logging.INFO)
        self._max_events = max_events
        self._max_bytes = max_bytes
        # By number, ascending; of some sources earlier ones have been dropped than of others.
        self._events: dict[int, Event] = {}
        self._numbers_by_source: dict[_Source, deque[int]] = {}
        self._client_event_count = 0
        self._nbytes = 0
        # The next daemon begins later than this one has logged a million events a second.
        self._first_number = self._next_number = time.time_ns() // 1000

    @contextlib.contextmanager
    def capture_logs(self) -> Generator[None, None, None]:
        """Keep what is logged in the block."""
        log = logging.getLogger("weightd")
        log.addHandler(self)
        try:
            yield
        finally:
            log.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:  # noqa: D102
        if record.name == _ROUTINE_LOGGER and record.levelno < logging.WARNING:
            return
        model, generation, child = subject_of(record)
        event = Event(
            self._next_number, record.created, _severity(record.levelno), _text(record), model, generation, child
        )
        self._next_number += 1
        client = client_of(record)
        source = (False, model) if client is None else (True, client)
        self._events[event.number] = event
        self._numbers_by_source.setdefault(source, deque()).append(event.number)
        self._client_event_count += source[0]
        self._nbytes += _nbytes(event)
        while len(self._events) > self._max_events or self._nbytes > self._max_bytes:
            self._drop_oldest()

    def query(self, request: Events) -> EventsResponse:
        """Return what has happened after the event that the question names: the first of it, as much as fits."""
        # Beyond what there is: it is of a daemon whose clock was ahead.
        after = request.after if request.after < self._next_number else 0
        later = [event for number, event in self._events.items() if number > after]
        matching: list[Event] = []
        nbytes = scanned = 0
        last = max(after, self._first_number - 1)
        for event in later:
            if request.model_name in ("", event.model):
                nbytes += _nbytes(event)
                if len(matching) == request.limit or nbytes > _MAX_REPLY_BYTES:
                    break
                matching.append(event)
            scanned += 1
            last = event.number
        if scanned == len(later):
            last = self._next_number - 1
        missed = last - max(after, self._first_number - 1) - scanned
        return EventsResponse(request.id, tuple(matching), last, len(later) - scanned, max(0, missed))

    def _drop_oldest(self) -> None:
        is_client = 2 * self._client_event_count > len(self._events)
        sources = [source for source in self._numbers_by_source if source[0] == is_client]
        source = max(sources, key=lambda each: len(self._numbers_by_source[each]))
        numbers = self._numbers_by_source[source]
        self._nbytes -= _nbytes(self._events.pop(numbers.popleft()))
        self._client_event_count -= is_client
        if not numbers:
            del self._numbers_by_source[source]


def _severity(level: int) -> str:
    return next((name for least, name in _SEVERITIES if level >= least), "info")


def _text(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    # Of a traceback the log has all.
    text = record.getMessage() if error is None else f"{record.getMessage()}: {type(error).__name__}: {error}"
    return clip(to_one_line(text), _MAX_TEXT_BYTES)


def _nbytes(event: Event) -> int:
    return _OVERHEAD_BYTES + sum(len(each.encode()) for each in (event.text, event.model, event.child))
