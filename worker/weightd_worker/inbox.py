"""Orders that have been read and not been obeyed yet: the daemon sends a few ahead, and may take some of them back."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Deque, List, Optional, Sequence, Tuple

from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.worker import BeginBatch, ChildOrder, Predict, UnmapRegion

Entry = Tuple[ChildOrder, Sequence[Any]]
"""An order, and what belongs to it: the tensors of a predict, or those of a batch, each with its own."""


class Inbox:
    """In the order in which they came, in which they are obeyed. What has not come as a whole is not here yet."""

    def __init__(self) -> None:
        self._entries: Deque[Entry] = collections.deque()
        # Predicts of a batch, of which so many are still to come; and what has come behind the first of them.
        self._open_batch: Optional[BeginBatch] = None
        self._items: List[Any] = []
        self._missing_count = 0
        self._deferred: List[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, order: ChildOrder, tensors: Sequence[Any] = ()) -> None:
        """One has come.

        Raises:
            RemoteProtocolError: predicts of a batch are still to come.
        """
        if self._open_batch is not None:
            self._put_in_open_batch(self._open_batch, order, tensors)
        elif isinstance(order, BeginBatch):
            if len(order.principal_ids) not in (0, order.items):
                raise RemoteProtocolError(
                    f"principal_ids: expected {order.items}, or none, got {len(order.principal_ids)}"
                )
            self._open_batch, self._missing_count = order, order.items
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

    def drop_incomplete_batch(self) -> None:
        """Forget predicts of which some will never come."""
        if self._open_batch is not None:
            self._items = []
            self._close_batch(self._open_batch)

    def cancel(self, request: int) -> bool:
        """A predict is taken back; return whether it was still here."""
        for index, entry in enumerate(self._entries):
            order, tensors = entry
            if isinstance(order, Predict):
                if order.request == request:
                    self._entries.remove(entry)
                    return True
            elif isinstance(order, BeginBatch):
                left = _cancel_item(order, tensors, request)
                if left is not None:
                    if tensors:
                        self._entries[index] = left, tensors
                    else:
                        del self._entries[index]
                    return True
        open_batch = None if self._open_batch is None else _cancel_item(self._open_batch, self._items, request)
        if open_batch is None:
            return False
        self._open_batch = open_batch
        return True

    def cancel_unmap(self, region: int) -> None:
        """A region is not to be taken away any more, if it was: no predict in between names it."""
        for entries in (self._entries, self._deferred):
            for entry in entries:
                if isinstance(entry[0], UnmapRegion) and entry[0].region == region:
                    entries.remove(entry)
                    return

    def _put_in_open_batch(self, batch: BeginBatch, order: ChildOrder, tensors: Sequence[Any]) -> None:
        if isinstance(order, Predict):
            self._items.append((order, tensors))
            self._missing_count -= 1
            if not self._missing_count:
                self._close_batch(batch)
        elif isinstance(order, BeginBatch):
            raise RemoteProtocolError(f"type: expected predict, {self._missing_count} more, got begin_batch")
        else:
            # A region that is taken away may be one that those before name; other orders come another way.
            self._deferred.append((order, tensors))

    def _close_batch(self, batch: BeginBatch) -> None:
        if self._items:
            self._entries.append((batch, self._items))
        self._entries.extend(self._deferred)
        self._open_batch, self._items, self._missing_count, self._deferred = None, [], 0, []


def _cancel_item(order: BeginBatch, items: Any, request: int) -> Optional[BeginBatch]:
    """Take a predict out of its batch; return the order without it, None if it is not there."""
    for index, part in enumerate(items):
        if part[0].request == request:
            items.remove(part)
            return dataclasses.replace(
                order, principal_ids=order.principal_ids[:index] + order.principal_ids[index + 1 :]
            )
    return None
