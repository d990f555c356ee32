"""Whose connection a gate reads next: users take turns, and so do the connections of each."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """What waits for its turn, by its user: however much of one user waits, others wait for one piece of it."""

    def __init__(self) -> None:
        self._users: dict[str, dict[T, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._users)

    def wait(self, user: str, what: T) -> None:
        """Let something of a user wait behind all other of this user."""
        self._users.setdefault(user, {})[what] = None

    def take(self) -> T:
        """Return what is next, and let its user be the last one."""
        user = next(iter(self._users))
        waiting = self._users.pop(user)
        what = next(iter(waiting))
        del waiting[what]
        if waiting:
            self._users[user] = waiting
        return what

    def forget(self, user: str, what: T) -> None:
        """Let something wait no more, if it does."""
        waiting = self._users.get(user, {})
        waiting.pop(what, None)
        if not waiting:
            self._users.pop(user, None)
