"""The request queue of one model: order and limits of the requests, and eviction of requests from a full queue.

Requests run first come, first served, adjusted for priority. Requests of clients under suspicion (`fault_isolation`)
are confined: the slots run one of them at a time, or one of each tenant while several tenants send requests. The parts
of a split request alternate with other queued requests, so that a split request does not hold all slots.

These rules apply to the requests of one tenant. With several tenants, the queue first selects the tenant that has used
the least time of the device with the free slot (`fair_share`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from weightd_daemon.scheduling.batch import BatchItem
from weightd_daemon.scheduling.batching.split import SplitRequest
from weightd_daemon.scheduling.fair_share import ActiveTenants, FairClock
from weightd_daemon.scheduling.queues import AnyQueue, TenantQueue, TenantQueues, make_queue, sort_key
from weightd_daemon.scheduling.request import Isolation, Request
from weightd_daemon.tenants.tenant import Tenant

# Maximum number of split requests among which the next request to run is chosen.
_MAX_SPLITTING = 16

_QueueT = TypeVar("_QueueT", TenantQueue, AnyQueue)


class RequestQueue:
    """The queued requests of one model. Iteration yields all requests, one of `queues` after another.

    Args:
        levels: the number of priority levels.

    Attributes:
        normal: requests that only wait for their turn and a slot, and have not started.
        confined: requests of clients under suspicion, of which one runs at a time.
        unchecked: requests that must not run before the content check has called `admit`.
        long: requests that take too long for the last free slot, see `Tenancy`; used only while there are several
            tenants.
        splitting: split requests with rows that no slot has received yet. The rows of the first request run first.
        splits: the states of the split requests that have not ended, by request number.
        was_split: whether the last batch was a part of a split request.
        is_multi_tenant: whether several tenants send requests. If so, each tenant has separate queues.
        tenants_last_split: tenants whose last batch was a part of a split request.
        queues: `normal`, `confined`, `splitting`, `long` and `unchecked`, in this order.
        active_tenants: the tenants with runnable requests, maintained while there are several tenants.
    """

    def __init__(self, levels: int) -> None:
        self._levels = levels
        self.splits: dict[int, SplitRequest] = {}
        self.was_split = False
        self.is_multi_tenant = False
        self.active_tenants = ActiveTenants(lambda tenant: any(queue.count for queue in self.runnable_of(tenant)))
        self.tenants_last_split: set[Tenant] = set()
        # The arguments are in the order of `queues`. Confined and unchecked requests have no priority levels.
        self._set_queues(make_queue(levels), make_queue(1), make_queue(levels), make_queue(levels), make_queue(1))

    def _set_queues(
        self, normal: AnyQueue, confined: AnyQueue, splitting: AnyQueue, long: AnyQueue, unchecked: AnyQueue
    ) -> None:
        self.normal, self.confined, self.splitting, self.long, self.unchecked = (
            normal,
            confined,
            splitting,
            long,
            unchecked,
        )
        self.queues: Sequence[AnyQueue] = (normal, confined, splitting, long, unchecked)

    # --- requests -----------------------------------------------------------------------------------------------

    def append(self, request: Request) -> None:
        """Put a request at the end of `normal`, `confined` or `splitting`, according to its state."""
        self._queue_for(request).append(request)

    def put_back(self, items: Sequence[BatchItem]) -> None:
        """Put the requests of batch items that slots did not finish back at the head of the queue."""
        requeued: list[Request] = []
        for item in items:
            if item.split is not None:
                item.split.put_back(item.first_row, item.rows)
            if item.request not in requeued and not any(item.request in queue for queue in self.queues):
                requeued.append(item.request)
        self.put_first(requeued)

    def put_first(self, requests: Sequence[Request]) -> None:
        """Put requests at the heads of their queues, or of their tenants' queues, in the given order."""
        for queue in (self.confined, self.splitting, self.normal):
            queue.put_back([request for request in requests if self._queue_for(request) is queue])

    def move_to_unchecked(self, matches: Callable[[Request], bool]) -> list[Request]:
        """Move the matching requests to `unchecked` and return them. Split requests that have started continue."""
        queues = (self.normal, self.confined, self.long)
        moved = [request for queue in queues for request in queue.take_matching(matches)]
        for request in moved:
            self.unchecked.append(request)
        return moved

    def admit(self, request: Request) -> None:
        """Allow an unchecked request to run. A request that has ended meanwhile is ignored."""
        if request in self.unchecked:
            self.unchecked.remove(request)
            self.append(request)

    def confine(self, matches: Callable[[Request], bool]) -> None:
        """Move the matching requests to `confined`."""
        for queue in (self.normal, self.splitting, self.long):
            for request in queue.take_matching(matches):
                self.confined.append(request)

    def remove_split(self, request: Request) -> SplitRequest | None:
        """End a split request, so that no more of its rows run; return its state. None if the request is not split."""
        split = self.splits.pop(request.number, None)
        if split is not None:
            split.is_ended = True
            self.remove(request)
        return split

    def remove(self, request: Request) -> bool:
        """Remove a request from the queue; return whether it was queued."""
        found = [queue for queue in self.queues if request in queue]
        for queue in found:
            queue.remove(request)
        return bool(found)

    def take_matching(self, should_take: Callable[[Request], bool]) -> list[Request]:
        """Remove and return all matching requests; `should_take` is called with each queued request."""
        return [request for queue in self.queues for request in queue.take_matching(should_take)]

    def take_of_client(self, client: bytes, request_id: str | None) -> list[Request]:
        """Remove and return the requests of a client, or only those with this id if it is given."""
        return [request for queue in self.queues for request in queue.take_of_client(client, request_id)]

    # --- tenants ------------------------------------------------------------------------------------------------

    def start_multi_tenant(self) -> None:
        """Switch to separate queues for each tenant. All requests that are queued now must be of one tenant."""
        self.is_multi_tenant = True
        levels = (self._levels, 1, self._levels, self._levels, 1)
        on_change = self.active_tenants.mark_changed
        for request in itertools.islice(self, 1):
            on_change(request.tenant)
        pairs = zip(levels, self.queues, strict=True)
        self._set_queues(
            *(
                old_queue if isinstance(old_queue, TenantQueues) else TenantQueues(each, old_queue, on_change)
                for each, old_queue in pairs
            )
        )

    def stop_multi_tenant(self) -> None:
        """Switch back to common queues. At most one tenant may have queued requests now."""
        self.is_multi_tenant = False
        self.active_tenants.clear()
        self.tenants_last_split.clear()
        self.normal.put_back(self.long.take_matching(lambda _: True))
        self._set_queues(*(queue.single_queue() if isinstance(queue, TenantQueues) else queue for queue in self.queues))

    @property
    def tenants(self) -> set[Tenant]:
        """The tenants with queued requests; empty while only one tenant sends requests."""
        return {each for queue in self.tenant_queues for each in queue.tenants}

    @property
    def counts_by_tenant(self) -> dict[Tenant, int]:
        """The number of queued requests of each tenant."""
        if self.is_multi_tenant:
            return {
                tenant: sum(queue.queue_of(tenant).count for queue in self.tenant_queues) for tenant in self.tenants
            }
        # With a single tenant, all queued requests have the tenant of the first one.
        return {request.tenant: self.count for request in itertools.islice(self, 1)}

    def has_splitting(self, tenant: Tenant) -> bool:
        """Return whether a tenant has a split request with rows that no slot has received yet."""
        splitting = self.splitting
        return (splitting.queue_of(tenant) if isinstance(splitting, TenantQueues) else splitting).count > 0

    def on_batch_formed(self, tenant: Tenant, *, is_split: bool) -> None:
        """Record, while there are several tenants, whether a tenant's latest batch was a part of a split request."""
        (self.tenants_last_split.add if is_split else self.tenants_last_split.discard)(tenant)

    # --- state --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain(*self.queues)

    @property
    def count(self) -> int:
        """The number of queued requests."""
        return self.normal.count + self.confined.count + self.splitting.count + self.long.count + self.unchecked.count

    def has_runnable(self) -> bool:
        """Return whether a queued request may run; unchecked requests may not."""
        return bool(self.normal.count or self.confined.count or self.splitting.count or self.long.count)

    @property
    def next_unchecked(self) -> Request | None:
        """The first unchecked request, or None."""
        return self.unchecked.first if self.unchecked.count else None

    # --- helpers ------------------------------------------------------------------------------------------------

    @property
    def tenant_queues(self) -> list[TenantQueues]:
        """The queues that are divided by tenant: all of `queues` while there are several tenants, none otherwise."""
        return [queue for queue in self.queues if isinstance(queue, TenantQueues)]

    def runnable_of(self, tenant: Tenant) -> list[TenantQueue]:
        """Return the queues of a tenant's requests that may run, in the order of `queues`."""
        return [queue.queue_of(tenant) for queue in self.tenant_queues[:4]]

    def _queue_for(self, request: Request) -> AnyQueue:
        if request.isolation is Isolation.CONFINED:
            return self.confined
        return self.splitting if request.number in self.splits else self.normal


