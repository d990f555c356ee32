"""The ordered collections of requests from which `RequestQueue` is built: by arrival, by priority and by tenant.

Requests run first come, first served. Each priority level counts as `PRIORITY_LEVEL_S` seconds of waiting, so that a
request with a low priority does not wait forever. The queues find a request by client and id without a search.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from weightd_daemon.scheduling.request import Request
from weightd_daemon.tenants.tenant import Tenant

# Seconds of waiting for which each priority level counts.
PRIORITY_LEVEL_S = 2.0


def sort_key(request: Request) -> tuple[float, int]:
    """Return the sort key of a request; requests with a smaller key run first."""
    return request.arrived_at + PRIORITY_LEVEL_S * request.priority_level, request.number


class FifoQueue:
    """Requests of one priority level, in the order in which they run.

    Attributes:
        count: the number of requests. It is stored because it is read for every message, and a call of `len` is slower.
        nbytes: the total tensor bytes of the requests.
    """

    __slots__ = ("_index", "_requests", "count", "nbytes")

    def __init__(self) -> None:
        self.count = 0
        self.nbytes = 0
        self._requests: OrderedDict[int, Request] = OrderedDict()
        # The requests by client, request id and number. A client may use the same id more than once.
        self._index: dict[bytes, dict[str, dict[int, Request]]] = {}

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.number in self._requests

    @property
    def first(self) -> Request:
        """The next request to run."""
        return next(iter(self._requests.values()))

    @property
    def last(self) -> Request:
        """The request at the end of the queue."""
        return next(reversed(self._requests.values()))

    def append(self, request: Request) -> None:
        """Put a request at the end."""
        self._requests[request.number] = request
        self._index.setdefault(request.client, {}).setdefault(request.id, {})[request.number] = request
        self.count += 1
        self.nbytes += request.nbytes

    def put_back(self, requests: Sequence[Request]) -> None:
        """Put requests at the head, in the given order."""
        for request in reversed(requests):
            self.append(request)
            self._requests.move_to_end(request.number, last=False)

    def take(self) -> Request:
        """Remove and return the first request."""
        _, request = self._requests.popitem(last=False)
        self._unindex(request)
        return request

    def remove(self, request: Request) -> None:
        """Remove a request."""
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
        """Remove and return all matching requests; `should_take` is called with each queued request."""
        return self._take_all([request for request in self if should_take(request)])

    def take_of_client(self, client: bytes, request_id: str | None = None) -> list[Request]:
        """Remove and return the requests of a client, or only those with this id if it is given."""
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
    """A `FifoQueue` for each priority level, with the interface of a single `FifoQueue`.

    Args:
        count: the number of priority levels. A request with a level beyond the last one goes to the last one.
    """

    def __init__(self, count: int) -> None:
        self._queues = [FifoQueue() for _ in range(count)]

    def __iter__(self) -> Iterator[Request]:
        return heapq.merge(*self._queues, key=sort_key)

    def __contains__(self, request: Request) -> bool:
        return request in self._queue_of_level(request)

    @property
    def count(self) -> int:
        """The number of requests."""
        return sum([queue.count for queue in self._queues])

    @property
    def nbytes(self) -> int:
        """The total tensor bytes of all requests."""
        return sum([queue.nbytes for queue in self._queues])

    @property
    def first(self) -> Request:
        """The next request to run."""
        return min((queue.first for queue in self._queues if queue.count), key=sort_key)

    @property
    def last(self) -> Request:
        """The newest of the requests at the ends of the levels."""
        return max((queue.last for queue in self._queues if queue.count), key=lambda each: each.number)

    def append(self, request: Request) -> None:
        """Put a request at the end of its level."""
        self._queue_of_level(request).append(request)

    def put_back(self, requests: Iterable[Request]) -> None:
        """Put requests at the heads of their levels, in the given order."""
        requests = list(requests)
        for queue in self._queues:
            queue.put_back([request for request in requests if self._queue_of_level(request) is queue])

    def take(self) -> Request:
        """Remove and return the first request."""
        return self._queue_of_level(self.first).take()

    def remove(self, request: Request) -> None:
        """Remove a request."""
        self._queue_of_level(request).remove(request)

    def take_matching(self, should_take: Callable[[Request], bool]) -> list[Request]:
        """Remove and return all matching requests; `should_take` is called with each queued request."""
        return [request for queue in self._queues for request in queue.take_matching(should_take)]

    def take_of_client(self, client: bytes, request_id: str | None = None) -> list[Request]:
        """Remove and return the requests of a client, or only those with this id if it is given."""
        return [request for queue in self._queues for request in queue.take_of_client(client, request_id)]

    def _queue_of_level(self, request: Request) -> FifoQueue:
        return self._queues[min(request.priority_level, len(self._queues) - 1)]


TenantQueue = FifoQueue | PriorityQueue


# The queue of a tenant without requests.
_EMPTY = FifoQueue()


class TenantQueues:
    """A `FifoQueue` or `PriorityQueue` for each tenant with requests.

    Args:
        levels: the number of priority levels.
        queue: the queue that was used while there was only one tenant, so that all its requests are of one tenant.
        on_change: called with a tenant when its first request is added, and when its last request is removed.
    """

    def __init__(self, levels: int, queue: TenantQueue, on_change: Callable[[Tenant], None]) -> None:
        self._levels = levels
        self._on_change = on_change
        self._queues: dict[Tenant, TenantQueue] = {}
        if queue.count:
            self._queues[queue.first.tenant] = queue

    def queue_of(self, tenant: Tenant) -> TenantQueue:
        """Return the queue of a tenant, which may be empty."""
        return self._queues.get(tenant, _EMPTY)

    @property
    def tenants(self) -> list[Tenant]:
        """The tenants that have queued requests."""
        return [*self._queues]

    def single_queue(self) -> TenantQueue:
        """Return the queue of the only tenant that has queued requests, or an empty queue."""
        return next(iter(self._queues.values()), None) or make_queue(self._levels)

    def last_of(self, tenant: Tenant) -> Request | None:
        """Return the newest request of a tenant; None if no request of the tenant is queued."""
        queue = self._queues.get(tenant)
        return None if queue is None else queue.last

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain(*self._queues.values())

    def __contains__(self, request: Request) -> bool:
        return request in self.queue_of(request.tenant)

    @property
    def count(self) -> int:
        """The number of requests."""
        return sum([queue.count for queue in self._queues.values()])

    @property
    def nbytes(self) -> int:
        """The total tensor bytes of all requests."""
        return sum([queue.nbytes for queue in self._queues.values()])

    @property
    def first(self) -> Request:
        """The request that would run first if all tenants had a common queue."""
        return min((queue.first for queue in self._queues.values()), key=sort_key)

    def append(self, request: Request) -> None:
        """Put a request at the end of its tenant's queue."""
        self._queue_for(request.tenant).append(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Put requests at the heads of their tenants' queues, in the given order."""
        for tenant in dict.fromkeys(request.tenant for request in requests):
            self._queue_for(tenant).put_back([each for each in requests if each.tenant is tenant])

    def remove(self, request: Request) -> None:
        """Remove a request."""
        self._queues[request.tenant].remove(request)
        self._drop_if_empty(request.tenant)

    def take_matching(self, should_take: Callable[[Request], bool]) -> list[Request]:
        """Remove and return all matching requests; `should_take` is called with each queued request."""
        return self._flatten_removed([queue.take_matching(should_take) for queue in self._queues.values()])

    def take_of_client(self, client: bytes, request_id: str | None = None) -> list[Request]:
        """Remove and return the requests of a client, or only those with this id if it is given."""
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
"""The queued requests of one tenant, or of several tenants in a queue each."""


def make_queue(levels: int) -> TenantQueue:
    """Return an empty queue."""
    return FifoQueue() if levels == 1 else PriorityQueue(levels)
