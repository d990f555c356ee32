"""A queue that divides seconds of one server among users: start-time fair queueing. Pure: no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairShareQueue(Generic[T]):
    """A queue from which the item of the user with the fewest seconds comes first.

    A user that had no item in the queue starts with as many seconds as the user of the latest item, so that nobody
    saves up seconds while idle.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[T]] = {}
        self._used_s: dict[Hashable, float] = {}
        self._virtual_time = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, user: Hashable, item: T) -> None:
        """Append an item of a user."""
        if user not in self._waiting:
            self._waiting[user] = deque()
            self._used_s[user] = max(self._used_s.get(user, 0.0), self._virtual_time)
        self._waiting[user].append(item)

    def get(self) -> tuple[Hashable, T]:
        """Remove and return the next item and its user; of users with equal seconds, the one that waits longest."""
        user = min(self._waiting, key=self._used_s.__getitem__)
        items = self._waiting.pop(user)
        item = items.popleft()
        if items:
            self._waiting[user] = items
        self._virtual_time = self._used_s[user]
        return user, item

    def charge(self, user: Hashable, seconds: float) -> None:
        """Count seconds that an item of a user took."""
        self._used_s[user] = self._used_s.get(user, self._virtual_time) + seconds
        self._used_s = {
            each: used for each, used in self._used_s.items() if used > self._virtual_time or each in self._waiting
        }

    def clear(self) -> list[T]:
        """Remove and return all items."""
        items = [item for each in self._waiting.values() for item in each]
        self._waiting.clear()
        return items
