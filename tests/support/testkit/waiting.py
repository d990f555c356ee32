"""Polling for conditions that no message announces."""

from __future__ import annotations

import time
from typing import Callable, Optional, TypeVar

T = TypeVar("T")

LIMIT_S = 30.0

# The interval grows with the time waited, up to 5 % of it, to leave the machine to the awaited process.
_POLL_S = 0.01
_MAX_POLL_S = 0.1


def until(check: Callable[[], Optional[T]], what: str, limit: float = LIMIT_S) -> T:
    """Poll until `check` returns a true value, and return that value.

    Raises:
        TimeoutError: `check` has returned no true value for `limit` seconds; the text names `what`.
    """
    begin = time.monotonic()
    while True:
        result = check()
        if result:
            return result
        waited = time.monotonic() - begin
        if waited > limit:
            raise TimeoutError(f"time-out after {limit:g} s: {what}")
        time.sleep(min(max(waited / 20, _POLL_S), _MAX_POLL_S))
