"""The watchdog of READY processes: each must send a message within a period, at least the answer to a ping.

The daemon considers a process hung in three cases, which it detects in different places:

- it is idle and does not answer a ping or the self-test: `Watchdog.take_due`, in this module
- it computes for longer than `predict_timeout`: `RunningBatches.take_overdue`
- it starts, builds, attaches or stops for too long: `GenerationBase.tick` in `generations/base.py`

`ProcessEvents.run_watchdog` ends a hung process. `Watchdog` does no I/O; its callers pass the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple


class WatchdogActions(NamedTuple):
    """The actions that are due: processes to ping, processes to self-test, and processes to end as unresponsive."""

    pings: list[str]
    selftests: list[str]
    unresponsive: list[str]


@dataclass(slots=True)
class _Watched:
    last_message_at: float
    last_selftest_at: float
    # The time by which the process must answer the pending ping; infinity without a ping.
    deadline: float = float("inf")
    is_pinged: bool = False
    is_selftesting: bool = False
    # The time before which a process that was found busy is not checked again.
    next_check_at: float = -float("inf")


class Watchdog:
    """Watches the READY processes of one model. Times are monotonic seconds.

    Args:
        period_s: seconds within which each process must send a message.
        selftest_interval_s: seconds after which each process, idle or not, runs the self-test again; 0 for never.
        selftest_timeout_s: the timeout of the self-test in seconds, including earlier work that the process has to
            finish.
        schedule_by: called with `next_event_at` whenever the value may have changed.
    """

    def __init__(
        self,
        period_s: float,
        selftest_interval_s: float,
        selftest_timeout_s: float,
        schedule_by: Callable[[float], object] = lambda _: None,
    ) -> None:
        self.period_s = period_s
        self._selftest_interval_s = selftest_interval_s or float("inf")
        self._selftest_timeout_s = selftest_timeout_s
        self._schedule_by = schedule_by
        self._watched: dict[str, _Watched] = {}
        # The earliest time at which `take_due` has an action to return.
        self.next_event_at = float("inf")

    def add(self, process: str, now: float, *, runs_selftest: bool = True) -> None:
        """Watch a process that has become READY and has just passed the self-test.

        Without `runs_selftest`, the process does not run the self-test again.
        """
        self._watched[process] = _Watched(now, now if runs_selftest else float("inf"))
        self._update_next_event()

    def remove(self, process: str) -> None:
        """Stop watching a process."""
        self._watched.pop(process, None)
        self._update_next_event()

    def on_message(self, process: str, now: float) -> None:
        """Record that the process has sent a message that is not an answer to a ping."""
        watched = self._watched.get(process)
        if watched is not None:
            watched.last_message_at = now

    def on_pong(self, process: str, now: float) -> None:
        """Record that the process has answered its ping."""
        watched = self._watched.get(process)
        if watched is not None:
            watched.last_message_at = now
            if watched.is_selftesting:
                watched.last_selftest_at = now
            watched.is_pinged, watched.is_selftesting, watched.deadline = False, False, float("inf")
            self._update_next_event()

    def take_due(self, now: float, is_busy: Callable[[str], bool]) -> WatchdogActions:
        """Return the actions that are due, and treat them as done.

        Args:
            now: the time in monotonic seconds.
            is_busy: called with a process; returns whether its slot runs a batch.
        """
        due = WatchdogActions([], [], [])
        if now < self.next_event_at:
            return due
        for name, watched in self._watched.items():
            if now >= watched.deadline:
                due.unresponsive.append(name)
            elif watched.is_pinged:
                continue
            elif now >= watched.last_selftest_at + self._selftest_interval_s:
                due.selftests.append(name)
                watched.is_pinged, watched.is_selftesting, watched.deadline = True, True, now + self._selftest_timeout_s
            elif now >= self._next_event_of(watched) and is_busy(name):
                watched.next_check_at = now + self.period_s / 4
            elif now >= self._next_event_of(watched):
                due.pings.append(name)
                watched.is_pinged, watched.deadline = True, now + self.period_s / 2
        for name in due.unresponsive:
            del self._watched[name]
        self._update_next_event()
        return due

    def silence_s(self, processes: Iterable[str], now: float) -> float | None:
        """Return the seconds since the last message of any of the processes; None if at most `period_s` have passed."""
        last_message_at = max(
            (self._watched[each].last_message_at for each in processes if each in self._watched), default=-float("inf")
        )
        silence = now - last_message_at
        return silence if silence > self.period_s else None

    def _update_next_event(self) -> None:
        self.next_event_at = min(map(self._next_event_of, self._watched.values()), default=float("inf"))
        self._schedule_by(self.next_event_at)

    def _next_event_of(self, watched: _Watched) -> float:
        if watched.is_pinged:
            return watched.deadline
        return min(
            max(watched.last_message_at + self.period_s / 2, watched.next_check_at),
            watched.last_selftest_at + self._selftest_interval_s,
        )
