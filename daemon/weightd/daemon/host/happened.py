"""What has happened, as far as it is logged at INFO or above: the last of it is kept for who asks the daemon itself.

The journal of the service manager has all of it, where there is one and one may read it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Generator

from weightd.daemon.host.logs import subject_of
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


class Happened(logging.Handler):
    """Keeps the last events, so many and of so many bytes; their numbers go on from one daemon to the next.

    Args:
        most: of events.
        most_bytes: of all of them.
    """

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        super().__init__(logging.INFO)
        self._most = most
        self._most_bytes = most_bytes
        self._kept: deque[Event] = deque()
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
        self._kept.append(event)
        self._nbytes += _nbytes(event)
        while len(self._kept) > self._most or self._nbytes > self._most_bytes:
            self._nbytes -= _nbytes(self._kept.popleft())

    def answer(self, question: Events) -> EventsResponse:
        """Return what has happened after the event that the question names: the first of it, as much as fits."""
        first = self._next - len(self._kept)
        # Beyond what there is: it is of a daemon whose clock was ahead.
        after = question.after if question.after < self._next else 0
        start = max(first, after + 1)
        told: list[Event] = []
        nbytes = 0
        last = start - 1
        for event in list(self._kept)[start - first :]:
            if question.model_name in ("", event.model):
                nbytes += _nbytes(event)
                if len(told) == question.limit or nbytes > _ANSWER_BYTES:
                    break
                told.append(event)
            last = event.number
        missed = first - max(after + 1, self._first)
        return EventsResponse(question.id, tuple(told), last, self._next - 1 - last, max(0, missed))


def _severity(level: int) -> str:
    return next((name for least, name in _SEVERITIES if level >= least), "info")


def _text(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    # Of a traceback the log has all.
    text = record.getMessage() if error is None else f"{record.getMessage()}: {type(error).__name__}: {error}"
    return clip(flat(text), _TEXT_BYTES)


def _nbytes(event: Event) -> int:
    return _OVERHEAD_BYTES + sum(len(each.encode()) for each in (event.text, event.model, event.child))
