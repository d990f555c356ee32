"""Batches: the unit that a slot runs at once. A batch has one or more items: requests, or some rows of one."""

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

# Items of split requests are numbered from here on. Request numbers stay below.
FIRST_SPLIT_NUMBER = 2**62


@dataclass(eq=False, slots=True)
class BatchItem:
    """A whole request, or some of its rows.

    Attributes:
        number: identifies the item in messages to the slot; the request's number if the item is the whole request.
        request: the request.
        split: the split request; None if the item is the whole request.
        first_row: the first of the item's rows, for a split request.
        rows: the number of rows, if it is known.
    """

    number: int
    request: Request
    split: SplitRequest | None = None
    first_row: int = 0
    rows: int = 0

    @property
    def row_range(self) -> range:
        """The rows of the request that the item covers. For a whole request, the range is larger than any request."""
        return _ALL_ROWS if self.split is None else range(self.first_row, self.first_row + self.rows)

    @property
    def is_awaited(self) -> bool:
        """Whether the request still needs the result of this item."""
        return not (self.request.is_ended or (self.split is not None and self.split.is_ended))


_NOT_STARTED = float("inf")


@dataclass(eq=False, slots=True)
class Batch:
    """One or more items that a slot runs at once; the slot answers each item separately.

    If a slot dies of a batch, hangs in it or rejects it, and the batch has a single item, then that request is the
    cause. A batch of several items does not reveal the cause, so each of its items runs again alone.

    Attributes:
        number: the number of the first item, which identifies the batch.
        items: the unanswered items, by number.
        item_count: the number of items that the batch started with.
        batch_key: the common form of the requests, if they have rows.
        rows: the total number of rows.
        charge: the batch's charge on the clock of its device, while there are several tenants.
        answered_items: the answered items except the last one.
        is_time_recorded: whether the batch's run time has been recorded.
        is_long: whether the batch is expected to run longer than other tenants should have to wait.
        started_at: when the batch began to run, in monotonic seconds; infinity while it is queued at its slot.
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
        """Return a batch of these items."""
        return cls(items[0].number, {item.number: item for item in items}, len(items), batch_key, rows)

    @property
    def has_started(self) -> bool:
        """Whether the batch runs, as far as the daemon can tell."""
        return self.started_at != _NOT_STARTED

    def record_time(self, seconds: float, last: BatchItem | None = None) -> None:
        """Charge the seconds for which the batch held its slot. Only the first call counts.

        The time is divided among the usage of the batch's tenants by rows, whatever ended the batch. `last` is the item
        that was answered last, if all items were answered.
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
        """Isolate the unanswered requests, so that each of them runs alone when it runs again."""
        for request in self.requests:
            isolate(request, Isolation.ALONE)

    @property
    def single_request(self) -> Request | None:
        """The request of the only item; None if the batch was formed of several items."""
        return next(iter(self.items.values())).request if self.item_count == 1 else None

    def item_of(self, request: Request) -> BatchItem | None:
        """Return the unanswered item of a request, or None."""
        item = self.items.get(request.number)
        if item is None and self.number >= FIRST_SPLIT_NUMBER:
            # A batch with a part of a split request has no other item.
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
        """The clients of the unanswered items."""
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
    """Count a lost slot in the usage of the tenant whose requests these batches had, if all belong to one tenant."""
    usages = {id(request.usage): request.usage for batch in batches for request in batch.requests}
    if len(usages) == 1:
        # With several tenants, the cause cannot be determined.
        [usage] = usages.values()
        usage.unexpected_exits += 1


class OutputBufferLeases:
    """Tracks which worker processes of a model may still write to output memory of clients.

    A worker that has started a request cannot be stopped: the worker writes the outputs to the client's memory even if
    the request has ended long before. Nor does the daemon know whether a worker has already started a request that the
    daemon recalls. Only the worker's answer or exit proves that it no longer writes.

    Two processes never write to the same memory. If an item runs again while its first worker may still write, the
    second worker answers in frames. Parts of a split request write to separate ranges. The pending writes are stored
    with the request, because the request may end at another model than it started at.

    Attributes:
        leases: items with output memory, by process and item number. While it is empty, callers can skip `release`.
    """

    def __init__(self) -> None:
        self.leases: dict[tuple[str, int], BatchItem] = {}

    def acquire(self, processes: Iterable[str], item: BatchItem) -> bool:
        """Record that processes get an item with output memory; return whether they may write to that memory."""
        rows, request = item.row_range, item.request
        if any(rows.start < other.stop and other.start < rows.stop for other in request.pending_writes):
            return False
        for process in processes:
            self.leases[process, item.number] = item
            request.pending_writes += (rows,)
        return True

    def release(self, process: str, number: int) -> list[Request]:
        """Record that a process no longer writes for an item.

        Returns:
            The request, if it has ended and no process writes for it any more.
        """
        item = self.leases.pop((process, number), None)
        if item is None:
            return []
        request = item.request
        index = request.pending_writes.index(item.row_range)
        request.pending_writes = request.pending_writes[:index] + request.pending_writes[index + 1 :]
        return [request] if request.may_still_write and not request.pending_writes else []

    def release_process(self, process: str) -> list[Request]:
        """Record that a process has exited; return the requests whose clients must be notified."""
        return [request for key in list(self.leases) if key[0] == process for request in self.release(*key)]
