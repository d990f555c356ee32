"""Whether a process that does nothing but hold what it has built is worth its memory."""

from __future__ import annotations

from typing import Mapping

COSTS: Mapping[str, int] = {"spawned": 32 << 20, "forked": 8 << 20}
"""What a holder takes for itself, in bytes, by its origin: measured with both engines, and some more."""

_MANY = 8


def is_worth(nbytes: int, users: int, costs: int, *, is_template: bool) -> bool:
    """Return whether others have less of their own by what a process costs that holds so many bytes for them.

    Args:
        nbytes: that were built.
        users: how many processes would share them; 0 if that is not asked.
        costs: what the holder costs, in bytes.
        is_template: others are forked from it. Then it is also worth what it spares the next one that is needed, if it
            costs little beside what would have to be built again.
    """
    return not users or nbytes * (users - 1) >= costs or (is_template and nbytes >= _MANY * costs)
