"""Whether a process that does nothing but hold what it has built is worth its memory."""

from __future__ import annotations

from typing import Mapping

HOLDER_COST_BYTES: Mapping[str, int] = {"spawned": 32 << 20, "forked": 8 << 20}
"""What a holder takes for itself, in bytes, by its origin: measured with both engines, and some more."""

_LARGE_MODEL_FACTOR = 8


def is_holder_worthwhile(nbytes: int, process_count: int, holder_cost_bytes: int) -> bool:
    """Return whether others have less of their own by what a process costs that holds so many bytes for them.

    Where it costs little beside them it is also worth what it spares the next one that is needed, and the pages that an
    engine has twice or leaves empty: with MindSpore Lite half of them, even for one worker.

    Args:
        nbytes: that were built.
        process_count: how many processes would share them; 0 if that is not asked.
        holder_cost_bytes: what the holder costs, in bytes.
    """
    return (
        not process_count
        or nbytes * (process_count - 1) >= holder_cost_bytes
        or nbytes >= _LARGE_MODEL_FACTOR * holder_cost_bytes
    )
