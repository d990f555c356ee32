"""Number of examples of a property test, scaled by the environment variable EXAMPLES."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """Return `count` times the factor in the environment variable EXAMPLES, at least 1."""
    return max(1, round(count * float(os.environ.get("EXAMPLES", "1"))))
