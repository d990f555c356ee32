"""The queue of one model: what waits for its slots, whose turn it is, and how much may wait (`QueueLimits`).

First come, first served, but for priorities. Requests of clients under suspicion (`offenders`) are confined: one of
them, where there are several tenants one of each, is with a slot at a time. A request that runs in parts takes turns
with what else waits: it does not hold all slots.

All of this is so among the requests of one tenant. Where there are several it is first a tenant's turn: that of the
one that has had least of the device whose slot is free (`shares`).
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

# Of what has begun so many are looked at.
_MAX_SPLITTING = 16

_QueueT = TypeVar("_QueueT", TenantQueue, AnyQueue)


class RequestQueue:
    """The requests that wait; iterated in the order in which they run, then those that are confined or aside.

    Args:
        levels: of priority.

    Attributes:
        normal: what waits for nothing but its turn and a slot, and has not begun.
        confined: what waits of clients under suspicion: one of these runs at a time.
        unchecked: what does not run before it is admitted.
        long: requests that take too long for the last free slot, see `Scheduler`; while there are several tenants.
        splitting: what runs in parts, of which some have still to be given to slots: those of the first, then the
            next's.
        splits: the requests that run in parts and have not ended, by their numbers.
        was_split: whether the last batch was a part of a request.
        is_multi_tenant: whether there are several tenants: then what waits of each is in queues of its own.
        tenants_last_split: those whose last batch was a part of a request.
        queues: all of these; the last is what is looked at before it may run.
        active_tenants: of tenants, while it is shared.
    """

    def __init__(self, levels: int) -> None:
        self._levels = levels
        self.splits: dict[int, SplitRequest] = {}
        self.was_split = False
        self.is_multi_tenant = False
        self.active_tenants = ActiveTenants(lambda tenant: any(queue.count for queue in self.runnable_of(tenant)))
        self.tenants_last_split: set[Tenant] = set()
        # The last is what is looked at before it may run.
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

    # --- who comes and goes -------------------------------------------------------------------------------------

    def append(self, request: Request) -> None:
        """It waits behind what is there."""
        self._queue_for(request).append(request)

    def put_back(self, items: Sequence[BatchItem]) -> None:
        """What slots had of requests waits again, at the head."""
        requeued: list[Request] = []
        for item in items:
            if item.split is not None:
                item.split.put_back(item.first_row, item.rows)
            if item.request not in requeued and not any(item.request in queue for queue in self.queues):
                requeued.append(item.request)
        self.put_first(requeued)

    def put_first(self, requests: Sequence[Request]) -> None:
        """They wait before what is there of their tenants, in their order."""
        for queue in (self.confined, self.splitting, self.normal):
            queue.put_back([request for request in requests if self._queue_for(request) is queue])

    def move_to_unchecked(self, matches: Callable[[Request], bool]) -> list[Request]:
        """Put what is `matches` aside, and return it. What has begun goes on."""
        queues = (self.normal, self.confined, self.long)
        moved = [request for queue in queues for request in queue.take_matching(matches)]
        for request in moved:
            self.unchecked.append(request)
        return moved

    def admit(self, request: Request) -> None:
        """What was put aside may run; one that has ended meanwhile stays ended."""
        if request in self.unchecked:
            self.unchecked.remove(request)
            self.append(request)

    def confine(self, matches: Callable[[Request], bool]) -> None:
        """What is `matches` waits among those of which one runs at a time."""
        for queue in (self.normal, self.splitting, self.long):
            for request in queue.take_matching(matches):
                self.confined.append(request)

    def remove_split(self, request: Request) -> SplitRequest | None:
        """Nothing more of it runs, if it runs in parts; return it as it was, None if it does not."""
        split = self.splits.pop(request.number, None)
        if split is not None:
            split.is_ended = True
            self.remove(request)
        return split

    def remove(self, request: Request) -> bool:
        """Take out a request, if it waits; return whether it did."""
        found = [queue for queue in self.queues if request in queue]
        for queue in found:
            queue.remove(request)
        return bool(found)

    def take_matching(self, should_take: Callable[[Request], bool]) -> list[Request]:
        """Take out all that are `should_take`, at the cost of a look at each."""
        return [request for queue in self.queues for request in queue.take_matching(should_take)]

    def take_of_client(self, client: bytes, request_id: str | None) -> list[Request]:
        """Take out a client's requests, or those of its requests that have this id."""
        return [request for queue in self.queues for request in queue.take_of_client(client, request_id)]

    # --- tenants ------------------------------------------------------------------------------------------------

    def start_multi_tenant(self) -> None:
        """There are several tenants from now on; what waits is of one so far."""
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
        """There is one tenant at most, and nothing of any other waits."""
        self.is_multi_tenant = False
        self.active_tenants.clear()
        self.tenants_last_split.clear()
        self.normal.put_back(self.long.take_matching(lambda _: True))
        self._set_queues(*(queue.single_queue() if isinstance(queue, TenantQueues) else queue for queue in self.queues))

    @property
    def tenants(self) -> set[Tenant]:
        """Those of which anything waits, while it is shared."""
        return {each for queue in self.tenant_queues for each in queue.tenants}

    @property
    def counts_by_tenant(self) -> dict[Tenant, int]:
        """How many requests of each tenant wait, at the cost of a look at each tenant."""
        if self.is_multi_tenant:
            return {
                tenant: sum(queue.queue_of(tenant).count for queue in self.tenant_queues) for tenant in self.tenants
            }
        # They are of one.
        return {request.tenant: self.count for request in itertools.islice(self, 1)}

    def has_splitting(self, tenant: Tenant) -> bool:
        """Return whether anything of a tenant runs in parts, of which some have still to be given to slots."""
        splitting = self.splitting
        return (splitting.queue_of(tenant) if isinstance(splitting, TenantQueues) else splitting).count > 0

    def on_batch_formed(self, tenant: Tenant, *, is_split: bool) -> None:
        """While it is shared, a batch has been made of what waited of a tenant: a part of a request, or not."""
        (self.tenants_last_split.add if is_split else self.tenants_last_split.discard)(tenant)

    # --- what it tells ------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain(*self.queues)

    @property
    def count(self) -> int:
        """Requests that wait."""
        return self.normal.count + self.confined.count + self.splitting.count + self.long.count + self.unchecked.count

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits that may run. Cheap: this is asked with every answer."""
        return not (self.normal.count or self.confined.count or self.splitting.count or self.long.count)

    @property
    def next_unchecked(self) -> Request | None:
        """The first of those that do not run before they are admitted."""
        return self.unchecked.first if self.unchecked.count else None

    # --- within -------------------------------------------------------------------------------------------------

    @property
    def tenant_queues(self) -> list[TenantQueues]:
        """Return `queues` while there are several tenants."""
        return [queue for queue in self.queues if isinstance(queue, TenantQueues)]

    def runnable_of(self, tenant: Tenant) -> list[TenantQueue]:
        """Return what waits of a tenant and may run, in the order of `queues`."""
        return [queue.queue_of(tenant) for queue in self.tenant_queues[:4]]

    def _queue_for(self, request: Request) -> AnyQueue:
        if request.isolation is Isolation.CONFINED:
            return self.confined
        return self.splitting if request.number in self.splits else self.normal


class Turns:
    """Whose turn it is of what waits in a queue.

    Args:
        queue: what waits.
        is_confined_running: whether a slot has a request that is confined; of a tenant, if one is given.
    """

    def __init__(self, queue: RequestQueue, is_confined_running: Callable[[Tenant | None], bool]) -> None:
        self._queue = queue
        self._is_confined_running = is_confined_running

    def candidates(self) -> Iterator[tuple[AnyQueue, Request]]:
        """Yield the requests that may run next, each with its queue, in the order of their turns.

        That is the one that has come first, and some of what has begun; these take turns, if both are of the same
        priority. The first of the long ones is before or behind these, wherever its turn is.
        """
        return _with_long_request(
            self.next_unsplit_queue(), self._queue.splitting, self._queue.long, was_split=self._queue.was_split
        )

    def fair_candidates(
        self, clock: FairClock, is_long: Callable[[Request], bool]
    ) -> Iterator[tuple[AnyQueue, Request]]:
        """Yield what `candidates` does of one tenant after another, in their order on the device with this clock."""
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
        """Have the requests at the head of `normal` that are long wait in `long`, while there are several tenants."""
        for tenant in self._queue.active_tenants.update():
            self._move_long_of(tenant, is_long)

    def fair_order(self, clock: FairClock, expected_s: float) -> Iterator[Request]:
        """Yield what waits for nothing but its turn, as if each took so many seconds of the device with this clock."""
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
        """Return the queue of which the first runs next, but for what has begun; None if nothing else may run."""
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
    """The bounds of a queue, and which request gives way where there are several tenants.

    Args:
        queue: what waits.
        max_requests: that may wait.
        max_bytes: tensor bytes that may wait.
    """

    def __init__(self, queue: RequestQueue, max_requests: int, max_bytes: int) -> None:
        self._queue = queue
        self._max_requests = max_requests
        self._max_bytes = max_bytes

    def full_reason(self, request: Request, count: int) -> str:
        """Return why there is no room for one more request beside so many, or ""."""
        nbytes = sum(queue.nbytes for queue in self._queue.queues)
        if count >= self._max_requests:
            return f"{count} requests are queued, the limit is {self._max_requests}"
        if nbytes + request.nbytes > self._max_bytes:
            limit_text = f"the limit of {self._max_bytes}"
            return f"{nbytes} bytes are queued, {request.nbytes} more exceed {limit_text}"
        return ""

    def evict_for(self, request: Request) -> list[Request] | None:
        """Return what has given way to a request that finds no room; None if it is the one that has to.

        That is, one after another, the newest of the tenant that has most waiting by its weight: requests, or bytes,
        whichever bound is in the way.
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
            # Of what runs in parts some may have been done.
            evictable = [
                (queue, each) for queue, each in newest if queue is not self._queue.splitting or not each.has_started
            ]
            if evictable:
                return max(evictable, key=lambda pair: pair[1].number)
        return None


def _with_long_request(
    unsplit: _QueueT | None, splitting: _QueueT, long: _QueueT, *, was_split: bool
) -> Iterator[tuple[_QueueT, Request]]:
    """Yield what `_take_turns` does, and the first of the long requests, wherever its turn is."""
    if not long.count:
        return _take_turns(unsplit, splitting, was_split=was_split)
    if unsplit is None:
        return _take_turns(long, splitting, was_split=was_split)
    first, second = (long, unsplit) if sort_key(long.first) < sort_key(unsplit.first) else (unsplit, long)
    return itertools.chain(_take_turns(first, splitting, was_split=was_split), [(second, second.first)])


def _take_turns(unsplit: _QueueT | None, splitting: _QueueT, *, was_split: bool) -> Iterator[tuple[_QueueT, Request]]:
    """Yield what runs next of the first of a queue, and of what has begun."""
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
    """Whether one goes before another because of its priority."""
    return one.priority_level < other.priority_level and sort_key(one) < sort_key(other)
