"""Event loop: calls handlers for ready descriptors (one epoll) and for due timers (one heap).

The loop's clock is monotonic and stands still while this process does not run. This is needed for the deadlines that
the daemon sets for its child processes: a worker has to answer within `predict_timeout`, a child has to report within
`load_timeout`. While the daemon is suspended (SIGSTOP, a debugger, the cgroup freezer, a suspended virtual machine), it
cannot receive their answers, and often the children are suspended, too. The time of the suspension must not count
against them.

The deadlines that clients and the service manager set for the daemon continue in real time: see
`EventLoop.on_suspended`.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import signal
import time
from collections.abc import Callable, Generator

TICK_S = 0.5
"""Maximum number of seconds between two readings of a `Clock`. A longer wait is divided into steps of this length."""

_SLACK_S = 0.5
"""If a `Clock` is read this many seconds later than expected, the process was suspended. Delays on a busy machine
are shorter."""


class Clock:
    """Monotonic clock, in seconds, that stands still while this process is suspended.

    The kernel does not notify a process that was suspended, but the time between two readings of the clock shows it:
    the event loop reads the clock before and after each wait, and waits for `TICK_S` at most. If a reading comes more
    than half a second later than expected, the clock does not count any of the time since the previous reading. The
    clock is not thread-safe.

    Args:
        real_time: returns the monotonic seconds of the system.

    Attributes:
        stopped_s: the total number of seconds for which the clock has stood still.
    """

    def __init__(self, real_time: Callable[[], float] = time.monotonic) -> None:
        self.stopped_s = 0.0
        self._real_time = real_time
        self._last_reading = real_time()
        self._max_step_s = _SLACK_S

    def now(self) -> float:
        """Return the current time."""
        real = self._real_time()
        if real - self._last_reading > self._max_step_s:
            self.stopped_s += real - self._last_reading
        self._last_reading = real
        self._max_step_s = _SLACK_S
        return real - self.stopped_s

    def clamp_wait(self, seconds: float) -> float:
        """Return how many of `seconds` a caller may wait before it has to read the clock again; at least 0."""
        if not 0.0 <= seconds <= TICK_S:
            seconds = 0.0 if seconds < 0.0 else TICK_S
        self._max_step_s = seconds + _SLACK_S
        return seconds


_CLOCK = Clock()

now = _CLOCK.now
"""Return the time of this process's clock, see `Clock.now`."""

clamp_wait = _CLOCK.clamp_wait
"""Limit a wait by this process's clock, see `Clock.clamp_wait`."""


def process_clock() -> Clock:
    """Return this process's clock, which the function `now` reads."""
    return _CLOCK


def poll(poller: select.poll, seconds: float, clock: Clock = _CLOCK) -> list[tuple[int, int]]:
    """Poll until a descriptor is ready; return an empty list once `clock` has advanced by `seconds`.

    Python's own `poll` returns an empty list if its timeout ended while the process was suspended, even if a descriptor
    is ready.
    """
    deadline = clock.now() + seconds
    while True:
        ready = poller.poll(1000 * clock.clamp_wait(deadline - clock.now()))
        if ready:
            return ready
        if clock.now() >= deadline:
            return poller.poll(0)


_NEVER = float("inf")

_serial = itertools.count()

Handler = Callable[[float], object]


class Timer:
    """Timer that fires once and can then be set again.

    Setting a timer is cheap in most cases: the new time is pushed on the heap only if it is sooner than all times that
    the heap has for this timer. A postponed timer keeps its earlier time on the heap, and is pushed again when that
    time comes.

    Args:
        handler: called with the current time when the timer is due, once `EventLoop.add_timer` has added the timer to a
            loop.

    Attributes:
        due_at: the time at which the timer is due, in seconds of the loop's clock; infinite while the timer is not set.
    """

    __slots__ = ("_entries", "_handler", "_heap", "_serial", "due_at")

    def __init__(self, handler: Handler) -> None:
        self.due_at = _NEVER
        self._handler = handler
        self._heap: Heap = []
        # The times that the heap has for this timer, in descending order.
        self._entries = [_NEVER]
        self._serial = next(_serial)

    def set(self, due: float) -> None:
        """Set the time at which the timer is due. The new time replaces the previous one."""
        self.due_at = due
        if due < self._entries[-1]:
            self._entries.append(due)
            heapq.heappush(self._heap, (due, self._serial, self))

    def set_no_later_than(self, latest: float) -> None:
        """Set the timer to the time `latest`, unless the timer is already due sooner."""
        if latest < self.due_at:
            self.set(latest)

    def attach(self, heap: Heap) -> None:
        """Use `heap` for the times of this timer, and push the timer's time on it."""
        self._heap = heap
        self._entries = [_NEVER]
        self.set(self.due_at)

    def on_entry_popped(self, now: float) -> bool:
        """Forget the soonest time, which the caller has popped from the heap; return whether the timer is due.

        A timer that was postponed is pushed on the heap with its new time.
        """
        self._entries.pop()
        if self.due_at <= now:
            return True
        self.set(self.due_at)
        return False

    def fire(self, now: float) -> None:
        """Call the handler, unless another handler has postponed the timer since `on_entry_popped` returned True."""
        if self.due_at <= now:
            self.due_at = _NEVER
            self._handler(now)


