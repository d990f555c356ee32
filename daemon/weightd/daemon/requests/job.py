"""A job: what a seat runs at once, and answers at once."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from weightd.daemon.requests.request import Company, Origin, Request

_ENDED = operator.attrgetter("ended")


@dataclass(eq=False, slots=True)
class Job:
    """One or more parts of requests; a part is all of a request.

    What becomes of a job says something of its parts only if it has one. Where it has several, and its seat dies of
    it, hangs in it or refuses it, each of them runs again alone.

    Attributes:
        number: by which its seat calls it: that of its first part.
        parts: of each, the request.
    """

    number: int
    parts: tuple[Request, ...]

    @property
    def sole(self) -> Request | None:
        """The request that it is, all alone; None if it has several parts."""
        return self.parts[0] if len(self.parts) == 1 else None

    @property
    def origins(self) -> set[Origin]:
        """Who has asked."""
        return {each.origin for each in self.parts}

    @property
    def awaited(self) -> list[Request]:
        """The requests that have not ended while it ran."""
        return [each for each in self.parts if not each.ended]

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits for what comes of it."""
        return not all(map(_ENDED, self.parts))

    @property
    def company(self) -> Company:
        """What else may run: as the narrowest of its parts bears."""
        return max(each.company for each in self.parts)
