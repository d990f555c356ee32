"""Events of the daemon, and log tails of its processes."""

from __future__ import annotations

from dataclasses import field
from typing import Optional, Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.schema import integer, list_of, number, omit_default, one_of, record, text

_COUNT = integer(0, limits.MAX_COUNT)

# Created here, because the fields `number` and `text` hide these functions in the bodies of the classes.
_TIME = number()
_TEXT = text(limits.MAX_TEXT_BYTES, empty=True)
_NAME = omit_default(text(limits.MAX_NAME_BYTES, empty=True))

# From the least to the most severe.
SEVERITIES = ("info", "warning", "error")


@dataclass(frozen=True)
class Events:
    """client → daemon: ask for the events after the event with number `after`.

    `model_name` is "" for all events. A client that may not see other tenants' data is rejected.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    after: int = field(default=0, metadata=_COUNT)
    model_name: str = field(default="", metadata=text(limits.MAX_NAME_BYTES, empty=True))
    limit: int = field(default=limits.MAX_EVENTS, metadata=integer(1, limits.MAX_EVENTS))


@dataclass(frozen=True)
class Event:
    """An event. `time` is in seconds since 1970 by the host's clock.

    Numbers increase by 1 with each event, across restarts of the daemon. `model`, `generation` and `child` identify the
    subject of the event, if it has one. The daemon keeps only recent events, so there may be gaps between numbers.
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
    """daemon → client: events, oldest first.

    `last` is the number of the last event that was examined: use it as `after` in the next query. `remaining` is the
    number of later events that exist already. `missed` is the number of events between the requested one and `last`
    that the daemon no longer has.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    events: Tuple[Event, ...] = field(metadata=list_of(record(Event), limits.MAX_EVENTS))
    last: int = field(metadata=_COUNT)
    remaining: int = field(default=0, metadata=_COUNT)
    missed: int = field(default=0, metadata=_COUNT)


@dataclass(frozen=True)
class Logs:
    """client → daemon: ask for the last log lines of a model's processes.

    `process` is "" for all of them, including processes that have exited. Only operators may send this.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    process: str = field(default="", metadata=text(limits.MAX_NAME_BYTES, empty=True))
    lines: int = field(default=100, metadata=integer(1, limits.MAX_LOG_LINES))


@dataclass(frozen=True)
class LogTail:
    """The end of a process's log, as UTF-8. `text` consists of whole lines, except the tail of an overlong line.

    `size` is the total size of the log in bytes. `changed_at` is the time of the last write, in seconds since 1970.
    """

    process: str = field(metadata=text(limits.MAX_NAME_BYTES))
    generation: int = field(metadata=_COUNT)
    size: int = field(metadata=_COUNT)
    changed_at: float = field(metadata=_TIME)
    text: str = field(metadata=text(limits.MAX_LOG_BYTES, empty=True))


@dataclass(frozen=True)
class LogsResponse:
    """daemon → client: log tails, the most recently written last. `omitted` older ones did not fit."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    logs: Tuple[LogTail, ...] = field(metadata=list_of(record(LogTail), limits.MAX_LOGS))
    omitted: int = field(default=0, metadata=_COUNT)
