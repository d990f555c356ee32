"""Batches: the unit that a slot runs at once. A batch has one or more items: whole requests, or parts of a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weightd_daemon.scheduling.batching.policy import BatchKey
from weightd_daemon.scheduling.batching.split import SplitRequest
from weightd_daemon.scheduling.fair_share import Charge
from weightd_daemon.scheduling.request import ClientOrigin, Isolation, Request, isolate
from weightd_daemon.tenants.tenant import Tenant
from weightd_protocol import limits

_ALL_ROWS = range(limits.MAX_DIM)

# Parts of split requests are numbered from this number on. Numbers of requests are always smaller.
FIRST_SPLIT_NUMBER = 2**62


@dataclass(eq=False, slots=True)
class BatchItem:
    """The part of a batch that belongs to one request: the whole request, or some of its rows.

    Attributes:
        number: identifies the item in messages between the daemon and the slot; equals the request's number if the item
            is the whole request.
        request: the request whose rows the item contains.
        split: the state of the split request; None if the item is the whole request.
        first_row: the index, within a split request, of the item's first row.
        rows: the number of the item's rows; 0 if unknown.
    """

    number: int
    request: Request
    split: SplitRequest | None = None
    first_row: int = 0
    rows: int = 0

    @property
    def row_range(self) -> range:
        """The range of the request's rows in this item; for a whole request, a range larger than any request."""
        return _ALL_ROWS if self.split is None else range(self.first_row, self.first_row + self.rows)

    @property
    def is_awaited(self) -> bool:
        """Whether the request still needs the result of this item."""
        return not (self.request.is_ended or (self.split is not None and self.split.is_ended))


_NOT_STARTED = float("inf")


@dataclass(eq=False, slots=True)
class Batch:
    """One or more items that a slot runs at once; the slot answers each item separately.

    If a slot crashes, hangs or returns an error while it runs a batch with a single item, the item's request is
    considered the cause. A batch of several items does not show which item is the cause, so each of its items runs
    again alone.

    Attributes:
        number: the number of the first item, which identifies the batch.
        items: the items that the slot has not answered yet, by item number.
        item_count: the number of items from which the batch was formed.
        batch_key: the form of inputs and outputs that the requests have in common; None for a request without rows.
        rows: the total number of rows of all items.
        charge: the device time that is charged to the batch's tenants; None while there is only one tenant.
        answered_items: the answered items, without the item whose answer completed the batch.
        is_time_recorded: whether the batch's run time has been added to the usage of its tenants.
        is_long: whether the batch is expected to run longer than other tenants should have to wait for a slot.
        started_at: when the slot started the batch, in monotonic seconds; infinity while the batch is queued at its
            slot.
    """

    number: int
    items: dict[int, BatchItem]
    item_count: int = 1
    batch_key: BatchKey | None = None
    rows: int = 0
    started_at: float = _NOT_STARTED
    charge: Charge | None = None
    answered_items: tuple[BatchItem, ...] = ()
    is_time_recorded: bool = False
    is_long: bool = False

    @classmethod
    def from_items(cls, items: Sequence[BatchItem], batch_key: BatchKey | None = None, rows: int = 0) -> Batch:
        """Return a batch of these items. The number of the first item becomes the number of the batch."""
        return cls(items[0].number, {item.number: item for item in items}, len(items), batch_key, rows)

    @property
    def has_started(self) -> bool:
        """Whether the slot has started the batch, as far as the daemon can tell."""
        return self.started_at != _NOT_STARTED

    def record_time(self, seconds: float, last: BatchItem | None = None) -> None:
        """Charge the batch's tenants for the seconds for which the batch held its slot. Only the first call counts.

        The seconds are divided among the items in proportion to their rows, and added to the usage of each item's
        tenant, no matter whether the slot answered, crashed or hung. `last` is the item that was answered last; None if
        the slot has not answered all items.
        """
        if self.is_time_recorded:
            return
        self.is_time_recorded = True
        if self.charge is not None:
            self.charge.settle(seconds)
        executed = [*self.answered_items, *self.items.values()] if last is None else [*self.answered_items, last]
        rows = sum([item.rows for item in executed]) if self.item_count > 1 else 0
        for item in executed:
            share = seconds * item.rows / rows if rows else seconds / len(executed)
            item.request.usage.add_run(share, 0 if item.number in self.items else item.rows)

    def isolate_requests(self) -> None:
        """Mark the unanswered requests as isolated: when they run again, each of them runs alone."""
        for request in self.requests:
            isolate(request, Isolation.ALONE)

    @property
    def single_request(self) -> Request | None:
        """The request of the only item; None if the batch was formed of several items."""
        return next(iter(self.items.values())).request if self.item_count == 1 else None

    def item_of(self, request: Request) -> BatchItem | None:
        """Return the unanswered item of a request; None if the batch has no such item."""
        item = self.items.get(request.number)
        if item is None and self.number >= FIRST_SPLIT_NUMBER:
            # Items are stored by number, but a part of a split request has another number than its request. So search
            # for the request; a batch with a part has no other item.
            item = next((each for each in self.items.values() if each.request is request), None)
        return item

    @property
    def requests(self) -> list[Request]:
        """The requests of the unanswered items."""
        return [item.request for item in self.items.values()]

    @property
    def tenants(self) -> set[Tenant]:
        """The tenants of the unanswered items."""
        return {request.tenant for request in self.requests}

    @property
    def origins(self) -> set[ClientOrigin]:
        """The clients that sent the requests of the unanswered items."""
        return {request.origin for request in self.requests}

    @property
    def awaited_items(self) -> list[BatchItem]:
        """The unanswered items whose requests have not ended."""
        return [item for item in self.items.values() if item.is_awaited]

    @property
    def isolation(self) -> Isolation:
        """The highest isolation level among the requests."""
        return max(request.isolation for request in self.requests)


