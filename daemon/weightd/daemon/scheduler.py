"""Which request runs on which worker, and when: the queue of one model.

First come, first served, among the workers that have credit. A worker holds at most `CREDIT` requests: one runs and
one is ready, so it never waits for the daemon between two. Plain decisions, fed with the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weightd.protocol.errors import DeadlineExceeded, Internal, RequestError, ResourceExhausted
from weightd.protocol.messages import TensorSpec

CREDIT = 2

# A request that two workers died of is held to be the cause.
MAX_DEATHS = 2


@dataclass(eq=False, slots=True)
class Request:
    """An accepted request. Times are monotonic seconds; `frames` are the tensors' bytes, never looked at."""

    number: int
    client: bytes
    id: str
    model_name: str
    inputs: Sequence[TensorSpec]
    frames: Sequence[Any]
    arrived: float
    deadline: float
    nbytes: int
    deaths: int = 0
    answered: bool = False


class Scheduler:
    """The queue of one model.

    Args:
        max_queue: requests that may wait.
        max_queue_bytes: tensor bytes that may wait.
    """

    def __init__(self, max_queue: int, max_queue_bytes: int) -> None:
        self._max_queue = max_queue
        self._max_queue_bytes = max_queue_bytes
        self._queue: deque[Request] = deque()
        self._queued_bytes = 0
        # What each worker has. A worker that is not enlisted gets nothing new but may still answer.
        self._running: dict[str, dict[int, Request]] = {}
        self._enlisted: dict[str, dict[int, Request]] = {}
        # No outstanding request has an earlier deadline than this.
        self._earliest = float("inf")

    # --- events -------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Put a request into the queue.

        Raises:
            ResourceExhausted: the queue is full.
        """
        if len(self._queue) >= self._max_queue:
            raise ResourceExhausted(f"{len(self._queue)} requests wait already, the bound is {self._max_queue}")
        if self._queued_bytes + request.nbytes > self._max_queue_bytes and self._queue:
            raise ResourceExhausted(
                f"{self._queued_bytes} bytes wait already, {request.nbytes} more are over the bound of "
                f"{self._max_queue_bytes}"
            )
        self._queue.append(request)
        self._queued_bytes += request.nbytes
        self._earliest = min(self._earliest, request.deadline)

    def enlist(self, worker: str) -> None:
        """The worker takes requests from now on."""
        self._enlisted[worker] = self._running.setdefault(worker, {})

    def dismiss(self, worker: str) -> None:
        """The worker gets nothing new; it may still answer what it has."""
        self._enlisted.pop(worker, None)

    def finish(self, worker: str, number: int) -> Request | None:
        """The worker has answered; return the request, or None if nobody waits for this answer any more."""
        request = self._running.get(worker, {}).pop(number, None)
        return None if request is None or request.answered else request

    def release(self, worker: str) -> None:
        """The worker leaves of itself: what it has not answered waits again, at the head of the queue."""
        self._requeue(self._remove(worker))

    def lost(self, worker: str) -> list[tuple[Request, RequestError]]:
        """The worker is dead: what it had waits again, but for a request that has now killed too many.

        A worker runs one request at a time, in the order in which it got them: it died of the first. The others
        only waited in its socket, and are not blamed.
        """
        for request in list(self._running.get(worker, {}).values())[:1]:
            request.deaths += 1
        had = self._remove(worker)
        self._requeue([request for request in had if request.deaths < MAX_DEATHS])
        return [
            (request, Internal(f"the request killed {request.deaths} workers"))
            for request in had
            if request.deaths >= MAX_DEATHS
        ]

    def assign(self) -> Iterator[tuple[str, Request]]:
        """Yield each pair of worker and request that is due now; what is yielded is running."""
        while self._queue:
            worker = self._freest()
            if worker is None:
                return
            request = self._queue.popleft()
            self._queued_bytes -= request.nbytes
            self._enlisted[worker][request.number] = request
            yield worker, request

    def expire(self, now: float) -> list[tuple[Request, RequestError]]:
        """Give up each request whose deadline has passed; a late answer to it will find nobody."""
        if now < self._earliest:
            return []
        queued = self.withdraw(lambda request: request.deadline <= now)
        running = [request for request in self._unanswered() if request.deadline <= now]
        for request in running:
            # The worker is busy with it all the same: its credit comes back when it answers.
            request.answered = True
        self._earliest = min(
            (request.deadline for request in (*self._queue, *self._unanswered())), default=float("inf")
        )
        return [
            *((request, DeadlineExceeded("waited in the queue until its deadline")) for request in queued),
            *((request, DeadlineExceeded("was running at its deadline")) for request in running),
        ]

    def withdraw(self, unfit: Callable[[Request], bool]) -> list[Request]:
        """Return the requests that wait and are `unfit`, and forget them."""
        withdrawn = [request for request in self._queue if unfit(request)]
        if withdrawn:
            gone = {request.number for request in withdrawn}
            self._queue = deque(request for request in self._queue if request.number not in gone)
            self._queued_bytes -= sum(request.nbytes for request in withdrawn)
        return withdrawn

    def give_up(self) -> list[Request]:
        """Return every request that waits, and forget it."""
        return self.withdraw(lambda _: True)

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
        return not self._queue and not any(self._running.values())

    @property
    def next_deadline(self) -> float:
        """No request is due to expire before this (monotonic seconds)."""
        return self._earliest

    def in_flight(self, worker: str) -> int:
        """Requests that the worker has."""
        return len(self._running.get(worker, ()))

    def _freest(self) -> str | None:
        """The worker with the most credit left, the first of them; None if no worker has any."""
        freest, least = None, CREDIT
        for worker, running in self._enlisted.items():
            if len(running) < least:
                freest, least = worker, len(running)
                if not least:
                    break
        return freest

    def _unanswered(self) -> list[Request]:
        return [each for had in self._running.values() for each in had.values() if not each.answered]

    def _remove(self, worker: str) -> list[Request]:
        self.dismiss(worker)
        return [each for each in self._running.pop(worker, {}).values() if not each.answered]

    def _requeue(self, requests: Sequence[Request]) -> None:
        self._queue.extendleft(reversed(requests))
        self._queued_bytes += sum(request.nbytes for request in requests)
