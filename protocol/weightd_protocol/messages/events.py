"""Messages that query the daemon's events and the logs of its child processes."""

from __future__ import annotations

from dataclasses import field
from typing import Optional, Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.schema import integer, list_of, number, omit_default, one_of, record, text

_COUNT = integer(0, limits.MAX_COUNT)

# Field types that are created outside the classes, because the fields `number` and `text` of the classes hide the
# functions of the same names there.
_TIME = number()
_TEXT = text(limits.MAX_TEXT_BYTES, empty=True)
_NAME = omit_default(text(limits.MAX_NAME_BYTES, empty=True))

# Severities of an event, from the least to the most severe.
SEVERITIES = ("info", "warning", "error")


@dataclass(frozen=True)
class Events:
    """client → daemon: request the events that follow the event with number `after`.

    `model_name` is the model whose events are requested; "" for all events. The daemon rejects clients that may not see
    other tenants' data.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    after: int = field(default=0, metadata=_COUNT)
    model_name: str = field(default="", metadata=text(limits.MAX_NAME_BYTES, empty=True))
    limit: int = field(default=limits.MAX_EVENTS, metadata=integer(1, limits.MAX_EVENTS))


@dataclass(frozen=True)
class Event:
    """An event of the daemon. `time` is in seconds since 1970, by the clock of the daemon's host.

    The number of an event is 1 more than the number of the previous event, also across restarts of the daemon. The
    daemon keeps only recent events. `model`, `generation` and `child` (a process name) say what the event is about;
    each may be absent.
    """

    number: int = field(metadata=_COUNT)
    time: float = field(metadata=_TIME)
    severity: str = field(metadata=one_of(SEVERITIES))
    text: str = field(metadata=_TEXT)
    model: str = field(default="", metadata=_NAME)
    generation: Optional[int] = field(default=None, metadata=_COUNT)
    child: str = field(default="", metadata=_NAME)


@dataclass(frozen=True)
class EventsResponse:
    """daemon → client: events, the oldest first.

    `last` is the number of the last event that the daemon has examined for this response. Send it as `after` in the
    next query. `remaining` is the number of events after `last` that already exist. `missed` is the number of requested
    events up to `last` that the daemon no longer has.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    events: Tuple[Event, ...] = field(metadata=list_of(record(Event), limits.MAX_EVENTS))
    last: int = field(metadata=_COUNT)
    remaining: int = field(default=0, metadata=_COUNT)
    missed: int = field(default=0, metadata=_COUNT)


@dataclass(frozen=True)
class Logs:
    """client → daemon: request the last log lines of a model's processes.

    `process` is the name of one process; "" for all processes of the model, including exited processes. Only clients
    with the right to operate the daemon may send this message.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    process: str = field(default="", metadata=text(limits.MAX_NAME_BYTES, empty=True))
    lines: int = field(default=100, metadata=integer(1, limits.MAX_LOG_LINES))


@dataclass(frozen=True)
class LogTail:
    """The end of a process's log, in UTF-8. `text` consists of whole lines, except the end of a line that is too long.

    `size` is the size of the whole log in bytes. `changed_at` is when the log was last written, in seconds since 1970.
    """

    process: str = field(metadata=text(limits.MAX_NAME_BYTES))
    generation: int = field(metadata=_COUNT)
    size: int = field(metadata=_COUNT)
    changed_at: float = field(metadata=_TIME)
    text: str = field(metadata=text(limits.MAX_LOG_BYTES, empty=True))


@dataclass(frozen=True)
class LogsResponse:
    """daemon → client: log tails, the most recently written one last.

    `omitted` is the number of older log tails that did not fit into the response.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    logs: Tuple[LogTail, ...] = field(metadata=list_of(record(LogTail), limits.MAX_LOGS))
    omitted: int = field(default=0, metadata=_COUNT)
