"""A batch: what a slot runs at once, one or more items, each of them a request or some rows of one."""

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

# Parts that are not all of a request have numbers from here on, which no request has.
FIRST_SPLIT_NUMBER = 2**62


@dataclass(eq=False, slots=True)
class BatchItem:
    """All of a request, or some of its rows.

    Attributes:
        number: by which its slot calls it; that of the request, if it is all of it.
        request: whose it is.
        split: the request, if this is not all of it.
        first_row: the first of the rows, then.
        rows: how many there are, as far as that is known.
    """

    number: int
    request: Request
    split: SplitRequest | None = None
    first_row: int = 0
    rows: int = 0

    @property
    def row_range(self) -> range:
        """Those of the request that it has, and more if that is all of them."""
        return _ALL_ROWS if self.split is None else range(self.first_row, self.first_row + self.rows)

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits for what comes of it."""
        return not (self.request.is_ended or (self.split is not None and self.split.is_ended))


_NOT_STARTED = float("inf")


@dataclass(eq=False, slots=True)
class Batch:
    """One or more parts of requests; each is answered by itself.

    What becomes of a batch says something of its parts only if it has one. Where it has several, and its slot dies of
    it, hangs in it or refuses it, each of them runs again alone.

    Attributes:
        number: by which its slot calls it: that of its first part.
        items: what has not been answered of it, by number.
        item_count: how many parts it had.
        batch_key: of its rows, if it has some.
        rows: how many they are.
        charge: what it has been charged, where there are several tenants.
        answered_items: its parts that were, but for the last.
        is_time_recorded: its seconds have been told.
        is_long: it is expected to take longer than other tenants should wait.
        started_at: when it began to run, in monotonic seconds; later than any clock says while it is only ready.
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
        """Return a batch of these parts."""
        return cls(items[0].number, {item.number: item for item in items}, len(items), batch_key, rows)

    @property
    def has_started(self) -> bool:
        """Whether it runs, as far as can be told from here."""
        return self.started_at != _NOT_STARTED

    def record_time(self, seconds: float, last: BatchItem | None = None) -> None:
        """It has had its slot for so many seconds, and has it no more. Only the first word counts.

        They go on the accounts of who has asked, by rows, whoever is to blame for the end. `last`: this part was
        answered as the last, if all were.
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
        """Whatever has to run again of it, does so alone."""
        for request in self.requests:
            isolate(request, Isolation.ALONE)

    @property
    def single_request(self) -> Request | None:
        """The request that it is a part of, all alone; None if it has several parts."""
        return next(iter(self.items.values())).request if self.item_count == 1 else None

    def item_of(self, request: Request) -> BatchItem | None:
        """Return its part of a request, which has not been answered; None if it has none."""
        item = self.items.get(request.number)
        if item is None and self.number >= FIRST_SPLIT_NUMBER:
            # A batch that has some rows of a request has nothing else.
            item = next((each for each in self.items.values() if each.request is request), None)
        return item

    @property
    def requests(self) -> list[Request]:
        """Those that it has not answered."""
        return [item.request for item in self.items.values()]

    @property
    def tenants(self) -> set[Tenant]:
        """On whose accounts those go."""
        return {request.tenant for request in self.requests}

    @property
    def origins(self) -> set[ClientOrigin]:
        """Who has asked."""
        return {request.origin for request in self.requests}

    @property
    def awaited_items(self) -> list[BatchItem]:
        """The parts of which the requests have not ended while it ran."""
        return [item for item in self.items.values() if item.is_awaited]

    @property
    def isolation(self) -> Isolation:
        """What else may run: as the narrowest of its parts bears."""
        return max(request.isolation for request in self.requests)


def record_death(batches: Sequence[Batch]) -> None:
    """A slot was lost to these batches: that goes on the account of who has asked, if all are one tenant's."""
    usages = {id(request.usage): request.usage for batch in batches for request in batch.requests}
    if len(usages) == 1:
        # Of several nobody can tell whose fault it was.
        [usage] = usages.values()
        usage.unexpected_exits += 1


class OutputBufferLeases:
    """The processes of a model that may still write to the memory of clients.

    A worker that has begun with a request cannot be stopped: it writes the outputs where there was room for them even
    if the request has ended long before. Nor can be seen from here whether one has begun with what is recalled from it.
    Only its answer, or its death, tells that it writes no more. Two never write to the same place: what runs again
    while the one that had it first may still write is answered in frames. Parts of a request write to places of their
    own. What is known of a request goes with it: it may end with another model than the one on which it has begun.

    Attributes:
        leases: what they have been given, by process and number; while there is none nothing has to be asked.
    """

    def __init__(self) -> None:
        self.leases: dict[tuple[str, int], BatchItem] = {}

    def acquire(self, processes: Iterable[str], item: BatchItem) -> bool:
        """The processes of a slot are given a part that has room for outputs; return whether they may use it."""
        rows, request = item.row_range, item.request
        if any(rows.start < other.stop and other.start < rows.stop for other in request.pending_writes):
            return False
        for process in processes:
            self.leases[process, item.number] = item
            request.pending_writes += (rows,)
        return True

    def release(self, process: str, number: int) -> list[Request]:
        """The process has done with a part; return its request if that has ended, and nobody writes for it any more."""
        item = self.leases.pop((process, number), None)
        if item is None:
            return []
        request = item.request
        index = request.pending_writes.index(item.row_range)
        request.pending_writes = request.pending_writes[:index] + request.pending_writes[index + 1 :]
        return [request] if request.may_still_write and not request.pending_writes else []

    def release_process(self, process: str) -> list[Request]:
        """The process has ended; return the requests whose clients have to be told."""
        return [request for key in list(self.leases) if key[0] == process for request in self.release(*key)]
