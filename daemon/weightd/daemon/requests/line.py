"""What waits for the seats of one model, and whose turn it is.

First come, first served, but for priorities. Requests of clients under suspicion (`suspects`) are confined: one of
them, where there are several tenants one of each, is with a seat at a time. A request that runs in parts takes turns
with what else waits: it does not hold all seats.

All of this is so among the requests of one tenant. Where there are several it is first a tenant's turn: that of the
one that has had least of the device whose seat is free (`shares`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from weightd.daemon.requests.by_tenant import ByTenant, waiting
from weightd.daemon.requests.part import Part
from weightd.daemon.requests.presence import Presence
from weightd.daemon.requests.request import Company, Request
from weightd.daemon.requests.rows.cut import Cut
from weightd.daemon.requests.shares import Clock
from weightd.daemon.requests.waiting import Waiting, turn
from weightd.daemon.tenants.tenant import Tenant

# Of what has begun so many are looked at.
_MOST_BEGUN = 16

Queued = Waiting | ByTenant
"""What waits, of one tenant or of each by itself."""

_Q = TypeVar("_Q", Waiting, Queued)


class Line:
    """The requests that wait; iterated in the order in which they run, then those that are confined or aside.

    Args:
        max_queue: requests that may wait.
        max_queue_bytes: tensor bytes that may wait.
        levels: of priority.
        runs_confined: whether a seat has a request that is confined; of a tenant, if one is given.

    Attributes:
        normal: what waits for nothing but its turn and a seat, and has not begun.
        long: requests that take too long for the last free seat, see `Scheduler`; while there are several tenants.
        begun: what runs in parts, of which some have still to be given to seats: those of the first, then the next's.
        cuts: the requests that run in parts and have not ended, by their numbers.
        was_part: whether the last job was a part of a request.
        shared: whether there are several tenants: then what waits of each is in queues of its own.
        presence: of tenants, while it is shared.
    """

    def __init__(
        self, max_queue: int, max_queue_bytes: int, levels: int, runs_confined: Callable[[Tenant | None], bool]
    ) -> None:
        self._max_queue = max_queue
        self._max_queue_bytes = max_queue_bytes
        self._levels = levels
        self._runs_confined = runs_confined
        self.cuts: dict[int, Cut] = {}
        self.was_part = False
        self.shared = False
        self.presence = Presence(lambda tenant: any(queue.count for queue in self._of(tenant)))
        # Those whose last job was a part of a request.
        self._had_part: set[Tenant] = set()
        # The last is what is looked at before it may run.
        self._put(waiting(levels), waiting(1), waiting(levels), waiting(levels), waiting(1))

    def _put(self, normal: Queued, confined: Queued, begun: Queued, long: Queued, aside: Queued) -> None:
        self.normal, self._confined, self.begun, self.long, self._aside = normal, confined, begun, long, aside
        self._queues: Sequence[Queued] = (normal, confined, begun, long, aside)

    # --- who comes and goes -------------------------------------------------------------------------------------

    def append(self, request: Request) -> None:
        """It waits behind what is there."""
        self._queue_of(request).append(request)

    def put_back(self, parts: Sequence[Part]) -> None:
        """What seats had of requests waits again, at the head."""
        again: list[Request] = []
        for item in parts:
            if item.cut is not None:
                item.cut.put_back(item.first, item.rows)
            if item.request not in again and not any(item.request in queue for queue in self._queues):
                again.append(item.request)
        self.put_first(again)

    def put_first(self, requests: Sequence[Request]) -> None:
        """They wait before what is there of their tenants, in their order."""
        for queue in (self._confined, self.begun, self.normal):
            queue.put_back([request for request in requests if self._queue_of(request) is queue])

    def put_aside(self, request: Request) -> None:
        """It does not run before it is admitted."""
        self._aside.append(request)

    def set_aside(self, chosen: Callable[[Request], bool]) -> list[Request]:
        """Put what is `chosen` aside, and return it. What has begun goes on."""
        queues = (self.normal, self._confined, self.long)
        chosen_ones = [request for queue in queues for request in queue.withdraw(chosen)]
        for request in chosen_ones:
            self._aside.append(request)
        return chosen_ones

    def admit(self, request: Request) -> None:
        """What was put aside may run; one that has ended meanwhile stays ended."""
        if request in self._aside:
            self._aside.remove(request)
            self.append(request)

    def confine(self, chosen: Callable[[Request], bool]) -> None:
        """What is `chosen` waits among those of which one runs at a time."""
        for queue in (self.normal, self.begun, self.long):
            for request in queue.withdraw(chosen):
                self._confined.append(request)

    def uncut(self, request: Request) -> Cut | None:
        """Nothing more of it runs, if it runs in parts; return it as it was, None if it does not."""
        cut = self.cuts.pop(request.number, None)
        if cut is not None:
            cut.ended = True
            self.take_out(request)
        return cut

    def take_out(self, request: Request) -> bool:
        """Take out a request, if it waits; return whether it did."""
        found = [queue for queue in self._queues if request in queue]
        for queue in found:
            queue.remove(request)
        return bool(found)

    def withdraw(self, unfit: Callable[[Request], bool]) -> list[Request]:
        """Take out all that are `unfit`, at the cost of a look at each."""
        return [request for queue in self._queues for request in queue.withdraw(unfit)]

    def withdraw_of(self, client: bytes, request_id: str | None) -> list[Request]:
        """Take out a client's requests, or those of its requests that have this id."""
        return [request for queue in self._queues for request in queue.withdraw_of(client, request_id)]

    # --- tenants ------------------------------------------------------------------------------------------------

    def share(self) -> None:
        """There are several tenants from now on; what waits is of one so far."""
        self.shared = True
        levels = (self._levels, 1, self._levels, self._levels, 1)
        whose = self.presence.changed
        for request in itertools.islice(self, 1):
            whose(request.tenant)
        pairs = zip(levels, self._queues, strict=True)
        self._put(*(old_queue if isinstance(old_queue, ByTenant) else ByTenant(each, old_queue, whose) for each, old_queue in pairs))

    def share_no_more(self) -> None:
        """There is one tenant at most, and nothing of any other waits."""
        self.shared = False
        self.presence.over()
        self._had_part.clear()
        self.normal.put_back(self.long.withdraw(lambda _: True))
        self._put(*(queue.sole() if isinstance(queue, ByTenant) else queue for queue in self._queues))

    @property
    def tenants(self) -> set[Tenant]:
        """Those of which anything waits, while it is shared."""
        return {each for queue in self._apart for each in queue.tenants}

    @property
    def counts(self) -> dict[Tenant, int]:
        """How many requests of each tenant wait, at the cost of a look at each tenant."""
        if self.shared:
            return {tenant: self._amount(tenant, is_many=True) for tenant in self.tenants}
        # They are of one.
        return {request.tenant: self.count for request in itertools.islice(self, 1)}

    def has_begun(self, tenant: Tenant) -> bool:
        """Return whether anything of a tenant runs in parts, of which some have still to be given to seats."""
        begun = self.begun
        return (begun.of(tenant) if isinstance(begun, ByTenant) else begun).count > 0

    def gave(self, tenant: Tenant, *, part: bool) -> None:
        """While it is shared, a job has been made of what waited of a tenant: a part of a request, or not."""
        (self._had_part.add if part else self._had_part.discard)(tenant)

    def make_room(self, request: Request) -> list[Request] | None:
        """Return what has given way to a request that finds no room; None if it is the one that has to.

        That is, one after another, the newest of the tenant that has most waiting by its weight: requests, or bytes,
        whichever bound is in the way.
        """
        gone: list[tuple[Queued, Request]] = []
        while self.full(request, self.count):
            newest = self._gives_way(request, is_many=self.count >= self._max_queue)
            if newest is None:
                for queue, each in reversed(gone):
                    queue.append(each)
                return None
            queue, each = newest
            queue.remove(each)
            gone.append(newest)
        return [each for _, each in gone]

    # --- whose turn it is ---------------------------------------------------------------------------------------

    def turns(self) -> Iterator[tuple[Queued, Request]]:
        """Yield the requests that may run next, each with its queue, in the order of their turns.

        That is the one that has come first, and some of what has begun; these take turns, if both are of the same
        priority. The first of the long ones is before or behind these, wherever its turn is.
        """
        return _with_long(self.next_whole(), self.begun, self.long, was_part=self.was_part)

    def fair_turns(self, clock: Clock, is_long: Callable[[Request], bool]) -> Iterator[tuple[Queued, Request]]:
        """Yield what `turns` does of one tenant after another, in their order on the device with this clock."""
        for tenant in sorted(self.presence.look(), key=clock.order):
            self._set_apart(tenant, is_long)
            normal, confined, splitting, long = self._of(tenant)
            shared_queues = {id(confined): self._confined, id(splitting): self.begun, id(long): self.long}
            unsplit, was_split = self._whole(normal, confined, tenant), tenant in self._had_part
            for queue, request in _with_long(unsplit, splitting, long, was_part=was_split):
                yield shared_queues.get(id(queue), self.normal), request

    def sort_out(self, is_long: Callable[[Request], bool]) -> None:
        """Have the requests at the head of `normal` that are long wait in `long`, while there are several tenants."""
        for tenant in self.presence.look():
            self._set_apart(tenant, is_long)

    def fair(self, clock: Clock, guess: float) -> Iterator[Request]:
        """Yield what waits for nothing but its turn, as if each took so many seconds of the device with this clock."""
        heads = [
            (clock.order(tenant), index, tenant, iter(self._of(tenant)[0]))
            for index, tenant in enumerate(self.presence.look())
        ]
        heapq.heapify(heads)
        while heads:
            (virtual_s, last), index, tenant, requests = heads[0]
            request = next(requests, None)
            if request is None:
                heapq.heappop(heads)
                continue
            heapq.heapreplace(heads, ((virtual_s + guess / tenant.config.weight, last), index, tenant, requests))
            yield request

    def next_whole(self) -> Queued | None:
        """Return the queue of which the first runs next, but for what has begun; None if nothing else may run."""
        return self._whole(self.normal, self._confined)

    # --- what it tells ------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain(*self._queues)

    @property
    def count(self) -> int:
        """Requests that wait."""
        return self.normal.count + self._confined.count + self.begun.count + self.long.count + self._aside.count

    @property
    def is_still(self) -> bool:
        """Whether nothing waits that may run. Cheap: this is asked with every answer."""
        return not (self.normal.count or self._confined.count or self.begun.count or self.long.count)

    @property
    def aside(self) -> Request | None:
        """The first of those that do not run before they are admitted."""
        return self._aside.first if self._aside.count else None

    def full(self, request: Request, count: int) -> str:
        """Return why there is no room for one more request beside so many, or ""."""
        nbytes = sum(queue.nbytes for queue in self._queues)
        if count >= self._max_queue:
            return f"{count} requests wait already, the bound is {self._max_queue}"
        if nbytes + request.nbytes > self._max_queue_bytes:
            bound = f"the bound of {self._max_queue_bytes}"
            return f"{nbytes} bytes wait already, {request.nbytes} more are over {bound}"
        return ""

    # --- within -------------------------------------------------------------------------------------------------

    @property
    def _apart(self) -> list[ByTenant]:
        return [queue for queue in self._queues if isinstance(queue, ByTenant)]

    def _of(self, tenant: Tenant) -> list[Waiting]:
        """What waits of a tenant and may run, in the order of `_queues`."""
        return [queue.of(tenant) for queue in self._apart[:4]]

    def _set_apart(self, tenant: Tenant, is_long: Callable[[Request], bool]) -> None:
        while (queues := self._of(tenant))[0].count and is_long(request := queues[0].first):
            self.normal.remove(request)
            long = queues[3]
            if long.count and turn(request) < turn(long.first):
                self.long.put_back([request])
            else:
                self.long.append(request)

    def _amount(self, tenant: Tenant, *, is_many: bool) -> int:
        queues = [queue.of(tenant) for queue in self._apart]
        return sum(queue.count if is_many else queue.nbytes for queue in queues)

    def _gives_way(self, request: Request, *, is_many: bool) -> tuple[Queued, Request] | None:
        amounts = {each: self._amount(each, is_many=is_many) for each in self.tenants}
        amounts[request.tenant] = amounts.get(request.tenant, 0) + (1 if is_many else request.nbytes)
        of_most = sorted(amounts, key=lambda each: (amounts[each] / each.config.weight, each is request.tenant))
        for largest in reversed(of_most):
            if largest is request.tenant:
                break
            newest = [(queue, each) for queue in self._apart if (each := queue.last_of(largest)) is not None]
            # Of what runs in parts some may have been done.
            evictable = [(queue, each) for queue, each in newest if queue is not self.begun or not each.begun]
            if evictable:
                return max(evictable, key=lambda pair: pair[1].number)
        return None

    def _queue_of(self, request: Request) -> Queued:
        if request.company is Company.CONFINED:
            return self._confined
        return self.begun if request.number in self.cuts else self.normal

    def _whole(self, normal: _Q, confined: _Q, tenant: Tenant | None = None) -> _Q | None:
        if not confined.count or self._runs_confined(tenant):
            return normal if normal.count else None
        return normal if normal.count and turn(normal.first) < turn(confined.first) else confined


