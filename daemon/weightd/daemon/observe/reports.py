"""Answers the questions that cost the daemon's loop time: a step in each turn, and each user's within a share of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from weightd.daemon.host import clock
from weightd.daemon.host.loop import Loop
from weightd.daemon.host.timers import Timer
from weightd.daemon.requests.signature import Waiter
from weightd.protocol.errors import ResourceExhausted

# Of one user, and of all: each answer may cost milliseconds.
MAX_OF_USER = 8
MAX_WAITING = 16

# Of the loop's time, for the questions of one user.
SHARE = 0.1

# So much of it a user can have at once who has asked for little: nobody who asks now and then waits.
BURST_S = 0.1


class _Question(NamedTuple):
    """A question that waits; `step` does a part of the work, and returns whether it has sent the answer."""

    asker: Waiter
    step: Callable[[], bool]


class Reports:
    """The questions that wait.

    Args:
        loop: calls when a step is due.
        refuse: is given a question that is not answered, and why.
        now: monotonic seconds.
    """

    def __init__(
        self,
        loop: Loop,
        refuse: Callable[[Waiter, ResourceExhausted], object],
        now: Callable[[], float] = clock.now,
    ) -> None:
        self._loop = loop
        self._refuse = refuse
        self._now = now
        self._waiting: list[_Question] = []
        self._of_user = Counter[str]()
        # By user: when the share of the loop's time makes up for all that it has had.
        self._settled: dict[str, float] = {}
        self.timer = Timer(lambda _: self.step())

    def ask(self, asker: Waiter, step: Callable[[], bool]) -> None:
        """Answer a question by steps; past `MAX_WAITING` the user that has most of them has one refused.

        Raises:
            ResourceExhausted: the user has `MAX_OF_USER` already.
        """
        if self._of_user[asker.user] == MAX_OF_USER:
            text = f"{MAX_OF_USER} questions of this user for status, metrics and events wait already"
            raise ResourceExhausted(text, retry_after=self._after(asker))
        self._waiting.append(_Question(asker, step))
        self._of_user[asker.user] += 1
        self._loop.call_soon(self.step)
        if len(self._waiting) > MAX_WAITING:
            last = self._crowding()
            self._end(last)
            text = f"{MAX_WAITING} questions for status, metrics and events wait already, most of them of this user"
            self._refuse(last.asker, ResourceExhausted(text, retry_after=self._after(last.asker)))

    def step(self) -> None:
        """Do a step for the user that has had least, if one is due."""
        if not self._waiting:
            return
        began = self._now()
        self._settled = {user: at for user, at in self._settled.items() if at > began}
        question = min(self._waiting, key=lambda each: self._settled.get(each.asker.user, 0.0))
        user = question.asker.user
        due = self._settled.get(user, 0.0) - BURST_S / SHARE
        if due > began:
            self.timer.set(due)
            return
        if question.step():
            self._end(question)
        self._settled[user] = max(began, self._settled.get(user, 0.0)) + (self._now() - began) / SHARE
        if self._waiting:
            self._loop.call_soon(self.step)

    def _end(self, question: _Question) -> None:
        self._waiting.remove(question)
        self._of_user[question.asker.user] -= 1
        if not self._of_user[question.asker.user]:
            del self._of_user[question.asker.user]

    def _crowding(self) -> _Question:
        """Return which one gives way: the last one of the client that has most, of the user that has most."""
        by_client = Counter(each.asker.client for each in self._waiting)
        of_user = self._of_user
        return max(reversed(self._waiting), key=lambda each: (of_user[each.asker.user], by_client[each.asker.client]))

    def _after(self, asker: Waiter) -> float:
        """Return after how many seconds another question of a user is likely to be answered."""
        return max(BURST_S, self._settled.get(asker.user, 0.0) - BURST_S / SHARE - self._now())
