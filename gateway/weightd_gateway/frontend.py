"""A protocol that is spoken with callers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Frontend(Protocol):
    """One protocol, at all its addresses, on the one loop of the process."""

    async def start(self) -> Sequence[str]:
        """Listen; return where, for people.

        Raises:
            OSError: an address cannot be had; the text names it.
        """
        ...

    async def stop(self, grace_s: float) -> None:
        """Take nothing new, and return when what is under way has been answered, or after so many seconds.

        It may not have been started, or only in part.
        """
