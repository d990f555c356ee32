"""Places that callers have among them, of which nobody takes so many that none are left to others."""

from __future__ import annotations

from collections import Counter

from weightd.gateway.callers import Caller

# Of what would still be free: who is alone has three quarters of all, and each of two has three sevenths.
_TIMES_FREE = 3


class Shares:
    """Counts who has how many.

    Tenants are told apart, and those who ask for the gateway itself by their names; None is whoever asks.

    Args:
        most: places.

    Attributes:
        taken: how many are somebody's.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: Counter[str | Caller] = Counter()
        self.taken = 0

    def take(self, caller: Caller | str | None, count: int = 1, own: int = 0) -> bool:
        """Have so many more, if they are to be had; return whether they were.

        The first of a caller are if any are, and those that come to `own`, which are all that it has.
        """
        free = self._most - self.taken - count
        if free < 0:
            return False
        if caller is not None:
            who = caller if isinstance(caller, str) else caller.tenant or caller
            has = self._of[who]
            if has > own and has + count > _TIMES_FREE * free:
                return False
            self._of[who] = has + count
        self.taken += count
        return True

    def give(self, caller: Caller | str | None, count: int = 1) -> None:
        """Have so many fewer."""
        self.taken -= count
        if caller is not None:
            who = caller if isinstance(caller, str) else caller.tenant or caller
            self._of[who] -= count
            if not self._of[who]:
                del self._of[who]
