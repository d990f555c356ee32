"""A queue whose users take turns."""

from __future__ import annotations

from typing import Dict, Generic, Iterator, Optional, TypeVar

T = TypeVar("T")


class RoundRobinQueue(Generic[T]):
    """Items by user: however many items of one user wait, the next user waits for one of them only.

    Items are hashable, and no item is in the queue twice. Every operation takes the same time for any number of items.
    A user may be None.
    """

    def __init__(self) -> None:
        # The first user, and the first item of it, are next.
        self._items_by_user: Dict[Optional[str], Dict[T, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._items_by_user)

    def __iter__(self) -> Iterator[Optional[str]]:
        """Iterate over the users that have items, the next one first."""
        return iter([*self._items_by_user])

    def __contains__(self, user: Optional[str]) -> bool:
        return user in self._items_by_user

    def put(self, user: Optional[str], item: T) -> None:
        """Append an item to those of a user."""
        self._items_by_user.setdefault(user, {})[item] = None

    def take(self) -> T:
        """Remove and return the next item; the next turn of its user comes after those of all others."""
        return self.take_of(next(iter(self._items_by_user)))

    def take_of(self, user: Optional[str]) -> T:
        """Remove and return the next item of a user; the next turn of that user comes after those of all others."""
        items = self._items_by_user.pop(user)
        item = next(iter(items))
        del items[item]
        if items:
            self._items_by_user[user] = items
        return item

    def remove(self, user: Optional[str], item: T) -> bool:
        """Remove an item of a user; return whether it was in the queue."""
        items = self._items_by_user.get(user)
        if items is None or item not in items:
            return False
        del items[item]
        if not items:
            del self._items_by_user[user]
        return True
