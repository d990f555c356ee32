"""Which request runs on which worker, and when: the queue of one model.

First come, first served, among the workers that have credit. A worker that is quick has credit for two requests: one
runs and one is ready, so it never waits for the daemon between two. One that computes for long has nothing ready, and
what waits behind it is taken back: no request waits for one worker while another is free. Plain decisions, fed with
the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from weightd.daemon.request import Request
from weightd.protocol.errors import DeadlineExceeded, Internal, RequestError, ResourceExhausted

CREDIT = 2

# A request that two workers died of is held to be the cause.
MAX_DEATHS = 2

# A worker that has computed for longer than this gets nothing ahead: handing it the next request then costs it less
# than a hundredth of its time (a round trip is a fraction of a millisecond, one with 8 MiB a few).
QUICK_S = 0.25

# A hint to try again sooner would only bring the next refusal.
_LEAST_RETRY_S = 0.01

# How much of the mean of durations the latest one makes.
_LATEST = 0.1


@dataclass(eq=False, slots=True)
class _Worker:
    """What a worker has, in the order in which it got it: it runs the first, since `since`."""

    has: dict[int, Request] = field(default_factory=dict[int, Request])
    since: float = 0.0
    credit: int = CREDIT


class Scheduler:
    """The queue of one model.

    Args:
        max_queue: requests that may wait.
        max_queue_bytes: tensor bytes that may wait.
        predict_timeout: seconds after which a worker that computes is held to hang.
    """

    def __init__(self, max_queue: int, max_queue_bytes: int, predict_timeout: float = float("inf")) -> None:
        self._max_queue = max_queue
        self._max_queue_bytes = max_queue_bytes
        self._predict_timeout = predict_timeout
        self._queue: deque[Request] = deque()
        self._queued_bytes = 0
        self._workers: dict[str, _Worker] = {}
        # Those that take requests. One that is not among them gets nothing new but may still answer.
        self._enlisted: dict[str, _Worker] = {}
        # No outstanding request has an earlier deadline than this.
        self._earliest = float("inf")
        # No worker has computed for too long before this.
        self._look = float("inf")
        self._recalled: list[tuple[str, int]] = []
        # Their deadline had passed when it was their turn: `expire` tells.
        self._late: list[Request] = []
        self._mean_s = 0.0

    # --- events -------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Put a request into the queue.

        Raises:
            ResourceExhausted: the queue is full.
        """
        if len(self._queue) >= self._max_queue:
            raise self._full(f"{len(self._queue)} requests wait already, the bound is {self._max_queue}")
        if self._queued_bytes + request.nbytes > self._max_queue_bytes and self._queue:
            raise self._full(
                f"{self._queued_bytes} bytes wait already, {request.nbytes} more are over the bound of "
                f"{self._max_queue_bytes}"
            )
        self._queue.append(request)
        self._queued_bytes += request.nbytes
        self._earliest = min(self._earliest, request.deadline)

    def enlist(self, worker: str) -> None:
        """The worker takes requests from now on."""
        self._enlisted[worker] = self._workers.setdefault(worker, _Worker())

    def dismiss(self, worker: str) -> None:
        """The worker gets nothing new; it may still answer what it has."""
        self._enlisted.pop(worker, None)

    def finish(self, name: str, number: int, now: float) -> Request | None:
        """The worker has answered; return the request, or None if nobody waits for this answer any more."""
        worker = self._workers.get(name)
        request = worker.has.pop(number, None) if worker is not None else None
        if worker is None or request is None:
            return None
        took = now - worker.since
        worker.since = now
        worker.credit = CREDIT if took < QUICK_S else 1
        self._mean_s += _LATEST * (took - self._mean_s)
        return None if request.answered else request

    def release(self, name: str) -> None:
        """The worker leaves of itself: what it has not answered waits again, at the head of the queue."""
        self._requeue(self._remove(name))

    def lost(self, name: str, how: str = "") -> list[tuple[Request, RequestError]]:
        """The worker is dead: what it had waits again, but for a request that has now killed too many.

        A worker runs one request at a time, in the order in which it got them: it died of the first. The others
        only waited in its socket, and are not blamed.
        """
        for request in list(self._has(name))[:1]:
            request.deaths += 1
        had = self._remove(name)
        self._requeue([request for request in had if request.deaths < MAX_DEATHS])
        words = f", the last one {how}" if how else ""
        return [
            (request, Internal(f"request {request.id} was on {request.deaths} workers when they died{words}"))
            for request in had
            if request.deaths >= MAX_DEATHS
        ]

    def assign(self, now: float) -> Iterator[tuple[str, Request]]:
        """Yield each pair of worker and request that is due now; what is yielded is running."""
        while self._queue:
            name = self._freest(now)
            if name is None:
                return
            request = self._queue.popleft()
            self._queued_bytes -= request.nbytes
            if request.deadline <= now:
                self._late.append(request)
                continue
            worker = self._enlisted[name]
            if worker.has:
                self._look = min(self._look, worker.since + QUICK_S)
            else:
                worker.since = now
                self._look = min(self._look, now + self._predict_timeout)
            worker.has[request.number] = request
            yield name, request

    def expire(self, now: float) -> list[tuple[Request, RequestError]]:
        """Give up each request whose deadline has passed; a late answer to it will find nobody."""
        if now < self._earliest:
            return []
        late, self._late = self._late, []
        ended = [(request, False) for request in late] + self.end(lambda request: request.deadline <= now)
        self._earliest = min((request.deadline for request in self._outstanding()), default=float("inf"))
        return [
            (request, DeadlineExceeded(f"was {'running' if ran else 'waiting in the queue'} at its deadline"))
            for request, ran in ended
        ]

    def end(self, unfit: Callable[[Request], bool]) -> list[tuple[Request, bool]]:
        """Take out each request that is `unfit`, wherever it is.

        What a worker runs cannot be stopped: its credit comes back when it answers, and then nobody waits for that.

        Returns:
            The requests, each with whether a worker is running it.
        """
        ended = [(request, False) for request in self.withdraw(unfit)]
        for name, worker in self._workers.items():
            for position, request in enumerate(list(worker.has.values())):
                if request.answered or not unfit(request):
                    continue
                if position:
                    self._recall(name, request)
                else:
                    request.answered = True
                ended.append((request, not position))
        return ended

    def overdue(self, now: float) -> list[tuple[str, Request]]:
        """Take out the workers that have computed for too long, each with what it runs.

        What they had ahead waits again; what waits behind a request that only runs long is taken back, too.
        """
        if now < self._look:
            return []
        hung: list[tuple[str, Request]] = []
        for name, worker in list(self._workers.items()):
            requests = list(worker.has.values())
            if not requests:
                continue
            if now >= worker.since + self._predict_timeout:
                hung.append((name, requests[0]))
                worker.has.pop(requests[0].number)
                self._requeue(self._remove(name))
            elif now >= worker.since + QUICK_S and len(requests) > 1:
                for request in requests[1:]:
                    self._recall(name, request)
                self._requeue(requests[1:])
        self._look = min((self._due(worker) for worker in self._workers.values()), default=float("inf"))
        return hung

    def withdraw(self, unfit: Callable[[Request], bool]) -> list[Request]:
        """Return the requests that wait and are `unfit`, and forget them."""
        withdrawn = [request for request in self._queue if unfit(request)]
        if withdrawn:
            gone = {request.number for request in withdrawn}
            self._queue = deque(request for request in self._queue if request.number not in gone)
            self._queued_bytes -= sum(request.nbytes for request in withdrawn)
        return withdrawn

    def give_up(self) -> list[Request]:
        """Return every request that waits, or has waited until its deadline, and forget it."""
        late, self._late = self._late, []
        return late + self.withdraw(lambda _: True)

    def take_recalled(self) -> list[tuple[str, int]]:
        """Return what workers have in vain, by name and number, so that they need not begin with it; and forget it."""
        recalled, self._recalled = self._recalled, []
        return recalled

    # --- what it tells ------------------------------------------------------------------------------------------

    def waiting(self) -> Iterator[Request]:
        """Yield the requests that wait, first come first."""
        yield from self._queue

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._queue and not self._late and not any(worker.has for worker in self._workers.values())

    @property
    def next_event(self) -> float:
        """No request and no worker is due for `expire` or `overdue` before this (monotonic seconds)."""
        return min(self._earliest, self._look)

    def in_flight(self, name: str) -> int:
        """Requests that the worker has."""
        return sum(1 for _ in self._has(name))

    # --- within -------------------------------------------------------------------------------------------------

    def _freest(self, now: float) -> str | None:
        """The worker with the least to do that has credit, the first of them; None if no worker has any."""
        freest, least = None, CREDIT
        for name, worker in self._enlisted.items():
            load = len(worker.has)
            if load < least and (not load or (load < worker.credit and now < worker.since + QUICK_S)):
                freest, least = name, load
                if not least:
                    break
        return freest

    def _full(self, text: str) -> ResourceExhausted:
        """The queue has moved on by one place for each worker after the time that a request takes."""
        seconds = self._mean_s * len(self._queue) / max(1, len(self._enlisted))
        return ResourceExhausted(text, retry_after=max(seconds, _LEAST_RETRY_S))

    def _due(self, worker: _Worker) -> float:
        if not worker.has:
            return float("inf")
        return worker.since + (QUICK_S if len(worker.has) > 1 else self._predict_timeout)

    def _outstanding(self) -> Iterator[Request]:
        yield from self._queue
        for worker in self._workers.values():
            yield from (each for each in worker.has.values() if not each.answered)

    def _has(self, name: str) -> Iterator[Request]:
        worker = self._workers.get(name)
        yield from () if worker is None else worker.has.values()

    def _recall(self, name: str, request: Request) -> None:
        del self._workers[name].has[request.number]
        self._recalled.append((name, request.number))

    def _remove(self, name: str) -> list[Request]:
        had = [each for each in self._has(name) if not each.answered]
        self.dismiss(name)
        self._workers.pop(name, None)
        return had

    def _requeue(self, requests: Sequence[Request]) -> None:
        self._queue.extendleft(reversed(requests))
        self._queued_bytes += sum(request.nbytes for request in requests)
