"""Fairness between callers: limits on requests, bytes and connections, and the order of work. Pure: no I/O."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable
from typing import Generic, TypeVar

from weightd_common.rate_limits import RoundRobinQueue
from weightd_gateway.auth import Caller
from weightd_gateway.error_codes import TooLarge
from weightd_protocol.errors import ResourceExhausted

T = TypeVar("T")


class FairShareQueue(Generic[T]):
    """A queue that returns the item of the user with the least accumulated time first.

    A user without items in the queue resumes with at least the accumulated time of the user that was served last, so
    that an idle user cannot save up time.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[T]] = {}
        self._used_s: dict[Hashable, float] = {}
        self._virtual_time = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, user: Hashable, item: T) -> None:
        """Append an item of a user."""
        if user not in self._waiting:
            self._waiting[user] = deque()
            self._used_s[user] = max(self._used_s.get(user, 0.0), self._virtual_time)
        self._waiting[user].append(item)

    def get(self) -> tuple[Hashable, T]:
        """Remove and return the next item and its user; of users with equal time, the one that has waited longest."""
        user = min(self._waiting, key=self._used_s.__getitem__)
        items = self._waiting.pop(user)
        item = items.popleft()
        if items:
            self._waiting[user] = items
        self._virtual_time = self._used_s[user]
        return user, item

    def charge(self, user: Hashable, seconds: float) -> None:
        """Add the seconds that an item took to the user's accumulated time."""
        self._used_s[user] = self._used_s.get(user, self._virtual_time) + seconds
        self._used_s = {
            each: used for each, used in self._used_s.items() if used > self._virtual_time or each in self._waiting
        }

    def clear(self) -> list[T]:
        """Remove and return all items."""
        items = [item for each in self._waiting.values() for item in each]
        self._waiting.clear()
        return items


# A caller may hold at most three times what remains free: a single caller three quarters, each of two three sevenths.
_MAX_TIMES_FREE = 3


class FairLimit:
    """Counts units of a limited resource by caller, and keeps one caller from taking all of them.

    Callers of the same tenant share one count. A caller without a tenant has a separate count, as does a peer, given
    by its key. For None only the total is limited.

    Args:
        limit: units in total.

    Attributes:
        in_use: units that are taken.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count_by_caller: Counter[str | Caller] = Counter()
        self.in_use = 0

    def take(self, caller: Caller | str | None, count: int = 1, held: int = 0) -> bool:
        """Take `count` units if the limits allow it; return whether they were taken.

        While the caller holds at most `held` units, only the total is limited, so that its first request can always
        proceed.
        """
        free = self._limit - self.in_use - count
        if free < 0:
            return False
        if caller is not None:
            key = caller if isinstance(caller, str) else caller.tenant or caller
            count_before = self._count_by_caller[key]
            if count_before > held and count_before + count > _MAX_TIMES_FREE * free:
                return False
            self._count_by_caller[key] = count_before + count
        self.in_use += count
        return True

    def release(self, caller: Caller | str | None, count: int = 1) -> None:
        """Return `count` units."""
        self.in_use -= count
        if caller is not None:
            key = caller if isinstance(caller, str) else caller.tenant or caller
            self._count_by_caller[key] -= count
            if not self._count_by_caller[key]:
                del self._count_by_caller[key]


# A guess of when some of the requests in flight will have ended.
_RETRY_S = 1.0


class AdmissionControl:
    """Limits the requests in flight and the bytes that they occupy.

    Args:
        max_requests: requests of all callers; `FairLimit` bounds each caller's part of them, and of the bytes.
        max_bytes: bytes of all requests and responses.

    Attributes:
        max_requests: as above.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.max_requests = max_requests
        self._max_bytes = max_bytes
        self._request_limit = FairLimit(max_requests)
        self._byte_limit = FairLimit(max_bytes)

    @property
    def in_flight(self) -> int:
        """Number of requests in flight."""
        return self._request_limit.in_use

    @property
    def reserved_bytes(self) -> int:
        """Number of bytes that are reserved for requests and responses."""
        return self._byte_limit.in_use

    @contextlib.contextmanager
    def admit(self, caller: Caller | None) -> Generator[Permit, None, None]:
        """Hold a request permit within the block; with None, no caller's share applies.

        Raises:
            ResourceExhausted: the limit of requests, or the caller's share of it, is reached.
        """
        if not self._request_limit.take(caller):
            raise _exhausted(f"its share of {self.max_requests} requests", "max_in_flight")
        permit = Permit(self._byte_limit, self._max_bytes, caller)
        try:
            yield permit
        finally:
            self._request_limit.release(caller)
            permit.release()

    def reserve_response(self, caller: Caller | None, nbytes: int) -> Permit:
        """Return a permit for the bytes of a response. It outlasts the request and is held until `Permit.release`.

        Raises:
            TooLarge: the response exceeds the limit for all responses.
            ResourceExhausted: the bytes are in use at the moment.
        """
        permit = Permit(self._byte_limit, self._max_bytes, caller)
        permit.reserve(nbytes)
        return permit


