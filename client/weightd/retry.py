"""Retry policy: decides whether a failed call is repeated, and after which pause. This module does not sleep."""

from __future__ import annotations

import random
from dataclasses import dataclass
from time import monotonic
from typing import Any, Callable, Optional

from weightd import arguments
from weightd_protocol.errors import InvalidArgument, RequestError, ResourceExhausted, Unavailable
from weightd_protocol.schema import describe_value

# A request that still fails after this many attempts needs a person's attention.
MAX_ATTEMPTS = 10
MAX_PAUSE_S = 60.0

# The errors that docs/protocol.md marks with "later": the same request may succeed later.
_RETRYABLE_ERRORS = (ResourceExhausted, Unavailable)

# There is no further attempt if it would have less time than this.
_MIN_ATTEMPT_S = 0.001


@dataclass(frozen=True)
class Retry:
    """Retry policy for calls that fail with `ResourceExhausted` or `Unavailable`. Attempts share the timeout.

    Attributes:
        attempts: the maximum number of attempts, including the first.
        pause: seconds before the second attempt, doubled before each further attempt. The client waits for a random
            part of the pause, between half and all of it, so that clients do not return at the same moment. The error's
            `retry_after` is added.
        max_pause: the upper limit of the growing pause, in seconds.

    Raises:
        InvalidArgument: a value is out of range.
    """

    attempts: int = 3
    pause: float = 0.1
    max_pause: float = 2.0

    def __post_init__(self) -> None:
        attempts: Any = self.attempts
        if not (type(attempts) is int and 1 <= attempts <= MAX_ATTEMPTS):
            raise InvalidArgument(
                f"attempts: expected an integer from 1 to {MAX_ATTEMPTS}, got {describe_value(attempts)}"
            )
        for name in ("pause", "max_pause"):
            object.__setattr__(self, name, arguments.parse_seconds(name, getattr(self, name), MAX_PAUSE_S))


def check_retry(retry: Any) -> Optional[Retry]:
    """Return the retry policy of a client, or None.

    Raises:
        InvalidArgument: `retry` is neither a `Retry` nor None.
    """
    if retry is not None and not isinstance(retry, Retry):
        raise InvalidArgument(f"retry: expected a Retry or None, got {describe_value(retry)}")
    return retry


class Attempts:
    """Attempts of one call, which share its timeout.

    Args:
        retry: the retry policy.
        seconds: the timeout of the call.
        clock: returns the time in seconds.
        random_fraction: returns a new random number from 0 to 1 at each call.
    """

    def __init__(
        self,
        retry: Retry,
        seconds: float,
        *,
        clock: Callable[[], float] = monotonic,
        random_fraction: Callable[[], float] = random.random,
    ) -> None:
        self._retry = retry
        self._clock = clock
        self._random = random_fraction
        self._deadline = clock() + seconds
        self._failure_count = 0

    def remaining_s(self) -> float:
        """Return the seconds available to the next attempt, which is always more than 0."""
        return max(_MIN_ATTEMPT_S, self._deadline - self._clock())

    def pause_after(self, error: RequestError) -> Optional[float]:
        """Record a failed attempt. Return the seconds before the next one, or None if there must be no further one."""
        self._failure_count += 1
        if self._failure_count >= self._retry.attempts or not isinstance(error, _RETRYABLE_ERRORS):
            return None
        backoff_s = min(self._retry.pause * 2.0 ** (self._failure_count - 1), self._retry.max_pause)
        pause = (error.retry_after or 0.0) + backoff_s * (1.0 + self._random()) / 2.0
        return pause if pause + _MIN_ATTEMPT_S < self._deadline - self._clock() else None
