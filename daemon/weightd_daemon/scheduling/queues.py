"""Ordered collections of requests, of which `RequestQueue` is built: by turn, by tenant, and by deadline.

Requests run first come first served, and are found by their client and id without a look at any other. Where there are
levels of priority, each is worth some seconds of waiting: a request goes before all that have come so much later,
whatever their level, so that none waits for ever.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from weightd_daemon.scheduling.request import Request
from weightd_daemon.tenants.tenant import Tenant

# What a level of priority is worth.
PRIORITY_LEVEL_S = 2.0


def sort_key(request: Request) -> tuple[float, int]:
    """Return what is less for a request that runs before another one."""
    return request.arrived_at + PRIORITY_LEVEL_S * request.priority_level, request.number


class FifoQueue:
    """Requests of one level, in the order in which they are to run.

    Attributes:
        count: how many there are; cheaper than `len`, which is asked for with every message.
        nbytes: of the tensors of all of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.nbytes = 0
        self._requests: OrderedDict[int, Request] = OrderedDict()
        # By client and id; nobody keeps a client from using an id twice.
        self._index: dict[bytes, dict[str, dict[int, Request]]] = {}

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.number in self._requests

    @property
    def first(self) -> Request:
        """The one whose turn it is."""
        return next(iter(self._requests.values()))

    @property
    def last(self) -> Request:
        """The one that has come last, but for what was put back."""
        return next(reversed(self._requests.values()))

    def append(self, request: Request) -> None:
        """Put a request at the end."""
        self._requests[request.number] = request
        self._index.setdefault(request.client, {}).setdefault(request.id, {})[request.number] = request
        self.count += 1
        self.nbytes += request.nbytes

    def put_back(self, requests: Sequence[Request]) -> None:
        """Put requests at the head, in their order."""
        for request in reversed(requests):
            self.append(request)
            self._requests.move_to_end(request.number, last=False)

    def take(self) -> Request:
        """Take out the first."""
        _, request = self._requests.popitem(last=False)
        self._unindex(request)
        return request

    def remove(self, request: Request) -> None:
        """Take one out."""
        del self._requests[request.number]
        self._unindex(request)

    def _unindex(self, request: Request) -> None:
        self.count -= 1
        self.nbytes -= request.nbytes
        of_client = self._index[request.client]
        of_id = of_client[request.id]
        del of_id[request.number]
        if not of_id:
            del of_client[request.id]
            if not of_client:
                del self._index[request.client]

    def take_matching(self, should_take: Callable[[Request], bool]) -> list[Request]:
        """Take out all that are `should_take`, at the cost of a look at each."""
        return self._take_all([request for request in self if should_take(request)])

    def take_of_client(self, client: bytes, request_id: str | None = None) -> list[Request]:
        """Take out a client's requests, or those of its requests that have this id."""
        of_client = self._index.get(client)
        if of_client is None:
            return []
        found = of_client.values() if request_id is None else [of_client.get(request_id, {})]
        return self._take_all([request for each in found for request in each.values()])

    def _take_all(self, requests: list[Request]) -> list[Request]:
        for request in requests:
            self.remove(request)
        return requests


class PriorityQueue:
    """A `FifoQueue` for each level of priority, and to others like one.

    Args:
        count: how many levels there are; a request of one that there is not any more is of the last.
    """

    def __init__(self, count: int) -> None:
        self._queues = [FifoQueue() for _ in range(count)]

    def __iter__(self) -> Iterator[Request]:
        return heapq.merge(*self._queues, key=sort_key)

    def __contains__(self, request: Request) -> bool:
        return request in self._queue_of_level(request)

    @property
    def count(self) -> int:
        """How many there are."""
        return sum([queue.count for queue in self._queues])

    @property
    def nbytes(self) -> int:
        """Of the tensors of all of them."""
        return sum([queue.nbytes for queue in self._queues])

    @property
    def first(self) -> Request:
        """The one whose turn it is."""
        return min((queue.first for queue in self._queues if queue.count), key=sort_key)

    @property
    def last(self) -> Request:
        """The one that has come last, but for what was put back."""
        return max((queue.last for queue in self._queues if queue.count), key=lambda each: each.number)

    def append(self, request: Request) -> None:
        """Put a request at the end of its level."""
        self._queue_of_level(request).append(request)

    def put_back(self, requests: Iterable[Request]) -> None:
        """Put requests at the heads of their levels, in their order."""
        requests = list(requests)
        for queue in self._queues:
            queue.put_back([request for request in requests if self._queue_of_level(request) is queue])

    def take(self) -> Request:
        """Take out the first."""
        return self._queue_of_level(self.first).take()

    def remove(self, request: Request) -> None:
        """Take one out."""
        self._queue_of_level(request).remove(request)

    def take_matching(self, should_take: Callable[[Request], bool]) -> list[Request]:
        """Take out all that are `should_take`, at the cost of a look at each."""
        return [request for queue in self._queues for request in queue.take_matching(should_take)]

    def take_of_client(self, client: bytes, request_id: str | None = None) -> list[Request]:
        """Take out a client's requests, or those of its requests that have this id."""
        return [request for queue in self._queues for request in queue.take_of_client(client, request_id)]

    def _queue_of_level(self, request: Request) -> FifoQueue:
        return self._queues[min(request.priority_level, len(self._queues) - 1)]


TenantQueue = FifoQueue | PriorityQueue


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


AnyQueue = TenantQueue | TenantQueues
"""What waits, of one tenant or of each by itself."""


def make_queue(levels: int) -> TenantQueue:
    """Return an empty queue."""
    return FifoQueue() if levels == 1 else PriorityQueue(levels)
