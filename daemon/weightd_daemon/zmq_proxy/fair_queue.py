"""Whose connection a proxy reads next: users take turns, and so do the connections of each."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """What waits for its turn, by its user: however much of one user waits, others wait for one piece of it."""

    def __init__(self) -> None:
        self._items_by_user: dict[str, dict[T, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._items_by_user)

    def put(self, user: str, item: T) -> None:
        """Let something of a user wait behind all other of this user."""
        self._items_by_user.setdefault(user, {})[item] = None

    def take(self) -> T:
        """Return what is next, and let its user be the last one."""
        user = next(iter(self._items_by_user))
        user_items = self._items_by_user.pop(user)
        item = next(iter(user_items))
        del user_items[item]
        if user_items:
            self._items_by_user[user] = user_items
        return item

    def remove(self, user: str, item: T) -> None:
        """Let something wait no more, if it does."""
        user_items = self._items_by_user.get(user, {})
        user_items.pop(item, None)
        if not user_items:
            self._items_by_user.pop(user, None)
