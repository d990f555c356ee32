"""Token buckets: one, or one for each of any number of keys. Pure: no I/O, no clock."""

from __future__ import annotations

from typing import Dict

# Full buckets are dropped when the table has grown to twice its size after the last time.
_MIN_DROP_SIZE = 1024


class TokenBucket:
    """Limits how often something happens. A new bucket is full.

    The rate, in tokens a second, and the burst, the tokens of a full bucket, may be others in each call. The rate has
    to be more than 0.
    """

    __slots__ = ("_tokens", "_updated_at")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._updated_at = -float("inf")

    def tokens(self, rate: float, burst: float, now: float) -> float:
        """Return how many tokens it has; less than 0 after a `charge` that it could not pay."""
        return min(burst, self._tokens + (now - self._updated_at) * rate)

    def take(self, rate: float, burst: float, now: float) -> bool:
        """Take one token, if there is one; return whether there was."""
        tokens = self.tokens(rate, burst, now)
        if tokens < 1.0:
            return False
        self._tokens, self._updated_at = tokens - 1.0, now
        return True

    def charge(self, tokens: float, rate: float, burst: float, now: float) -> None:
        """Take so many tokens, also those that it does not have yet, up to one burst; see `TokenBuckets.charge`."""
        self._tokens, self._updated_at = max(-burst, self.tokens(rate, burst, now) - tokens), now


class TokenBuckets:
    """A bucket for each key; a decision takes the same time for any number of keys.

    Args:
        rate: tokens a second that each bucket gets; 0 for no limit.
        burst: tokens of a full bucket.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._buckets: Dict[str, TokenBucket] = {}
        self._drop_at = _MIN_DROP_SIZE

    def take(self, key: str, now: float) -> bool:
        """Take one token of a key, if it has one; return whether it had."""
        return not self._rate or self._bucket(key, now).take(self._rate, self._burst, now)

    def has_one(self, key: str, now: float) -> bool:
        """Return whether `take` would succeed."""
        return not self._rate or self._bucket(key, now).tokens(self._rate, self._burst, now) >= 1.0

    def charge(self, key: str, tokens: float, now: float) -> None:
        """Take so many tokens of a key, also those that it does not have yet, up to one burst.

        A negative number gives tokens back.
        """
        if self._rate:
            self._bucket(key, now).charge(tokens, self._rate, self._burst, now)

    def __len__(self) -> int:
        """Return how many keys are kept."""
        return len(self._buckets)

    def _bucket(self, key: str, now: float) -> TokenBucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._drop_at:
                self._drop_full(now)
            bucket = self._buckets[key] = TokenBucket()
        return bucket

    def _drop_full(self, now: float) -> None:
        rate, burst = self._rate, self._burst
        self._buckets = {key: each for key, each in self._buckets.items() if each.tokens(rate, burst, now) < burst}
        self._drop_at = max(_MIN_DROP_SIZE, 2 * len(self._buckets))
