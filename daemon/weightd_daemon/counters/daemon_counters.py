"""What is counted of the daemon as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from weightd_daemon.counters.histogram import MAX_COUNT
from weightd_protocol.schema import integer

_COUNT = integer(0, MAX_COUNT)


@dataclass(frozen=True)
class DaemonCounterRecord:
    """The totals as they are written down; the fields are those of `DaemonCounters`."""

    reloads: int = field(metadata=_COUNT)
    refused_reloads: int = field(metadata=_COUNT)
    dropped_responses: int = field(metadata=_COUNT)

    @property
    def key(self) -> str:
        """There is one."""
        return ""


class DaemonCounters:
    """Counts what concerns no single model.

    Args:
        count_dropped: returns how many answers could not be sent by this daemon.

    Attributes:
        reloads: how often another configuration was put in force.
        refused_reloads: how often that was refused.
    """

    def __init__(self, count_dropped: Callable[[], int]) -> None:
        self.reloads = 0
        self.refused_reloads = 0
        self._restored_dropped = 0
        self._count_dropped = count_dropped

    @property
    def dropped_responses(self) -> int:
        """Answers that could not be sent, by this daemon and those before it."""
        return self._restored_dropped + self._count_dropped()

    def records(self) -> Iterator[DaemonCounterRecord]:
        """Yield what is to be written down."""
        counted = self.reloads, self.refused_reloads, self.dropped_responses
        yield DaemonCounterRecord(*(min(each, MAX_COUNT) for each in counted))

    def restore(self, records: Iterable[DaemonCounterRecord]) -> None:
        """Go on from what was written down."""
        for each in records:
            self.reloads += each.reloads
            self.refused_reloads += each.refused_reloads
            self._restored_dropped += each.dropped_responses
