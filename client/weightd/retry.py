"""Whether what has ended in an error is asked once more, and after which pause. It never waits itself."""

from __future__ import annotations

import random
from dataclasses import dataclass
from time import monotonic
from typing import Any, Callable, Optional

from weightd import arguments
from weightd_protocol.errors import InvalidArgument, RequestError, ResourceExhausted, Unavailable
from weightd_protocol.schema import describe_value

# What could not be answered for so long is news for a person, not for a program.
MAX_ATTEMPTS = 10
MAX_PAUSE_S = 60.0

# Those of which docs/protocol.md says "later": the same request may succeed then.
_RETRYABLE_ERRORS = (ResourceExhausted, Unavailable)

# Who would have no more than this left for the answer does not ask again.
_MIN_ATTEMPT_S = 0.001


@dataclass(frozen=True)
class Retry:
    """How calls are made again that ended in `ResourceExhausted` or `Unavailable`: within their timeout, and no more.

    Attributes:
        attempts: how often at most, the first time included.
        pause: seconds before the second attempt; twice as many before each further one. Of these between half and all
            are waited, so that not all clients come back at once, and before them for as long as the daemon has said.
        max_pause: what they do not grow beyond.

    Raises:
        InvalidArgument: one of them is out of its bounds.
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
    """Return the policy that a client was given, or None.

    Raises:
        InvalidArgument: it is something else.
    """
    if retry is not None and not isinstance(retry, Retry):
        raise InvalidArgument(f"retry: expected a Retry or None, got {describe_value(retry)}")
    return retry


class Attempts:
    """Those of one call, which has so many seconds for all of them.

    Args:
        retry: how often, and when.
        seconds: that the call may take.
        clock: tells the time in seconds.
        random_fraction: gives a number from 0 to 1, another one each time.
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
        """Return how many seconds the next attempt may take: always some."""
        return max(_MIN_ATTEMPT_S, self._deadline - self._clock())

    def pause_after(self, error: RequestError) -> Optional[float]:
        """An attempt has ended in `error`; return for how long to wait before the next one, None if there is none."""
        self._failure_count += 1
        if self._failure_count >= self._retry.attempts or not isinstance(error, _RETRYABLE_ERRORS):
            return None
        backoff_s = min(self._retry.pause * 2.0 ** (self._failure_count - 1), self._retry.max_pause)
        pause = (error.retry_after or 0.0) + backoff_s * (1.0 + self._random()) / 2.0
        return pause if pause + _MIN_ATTEMPT_S < self._deadline - self._clock() else None
