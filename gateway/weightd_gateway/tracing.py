"""What callers say of the trace that a request belongs to: W3C Trace Context."""

from __future__ import annotations

import re

TRACEPARENT = "traceparent"

# Version, trace, parent, flags; version ff is forbidden, and so are ids of zeros.
_PATTERN = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def valid_traceparent(traceparent: str) -> str:
    """Return what was given; "" where that is none."""
    return traceparent if traceparent and _PATTERN.fullmatch(traceparent) else ""
