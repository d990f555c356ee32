"""What anybody can bring about as often as it likes is told seldom: the log is everybody's."""

from __future__ import annotations

from typing import Dict, Optional, Tuple

# Who is told apart. Of more than these all others are one.
_MOST_TOLD_APART = 256

_OTHERS = ""


class Seldom:
    """Says when something is to be told of somebody: at once, and then no more often than each so many seconds.

    Args:
        seconds: between two lines about one.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # When it may be told again, and how often it has happened meanwhile.
        self._told: Dict[str, Tuple[float, int]] = {}
        # None of them may be forgotten before.
        self._forget_at = 0.0

    def tell(self, who: str, now: float) -> Optional[int]:
        """It has happened once more; return how often it was not told since the last time, None if it is not to be."""
        if who not in self._told and len(self._told) >= _MOST_TOLD_APART and now >= self._forget_at:
            self._forget(now)
        if who not in self._told and len(self._told) >= _MOST_TOLD_APART:
            who = _OTHERS
        until, untold = self._told.get(who, (now, 0))
        if now < until:
            self._told[who] = until, untold + 1
            return None
        self._told[who] = now + self._seconds, 0
        return untold

    def _forget(self, now: float) -> None:
        self._told = {who: each for who, each in self._told.items() if now < each[0]}
        self._forget_at = min((until for until, _ in self._told.values()), default=now)
