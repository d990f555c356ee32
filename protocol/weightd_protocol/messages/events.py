"""What has happened in the daemon, and what its processes have said."""

from __future__ import annotations

from dataclasses import field
from typing import Optional, Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.schema import integer, list_of, number, omit_default, one_of, record, text

_COUNT = integer(0, limits.MAX_COUNT)

# Fields are called as the kinds are.
_TIME = number()
_TEXT = text(limits.MAX_TEXT_BYTES, empty=True)
_NAME = omit_default(text(limits.MAX_NAME_BYTES, empty=True))

# From the least severe.
SEVERITIES = ("info", "warning", "error")


@dataclass(frozen=True)
class Events:
    """client → daemon: what has happened after this event?

    `model_name` is "" for all that has happened. Who may not see what concerns others is told nothing.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    after: int = field(default=0, metadata=_COUNT)
    model_name: str = field(default="", metadata=text(limits.MAX_NAME_BYTES, empty=True))
    limit: int = field(default=limits.MAX_EVENTS, metadata=integer(1, limits.MAX_EVENTS))


@dataclass(frozen=True)
class Event:
    """Something that has happened; `time` is that of the host's clock, in seconds since 1970.

    Numbers grow by 1 with each event, and from one daemon to the next. `model`, `generation` and `child` are what it is
    about, as far as it is about one. The daemon does not keep all events: there may be gaps between numbers.
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
    """daemon → client: what has happened, the oldest first.

    `last` is the event up to which was looked: the next question has it in `after`. `remaining` have happened already.
    `missed` happened after the event that the question has named, up to `last`, and are not kept any more.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    events: Tuple[Event, ...] = field(metadata=list_of(record(Event), limits.MAX_EVENTS))
    last: int = field(metadata=_COUNT)
    remaining: int = field(default=0, metadata=_COUNT)
    missed: int = field(default=0, metadata=_COUNT)


@dataclass(frozen=True)
class Logs:
    """client → daemon: what have the processes of a model said last?

    `process` is "" for all of them, those that have ended among them. Only who may operate is told.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    process: str = field(default="", metadata=text(limits.MAX_NAME_BYTES, empty=True))
    lines: int = field(default=100, metadata=integer(1, limits.MAX_LOG_LINES))


@dataclass(frozen=True)
class LogTail:
    """The end of what a process has written, as UTF-8: `text` are whole lines, but of one that is too long.

    `size` is what it has written in all, in bytes, and `changed_at` when it did so last, in seconds since 1970.
    """

    process: str = field(metadata=text(limits.MAX_NAME_BYTES))
    generation: int = field(metadata=_COUNT)
    size: int = field(metadata=_COUNT)
    changed_at: float = field(metadata=_TIME)
    text: str = field(metadata=text(limits.MAX_LOG_BYTES, empty=True))


@dataclass(frozen=True)
class LogsResponse:
    """daemon → client: what they have said, who has spoken last being the last; `omitted` have spoken before that."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    logs: Tuple[LogTail, ...] = field(metadata=list_of(record(LogTail), limits.MAX_LOGS))
    omitted: int = field(default=0, metadata=_COUNT)
