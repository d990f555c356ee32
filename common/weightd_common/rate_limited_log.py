"""What anybody can bring about as often as it likes is told seldom: the log is everybody's."""

from __future__ import annotations

from typing import Dict, Optional, Tuple

# Who is told apart. Of more than these all others are one.
_MAX_KEYS = 256

_OTHER_KEYS = ""


class RateLimitedLog:
    """Says when something is to be told of somebody: at once, and then no more often than each so many seconds.

    Args:
        interval_s: between two lines about one.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        # When it may be told again, and how often it has happened meanwhile.
        self._entries: Dict[str, Tuple[float, int]] = {}
        # None of them may be forgotten before.
        self._forget_at = 0.0

    def record(self, key: str, now: float) -> Optional[int]:
        """It has happened once more; return how often it was not told since the last time, None if it is not to be."""
        if key not in self._entries and len(self._entries) >= _MAX_KEYS and now >= self._forget_at:
            self._drop_expired(now)
        if key not in self._entries and len(self._entries) >= _MAX_KEYS:
            key = _OTHER_KEYS
        next_log_at, suppressed_count = self._entries.get(key, (now, 0))
        if now < next_log_at:
            self._entries[key] = next_log_at, suppressed_count + 1
            return None
        self._entries[key] = now + self._interval_s, 0
        return suppressed_count

    def _drop_expired(self, now: float) -> None:
        self._entries = {who: each for who, each in self._entries.items() if now < each[0]}
        self._forget_at = min((until for until, _ in self._entries.values()), default=now)
