"""How far something is that loads, for people: in a status, and for a service manager."""

from __future__ import annotations

from typing import Optional


def progress_text(fraction: Optional[float], remaining_s: Optional[float]) -> str:
    """Return "43 %, about 20 s left", or as much of it as is known, "" for nothing.

    Args:
        fraction: from 0 to 1; None if nobody knows. What is not over is never told as 100 %.
        remaining_s: seconds; None likewise.
    """
    parts = [] if fraction is None else [f"{percent(fraction)} %"]
    if remaining_s is not None:
        parts.append(f"about {_round_duration(remaining_s)} left")
    return ", ".join(parts)


def percent(fraction: float) -> int:
    """Return a share as a number of percent that is less than 100."""
    return max(0, min(99, int(100 * fraction)))


def _round_duration(seconds: float) -> str:
    """Seconds, no more exactly than anybody could know."""
    if seconds < 10:
        return f"{max(1, round(seconds))} s"
    if seconds < 120:
        return f"{5 * round(seconds / 5)} s"
    if seconds < 7200:
        return f"{round(seconds / 60)} min"
    return f"{round(seconds / 3600)} h"
