"""A job: what a seat runs at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightd.daemon.requests.part import FIRST_PART, Part
from weightd.daemon.requests.request import Company, Origin, Request
from weightd.daemon.requests.rows.terms import Form
from weightd.daemon.requests.shares import Bill

_NOT_YET = float("inf")


@dataclass(eq=False, slots=True)
class Job:
    """One or more parts of requests; each is answered by itself.

    What becomes of a job says something of its parts only if it has one. Where it has several, and its seat dies of
    it, hangs in it or refuses it, each of them runs again alone.

    Attributes:
        number: by which its seat calls it: that of its first part.
        parts: what has not been answered of it, by number.
        count: how many parts it had.
        form: of its rows, if it has some.
        rows: how many they are.
        bill: what it has been charged, where there are several tenants.
        answered: its parts that were, but for the last.
        is_settled: its seconds have been told.
        is_long: it is expected to take longer than other tenants should wait.
        began: when it began to run, in monotonic seconds; later than any clock says while it is only ready.
    """

    number: int
    parts: dict[int, Part]
    count: int = 1
    form: Form | None = None
    rows: int = 0
    began: float = _NOT_YET
    bill: Bill | None = None
    answered: tuple[Part, ...] = ()
    is_settled: bool = False
    is_long: bool = False

    @classmethod
    def of(cls, parts: Sequence[Part], form: Form | None = None, rows: int = 0) -> Job:
        """Return a job of these parts."""
        return cls(parts[0].number, {item.number: item for item in parts}, len(parts), form, rows)

    @property
    def has_begun(self) -> bool:
        """Whether it runs, as far as can be told from here."""
        return self.began != _NOT_YET

    def settle(self, seconds: float, last: Part | None = None) -> None:
        """It has had its seat for so many seconds, and has it no more. Only the first word counts.

        They go on the accounts of who has asked, by rows, whoever is to blame for the end. `last`: this part was
        answered as the last, if all were.
        """
        if self.is_settled:
            return
        self.is_settled = True
        if self.bill is not None:
            self.bill.settle(seconds)
        if last is not None and self.count == 1:
            last.request.account.ran(seconds, last.rows)
            return
        ran = [*self.answered, *self.parts.values()] if last is None else [*self.answered, last]
        rows = sum([item.rows for item in ran]) if self.count > 1 else 0
        for item in ran:
            share = seconds * item.rows / rows if rows else seconds / len(ran)
            item.request.account.ran(share, 0 if item.number in self.parts else item.rows)

    def keep_apart(self) -> None:
        """Whatever has to run again of it, does so alone."""
        for request in self.requests:
            request.narrow(Company.ALONE)

    @property
    def sole(self) -> Request | None:
        """The request that it is a part of, all alone; None if it has several parts."""
        return next(iter(self.parts.values())).request if self.count == 1 else None

    def part_of(self, request: Request) -> Part | None:
        """Return its part of a request, which has not been answered; None if it has none."""
        part = self.parts.get(request.number)
        if part is None and self.number >= FIRST_PART:
            # A job that has some rows of a request has nothing else.
            part = next((each for each in self.parts.values() if each.request is request), None)
        return part

    @property
    def requests(self) -> list[Request]:
        """Those that it has not answered."""
        return [item.request for item in self.parts.values()]

    @property
    def origins(self) -> set[Origin]:
        """Who has asked."""
        return {request.origin for request in self.requests}

    @property
    def awaited(self) -> list[Part]:
        """The parts of which the requests have not ended while it ran."""
        return [item for item in self.parts.values() if item.is_awaited]

    @property
    def company(self) -> Company:
        """What else may run: as the narrowest of its parts bears."""
        return max(request.company for request in self.requests)


def blame(jobs: Sequence[Job]) -> None:
    """A seat was lost to these jobs: that goes on the account of who has asked, if all are one tenant's."""
    accounts = {id(request.account): request.account for batch in jobs for request in batch.requests}
    if len(accounts) == 1:
        # Of several nobody can tell whose fault it was.
        [account] = accounts.values()
        account.deaths += 1