class Turns:
    """Selects the queued request that runs next.

    Args:
        queue: the queue of the model.
        is_confined_running: called with a tenant, or with None for any tenant; returns whether a slot has a confined
            request of the tenant.
    """

    def __init__(self, queue: RequestQueue, is_confined_running: Callable[[Tenant | None], bool]) -> None:
        self._queue = queue
        self._is_confined_running = is_confined_running

    def candidates(self) -> Iterator[tuple[AnyQueue, Request]]:
        """Yield the requests that may run next, each with its queue, in order.

        The candidates are the earliest request that has not started and the first split requests; these two kinds
        alternate if they have the same priority. The first long request is a candidate, too, at its place in the order.
        """
        return _with_long_request(
            self.next_unsplit_queue(), self._queue.splitting, self._queue.long, was_split=self._queue.was_split
        )

    def fair_candidates(
        self, clock: FairClock, is_long: Callable[[Request], bool]
    ) -> Iterator[tuple[AnyQueue, Request]]:
        """Yield the `candidates` of each tenant; the tenant with the lowest virtual time on the clock comes first."""
        for tenant in sorted(self._queue.active_tenants.update(), key=clock.sort_key):
            self._move_long_of(tenant, is_long)
            normal, confined, splitting, long = self._queue.runnable_of(tenant)
            shared_queues = {
                id(confined): self._queue.confined,
                id(splitting): self._queue.splitting,
                id(long): self._queue.long,
            }
            unsplit, was_split = self._next_unsplit(normal, confined, tenant), tenant in self._queue.tenants_last_split
            for queue, request in _with_long_request(unsplit, splitting, long, was_split=was_split):
                yield shared_queues.get(id(queue), self._queue.normal), request

    def move_long(self, is_long: Callable[[Request], bool]) -> None:
        """Move long requests from the heads of the tenants' queues in `normal` to `long`."""
        for tenant in self._queue.active_tenants.update():
            self._move_long_of(tenant, is_long)

    def fair_order(self, clock: FairClock, expected_s: float) -> Iterator[Request]:
        """Yield the requests of `normal` in the order in which they would run if each took `expected_s` seconds."""
        heads = [
            (clock.sort_key(tenant), index, tenant, iter(self._queue.runnable_of(tenant)[0]))
            for index, tenant in enumerate(self._queue.active_tenants.update())
        ]
        heapq.heapify(heads)
        while heads:
            (virtual_s, last), index, tenant, requests = heads[0]
            request = next(requests, None)
            if request is None:
                heapq.heappop(heads)
                continue
            heapq.heapreplace(heads, ((virtual_s + expected_s / tenant.config.weight, last), index, tenant, requests))
            yield request

    def next_unsplit_queue(self) -> AnyQueue | None:
        """Return `normal` or `confined`: the one whose first request runs next. None if neither has a candidate."""
        return self._next_unsplit(self._queue.normal, self._queue.confined)

    def _next_unsplit(self, normal: _QueueT, confined: _QueueT, tenant: Tenant | None = None) -> _QueueT | None:
        if not confined.count or self._is_confined_running(tenant):
            return normal if normal.count else None
        return normal if normal.count and sort_key(normal.first) < sort_key(confined.first) else confined

    def _move_long_of(self, tenant: Tenant, is_long: Callable[[Request], bool]) -> None:
        while (queues := self._queue.runnable_of(tenant))[0].count and is_long(request := queues[0].first):
            self._queue.normal.remove(request)
            long = queues[3]
            if long.count and sort_key(request) < sort_key(long.first):
                self._queue.long.put_back([request])
            else:
                self._queue.long.append(request)


