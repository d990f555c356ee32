"""Orders that have been read and not been obeyed yet: the daemon sends a few ahead, and may take some of them back."""

from __future__ import annotations

import collections
from typing import Any, Deque, Sequence, Tuple

from weightd.protocol.messages.children import OrderMessage, Predict, Unmap

Entry = Tuple[OrderMessage, Sequence[Any]]
"""An order, and its tensors."""


class Inbox:
    """In the order in which they came, which is that in which they are obeyed."""

    def __init__(self) -> None:
        self._entries: Deque[Entry] = collections.deque()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, order: OrderMessage, tensors: Sequence[Any] = ()) -> None:
        """One has come."""
        self._entries.append((order, tensors))

    def put_back(self, order: OrderMessage) -> None:
        """One was taken that is still to be obeyed, before all others."""
        self._entries.appendleft((order, ()))

    def take(self) -> Entry:
        """Return the first, and forget it."""
        return self._entries.popleft()

    def skip(self, request: int) -> bool:
        """A predict is taken back; return whether it was still here."""
        for entry in self._entries:
            if isinstance(entry[0], Predict) and entry[0].request == request:
                self._entries.remove(entry)
                return True
        return False

    def keep(self, region: int) -> None:
        """A region is not to be taken away any more, if it was: no predict in between names it."""
        for entry in self._entries:
            if isinstance(entry[0], Unmap) and entry[0].region == region:
                self._entries.remove(entry)
                return
