"""Per-user limits: token buckets, rate-limited logging, and a round-robin queue. No I/O and no clock."""

from __future__ import annotations

from typing import Dict, Generic, Iterator, Optional, Tuple, TypeVar

T = TypeVar("T")

# Full buckets are dropped when the table has doubled in size since the last time.
_MIN_DROP_SIZE = 1024

# Number of keys with separate log limits. All further keys share one limit.
_MAX_KEYS = 256
_OTHER_KEYS = ""


class TokenBucket:
    """Token bucket. A new bucket is full.

    The rate (tokens per second, more than 0) and the burst (the capacity of the bucket) may differ in each call.
    """

    __slots__ = ("_tokens", "_updated_at")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._updated_at = -float("inf")

    def tokens(self, rate: float, burst: float, now: float) -> float:
        """Return the number of tokens, which is negative after a `charge` that exceeded the balance."""
        return min(burst, self._tokens + (now - self._updated_at) * rate)

    def take(self, rate: float, burst: float, now: float) -> bool:
        """Take one token if available, and return whether it was."""
        tokens = self.tokens(rate, burst, now)
        if tokens < 1.0:
            return False
        self._tokens, self._updated_at = tokens - 1.0, now
        return True

    def charge(self, tokens: float, rate: float, burst: float, now: float) -> None:
        """Take tokens, also beyond the balance, by at most one burst; see `TokenBuckets.charge`."""
        self._tokens, self._updated_at = max(-burst, self.tokens(rate, burst, now) - tokens), now


class TokenBuckets:
    """A token bucket for each key. Operations take the same time for any number of keys.

    Args:
        rate: tokens per second for each bucket; 0 for no limit.
        burst: the capacity of each bucket.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._buckets: Dict[str, TokenBucket] = {}
        self._drop_at = _MIN_DROP_SIZE

    def take(self, key: str, now: float) -> bool:
        """Take one token of a key if available, and return whether it was."""
        return not self._rate or self._bucket(key, now).take(self._rate, self._burst, now)

    def has_one(self, key: str, now: float) -> bool:
        """Return whether `take` would succeed."""
        return not self._rate or self._bucket(key, now).tokens(self._rate, self._burst, now) >= 1.0

    def charge(self, key: str, tokens: float, now: float) -> None:
        """Take tokens of a key, also beyond the balance, by at most one burst.

        A negative number returns tokens.
        """
        if self._rate:
            self._bucket(key, now).charge(tokens, self._rate, self._burst, now)

    def __len__(self) -> int:
        """Return the number of stored keys."""
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


class RateLimitedLog:
    """Rate limiter for log lines about events that a client can cause at any rate: the first, then one per interval.

    Args:
        interval_s: seconds between two lines for the same key.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        # The time of the next allowed line, and the number of events suppressed since the last line.
        self._entries: Dict[str, Tuple[float, int]] = {}
        # No entry expires before this time.
        self._forget_at = 0.0

    def record(self, key: str, now: float) -> Optional[int]:
        """Count an event. Return None to suppress it, otherwise the number suppressed since the last line."""
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


class RoundRobinQueue(Generic[T]):
    """Round-robin queue over users: a user with many queued items delays the next user by one item only.

    Items must be hashable, and no item may be in the queue twice. Operations take the same time for any number of
    items. A user may be None.
    """

    def __init__(self) -> None:
        # The first item of the first user is next.
        self._items_by_user: Dict[Optional[str], Dict[T, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._items_by_user)

    def __iter__(self) -> Iterator[Optional[str]]:
        """Iterate over the users with items, the next one first."""
        return iter([*self._items_by_user])

    def __contains__(self, user: Optional[str]) -> bool:
        return user in self._items_by_user

    def put(self, user: Optional[str], item: T) -> None:
        """Append an item of a user."""
        self._items_by_user.setdefault(user, {})[item] = None

    def take(self) -> T:
        """Remove and return the next item. Its user moves to the end."""
        return self.take_of(next(iter(self._items_by_user)))

    def take_of(self, user: Optional[str]) -> T:
        """Remove and return the next item of a user. The user moves to the end."""
        items = self._items_by_user.pop(user)
        item = next(iter(items))
        del items[item]
        if items:
            self._items_by_user[user] = items
        return item

    def remove(self, user: Optional[str], item: T) -> bool:
        """Remove an item of a user, and return whether it was in the queue."""
        items = self._items_by_user.get(user)
        if items is None or item not in items:
            return False
        del items[item]
        if not items:
            del self._items_by_user[user]
        return True