class Permit:
    """A request in flight and the bytes that are reserved for it.

    Args:
        byte_limit: the limit of bytes of all requests.
        max_bytes: the total of that limit.
        caller: the caller of the request.
    """

    def __init__(self, byte_limit: FairLimit, max_bytes: int, caller: Caller | None) -> None:
        self._byte_limit = byte_limit
        self._max_bytes = max_bytes
        self._caller = caller
        self._nbytes = 0

    def reserve(self, nbytes: int) -> None:
        """Reserve further bytes until `release`.

        Raises:
            TooLarge: the request exceeds the limit for all requests.
            ResourceExhausted: the bytes are in use at the moment.
        """
        if self._nbytes + nbytes > self._max_bytes:
            raise TooLarge(f"expected a request or response of at most {self._max_bytes} bytes (max_memory_bytes)")
        if not self._byte_limit.take(self._caller, nbytes, self._nbytes):
            raise _exhausted(f"its share of {self._max_bytes} bytes of requests", "max_memory_bytes")
        self._nbytes += nbytes

    def release(self) -> None:
        """Release all bytes of the permit."""
        self._byte_limit.release(self._caller, self._nbytes)
        self._nbytes = 0


def _exhausted(what: str, key: str) -> ResourceExhausted:
    return ResourceExhausted(f"the caller has reached {what} at this gateway ({key})", retry_after=_RETRY_S)


Work = Callable[[], None]

SLICE_S = 1e-4
"""Time that one pass of the event loop spends on the work of all peers. Work that has begun is not interrupted."""

PIPELINE_PASSES = 32
"""Passes of the event loop between the starts of two pipelined requests, which leaves time for other requests."""


class PipelinedStarter:
    """Starts pipelined requests one at a time, in turns between peers, with passes for other work in between.

    Args:
        call_soon: schedules a function for the next pass of the event loop.
    """

    def __init__(self, call_soon: Callable[[Work], object]) -> None:
        self._call_soon = call_soon
        self._passes_left = 0
        self._waiting: RoundRobinQueue[Work] = RoundRobinQueue()

    def run(self, key: str, begin: Work) -> None:
        """Start a request of a peer now or, if another one was started recently, at the peer's turn."""
        self._waiting.put(key, begin)
        if not self._passes_left:
            self._begin_next()

    def _begin_next(self) -> None:
        if not self._waiting:
            return
        begin = self._waiting.take()
        self._passes_left = PIPELINE_PASSES
        self._call_soon(self._on_pass)
        begin()

    def _on_pass(self) -> None:
        self._passes_left -= 1
        if self._passes_left:
            self._call_soon(self._on_pass)
        else:
            self._begin_next()


class FairRunner:
    """Runs work immediately while the current pass of the event loop has time left; otherwise queues it by peer.

    Args:
        call_soon: schedules a function for the next pass of the event loop.
        clock: returns the time in seconds.

    Attributes:
        pipelined: starts pipelined requests.
    """

    def __init__(self, call_soon: Callable[[Work], object], clock: Callable[[], float]) -> None:
        self.pipelined = PipelinedStarter(call_soon)
        self._call_soon = call_soon
        self._clock = clock
        self._time_left_s = SLICE_S
        self._is_scheduled = False
        self._waiting: RoundRobinQueue[Work] = RoundRobinQueue()

    def run(self, key: str, work: Work) -> None:
        """Run work of a peer now or, if the pass has no time left, at the peer's turn."""
        if self._waiting or self._time_left_s <= 0.0:
            self._waiting.put(key, work)
        else:
            self._run_timed(work)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(self._on_pass)

    def _on_pass(self) -> None:
        self._is_scheduled = False
        self._time_left_s = SLICE_S
        try:
            while self._waiting and self._time_left_s > 0.0:
                self._run_timed(self._waiting.take())
        finally:
            if self._waiting and not self._is_scheduled:
                self._is_scheduled = True
                self._call_soon(self._on_pass)

    def _run_timed(self, work: Work) -> None:
        started_at = self._clock()
        try:
            work()
        finally:
            self._time_left_s -= self._clock() - started_at
