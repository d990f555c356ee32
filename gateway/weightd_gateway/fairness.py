"""Fairness between callers: how many requests, bytes and connections each has, and whose turn it is. Pure: no I/O."""

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
    """A queue from which the item of the user with the fewest seconds comes first.

    A user that had no item in the queue starts with as many seconds as the user of the latest item, so that nobody
    saves up seconds while idle.
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
        """Remove and return the next item and its user; of users with equal seconds, the one that waits longest."""
        user = min(self._waiting, key=self._used_s.__getitem__)
        items = self._waiting.pop(user)
        item = items.popleft()
        if items:
            self._waiting[user] = items
        self._virtual_time = self._used_s[user]
        return user, item

    def charge(self, user: Hashable, seconds: float) -> None:
        """Count seconds that an item of a user took."""
        self._used_s[user] = self._used_s.get(user, self._virtual_time) + seconds
        self._used_s = {
            each: used for each, used in self._used_s.items() if used > self._virtual_time or each in self._waiting
        }

    def clear(self) -> list[T]:
        """Remove and return all items."""
        items = [item for each in self._waiting.values() for item in each]
        self._waiting.clear()
        return items


# Of what would still be free: who is alone has three quarters of all, and each of two has three sevenths.
_MAX_TIMES_FREE = 3


class FairLimit:
    """Counts who has how many.

    Tenants are told apart, and those who ask for the gateway itself by their names; None is whoever asks.

    Args:
        limit: places.

    Attributes:
        in_use: how many are somebody's.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count_by_caller: Counter[str | Caller] = Counter()
        self.in_use = 0

    def take(self, caller: Caller | str | None, count: int = 1, held: int = 0) -> bool:
        """Have so many more, if they are to be had; return whether they were.

        The first of a caller are if any are, and those that come to `held`, which are all that it has.
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
        """Have so many fewer."""
        self.in_use -= count
        if caller is not None:
            key = caller if isinstance(caller, str) else caller.tenant or caller
            self._count_by_caller[key] -= count
            if not self._count_by_caller[key]:
                del self._count_by_caller[key]


# A guess: by then some of what is under way has been answered.
_RETRY_S = 1.0


class AdmissionControl:
    """Requests that are received or answered.

    Args:
        max_requests: of them; how many each caller may have of that is for `FairLimit` to say, as of the bytes.
        max_bytes: of all of them.

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
        """How many there are."""
        return self._request_limit.in_use

    @property
    def reserved_bytes(self) -> int:
        """How many bytes are kept of all of them."""
        return self._byte_limit.in_use

    @contextlib.contextmanager
    def admit(self, caller: Caller | None) -> Generator[Permit, None, None]:
        """Have a request under way within the block; None: of whoever asks.

        Raises:
            ResourceExhausted: there are as many as there may be.
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
        """Return a permit of an answer with so many bytes, which outlasts that of its request: until `Permit.release`.

        Raises:
            TooLarge: there will never be room for them.
            ResourceExhausted: there is none now.
        """
        permit = Permit(self._byte_limit, self._max_bytes, caller)
        permit.reserve(nbytes)
        return permit


class Permit:
    """A request that is under way.

    Args:
        byte_limit: of bytes.
        max_bytes: bytes.
        caller: whose request it is.
    """

    def __init__(self, byte_limit: FairLimit, max_bytes: int, caller: Caller | None) -> None:
        self._byte_limit = byte_limit
        self._max_bytes = max_bytes
        self._caller = caller
        self._nbytes = 0

    def reserve(self, nbytes: int) -> None:
        """Keep so many more bytes of the request, until its end.

        Raises:
            TooLarge: there will never be room for so many.
            ResourceExhausted: there is none now.
        """
        if self._nbytes + nbytes > self._max_bytes:
            raise TooLarge(f"expected at most {self._max_bytes} bytes of a request or an answer (max_memory_bytes)")
        if not self._byte_limit.take(self._caller, nbytes, self._nbytes):
            raise _exhausted(f"its share of {self._max_bytes} bytes of requests", "max_memory_bytes")
        self._nbytes += nbytes

    def release(self) -> None:
        """Nothing is kept of it any more."""
        self._byte_limit.release(self._caller, self._nbytes)
        self._nbytes = 0


def _exhausted(what: str, key: str) -> ResourceExhausted:
    return ResourceExhausted(f"the caller has {what} under way at this gateway ({key})", retry_after=_RETRY_S)


Work = Callable[[], None]

SLICE_S = 1e-4
"""Time of one pass of the loop for work of all peers; a piece of work that has begun is finished."""

PIPELINE_PASSES = 32
"""Passes of the loop from one request that was sent ahead to the next one. Those of others take as many."""


class PipelinedStarter:
    """Begins requests that were sent ahead one by one, in turns between peers, with passes for other work in between.

    Args:
        call_soon: calls a function in the next pass of the loop.
    """

    def __init__(self, call_soon: Callable[[Work], object]) -> None:
        self._call_soon = call_soon
        self._passes_left = 0
        self._waiting: RoundRobinQueue[Work] = RoundRobinQueue()

    def run(self, key: str, begin: Work) -> None:
        """Begin a request of a peer now, or when it is the turn of the peer."""
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
    """Runs pieces of work at once while the pass of the loop has time left, and queues them by peer otherwise.

    Args:
        call_soon: calls a function in the next pass of the loop.
        clock: tells the time in seconds.

    Attributes:
        pipelined: begins requests that were sent ahead.
    """

    def __init__(self, call_soon: Callable[[Work], object], clock: Callable[[], float]) -> None:
        self.pipelined = PipelinedStarter(call_soon)
        self._call_soon = call_soon
        self._clock = clock
        self._time_left_s = SLICE_S
        self._is_scheduled = False
        self._waiting: RoundRobinQueue[Work] = RoundRobinQueue()

    def run(self, key: str, work: Work) -> None:
        """Run a piece of work of a peer now, or when it is the turn of the peer."""
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
