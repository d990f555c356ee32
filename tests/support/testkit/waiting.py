"""Waiting for what comes without a message."""

from __future__ import annotations

import time
from typing import Callable, Optional, TypeVar

T = TypeVar("T")

LIMIT_S = 30.0

# The longer it takes, the less often is looked: what is waited for needs the machine, and 5 % more time is little.
_POLL_S = 0.01
_MAX_POLL_S = 0.1


def until(check: Callable[[], Optional[T]], what: str, limit: float = LIMIT_S) -> T:
    """Poll until `check` gives something true, and return it.

    Raises:
        TimeoutError: it has given nothing else for `limit` seconds; `what` says in the text what was waited for.
    """
    begin = time.monotonic()
    while True:
        result = check()
        if result:
            return result
        waited = time.monotonic() - begin
        if waited > limit:
            raise TimeoutError(f"waited {limit:g} s in vain: {what}")
        time.sleep(min(max(waited / 20, _POLL_S), _MAX_POLL_S))
