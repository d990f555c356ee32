"""What waits for the seats of one model, and whose turn it is.

First come, first served, but for priorities. Requests of clients under suspicion (`suspects`) are confined: one of
them is with a seat at a time. A request that runs in parts takes turns with what else waits: it does not hold all
seats.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from weightd.daemon.requests.part import Part
from weightd.daemon.requests.request import Company, Request
from weightd.daemon.requests.rows.cut import Cut
from weightd.daemon.requests.waiting import Levels, Queue, Waiting, turn

# Of what has begun so many are looked at.
_MOST_BEGUN = 16


class Line:
    """The requests that wait; iterated in the order in which they run, then those that are confined or aside.

    Args:
        max_queue: requests that may wait.
        max_queue_bytes: tensor bytes that may wait.
        levels: of priority.
        runs_confined: whether a seat has a request that is confined.

    Attributes:
        normal: what waits for nothing but its turn and a seat, and has not begun.
        begun: what runs in parts, of which some have still to be given to seats: those of the first, then the next's.
        cuts: the requests that run in parts and have not ended, by their numbers.
        was_part: whether the last job was a part of a request.
    """

    def __init__(self, max_queue: int, max_queue_bytes: int, levels: int, runs_confined: Callable[[], bool]) -> None:
        self._max_queue = max_queue
        self._max_queue_bytes = max_queue_bytes
        self._runs_confined = runs_confined
        self.normal: Waiting = Queue() if levels == 1 else Levels(levels)
        self.begun: Waiting = Queue() if levels == 1 else Levels(levels)
        self._confined = Queue()
        # What is looked at before it may run.
        self._aside = Queue()
        self._queues: Sequence[Waiting] = (self.normal, self._confined, self.begun, self._aside)
        self.cuts: dict[int, Cut] = {}
        self.was_part = False

    # --- who comes and goes -------------------------------------------------------------------------------------

    def append(self, request: Request) -> None:
        """It waits behind what is there."""
        self._queue_of(request).append(request)

    def put_back(self, parts: Sequence[Part]) -> None:
        """What seats had of requests waits again, at the head."""
        again: list[Request] = []
        for part in parts:
            if part.cut is not None:
                part.cut.put_back(part.first, part.rows)
            if part.request not in again and not any(part.request in queue for queue in self._queues):
                again.append(part.request)
        self.put_first(again)

    def put_first(self, requests: Sequence[Request]) -> None:
        """They wait before what is there, in their order."""
        for queue in (self._confined, self.begun, self.normal):
            queue.put_back([request for request in requests if self._queue_of(request) is queue])

    def put_aside(self, request: Request) -> None:
        """It does not run before it is admitted."""
        self._aside.append(request)

    def set_aside(self, chosen: Callable[[Request], bool]) -> list[Request]:
        """Put what is `chosen` aside, and return it. What has begun goes on."""
        chosen_ones = [request for queue in (self.normal, self._confined) for request in queue.withdraw(chosen)]
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
        for queue in (self.normal, self.begun):
            for request in queue.withdraw(chosen):
                self._confined.append(request)

    def uncut(self, request: Request) -> Cut | None:
        """Nothing more of it runs, if it runs in parts; return it as it was, None if it does not."""
        cut = self.cuts.pop(request.number, None)
        if cut is not None:
            cut.ended = True
            for queue in self._queues:
                if request in queue:
                    queue.remove(request)
        return cut

    def withdraw(self, unfit: Callable[[Request], bool]) -> list[Request]:
        """Take out all that are `unfit`, at the cost of a look at each."""
        return [request for queue in self._queues for request in queue.withdraw(unfit)]

    def withdraw_of(self, client: bytes, request_id: str | None) -> list[Request]:
        """Take out a client's requests, or those of its requests that have this id."""
        return [request for queue in self._queues for request in queue.withdraw_of(client, request_id)]

    # --- whose turn it is ---------------------------------------------------------------------------------------

    def turns(self) -> Iterator[tuple[Waiting, Request]]:
        """Yield the requests that may run next, each with its queue, in the order of their turns.

        That is the one that has come first, and some of what has begun; these take turns, if both are of the same
        priority.
        """
        queue, begun = self.next_whole(), self.begun
        several = ((begun, request) for request in itertools.islice(begun, _MOST_BEGUN))
        if queue is None:
            yield from several
        elif not begun.count or self._goes_before(begun.first, queue.first):
            yield queue, queue.first
            yield from several
        else:
            yield from several
            yield queue, queue.first

    def next_whole(self) -> Waiting | None:
        """Return the queue of which the first runs next, but for what has begun; None if nothing else may run."""
        normal, confined = self.normal, self._confined
        if not confined.count or self._runs_confined():
            return normal if normal.count else None
        return normal if normal.count and turn(normal.first) < turn(confined.first) else confined

    # --- what it tells ------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain(*self._queues)

    @property
    def count(self) -> int:
        """Requests that wait."""
        return self.normal.count + self._confined.count + self.begun.count + self._aside.count

    @property
    def is_still(self) -> bool:
        """Whether nothing waits that may run. Cheap: this is asked with every answer."""
        return not (self.normal.count or self._confined.count or self.begun.count)

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

    def _queue_of(self, request: Request) -> Waiting:
        if request.company is Company.CONFINED:
            return self._confined
        return self.begun if request.number in self.cuts else self.normal

    def _goes_before(self, begun: Request, request: Request) -> bool:
        return _precedes(request, begun) or (self.was_part and not _precedes(begun, request))


def _precedes(one: Request, other: Request) -> bool:
    """Whether one goes before another because of its priority."""
    return one.level < other.level and turn(one) < turn(other)
