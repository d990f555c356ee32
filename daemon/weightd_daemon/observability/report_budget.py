"""Answers the questions that cost the daemon's loop time: a step in each turn, and each user's within a share of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from weightd_daemon.platform import clock
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.timers import Timer
from weightd_daemon.scheduling.signature import MetadataRequest
from weightd_protocol.errors import ResourceExhausted

# Of one user, and of all: each answer may cost milliseconds.
MAX_PER_USER = 8
MAX_PENDING = 16

# Of the loop's time, for the questions of one user.
LOOP_SHARE = 0.1

# So much of it a user can have at once who has asked for little: nobody who asks now and then waits.
BURST_S = 0.1


class _PendingReport(NamedTuple):
    """A question that waits; `step` does a part of the work, and returns whether it has sent the answer."""

    requester: MetadataRequest
    step: Callable[[], bool]


class Reports:
    """The questions that wait.

    Args:
        loop: calls when a step is due.
        reject: is given a question that is not answered, and why.
        get_time: monotonic seconds.
    """

    def __init__(
        self,
        loop: EventLoop,
        reject: Callable[[MetadataRequest, ResourceExhausted], object],
        get_time: Callable[[], float] = clock.now,
    ) -> None:
        self._loop = loop
        self._reject = reject
        self._get_time = get_time
        self._pending: list[_PendingReport] = []
        self._counts_by_user = Counter[str]()
        # By user: when the share of the loop's time makes up for all that it has had.
        self._paid_until: dict[str, float] = {}
        self.timer = Timer(lambda _: self.step())

    def add(self, requester: MetadataRequest, step: Callable[[], bool]) -> None:
        """Answer a question by steps; past `MAX_PENDING` the user that has most of them has one refused.

        Raises:
            ResourceExhausted: the user has `MAX_PER_USER` already.
        """
        if self._counts_by_user[requester.user] == MAX_PER_USER:
            text = f"{MAX_PER_USER} status, metrics and events requests of this user are waiting already"
            raise ResourceExhausted(text, retry_after=self._retry_after_s(requester))
        self._pending.append(_PendingReport(requester, step))
        self._counts_by_user[requester.user] += 1
        self._loop.call_soon(self.step)
        if len(self._pending) > MAX_PENDING:
            last = self._next_to_evict()
            self._remove(last)
            text = f"{MAX_PENDING} status, metrics and events requests are waiting already, most of them of this user"
            self._reject(last.requester, ResourceExhausted(text, retry_after=self._retry_after_s(last.requester)))

    def step(self) -> None:
        """Do a step for the user that has had least, if one is due."""
        if not self._pending:
            return
        started_at = self._get_time()
        self._paid_until = {user: at for user, at in self._paid_until.items() if at > started_at}
        pending = min(self._pending, key=lambda each: self._paid_until.get(each.requester.user, 0.0))
        user = pending.requester.user
        due_at = self._paid_until.get(user, 0.0) - BURST_S / LOOP_SHARE
        if due_at > started_at:
            self.timer.set(due_at)
            return
        if pending.step():
            self._remove(pending)
        self._paid_until[user] = (
            max(started_at, self._paid_until.get(user, 0.0)) + (self._get_time() - started_at) / LOOP_SHARE
        )
        if self._pending:
            self._loop.call_soon(self.step)

    def _remove(self, pending: _PendingReport) -> None:
        self._pending.remove(pending)
        self._counts_by_user[pending.requester.user] -= 1
        if not self._counts_by_user[pending.requester.user]:
            del self._counts_by_user[pending.requester.user]

    def _next_to_evict(self) -> _PendingReport:
        """Return which one gives way: the last one of the client that has most, of the user that has most."""
        by_client = Counter(each.requester.client for each in self._pending)
        by_user = self._counts_by_user
        return max(
            reversed(self._pending), key=lambda each: (by_user[each.requester.user], by_client[each.requester.client])
        )

    def _retry_after_s(self, requester: MetadataRequest) -> float:
        """Return after how many seconds another question of a user is likely to be answered."""
        return max(BURST_S, self._paid_until.get(requester.user, 0.0) - BURST_S / LOOP_SHARE - self._get_time())
