"""Cache of the descriptions of tensors that were decoded."""

from __future__ import annotations

from typing import Any, Dict

# Limits of the cached descriptions: number and total bytes. Every combination of shapes in use needs one description.
# The descriptions, with the objects made from them, take at most about 8 MiB; the cached envelopes take as much again.
MAX_CACHED = 1024
MAX_CACHED_BYTES = 2 * 1024 * 1024


class DescriptionCache:
    """Decoded descriptions of one type, by their bytes. The cache has limits; it drops the oldest entries first.

    Args:
        max_cached: the maximum number of descriptions.

    Attributes:
        get: returns the description with these bytes, or None if it is not cached.
    """

    def __init__(self, max_cached: int = MAX_CACHED) -> None:
        self._max_cached = max_cached
        self._descriptions: Dict[bytes, Any] = {}
        # The total size of the bytes.
        self._nbytes = 0
        self.get = self._descriptions.get

    def add(self, frame: bytes, description: Any) -> None:
        """Add a description that is not in the cache."""
        descriptions = self._descriptions
        descriptions[frame] = description
        self._nbytes += len(frame)
        while len(descriptions) > self._max_cached or self._nbytes > MAX_CACHED_BYTES:
            first = next(iter(descriptions))
            del descriptions[first]
            self._nbytes -= len(first)
