"""Decides which snapshots of model files are removed when the cache exceeds its limit. Uses no I/O and no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class CachedModel(NamedTuple):
    """A model with a snapshot.

    Attributes:
        name: the name of the model.
        nbytes: the size of its snapshots in bytes.
        last_used_at: when its last request arrived, in monotonic seconds.
        is_in_use: whether a process of the model runs or starts, so that the snapshots have to stay.
    """

    name: str
    nbytes: int
    last_used_at: float
    is_in_use: bool


def excess_models(cached: Iterable[CachedModel], max_bytes: int) -> list[str]:
    """Return the models whose snapshots have to be removed to keep the limit, the least recently used first.

    The snapshots of models in use count toward the limit, but are never removed.

    Args:
        cached: the models with a snapshot.
        max_bytes: the limit for all snapshots, in bytes.
    """
    models = list(cached)
    excess_bytes = sum(each.nbytes for each in models) - max_bytes
    removed: list[str] = []
    for each in sorted((each for each in models if not each.is_in_use), key=lambda each: each.last_used_at):
        if excess_bytes <= 0:
            break
        removed.append(each.name)
        excess_bytes -= each.nbytes
    return removed
