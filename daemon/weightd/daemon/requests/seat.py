"""A seat: where jobs run."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightd.daemon.requests.job import Job
from weightd.daemon.requests.request import Company

CREDIT = 2

# A seat that has computed for longer than this gets nothing ahead: handing it the next job then costs it less than a
# hundredth of its time (a round trip is a fraction of a millisecond, one with 8 MiB a few).
QUICK_S = 0.25


@dataclass(eq=False, slots=True)
class Seat:
    """One or more processes that act together: each is given every job, and who loses one of them has lost all.

    Attributes:
        name: of the seat.
        processes: their names.
        jobs: by their numbers, in the order in which it got them: it runs the first.
        since: when it began with that, in monotonic seconds.
        credit: how many jobs it may have.
    """

    name: str
    processes: tuple[str, ...]
    jobs: dict[int, Job] = field(default_factory=dict[int, Job])
    since: float = 0.0
    credit: int = CREDIT

    @property
    def has_confined(self) -> bool:
        """Whether one of its jobs is confined."""
        return any(job.company is Company.CONFINED for job in self.jobs.values())

    def takes_behind(self, company: Company, now: float) -> bool:
        """Return whether it takes a job that bears this company behind what it has."""
        if len(self.jobs) >= self.credit or now >= self.since + QUICK_S:
            return False
        return company is Company.ANY and all(job.company is Company.ANY for job in self.jobs.values())

    def finished(self, now: float) -> float:
        """It has answered a job: return for how many seconds that ran."""
        took = now - self.since
        self.since = now
        self.credit = CREDIT if took < QUICK_S else 1
        return took
