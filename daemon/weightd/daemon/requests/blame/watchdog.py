"""Whether processes still answer: each is heard of within a period, by what it answers, or by a ping if it is idle.

Plain decisions, fed with the clock. A process whose seat computes is not pinged: how long it may take is the
scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Due(NamedTuple):
    """What is due: the processes to ping, with or without the canary, and those that have not answered their ping."""

    plain: list[str]
    canary: list[str]
    silent: list[str]


@dataclass(slots=True)
class _Watched:
    heard: float
    proved: float
    # Of a ping under way: when it has to be answered.
    patience: float = float("inf")
    pinged: bool = False
    proving: bool = False
    # It was seen to compute: it need not be looked at before this.
    look: float = -float("inf")


class Watchdog:
    """Watches the READY processes of one model. Times are monotonic seconds.

    Args:
        period: seconds within which a process has to be heard of.
        canary_interval: seconds after which each process, idle or not, runs the canary again; 0 for never.
        canary_patience: seconds that it may take for that, what it has to finish first included.
        due_by: called with a time that may be sooner than what `next_event` was.
    """

    def __init__(
        self,
        period: float,
        canary_interval: float,
        canary_patience: float,
        due_by: Callable[[float], object] = lambda _: None,
    ) -> None:
        self.period = period
        self._canary_interval = canary_interval or float("inf")
        self._canary_patience = canary_patience
        self._due_by = due_by
        self._watched: dict[str, _Watched] = {}
        # Nothing is due before this.
        self.next_event = float("inf")

    def watch(self, process: str, now: float, *, proves: bool = True) -> None:
        """The process is READY: it has just answered the canary. Unless it `proves`, it is not asked for that again."""
        self._watched[process] = _Watched(now, now if proves else float("inf"))
        self._look_ahead()

    def forget(self, process: str) -> None:
        """The process is gone, or going."""
        self._watched.pop(process, None)
        self._look_ahead()

    def heard(self, process: str, now: float) -> None:
        """The process has answered a request."""
        watched = self._watched.get(process)
        if watched is not None:
            watched.heard = now

    def pong(self, process: str, now: float) -> None:
        """The process has answered its ping."""
        watched = self._watched.get(process)
        if watched is not None:
            watched.heard = now
            if watched.proving:
                watched.proved = now
            watched.pinged, watched.proving, watched.patience = False, False, float("inf")
            self._look_ahead()

    def due(self, now: float, is_busy: Callable[[str], bool]) -> Due:
        """Return what is due, and take it for done.

        Args:
            now: the clock.
            is_busy: whether the seat of this process computes.
        """
        due = Due([], [], [])
        if now < self.next_event:
            return due
        for name, watched in self._watched.items():
            if now >= watched.patience:
                due.silent.append(name)
            elif watched.pinged:
                continue
            elif now >= watched.proved + self._canary_interval:
                due.canary.append(name)
                watched.pinged, watched.proving, watched.patience = True, True, now + self._canary_patience
            elif now >= self._next(watched) and is_busy(name):
                watched.look = now + self.period / 4
            elif now >= self._next(watched):
                due.plain.append(name)
                watched.pinged, watched.patience = True, now + self.period / 2
        for name in due.silent:
            del self._watched[name]
        self._look_ahead()
        return due

    def unheard_of(self, processes: Iterable[str], now: float) -> float | None:
        """Return for how many seconds none of them has been heard of, if that is too long; None if it is not."""
        last = max((self._watched[each].heard for each in processes if each in self._watched), default=-float("inf"))
        silence = now - last
        return silence if silence > self.period else None

    def _look_ahead(self) -> None:
        self.next_event = min(map(self._next, self._watched.values()), default=float("inf"))
        self._due_by(self.next_event)

    def _next(self, each: _Watched) -> float:
        if each.pinged:
            return each.patience
        return min(max(each.heard + self.period / 2, each.look), each.proved + self._canary_interval)
