"""A seat: where jobs run."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightd.daemon.requests.job import Job
from weightd.daemon.requests.lockstep import Lockstep
from weightd.daemon.requests.request import Company
from weightd.daemon.requests.rows.terms import WHOLE, RowTerms
from weightd.daemon.tenants.tenant import Tenant

# A seat that has computed for longer than this gets nothing ahead: handing it the next job then costs it less than a
# hundredth of its time (a round trip is a fraction of a millisecond, one with 8 MiB a few).
QUICK_S = 0.25


@dataclass(eq=False, slots=True)
class Seat:
    """One or more processes that act together: each is given every job, and who loses one of them has lost all.

    Attributes:
        name: of the seat.
        processes: their names.
        device: where they run.
        terms: what may be done with the rows of requests here.
        concurrency: how many jobs it runs at once.
        jobs: by their numbers, in the order in which it got them, and begins with them.
        is_quick: whether it was with its last job: then it may have one ready behind those that it runs.
        lockstep: of its processes, if these compute together: then it has nothing ready, for what a process has been
            given is never taken back from it.
        others: processes that are given no jobs, but without which those of the seat are lost.
        member: which of the models of its process.
    """

    name: str
    processes: tuple[str, ...]
    device: str = ""
    terms: RowTerms = WHOLE
    concurrency: int = 1
    jobs: dict[int, Job] = field(default_factory=dict[int, Job])
    is_quick: bool = True
    lockstep: Lockstep | None = None
    others: tuple[str, ...] = ()
    member: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether its processes compute."""
        return bool(self.jobs)

    @property
    def lives_on(self) -> tuple[str, ...]:
        """The processes without any of which it is lost."""
        return (*self.processes, *self.others)

    @property
    def is_free(self) -> bool:
        """Whether it would begin with a job at once."""
        return len(self.jobs) < self.concurrency

    def long_jobs(self, now: float, long_s: float) -> int:
        """Return how many of its jobs are expected to take long, or already have run for `long_s` seconds."""
        return sum(batch.is_long or batch.began + long_s <= now for batch in self.jobs.values())

    @property
    def has_confined(self) -> bool:
        """Whether one of its jobs is confined."""
        return any(batch.company is Company.CONFINED for batch in self.jobs.values())

    @property
    def tenants(self) -> set[Tenant]:
        """Whose jobs it has."""
        return {request.tenant for batch in self.jobs.values() for request in batch.requests}

    @property
    def since(self) -> float:
        """When it began with the job that runs longest; later than any clock says where none does."""
        return min((batch.began for batch in self.jobs.values()), default=float("inf"))

    @property
    def ready(self) -> list[Job]:
        """The jobs that wait for those that run."""
        return [batch for batch in self.jobs.values() if not batch.has_begun]

    def takes(self, company: Company, now: float) -> bool:
        """Return whether it takes one more job that bears this company, be it behind what it has."""
        if not self.jobs:
            return True
        if self.lockstep is not None:
            return False
        if company is not Company.ANY or any(batch.company is not Company.ANY for batch in self.jobs.values()):
            return False
        if self.is_free:
            return True
        return len(self.jobs) == self.concurrency and self.is_quick and now < self.since + QUICK_S

    def give(self, job: Job, now: float) -> bool:
        """It has a job; return whether it begins with it, as it was free."""
        begins = len(self.jobs) < self.concurrency
        if begins:
            job.began = now
        self.jobs[job.number] = job
        return begins

    def job_of(self, number: int) -> Job | None:
        """Return the job that has the part of this number, which has not been answered."""
        job = self.jobs.get(number)
        if job is not None and number in job.parts:
            return job
        return next((each for each in self.jobs.values() if number in each.parts), None)

    def finished(self, job: Job, now: float) -> float:
        """It has answered a job: return for how many seconds that ran."""
        del self.jobs[job.number]
        # What was only ready, for all that is known here, has run all the same.
        took = now - job.began if job.began < now else 0.0
        self.is_quick = took < QUICK_S
        if self.jobs:
            self._begin(now)
        return took

    def lost(self) -> None:
        """Its processes are of no use any more."""

    def _begin(self, now: float) -> None:
        """What was ready begins where there is room."""
        for batch in list(self.jobs.values())[: self.concurrency]:
            batch.began = min(batch.began, now)