class QueueLimits:
    """Checks the limits of a queue, and selects the requests to evict if the queue is full.

    Args:
        queue: the queue of the model.
        max_requests: the maximum number of queued requests.
        max_bytes: the maximum number of queued tensor bytes.
    """

    def __init__(self, queue: RequestQueue, max_requests: int, max_bytes: int) -> None:
        self._queue = queue
        self._max_requests = max_requests
        self._max_bytes = max_bytes

    def full_reason(self, request: Request, count: int) -> str:
        """Return why a queue that has `count` requests cannot take `request`, or "" if it can."""
        nbytes = sum(queue.nbytes for queue in self._queue.queues)
        if count >= self._max_requests:
            return f"the queue is full: it holds {count} of at most {self._max_requests} requests"
        if nbytes + request.nbytes > self._max_bytes:
            limit_text = f"the limit of {self._max_bytes}"
            return f"the queue is full: {nbytes} bytes are queued, and {request.nbytes} more exceed {limit_text}"
        return ""

    def evict_for(self, request: Request) -> list[Request] | None:
        """Remove and return requests of other tenants until `request` fits; None if `request` itself must be refused.

        Each step evicts the newest request of the tenant with the most queued requests in proportion to its weight, or
        with the most queued bytes if the limit of bytes is exceeded. If no eviction helps, the evicted requests return
        to the queue.
        """
        evicted: list[tuple[AnyQueue, Request]] = []
        while self.full_reason(request, self._queue.count):
            newest = self._find_eviction(request, in_requests=self._queue.count >= self._max_requests)
            if newest is None:
                for queue, each in reversed(evicted):
                    queue.append(each)
                return None
            queue, each = newest
            queue.remove(each)
            evicted.append(newest)
        return [each for _, each in evicted]

    def _amount(self, tenant: Tenant, *, in_requests: bool) -> int:
        queues = [queue.queue_of(tenant) for queue in self._queue.tenant_queues]
        return sum(queue.count if in_requests else queue.nbytes for queue in queues)

    def _find_eviction(self, request: Request, *, in_requests: bool) -> tuple[AnyQueue, Request] | None:
        amounts = {each: self._amount(each, in_requests=in_requests) for each in self._queue.tenants}
        amounts[request.tenant] = amounts.get(request.tenant, 0) + (1 if in_requests else request.nbytes)
        by_amount = sorted(amounts, key=lambda each: (amounts[each] / each.config.weight, each is request.tenant))
        for largest in reversed(by_amount):
            if largest is request.tenant:
                break
            newest = [
                (queue, each) for queue in self._queue.tenant_queues if (each := queue.last_of(largest)) is not None
            ]
            # A split request that has started is not evicted: the work for its finished rows would be wasted.
            evictable = [
                (queue, each) for queue, each in newest if queue is not self._queue.splitting or not each.has_started
            ]
            if evictable:
                return max(evictable, key=lambda pair: pair[1].number)
        return None


