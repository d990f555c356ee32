"""Recent log events at INFO and above, kept in memory so that clients can query the daemon for them.

systemd's journal has all events, too, but not every host has a journal, and not every client may read it.
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

# Default maximum number of events and of their bytes. They cover about a day of a healthy service, or half an hour of a
# service whose workers crash all the time.
MAX_EVENTS = 2000
MAX_BYTES = 1024 * 1024

# Maximum size of an event's text in bytes. Longer texts are truncated: they may quote other programs, such as the end
# of a worker's log.
_MAX_TEXT_BYTES = 1024

# Size in bytes of an event without its texts. In an encoded response it is exact, and in memory approximate.
_OVERHEAD_BYTES = 160

# Maximum size in bytes of all events in a response. It must be less than `limits.MAX_HEADER_BYTES`.
_MAX_REPLY_BYTES = 56 * 1024

_SEVERITIES = ((logging.ERROR, "error"), (logging.WARNING, "warning"))

# Name of a logger whose INFO lines are not kept: it logs usage at regular intervals, which would push out other events.
_ROUTINE_LOGGER = "weightd.usage"


_Source = tuple[bool, str]
"""The source of an event: whether a client caused the event, and the name of this client or else of the model."""


class EventLog(logging.Handler):
    """Log handler that keeps the most recent events. Event numbers continue to increase when the daemon restarts.

    If a limit is exceeded, the oldest event of the source with the most events is dropped. If clients have caused more
    than half of the events, this source is a client; otherwise it is a model or the daemon. So no client can push out
    events of other clients, of models or of the daemon.

    Args:
        max_events: the maximum number of events.
        max_bytes: the maximum size of all events together.
    """

    def __init__(self, max_events: int = MAX_EVENTS, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(logging.INFO)
        self._max_events = max_events
        self._max_bytes = max_bytes
        # Events by number, in ascending order. Numbers may be missing, because dropped events need not be the oldest.
        self._events: dict[int, Event] = {}
        self._numbers_by_source: dict[_Source, deque[int]] = {}
        self._client_event_count = 0
        self._nbytes = 0
        # The first number is the time in microseconds since 1970. So the numbers of the next daemon are higher, unless
        # this daemon logs a million events a second.
        self._first_number = self._next_number = time.time_ns() // 1000

    @contextlib.contextmanager
    def capture_logs(self) -> Generator[None, None, None]:
        """Keep the events that are logged within the block."""
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
        """Return the events after the number in the request, the oldest first, as many as fit into a response."""
        # A number that this daemon has not reached comes from an earlier daemon whose clock was ahead. Return all
        # events.
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
    # Omit the traceback, which only the log contains.
    text = record.getMessage() if error is None else f"{record.getMessage()}: {type(error).__name__}: {error}"
    return clip(to_one_line(text), _MAX_TEXT_BYTES)


def _nbytes(event: Event) -> int:
    return _OVERHEAD_BYTES + sum(len(each.encode()) for each in (event.text, event.model, event.child))
