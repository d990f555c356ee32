"""Turns of peers in the time of the event loop: a peer with many connections holds up no other. Pure: no I/O."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

Work = Callable[[], None]

SLICE_S = 1e-4
"""Time of one pass of the loop for work of all peers; a piece of work that has begun is finished."""

PIECE_S = 2.5e-4
"""Time of one piece of what a connection has sent. A request takes as much again once it is parsed."""


PASSES = 32
"""Passes of the loop from one request that was sent ahead to the next one. Those of others take as many."""


class Ahead:
    """Begins requests that were sent ahead one by one, in turns between peers, with passes for other work in between.

    Args:
        later: calls a function in the next pass of the loop.
    """

    def __init__(self, later: Callable[[Work], object]) -> None:
        self._later = later
        self._passes = 0
        self._waiting: OrderedDict[str, deque[Work]] = OrderedDict()

    def run(self, key: str, begin: Work) -> None:
        """Begin a request of a peer now, or when it is the turn of the peer."""
        self._waiting.setdefault(key, deque()).append(begin)
        if not self._passes:
            self._next()

    def _next(self) -> None:
        if not self._waiting:
            return
        key, queue = self._waiting.popitem(last=False)
        begin = queue.popleft()
        if queue:
            self._waiting[key] = queue
        self._passes = PASSES
        self._later(self._pass)
        begin()

    def _pass(self) -> None:
        self._passes -= 1
        if self._passes:
            self._later(self._pass)
        else:
            self._next()


class Turns:
    """Runs pieces of work at once while the pass of the loop has time left, and queues them by peer otherwise.

    Args:
        later: calls a function in the next pass of the loop.
        clock: tells the time in seconds.

    Attributes:
        ahead: begins requests that were sent ahead.
    """

    def __init__(self, later: Callable[[Work], object], clock: Callable[[], float]) -> None:
        self.ahead = Ahead(later)
        self._later = later
        self._clock = clock
        self._left = SLICE_S
        self._is_scheduled = False
        self._waiting: OrderedDict[str, deque[Work]] = OrderedDict()

    def run(self, key: str, work: Work) -> None:
        """Run a piece of work of a peer now, or when it is the turn of the peer."""
        if self._waiting or self._left <= 0.0:
            self._waiting.setdefault(key, deque()).append(work)
        else:
            self._spend(work)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._later(self._pass)

    def _pass(self) -> None:
        self._is_scheduled = False
        self._left = SLICE_S
        try:
            while self._waiting and self._left > 0.0:
                key, queue = self._waiting.popitem(last=False)
                work = queue.popleft()
                if queue:
                    self._waiting[key] = queue
                self._spend(work)
        finally:
            if self._waiting and not self._is_scheduled:
                self._is_scheduled = True
                self._later(self._pass)

    def _spend(self, work: Work) -> None:
        begun = self._clock()
        try:
            work()
        finally:
            self._left -= self._clock() - begun


class Piece:
    """How many bytes of a connection are parsed at once: those that take no longer than `PIECE_S`.

    Attributes:
        size: of the next piece.
    """

    LEAST = 2 * 1024
    MOST = 256 * 1024
    FIRST = 2 * 1024

    def __init__(self) -> None:
        self.size = self.FIRST

    def took(self, nbytes: int, seconds: float) -> None:
        """Adjust the size after a piece with so many bytes."""
        if seconds > PIECE_S:
            self.size = max(self.LEAST, self.size // 2)
        elif nbytes == self.size and seconds < PIECE_S / 4:
            self.size = min(self.MOST, self.size * 2)
