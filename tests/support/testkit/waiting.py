"""Waiting for what comes without a message."""

from __future__ import annotations

import time
from typing import Callable, Optional, TypeVar

T = TypeVar("T")

LIMIT_S = 30.0

_POLL_S = 0.01


def until(check: Callable[[], Optional[T]], what: str, limit: float = LIMIT_S) -> T:
    """Poll until `check` gives something true, and return it.

    Raises:
        TimeoutError: it has given nothing else for `limit` seconds; `what` says in the text what was waited for.
    """
    deadline = time.monotonic() + limit
    while True:
        result = check()
        if result:
            return result
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {limit:g} s in vain: {what}")
        time.sleep(_POLL_S)