def record_death(batches: Sequence[Batch]) -> None:
    """Count a lost slot for the tenant that sent the requests of these batches, unless several tenants sent them."""
    usages = {id(request.usage): request.usage for batch in batches for request in batch.requests}
    if len(usages) == 1:
        # Among the requests of several tenants, the cause would be unknown, so only a single tenant is charged.
        [usage] = usages.values()
        usage.unexpected_exits += 1


class OutputBufferLeases:
    """Tracks which worker processes of a model may still write outputs to the shared memory of clients.

    A worker that has started a request cannot be stopped: the worker writes the outputs to the client's memory even if
    the request has ended long before. Nor does the daemon know whether a worker has already started a request that the
    daemon recalls. Only the worker's answer or exit proves that the worker no longer writes.

    Two processes never write to the same memory. If an item runs again while its first worker may still write, the
    second worker sends the outputs in message frames instead. The parts of a split request write to separate ranges.
    Pending writes are stored in the request (`Request.pending_writes`), because a reload may move the request to
    another dispatcher.

    Attributes:
        leases: the items whose outputs a process may still write, by process and item number. While this dictionary is
            empty, callers can skip `release`.
    """

    def __init__(self) -> None:
        self.leases: dict[tuple[str, int], BatchItem] = {}

    def acquire(self, processes: Iterable[str], item: BatchItem) -> bool:
        """Record that processes may write the outputs of an item to the client's memory; return whether they may.

        If another process may still write the same rows of the request, record nothing and return False.
        """
        rows, request = item.row_range, item.request
        if any(rows.start < other.stop and other.start < rows.stop for other in request.pending_writes):
            return False
        for process in processes:
            self.leases[process, item.number] = item
            request.pending_writes += (rows,)
        return True

    def release(self, process: str, number: int) -> list[Request]:
        """Record that a process no longer writes the outputs of an item.

        Returns:
            The item's request, in a list, if the request has ended and no process may write its outputs any more;
            otherwise an empty list.
        """
        item = self.leases.pop((process, number), None)
        if item is None:
            return []
        request = item.request
        index = request.pending_writes.index(item.row_range)
        request.pending_writes = request.pending_writes[:index] + request.pending_writes[index + 1 :]
        return [request] if request.may_still_write and not request.pending_writes else []

    def release_process(self, process: str) -> list[Request]:
        """Record that a process has exited; return the ended requests whose outputs no process may write any more."""
        return [request for key in list(self.leases) if key[0] == process for request in self.release(*key)]
