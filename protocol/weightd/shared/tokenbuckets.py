"""A token bucket for each of any number of keys. Pure: no I/O, no clock."""

from __future__ import annotations

from typing import Dict, Tuple

# Full buckets are dropped when the table has grown to twice its size after the last time.
_LEAST_KEPT = 1024


class TokenBuckets:
    """Limits how often something happens for each key; a decision takes the same time for any number of keys.

    Args:
        rate: tokens a second that each bucket gets; 0 for no limit.
        burst: tokens of a full bucket. A key that was not seen yet has a full one.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        # The tokens of each key, and when they were counted.
        self._buckets: Dict[str, Tuple[float, float]] = {}
        self._drop_at = _LEAST_KEPT

    def take(self, key: str, now: float) -> bool:
        """Take one token of a key, if it has one; return whether it had."""
        if not self._rate:
            return True
        tokens = self._tokens(key, now)
        if tokens < 1.0:
            return False
        self._buckets[key] = tokens - 1.0, now
        return True

    def has_one(self, key: str, now: float) -> bool:
        """Return whether `take` would succeed."""
        return not self._rate or self._tokens(key, now) >= 1.0

    def charge(self, key: str, tokens: float, now: float) -> None:
        """Take so many tokens of a key, also those that it does not have yet, up to one burst.

        A negative number gives tokens back.
        """
        if self._rate:
            self._buckets[key] = max(-self._burst, self._tokens(key, now) - tokens), now

    def __len__(self) -> int:
        """Return how many keys are kept."""
        return len(self._buckets)

    def _tokens(self, key: str, now: float) -> float:
        found = self._buckets.get(key)
        if found is None:
            if len(self._buckets) >= self._drop_at:
                self._drop_full(now)
            return self._burst
        tokens, at = found
        return min(self._burst, tokens + (now - at) * self._rate)

    def _drop_full(self, now: float) -> None:
        self._buckets = {
            key: (tokens, at)
            for key, (tokens, at) in self._buckets.items()
            if tokens + (now - at) * self._rate < self._burst
        }
        self._drop_at = max(_LEAST_KEPT, 2 * len(self._buckets))
