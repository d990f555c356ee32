"""Places that callers have among them, of which nobody takes so many that none are left to others."""

from __future__ import annotations

from collections import Counter

from weightd_gateway.auth import Caller

# Of what would still be free: who is alone has three quarters of all, and each of two has three sevenths.
_MAX_TIMES_FREE = 3


class FairLimit:
    """Counts who has how many.

    Tenants are told apart, and those who ask for the gateway itself by their names; None is whoever asks.

    Args:
        limit: places.

    Attributes:
        in_use: how many are somebody's.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count_by_caller: Counter[str | Caller] = Counter()
        self.in_use = 0

    def take(self, caller: Caller | str | None, count: int = 1, held: int = 0) -> bool:
        """Have so many more, if they are to be had; return whether they were.

        The first of a caller are if any are, and those that come to `held`, which are all that it has.
        """
        free = self._limit - self.in_use - count
        if free < 0:
            return False
        if caller is not None:
            key = caller if isinstance(caller, str) else caller.tenant or caller
            count_before = self._count_by_caller[key]
            if count_before > held and count_before + count > _MAX_TIMES_FREE * free:
                return False
            self._count_by_caller[key] = count_before + count
        self.in_use += count
        return True

    def release(self, caller: Caller | str | None, count: int = 1) -> None:
        """Have so many fewer."""
        self.in_use -= count
        if caller is not None:
            key = caller if isinstance(caller, str) else caller.tenant or caller
            self._count_by_caller[key] -= count
            if not self._count_by_caller[key]:
                del self._count_by_caller[key]
