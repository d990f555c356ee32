"""Per-user limits: token buckets, rate-limited logging, and a round-robin queue.

The module does no I/O and reads no clock: callers pass the current time.
"""

from __future__ import annotations

from typing import Dict, Generic, Iterator, Optional, Tuple, TypeVar

T = TypeVar("T")

# When this many buckets are stored, all full buckets are dropped, because a full bucket is like a new one. The next
# drop happens when the number of stored buckets has doubled.
_MIN_DROP_SIZE = 1024

# Maximum number of keys with separate limits in a RateLimitedLog. All further keys share one limit.
_MAX_KEYS = 256
_OTHER_KEYS = ""


class TokenBucket:
    """Token bucket. A new bucket is full.

    Callers pass the rate (tokens per second, more than 0) and the burst (the capacity of the bucket) in each call, and
    may change both between calls.
    """

    __slots__ = ("_tokens", "_updated_at")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._updated_at = -float("inf")

    def tokens(self, rate: float, burst: float, now: float) -> float:
        """Return the number of tokens in the bucket. It is negative after a `charge` of more tokens than available."""
        return min(burst, self._tokens + (now - self._updated_at) * rate)

    def take(self, rate: float, burst: float, now: float) -> bool:
        """Take one token if the bucket has one, and return whether a token was taken."""
        tokens = self.tokens(rate, burst, now)
        if tokens < 1.0:
            return False
        self._tokens, self._updated_at = tokens - 1.0, now
        return True

    def charge(self, tokens: float, rate: float, burst: float, now: float) -> None:
        """Take tokens even if the bucket has fewer. The number of tokens becomes negative, down to -`burst`."""
        self._tokens, self._updated_at = max(-burst, self.tokens(rate, burst, now) - tokens), now


class TokenBuckets:
    """Token buckets by key, such as a user. The time of an operation does not grow with the number of keys.

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
        """Take one token from the key's bucket if it has one, and return whether a token was taken."""
        return not self._rate or self._bucket(key, now).take(self._rate, self._burst, now)

    def has_one(self, key: str, now: float) -> bool:
        """Return whether the key's bucket has a token, so that `take` would succeed."""
        return not self._rate or self._bucket(key, now).tokens(self._rate, self._burst, now) >= 1.0

    def charge(self, key: str, tokens: float, now: float) -> None:
        """Take tokens from the key's bucket even if it has fewer. The number becomes negative, down to -`burst`.

        A negative argument `tokens` puts tokens back.
        """
        if self._rate:
            self._bucket(key, now).charge(tokens, self._rate, self._burst, now)

    def __len__(self) -> int:
        """Return the number of keys with a stored bucket."""
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
    """Rate limiter for log lines about events that a client can cause at any rate.

    For each key, such as a client, the first event is logged, and then at most one event per interval.

    Args:
        interval_s: minimum number of seconds between two log lines for the same key.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        # For each key: the time from which its next event may be logged, and the number of its events since its last
        # log line.
        self._entries: Dict[str, Tuple[float, int]] = {}
        # Time at which the first of the entries expires. Before then, `_drop_expired` would find nothing to drop.
        self._forget_at = 0.0

    def record(self, key: str, now: float) -> Optional[int]:
        """Record an event, and return whether the caller should log it.

        Returns:
            None if the caller should not log the event. Otherwise the number of the key's events that were suppressed
            since the key's last log line.
        """
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
    """Round-robin queue over users: `take` takes an item of each user in turn.

    So a user with many queued items delays every other user by one item only.

    Items must be hashable, and no item may be in the queue twice. The time of an operation does not grow with the
    number of items. A user may be None.
    """

    def __init__(self) -> None:
        # The queued items of each user. The next item is the first one of the first user.
        self._items_by_user: Dict[Optional[str], Dict[T, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._items_by_user)

    def __iter__(self) -> Iterator[Optional[str]]:
        """Iterate over the users with queued items, in the order of their turns."""
        return iter([*self._items_by_user])

    def __contains__(self, user: Optional[str]) -> bool:
        return user in self._items_by_user

    def put(self, user: Optional[str], item: T) -> None:
        """Append an item to the items of a user."""
        self._items_by_user.setdefault(user, {})[item] = None

    def take(self) -> T:
        """Remove and return the first item of the user whose turn it is.

        This user's next turn is after the turns of all other users.
        """
        return self.take_of(next(iter(self._items_by_user)))

    def take_of(self, user: Optional[str]) -> T:
        """Remove and return the first item of `user`, whose next turn is then after all other users."""
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
