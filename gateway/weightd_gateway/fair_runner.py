"""Turns of peers in the time of the event loop: a peer with many connections holds up no other. Pure: no I/O."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

Work = Callable[[], None]

SLICE_S = 1e-4
"""Time of one pass of the loop for work of all peers; a piece of work that has begun is finished."""

CHUNK_S = 2.5e-4
"""Time of one piece of what a connection has sent. A request takes as much again once it is parsed."""


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
        self._waiting: OrderedDict[str, deque[Work]] = OrderedDict()

    def run(self, key: str, begin: Work) -> None:
        """Begin a request of a peer now, or when it is the turn of the peer."""
        self._waiting.setdefault(key, deque()).append(begin)
        if not self._passes_left:
            self._begin_next()

    def _begin_next(self) -> None:
        if not self._waiting:
            return
        key, queue = self._waiting.popitem(last=False)
        begin = queue.popleft()
        if queue:
            self._waiting[key] = queue
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
        self._waiting: OrderedDict[str, deque[Work]] = OrderedDict()

    def run(self, key: str, work: Work) -> None:
        """Run a piece of work of a peer now, or when it is the turn of the peer."""
        if self._waiting or self._time_left_s <= 0.0:
            self._waiting.setdefault(key, deque()).append(work)
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
                key, queue = self._waiting.popitem(last=False)
                work = queue.popleft()
                if queue:
                    self._waiting[key] = queue
                self._run_timed(work)
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


class ParseChunk:
    """How many bytes of a connection are parsed at once: those that take no longer than `CHUNK_S`.

    Attributes:
        size_bytes: of the next piece.
    """

    MIN_BYTES = 2 * 1024
    MAX_BYTES = 256 * 1024
    INITIAL_BYTES = 2 * 1024

    def __init__(self) -> None:
        self.size_bytes = self.INITIAL_BYTES

    def on_parsed(self, nbytes: int, seconds: float) -> None:
        """Adjust the size after a piece with so many bytes."""
        if seconds > CHUNK_S:
            self.size_bytes = max(self.MIN_BYTES, self.size_bytes // 2)
        elif nbytes == self.size_bytes and seconds < CHUNK_S / 4:
            self.size_bytes = min(self.MAX_BYTES, self.size_bytes * 2)