def _with_long(whole: _Q | None, begun: _Q, long: _Q, *, was_part: bool) -> Iterator[tuple[_Q, Request]]:
    """Yield what `_turns` does, and the first of the long requests, wherever its turn is."""
    if not long.count:
        return _turns(whole, begun, was_part=was_part)
    if whole is None:
        return _turns(long, begun, was_part=was_part)
    first, second = (long, whole) if turn(long.first) < turn(whole.first) else (whole, long)
    return itertools.chain(_turns(first, begun, was_part=was_part), [(second, second.first)])


def _turns(whole: _Q | None, begun: _Q, *, was_part: bool) -> Iterator[tuple[_Q, Request]]:
    """Yield what runs next of the first of a queue, and of what has begun."""
    several = ((begun, request) for request in itertools.islice(begun, _MOST_BEGUN))
    if whole is None:
        yield from several
    elif not begun.count or _goes_before(begun.first, whole.first, was_part=was_part):
        yield whole, whole.first
        yield from several
    else:
        yield from several
        yield whole, whole.first


def _goes_before(begun: Request, request: Request, *, was_part: bool) -> bool:
    return _precedes(request, begun) or (was_part and not _precedes(begun, request))


def _precedes(one: Request, other: Request) -> bool:
    """Whether one goes before another because of its priority."""
    return one.level < other.level and turn(one) < turn(other)
