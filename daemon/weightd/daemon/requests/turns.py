"""Several models in one process, each with a desk of its own: who of them may give it the next job.

The process has one job at a time, and nothing ready behind it: so what becomes of it is to be laid to the one desk
whose job it runs. While it runs one, its seats are paused at all desks; when it has answered, all of them go on, those
first whose turn is next. So nobody waits for more than one job of each other model, and the process idles for nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from weightd.daemon.requests.job import Job
from weightd.daemon.requests.line import Line
from weightd.daemon.requests.seat import Seat
from weightd.daemon.requests.seats import Seats


class _Member(NamedTuple):
    """A desk, as far as it has to do with the process: its seat there and all others, what waits, what assigns that."""

    seat: Seat
    seats: Seats
    line: Line
    dispatch: Callable[[float], None]


class Turns:
    """The turns of one process.

    Attributes:
        running: the seat of the desk whose job it runs; None where it runs none.
    """

    def __init__(self) -> None:
        self.running: Seat | None = None
        self._members: list[_Member] = []
        self._is_over = False

    def join(self, seat: Seat, seats: Seats, line: Line, dispatch: Callable[[float], None]) -> None:
        """A desk has a seat at the process from now on, where it is of those that have one already."""
        seats.add(seat)
        self._members.append(_Member(seat, seats, line, dispatch))
        if self.running is not None or self._is_over:
            seats.pause(seat.name)

    def begins(self, seat: Seat) -> None:
        """The process has been given a job at this seat."""
        self.running = seat
        self._pause()

    def ended(self, seat: Seat, now: float) -> None:
        """The process has answered that job: the next one is that of whoever comes after, and has something to run."""
        self.running = None
        if self._is_over:
            return
        for each in self._members:
            each.seats.go_on(each.seat.name)
        at = next(index for index, each in enumerate(self._members) if each.seat is seat)
        # Who has just run one comes last; its desk sees to that itself, once it has passed on the answer.
        for each in self._members[at + 1 :] + self._members[:at]:
            if not each.line.is_still:
                each.dispatch(now)

    def over(self) -> None:
        """The process is of no use any more, to anybody."""
        self._is_over = True
        self._pause()

    def _pause(self) -> None:
        for each in self._members:
            each.seats.pause(each.seat.name)


@dataclass(eq=False, slots=True)
class MemberSeat(Seat):
    """A seat at a process that others have a seat at, too.

    Attributes:
        turns: of the process.
    """

    turns: Turns = field(default_factory=Turns)

    @property
    def is_busy(self) -> bool:
        """Whether the process computes, for whichever model."""
        return self.turns.running is not None

    def long_jobs(self, now: float, long_s: float) -> int:
        """Return whether the job that the process runs, for whichever model, is long, as 0 or 1."""
        running = self.turns.running
        return 0 if running is None else Seat.long_jobs(running, now, long_s)

    def give(self, job: Job, now: float) -> bool:
        """It has a job, and begins with it."""
        self.turns.begins(self)
        return Seat.give(self, job, now)

    def finished(self, job: Job, now: float) -> float:
        """It has answered a job: return for how many seconds that ran."""
        took = Seat.finished(self, job, now)
        self.turns.ended(self, now)
        return took

    def lost(self) -> None:
        """The process is of no use any more."""
        self.turns.over()
