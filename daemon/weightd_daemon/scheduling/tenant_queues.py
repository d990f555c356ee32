"""Requests that wait, of each tenant by themselves: like one queue to those who do not ask whose they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from weightd_daemon.scheduling.queues import FifoQueue, PriorityQueue, TenantQueue, sort_key
from weightd_daemon.scheduling.request import Request
from weightd_daemon.tenants.tenant import Tenant

# Of who has none.
_EMPTY = FifoQueue()


class TenantQueues:
    """A queue, or one of levels, for each tenant that has something in it.

    Args:
        levels: of priority.
        queue: what waited before there were several tenants, all of one; whose it is is told by what is in it.
        on_change: called with a tenant that has something now and had nothing, and with one that has nothing any more.
    """

    def __init__(self, levels: int, queue: TenantQueue, on_change: Callable[[Tenant], None]) -> None:
        self._levels = levels
        self._on_change = on_change
        self._queues: dict[Tenant, TenantQueue] = {}
        if queue.count:
            self._queues[queue.first.tenant] = queue

    def queue_of(self, tenant: Tenant) -> TenantQueue:
        """Return what waits of a tenant."""
        return self._queues.get(tenant, _EMPTY)

    @property
    def tenants(self) -> list[Tenant]:
        """Those that have something here."""
        return [*self._queues]

    def single_queue(self) -> TenantQueue:
        """Return the queue of the only tenant that has something here, or an empty one."""
        return next(iter(self._queues.values()), None) or make_queue(self._levels)

    def last_of(self, tenant: Tenant) -> Request | None:
        """Return what has come last of a tenant's, None if nothing of it is there."""
        queue = self._queues.get(tenant)
        return None if queue is None else queue.last

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain(*self._queues.values())

    def __contains__(self, request: Request) -> bool:
        return request in self.queue_of(request.tenant)

    @property
    def count(self) -> int:
        """How many there are."""
        return sum([queue.count for queue in self._queues.values()])

    @property
    def nbytes(self) -> int:
        """Of the tensors of all of them."""
        return sum([queue.nbytes for queue in self._queues.values()])

    @property
    def first(self) -> Request:
        """The one that would run first if nobody's share mattered."""
        return min((queue.first for queue in self._queues.values()), key=sort_key)

    def append(self, request: Request) -> None:
        """Put a request at the end of its tenant's."""
        self._queue_for(request.tenant).append(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Put requests at the heads of their tenants', in their order."""
        for tenant in dict.fromkeys(request.tenant for request in requests):
            self._queue_for(tenant).put_back([each for each in requests if each.tenant is tenant])

    def remove(self, request: Request) -> None:
        """Take one out."""
        self._queues[request.tenant].remove(request)
        self._drop_if_empty(request.tenant)

    def take_matching(self, should_take: Callable[[Request], bool]) -> list[Request]:
        """Take out all that are `should_take`, at the cost of a look at each."""
        return self._flatten_removed([queue.take_matching(should_take) for queue in self._queues.values()])

    def take_of_client(self, client: bytes, request_id: str | None = None) -> list[Request]:
        """Take out a client's requests, or those of its requests that have this id."""
        return self._flatten_removed([queue.take_of_client(client, request_id) for queue in self._queues.values()])

    def _flatten_removed(self, removed: list[list[Request]]) -> list[Request]:
        for tenant in [*self._queues]:
            self._drop_if_empty(tenant)
        return [request for requests in removed for request in requests]

    def _queue_for(self, tenant: Tenant) -> TenantQueue:
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = make_queue(self._levels)
            self._on_change(tenant)
        return queue

    def _drop_if_empty(self, tenant: Tenant) -> None:
        if not self._queues[tenant].count:
            del self._queues[tenant]
            self._on_change(tenant)


def make_queue(levels: int) -> TenantQueue:
    """Return an empty queue."""
    return FifoQueue() if levels == 1 else PriorityQueue(levels)
