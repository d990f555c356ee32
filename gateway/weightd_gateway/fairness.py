"""Fairness between callers: limits each caller's requests, bytes and connections, and decides whose work runs next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from weightd_common.rate_limits import RoundRobinQueue
from weightd_gateway.auth import Caller
from weightd_gateway.error_codes import TooLarge
from weightd_protocol.errors import ResourceExhausted

T = TypeVar("T")


class FairShareQueue(Generic[T]):
    """A queue of several users' items; `get` returns an item of the user with the least accumulated time.

    When a user without queued items adds one, the user's accumulated time is raised at least to the time of the user
    that was served last. So a user does not gain precedence by having been idle.
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
        """Remove the next item; return its user and the item.

        If several users have the least accumulated time, the one that has waited longest is next.
        """
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


# A caller may hold at most this many times the number of units that remain free. So a single caller gets three quarters
# of all units, and each of two callers three sevenths.
_MAX_TIMES_FREE = 3


class FairLimit:
    """Counts the units of a limited resource that each caller holds, and keeps one caller from taking all units.

    A caller is a `Caller`, or a peer's key as text. All callers of a tenant share one count; each caller without a
    tenant and each peer has a separate count. For the caller None, only the total of all callers is limited.

    Args:
        limit: the total number of units.

    Attributes:
        in_use: the number of units that callers hold.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count_by_caller: dict[str | Caller, int] = {}
        self.in_use = 0

    def take(self, caller: Caller | str | None, count: int = 1, held: int = 0) -> bool:
        """Take `count` units, at least 1, if the limits allow it; return whether they were taken.

        `held` is the number of units that the caller already holds for the same request. If the caller holds no units
        for other requests, only the total is limited: a caller's only request may use all free units.
        """
        free = self._limit - self.in_use - count
        if free < 0:
            return False
        if caller is not None:
            key = caller.tenant or caller if type(caller) is Caller else caller
            count_before = self._count_by_caller.get(key, 0)
            if count_before > held and count_before + count > _MAX_TIMES_FREE * free:
                return False
            self._count_by_caller[key] = count_before + count
        self.in_use += count
        return True

    def release(self, caller: Caller | str | None, count: int = 1) -> None:
        """Give back `count` units, at least 1, which the caller has taken."""
        self.in_use -= count
        if caller is not None:
            key = caller.tenant or caller if type(caller) is Caller else caller
            self._count_by_caller[key] -= count
            if not self._count_by_caller[key]:
                del self._count_by_caller[key]


# Seconds after which a rejected caller should retry. By then, some of the requests in flight have probably ended.
_RETRY_S = 1.0


class AdmissionControl:
    """Limits the requests in flight and the bytes that they occupy.

    Args:
        max_requests: maximum number of requests of all callers. `FairLimit` limits each caller's share of the requests,
            and of the bytes.
        max_bytes: maximum bytes of all requests and responses.

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

    def admit(self, caller: Caller | None) -> Permit:
        """Return a permit for a request, to be used in a `with` block. For None, only the total of all is limited.

        Raises:
            ResourceExhausted: the limit of requests, or the caller's share of it, is reached.
        """
        if not self._request_limit.take(caller):
            raise _exhausted(f"its share of {self.max_requests} requests", "max_in_flight")
        return Permit(self._byte_limit, self._max_bytes, caller, self._request_limit)

    def reserve_response(self, caller: Caller | None, nbytes: int) -> Permit:
        """Return a permit for the bytes of a response. Release the permit after the response has been sent.

        Raises:
            TooLarge: the response alone is larger than `max_bytes`.
            ResourceExhausted: other requests have reserved too many bytes at the moment.
        """
        permit = Permit(self._byte_limit, self._max_bytes, caller)
        permit.reserve(nbytes)
        return permit


class Permit:
    """Permission to process a request, or to send a response; counts the bytes that are reserved for it.

    The permit ends at the end of a `with` block.

    Args:
        byte_limit: counts the reserved bytes of all requests.
        max_bytes: maximum of the reserved bytes of all requests.
        caller: the caller of the request.
        request_limit: counts the requests, if the permit counts as one.
    """

    def __init__(
        self, byte_limit: FairLimit, max_bytes: int, caller: Caller | None, request_limit: FairLimit | None = None
    ) -> None:
        self._byte_limit = byte_limit
        self._max_bytes = max_bytes
        self._caller = caller
        self._request_limit = request_limit
        self._nbytes = 0

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def reserved_bytes(self) -> int:
        """The number of bytes that are reserved."""
        return self._nbytes

    def reserve(self, nbytes: int) -> None:
        """Reserve further bytes until `release`.

        Raises:
            TooLarge: the request alone needs more than `max_bytes`.
            ResourceExhausted: other requests have reserved too many bytes at the moment.
        """
        if self._nbytes + nbytes > self._max_bytes:
            raise TooLarge(f"expected a request or response of at most {self._max_bytes} bytes (max_memory_bytes)")
        if nbytes and not self._byte_limit.take(self._caller, nbytes, self._nbytes):
            raise _exhausted(f"its share of {self._max_bytes} bytes of requests", "max_memory_bytes")
        self._nbytes += nbytes

    def release(self) -> None:
        """Release all bytes of the permit."""
        if self._nbytes:
            self._byte_limit.release(self._caller, self._nbytes)
            self._nbytes = 0

    def end(self) -> None:
        """Release all bytes of the permit, and its place among the requests. Further calls have no effect."""
        request_limit, self._request_limit = self._request_limit, None
        if request_limit is not None:
            request_limit.release(self._caller)
        self.release()


def _exhausted(what: str, key: str) -> ResourceExhausted:
    return ResourceExhausted(f"the caller has reached {what} at this gateway ({key})", retry_after=_RETRY_S)


Work = Callable[[], None]

SLICE_S = 1e-3
"""Seconds that `FairRunner` spends on work in one pass of the event loop. Work that has begun is not interrupted."""

PIPELINE_PASSES = 32
"""Number of passes of the event loop between the starts of two pipelined requests, so that other requests get time."""


class PipelinedStarter:
    """Starts pipelined HTTP requests one at a time, in turns between peers, every `PIPELINE_PASSES` passes.

    Args:
        call_soon: schedules a function for the next pass of the event loop.
    """

    def __init__(self, call_soon: Callable[[Work], object]) -> None:
        self._call_soon = call_soon
        self._passes_left = 0
        self._waiting: RoundRobinQueue[Work] = RoundRobinQueue()

    def run(self, key: str, begin: Work) -> None:
        """Start a request of a peer now or, if another request was started recently, at the peer's turn."""
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
    """Runs work immediately for up to `SLICE_S` seconds in each pass of the event loop; queues further work by peer.

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
        """Run work of a peer now or, if this pass of the event loop has no time left, at the peer's turn."""
        if self._is_scheduled:
            self._waiting.put(key, work)
        else:
            self._run_timed(work)

    def _on_pass(self) -> None:
        self._is_scheduled = False
        self._time_left_s = SLICE_S
        try:
            while self._waiting and self._time_left_s > 0.0:
                self._run_timed(self._waiting.take())
        finally:
            if self._waiting:
                self._schedule()

    def _schedule(self) -> None:
        """Let further work wait for the next pass. An unneeded pass would cost more than parsing a request."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(self._on_pass)

    def _run_timed(self, work: Work) -> None:
        started_at = self._clock()
        try:
            work()
        finally:
            self._time_left_s -= self._clock() - started_at
            if self._time_left_s <= 0.0:
                self._schedule()
