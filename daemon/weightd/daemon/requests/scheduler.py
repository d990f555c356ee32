"""Which request runs on which worker, and when: the queue of one model.

First come, first served, among the workers that have credit. A worker that is quick has credit for two requests: one
runs and one is ready, so it never waits for the daemon between two. One that computes for long has nothing ready, and
what waits behind it is taken back: no request waits for one worker while another is free. Requests of clients under
suspicion (`suspects`) are confined: one of them is with a worker at a time, and nothing waits behind it there. Plain
decisions, fed with the clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from weightd.daemon.requests.request import Request
from weightd.daemon.requests.waiting import Queue
from weightd.protocol.errors import DeadlineExceeded, RequestError, ResourceExhausted

CREDIT = 2

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

    @property
    def has_confined(self) -> bool:
        return any(request.confined for request in self.has.values())

    @property
    def has_one_alone(self) -> bool:
        return any(request.confined or request.alone for request in self.has.values())


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
        self._queue = Queue()
        self._confined = Queue()
        # What is looked at before it may run.
        self._aside = Queue()
        self._queues = (self._queue, self._confined, self._aside)
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
        # Of an answer; None before the first.
        self._mean_s: float | None = None

    # --- events -------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float, *, aside: bool = False) -> None:
        """Put a request into the queue; `aside`: it does not run before it is admitted.

        Raises:
            ResourceExhausted: the queue is full.
        """
        queued, nbytes = self.queued, self._queue.nbytes + self._confined.nbytes + self._aside.nbytes
        if queued >= self._max_queue:
            raise self._full(f"{queued} requests wait already, the bound is {self._max_queue}", now)
        if nbytes + request.nbytes > self._max_queue_bytes and queued:
            bound = f"the bound of {self._max_queue_bytes}"
            raise self._full(f"{nbytes} bytes wait already, {request.nbytes} more are over {bound}", now)
        (self._aside if aside else self._queue_of(request)).append(request)
        self._earliest = min(self._earliest, request.deadline)

    def set_aside(self, chosen: Callable[[Request], bool]) -> list[Request]:
        """Have what waits and is `chosen` not run before it is admitted; return it."""
        chosen_ones = [request for queue in (self._queue, self._confined) for request in queue.withdraw(chosen)]
        for request in chosen_ones:
            self._aside.append(request)
        return chosen_ones

    def admit(self, request: Request) -> None:
        """What was put aside may run; one that has ended meanwhile stays ended."""
        if request in self._aside:
            self._aside.remove(request)
            self._queue_of(request).append(request)

    def confine(self, chosen: Callable[[Request], bool]) -> None:
        """Have what is `chosen` run one at a time: what waits, and what is with a worker if it has to run again."""
        for request in filter(chosen, self._outstanding()):
            request.confined = True
        for request in self._queue.withdraw(chosen):
            self._confined.append(request)

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
        self._mean_s = took if self._mean_s is None else self._mean_s + _LATEST * (took - self._mean_s)
        return None if request.answered else request

    def release(self, name: str, *, but: Request | None = None) -> None:
        """The worker is gone, or as good as that: what it has not answered waits again, at the head of the queue.

        `but`: this one has ended.
        """
        self._requeue([request for request in self._remove(name) if request is not but])

    def assign(self, now: float) -> Iterator[tuple[str, Request]]:
        """Yield each pair of worker and request that is due now; what is yielded is running."""
        while (queue := self._next()) is not None:
            name = self._freest(queue.first, now)
            if name is None:
                return
            request = queue.take()
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
        return [(request, False) for request in self.withdraw(unfit)] + self._end_of_workers(unfit)

    def end_of(self, client: bytes, request_id: str | None = None) -> list[Request]:
        """Take out what the client has asked, or what it has asked under this id; nobody else's is looked at."""
        waited = [request for queue in self._queues for request in queue.withdraw_of(client, request_id)]
        ran = self._end_of_workers(lambda each: each.client == client and request_id in (None, each.id))
        return waited + [request for request, _ in ran]

    def _end_of_workers(self, unfit: Callable[[Request], bool]) -> list[tuple[Request, bool]]:
        ended: list[tuple[Request, bool]] = []
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
        return [request for queue in self._queues for request in queue.withdraw(unfit)]

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
        """Yield the requests that wait: in the order in which they run, then those that are confined or aside."""
        yield from itertools.chain(*self._queues)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return self._queue.count + self._confined.count + self._aside.count

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.queued and not self._late and not any(worker.has for worker in self._workers.values())

    @property
    def next_event(self) -> float:
        """No request and no worker is due for `expire` or `overdue` before this (monotonic seconds)."""
        return min(self._earliest, self._look)

    def has(self, name: str) -> list[Request]:
        """What the worker has, whether or not somebody waits for that: it runs the first, as far as it has told."""
        return list(self._has(name))

    def ran(self, name: str, now: float) -> float:
        """For how long the worker has computed what it runs, in seconds."""
        return now - self._workers[name].since

    @property
    def aside(self) -> Request | None:
        """The first of those that do not run before they are admitted."""
        return self._aside.first if self._aside.count else None

    def in_flight(self, name: str) -> int:
        """Requests that the worker has."""
        return sum(1 for _ in self._has(name))

    # --- within -------------------------------------------------------------------------------------------------

    def _next(self) -> Queue | None:
        """The queue whose turn it is: the one whose first request has come first."""
        queue, confined = self._queue, self._confined
        if not confined.count or any(worker.has_confined for worker in self._workers.values()):
            return queue if queue.count else None
        return queue if queue.count and queue.first.number < confined.first.number else confined

    def _queue_of(self, request: Request) -> Queue:
        return self._confined if request.confined else self._queue

    def _freest(self, request: Request, now: float) -> str | None:
        """The worker with the least to do that has credit, the first of them; None if no worker has any."""
        freest, least = None, CREDIT
        for name, worker in self._enlisted.items():
            load = len(worker.has)
            if load < least and (not load or self._takes_another(worker, request, now)):
                freest, least = name, load
                if not least:
                    break
        return freest

    def _takes_another(self, worker: _Worker, request: Request, now: float) -> bool:
        if request.confined or request.alone or worker.has_one_alone:
            return False
        return len(worker.has) < worker.credit and now < worker.since + QUICK_S

    def _full(self, text: str, now: float) -> ResourceExhausted:
        """The queue has moved on by one place for each worker after the time that a request takes.

        Before anything was answered nobody knows how long that is.
        """
        if self._mean_s is None or not self._enlisted:
            return ResourceExhausted(text)
        running = max((now - worker.since for worker in self._workers.values() if worker.has), default=0.0)
        seconds = max(self._mean_s, running) * self.queued / len(self._enlisted)
        return ResourceExhausted(text, retry_after=max(seconds, _LEAST_RETRY_S))

    def _due(self, worker: _Worker) -> float:
        if not worker.has:
            return float("inf")
        return worker.since + (QUICK_S if len(worker.has) > 1 else self._predict_timeout)

    def _outstanding(self) -> Iterator[Request]:
        yield from self.waiting()
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
        self._queue.put_back([request for request in requests if not request.confined])
        self._confined.put_back([request for request in requests if request.confined])
