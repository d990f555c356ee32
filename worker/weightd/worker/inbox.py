"""Orders that have been read and not been obeyed yet: the daemon sends a few ahead, and may take some of them back."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Deque, List, Optional, Sequence, Tuple

from weightd.protocol.errors import RemoteProtocolError
from weightd.protocol.messages.children import ChildOrder, Predict, Together, Unmap

Entry = Tuple[ChildOrder, Sequence[Any]]
"""An order, and what belongs to it: the tensors of a predict, or the predicts, each with its own, that are together."""


class Inbox:
    """In the order in which they came, in which they are obeyed. What has not come as a whole is not here yet."""

    def __init__(self) -> None:
        self._entries: Deque[Entry] = collections.deque()
        # Predicts that are together, of which so many are still to come; and what has come behind the first of them.
        self._begun: Optional[Together] = None
        self._parts: List[Any] = []
        self._missing = 0
        self._behind: List[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, order: ChildOrder, tensors: Sequence[Any] = ()) -> None:
        """One has come.

        Raises:
            RemoteProtocolError: predicts are still to come that are together.
        """
        if self._begun is not None:
            self._put_behind(self._begun, order, tensors)
        elif isinstance(order, Together):
            if len(order.parties) not in (0, order.parts):
                raise RemoteProtocolError(f"parties: expected {order.parts}, or none, got {len(order.parties)}")
            self._begun, self._missing = order, order.parts
        else:
            self._entries.append((order, tensors))

    def put_back(self, order: ChildOrder) -> None:
        """One was taken that is still to be obeyed, before all others."""
        self._entries.appendleft((order, ()))

    def take(self) -> Entry:
        """Return the first, and forget it."""
        return self._entries.popleft()

    @property
    def first(self) -> ChildOrder:
        """The order that is to be obeyed next."""
        return self._entries[0][0]

    def drop_begun(self) -> None:
        """Forget predicts of which some will never come."""
        if self._begun is not None:
            self._parts = []
            self._end(self._begun)

    def skip(self, request: int) -> bool:
        """A predict is taken back; return whether it was still here."""
        for index, entry in enumerate(self._entries):
            order, tensors = entry
            if isinstance(order, Predict):
                if order.request == request:
                    self._entries.remove(entry)
                    return True
            elif isinstance(order, Together):
                left = _skip(order, tensors, request)
                if left is not None:
                    if tensors:
                        self._entries[index] = left, tensors
                    else:
                        del self._entries[index]
                    return True
        begun = None if self._begun is None else _skip(self._begun, self._parts, request)
        if begun is None:
            return False
        self._begun = begun
        return True

    def keep(self, region: int) -> None:
        """A region is not to be taken away any more, if it was: no predict in between names it."""
        for entries in (self._entries, self._behind):
            for entry in entries:
                if isinstance(entry[0], Unmap) and entry[0].region == region:
                    entries.remove(entry)
                    return

    def _put_behind(self, begun: Together, order: ChildOrder, tensors: Sequence[Any]) -> None:
        if isinstance(order, Predict):
            self._parts.append((order, tensors))
            self._missing -= 1
            if not self._missing:
                self._end(begun)
        elif isinstance(order, Together):
            raise RemoteProtocolError(f"type: expected predict, {self._missing} more, got together")
        else:
            # A region that is taken away may be one that those before name; other orders come another way.
            self._behind.append((order, tensors))

    def _end(self, begun: Together) -> None:
        if self._parts:
            self._entries.append((begun, self._parts))
        self._entries.extend(self._behind)
        self._begun, self._parts, self._missing, self._behind = None, [], 0, []


def _skip(order: Together, parts: Any, request: int) -> Optional[Together]:
    """Take a predict out of those that are together; return the order without it, None if it is not there."""
    for index, part in enumerate(parts):
        if part[0].request == request:
            parts.remove(part)
            return dataclasses.replace(order, parties=order.parties[:index] + order.parties[index + 1 :])
    return None