Heap = list[tuple[float, int, Timer]]


class Timers:
    """The timers of one loop.

    Attributes:
        heap: times with their timers. No timer is due before the first time. A timer that was postponed may still have
            an earlier time on the heap.
    """

    def __init__(self) -> None:
        self.heap: Heap = []

    def add(self, timer: Timer) -> None:
        """Add a timer, with the time that was set before, if any."""
        timer.attach(self.heap)

    def run_due(self, now: float) -> None:
        """Call the handler of each due timer. A timer that a handler sets to a past time fires in the next call."""
        due: dict[Timer, None] = {}
        while self.heap and self.heap[0][0] <= now:
            timer = heapq.heappop(self.heap)[2]
            if timer.on_entry_popped(now):
                due[timer] = None
        for timer in due:
            timer.fire(now)


_MAX_WAIT_S = 3600.0

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT

# Event mask of a descriptor that is watched for neither reading nor writing. Edge-triggered, epoll reports the peer's
# hangup once. Level-triggered, epoll would report the hangup in each turn until the descriptor is closed.
_HANGUP_ONLY = select.EPOLLET

# The events for which the reader is called: all except EPOLLOUT. They include hangups and errors, because the reader's
# next read reports these.
_READABLE = ~_OUT


class EventLoop:
    """Event loop that calls handlers for ready file descriptors and due timers.

    A turn of the loop waits until a descriptor is ready or a timer is due, and then calls the handlers. The cost of a
    turn does not depend on the number of children, connections or models, because all descriptors are in one epoll and
    all timers in one heap. The loop calls a descriptor's handler in each turn in which the descriptor is readable or
    writable, so the handler need not do all work in one call.

    Timers use a clock that stands still while this process is suspended. A timer that becomes due while handlers run
    fires in the next turn. When the timeout of a poll has passed, the loop polls once more without waiting before it
    runs timers, so that input that arrived late is handled first.

    Args:
        clock: the clock of the timers.

    Attributes:
        now: the time at which the last wait ended. Handlers use it as the time of the events in the current turn.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or process_clock()
        self.now = self._clock.now()
        # The value of `Clock.stopped_s` when a suspension was last reported.
        self._stopped_s = self._clock.stopped_s
        self._on_suspended: Callable[[float], object] = lambda _: None
        self._epoll = select.epoll()
        self._timers = Timers()
        # The first entry has the soonest time. `_max_wait_timer` is always set, so the heap is never empty and no wait
        # exceeds the largest timeout of epoll.
        self._timer_heap = self._timers.heap
        self._max_wait_timer = Timer(self._reset_max_wait)
        self._timers.add(self._max_wait_timer)
        self._reset_max_wait(self.now)
        self._readers: dict[int, Callable[[], object]] = {}
        self._writers: dict[int, Callable[[], object]] = {}
        # By descriptor: the mask of the events for which epoll watches it.
        self._event_masks: dict[int, int] = {}
        # The descriptors that were removed since the last poll. The events that this poll returned for them are
        # dropped, because their numbers may already belong to other files.
        self._removed: set[int] = set()
        self._soon_handlers: dict[Callable[[], object], None] = {}
        self._on_turn_end: Callable[[], object] | None = None
        self._is_running = False

    def add(self, descriptor: int, handler: Callable[[], object]) -> None:
        """Call `handler` whenever `descriptor` is readable or its peer has hung up."""
        self._epoll.register(descriptor, _IN)
        self._event_masks[descriptor] = _IN
        self._readers[descriptor] = handler

    def remove(self, descriptor: int) -> None:
        """Stop watching `descriptor`, for reading and writing; call this before the descriptor is closed."""
        self._epoll.unregister(descriptor)
        del self._event_masks[descriptor], self._readers[descriptor]
        self._writers.pop(descriptor, None)
        self._removed.add(descriptor)

    def watch_writes(self, descriptor: int, handler: Callable[[], object]) -> None:
        """Call `handler` whenever `descriptor`, which was added before, is writable."""
        self._writers[descriptor] = handler
        self._set_mask(descriptor, self._event_masks[descriptor] | _OUT)

    def unwatch_writes(self, descriptor: int) -> None:
        """Stop watching whether `descriptor` is writable. Do nothing if it is not watched for this."""
        if self._writers.pop(descriptor, None) is not None:
            self._set_mask(descriptor, self._event_masks[descriptor] & ~_OUT)

    def pause_reading(self, descriptor: int) -> None:
        """Do not call the reader of `descriptor` until `resume_reading`, except once if its peer hangs up."""
        self._set_mask(descriptor, self._event_masks[descriptor] & ~_IN)

    def resume_reading(self, descriptor: int) -> None:
        """Call the reader of `descriptor` again whenever it is readable."""
        self._set_mask(descriptor, self._event_masks[descriptor] | _IN)

    def add_timer(self, timer: Timer) -> None:
        """Call the timer's handler whenever the timer is due."""
        self._timers.add(timer)

    def call_soon(self, handler: Callable[[], object]) -> None:
        """Call `handler` once, in this turn or the next one, after the handlers of ready descriptors.

        The loop does not wait before it calls `handler`. A handler that schedules itself again runs in the next turn,
        so that it does not delay other handlers. This method may be called at any time, even from `__del__`.
        """
        self._soon_handlers[handler] = None

    def on_turn_end(self, handler: Callable[[], object] | None) -> None:
        """Call `handler` at the end of each turn, instead of the previous handler; with None, call no handler."""
        self._on_turn_end = handler

    def on_suspended(self, handler: Callable[[float], object]) -> None:
        """Call `handler` with the number of seconds that the process was suspended, after each suspension.

        The loop calls `handler` after it has polled once and called the handlers of ready descriptors, and before it
        calls the handlers of due timers.
        """
        self._on_suspended = handler

    def run(self) -> None:
        """Wait and call handlers until one of them calls `stop`."""
        self._is_running = True
        timer_heap = self._timer_heap
        self._clock.now()
        # To the clock, a long start of the daemon looks like a suspension. Ignore it, as no deadline has begun yet.
        self._stopped_s = self._clock.stopped_s
        while self._is_running:
            self._run_turn(timer_heap[0][0])

    def stop(self) -> None:
        """Make `run` return at the end of the current turn."""
        self._is_running = False

    def run_once(self, seconds: float = _NEVER) -> None:
        """Run one turn: wait at most `seconds`, then call the handlers of ready descriptors and of due timers."""
        deadline = self._timer_heap[0][0]
        self._run_turn(deadline if seconds == _NEVER else min(deadline, self._clock.now() + seconds))

    def close(self) -> None:
        """Close the epoll descriptor."""
        self._epoll.close()

    def _run_turn(self, deadline: float) -> None:
        """Wait until a descriptor is ready, but not longer than until `deadline`; then call handlers."""
        clock = self._clock
        if self._soon_handlers:
            deadline = 0.0
        # epoll_wait takes milliseconds. Python rounds the timeout up, so a wait never ends early.
        ready = self._epoll.poll(clock.clamp_wait(deadline - clock.now()))
        self.now = clock.now()
        if not ready:
            ready = self._continue_wait(deadline)
        self._removed.clear()
        for descriptor, events in ready:
            if events & _OUT:
                self._on_writable(descriptor, events)
            elif descriptor not in self._removed:
                self._readers[descriptor]()
        if self._soon_handlers:
            self._run_soon_handlers()
        if clock.stopped_s != self._stopped_s:
            self._report_suspension()
        if self._timer_heap[0][0] <= self.now:
            self._timers.run_due(self.now)
        if self._on_turn_end is not None:
            self._on_turn_end()

    def _continue_wait(self, deadline: float) -> list[tuple[int, int]]:
        """Wait further until a descriptor is ready, until `deadline`, or until the clock shows a suspension."""
        clock = self._clock
        while self.now < deadline and clock.stopped_s == self._stopped_s:
            ready = self._epoll.poll(clock.clamp_wait(deadline - self.now))
            self.now = clock.now()
            if ready:
                return ready
        # If a timeout ended while the process was suspended, the poll has returned nothing, even if a descriptor is
        # ready. So poll once more.
        return self._epoll.poll(0.0)

    def _report_suspension(self) -> None:
        seconds, self._stopped_s = self._clock.stopped_s - self._stopped_s, self._clock.stopped_s
        self._on_suspended(seconds)

    def _reset_max_wait(self, now: float) -> None:
        self._max_wait_timer.set(now + _MAX_WAIT_S)

    def _on_writable(self, descriptor: int, events: int) -> None:
        """Call a descriptor's reader, if there are events for it, then its writer. Skip both after `remove`."""
        if events & _READABLE and descriptor not in self._removed:
            self._readers[descriptor]()
        if descriptor in self._writers and descriptor not in self._removed:
            self._writers[descriptor]()

    def _run_soon_handlers(self) -> None:
        handlers, self._soon_handlers = self._soon_handlers, {}
        for handler in handlers:
            handler()

    def _set_mask(self, descriptor: int, mask: int) -> None:
        if mask != self._event_masks[descriptor]:
            self._event_masks[descriptor] = mask
            self._epoll.modify(descriptor, mask or _HANGUP_ONLY)


def _ignore_signal(number: int, frame: object) -> None:
    """Do nothing: the interpreter has written the signal's number to the pipe, which wakes the loop."""


@contextlib.contextmanager
def watch_signals(numbers: list[signal.Signals]) -> Generator[int, None, None]:
    """Yield a descriptor from which the number of each received signal can be read, as one byte.

    The signals have no other effect within the block.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    # The pipe is set up before the handlers are installed and closed after they are removed, so that no signal is lost.
    old_wakeup_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    old_handlers = {number: signal.signal(number, _ignore_signal) for number in numbers}
    try:
        yield reader
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_wakeup_fd)
        os.close(reader)
        os.close(writer)
