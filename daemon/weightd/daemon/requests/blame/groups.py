"""Groups of ranks that were lost, and what that says of what they ran.

Why a group is lost is seldom known at once: if one of its processes is killed or stopped from outside, the others fail
or wait in vain, and they may be heard of first. So whatever it was, that it was lost while it ran a request is only
held against this; the second one that is lost to the same request ends it. And it is forgiven if a process of the
group turns out to have been ended from outside: then that was why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from weightd.daemon.host.ends import By, End
from weightd.daemon.requests.job import Job
from weightd.daemon.requests.request import Request
from weightd.daemon.requests.seat import Seat
from weightd.protocol.errors import RequestError, Unavailable

# A request that so many groups were lost to is held to be the cause.
MAX_GROUPS = 2


class Loss(NamedTuple):
    """Why a group is lost, and the error in which a request ends that was the cause; None: no request was."""

    why: str
    error: type[RequestError] | None


@dataclass(eq=False, slots=True)
class _Lost:
    """A group that was lost while it ran a request, of which not all processes have ended."""

    request: Request
    is_forgiven: bool = False


class Groups:
    """The groups of one model that were lost.

    Args:
        most: whatever ends the groups that run a request, this is the last one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # By each of its processes, until that has ended.
        self._lost: dict[str, _Lost] = {}

    def lost(self, seat: Seat, job: Job, loss: Loss, now: float) -> list[tuple[Request, RequestError]]:
        """A group is lost while it ran a job: return those requests of the job that end by that, each with its error.

        What becomes of a job says something of a request only if that is all of it.
        """
        accused = job.sole if loss.error is not None else None
        if accused is not None:
            accused.deaths += 1
            self._lost.update(dict.fromkeys(seat.lives_on, _Lost(accused)))
        ended: list[tuple[Request, RequestError]] = []
        for request in dict.fromkeys(item.request for item in job.awaited):
            # Those that have run parts of it at the same time may have been lost to the same thing.
            if job.began >= request.lost_at:
                request.losses += 1
                request.lost_at = now
            if loss.error is not None and request is accused and request.deaths >= MAX_GROUPS:
                ended.append((request, loss.error(_words(request, request.deaths, "lost to it", loss.why))))
            elif request.losses >= self._most:
                ended.append(
                    (request, Unavailable(_words(request, request.losses, "lost while they ran it", loss.why)))
                )
        return ended

    def exited(self, process: str, end: End) -> Request | None:
        """A process has ended; return the request against which its group is not held any more, if there is one."""
        lost = self._lost.pop(process, None)
        if lost is None or lost.is_forgiven or not end.is_external or end.by is By.DAEMON:
            return None
        lost.is_forgiven = True
        lost.request.deaths -= 1
        return lost.request


def _words(request: Request, count: int, how: str, why: str) -> str:
    return f"request {request.id}: {count} groups of ranks were {how}, the last one as {why}"
