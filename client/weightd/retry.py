"""Retry policy: decides whether a failed call is repeated, and after how many seconds. This module does not sleep."""

from __future__ import annotations

import random
from dataclasses import dataclass
from time import monotonic
from typing import Any, Callable, Optional

from weightd import arguments
from weightd_protocol.errors import InvalidArgument, RequestError, ResourceExhausted, Unavailable
from weightd_protocol.schema import describe_value

# Maximum value of `Retry.attempts`. If ten attempts fail, more attempts are unlikely to help.
MAX_ATTEMPTS = 10
MAX_PAUSE_S = 60.0

# The errors after which the same request may succeed later. The table of errors in docs/protocol.md marks them with
# "later".
_RETRYABLE_ERRORS = (ResourceExhausted, Unavailable)

# Minimum number of seconds for an attempt. If less time would remain, the call is not repeated.
_MIN_ATTEMPT_S = 0.001


@dataclass(frozen=True)
class Retry:
    """Retry policy for calls that fail with `ResourceExhausted` or `Unavailable`.

    All attempts of a call, and the pauses between them, share the timeout of the call.

    Attributes:
        attempts: the maximum number of attempts, including the first.
        pause: seconds of the pause before the second attempt. The pause doubles before each further attempt. The client
            waits for a random time between half the pause and the whole pause, so that several clients do not repeat
            their calls at the same moment. If the error has a `retry_after`, the client waits for these seconds in
            addition.
        max_pause: the maximum to which the pause grows by doubling, in seconds.

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
    """Check the argument `retry` of a client and return it.

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
        clock: returns the current time in seconds, as `time.monotonic`.
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
        """Return the number of seconds until the call's timeout, at least a minimum for one attempt."""
        return max(_MIN_ATTEMPT_S, self._deadline - self._clock())

    def pause_after(self, error: RequestError) -> Optional[float]:
        """Record that an attempt failed with `error`. Return the seconds until the next attempt, or None to give up."""
        self._failure_count += 1
        if self._failure_count >= self._retry.attempts or not isinstance(error, _RETRYABLE_ERRORS):
            return None
        backoff_s = min(self._retry.pause * 2.0 ** (self._failure_count - 1), self._retry.max_pause)
        pause = (error.retry_after or 0.0) + backoff_s * (1.0 + self._random()) / 2.0
        return pause if pause + _MIN_ATTEMPT_S < self._deadline - self._clock() else None