def _with_long_request(
    unsplit: _QueueT | None, splitting: _QueueT, long: _QueueT, *, was_split: bool
) -> Iterator[tuple[_QueueT, Request]]:
    """Yield the candidates of `_take_turns`, with the first long request added at its place in the order."""
    if not long.count:
        return _take_turns(unsplit, splitting, was_split=was_split)
    if unsplit is None:
        return _take_turns(long, splitting, was_split=was_split)
    first, second = (long, unsplit) if sort_key(long.first) < sort_key(unsplit.first) else (unsplit, long)
    return itertools.chain(_take_turns(first, splitting, was_split=was_split), [(second, second.first)])


def _take_turns(unsplit: _QueueT | None, splitting: _QueueT, *, was_split: bool) -> Iterator[tuple[_QueueT, Request]]:
    """Yield the first request of the queue `unsplit` and the first split requests, in the order of their turns."""
    started = ((splitting, request) for request in itertools.islice(splitting, _MAX_SPLITTING))
    if unsplit is None:
        yield from started
    elif not splitting.count or _is_unsplit_next(splitting.first, unsplit.first, was_split=was_split):
        yield unsplit, unsplit.first
        yield from started
    else:
        yield from started
        yield unsplit, unsplit.first


def _is_unsplit_next(splitting: Request, request: Request, *, was_split: bool) -> bool:
    return _has_higher_priority(request, splitting) or (was_split and not _has_higher_priority(splitting, request))


def _has_higher_priority(one: Request, other: Request) -> bool:
    """Return whether `one` runs before `other` because of its priority."""
    return one.priority_level < other.priority_level and sort_key(one) < sort_key(other)
