"""Event loop: one epoll over sockets, pidfds and the signal pipe, and a heap of timers, which call handlers.

The loop's clock is monotonic and stands still while this process does not run. The daemon judges other processes by
deadlines: a worker has to answer within `predict_timeout`, a child has to report within `load_timeout`. While the
daemon is stopped (SIGSTOP, a debugger, the cgroup freezer, a suspended virtual machine), it cannot receive their
answers, and often the other processes are stopped, too. That time must not count against them, so every deadline of
another process is a time of this clock. Deadlines of clients and of the service manager, by which others judge the
daemon, go by real time: see `EventLoop.on_suspended`.
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
"""The longest wait between two readings of a clock; longer waits are divided into several steps."""

_SLACK_S = 0.5
"""A reading that is this much later than expected shows that the process did not run. A busy machine stays below it."""


class Clock:
    """Monotonic seconds in which this process has run.

    The kernel does not notify a process that was stopped, but the time between two readings shows it: the event loop
    reads the clock before and after each wait, and waits for `TICK_S` at most. If a reading comes more than half a
    second later than expected, the clock does not count any of the time since the previous reading. The clock is not
    thread-safe.

    Args:
        real_time: the underlying clock.

    Attributes:
        stopped_s: seconds that were not counted so far.
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
        """Return how many of these seconds the caller may wait before it reads the clock again; not less than 0."""
        seconds = min(max(seconds, 0.0), TICK_S)
        self._max_step_s = seconds + _SLACK_S
        return seconds


_CLOCK = Clock()

now = _CLOCK.now
"""`Clock.now` of the process's clock."""

clamp_wait = _CLOCK.clamp_wait
"""`Clock.wait` of the process's clock."""


def process_clock() -> Clock:
    """Return the clock that `now` reads."""
    return _CLOCK


def poll(poller: select.poll, seconds: float, clock: Clock = _CLOCK) -> list[tuple[int, int]]:
    """Poll until a descriptor is ready; return an empty list after this process has run for `seconds`.

    Python's own `poll` returns an empty list if its timeout ended while the process was stopped, even if a descriptor
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
    """A one-shot timer that can be set again.

    Setting a timer is cheap in most cases: a time is pushed on the heap only if it is sooner than all times that the
    heap holds for this timer. A postponed timer is noticed when its earlier time comes.

    Args:
        handler: called with the current time when the timer is due, if an event loop has the timer.

    Attributes:
        due_at: when the timer is due, in monotonic seconds; infinite while it is not set.
    """

    __slots__ = ("_entries", "_handler", "_heap", "_serial", "due_at")

    def __init__(self, handler: Handler) -> None:
        self.due_at = _NEVER
        self._handler = handler
        self._heap: Heap = []
        # The times that the heap holds for this timer, the soonest last.
        self._entries = [_NEVER]
        self._serial = next(_serial)

    def set(self, due: float) -> None:
        """Set the time at which the timer is due; it replaces the time that was set before."""
        self.due_at = due
        if due < self._entries[-1]:
            self._entries.append(due)
            heapq.heappush(self._heap, (due, self._serial, self))

    def set_no_later_than(self, latest: float) -> None:
        """Set the timer to this time unless it is due sooner."""
        if latest < self.due_at:
            self.set(latest)

    def attach(self, heap: Heap) -> None:
        """Move the timer to another heap."""
        self._heap = heap
        self._entries = [_NEVER]
        self.set(self.due_at)

    def on_entry_popped(self, now: float) -> bool:
        """Drop the timer's soonest time, which the caller has taken from the heap; return whether the timer is due."""
        self._entries.pop()
        if self.due_at <= now:
            return True
        self.set(self.due_at)
        return False

    def fire(self, now: float) -> None:
        """Call the handler, unless the timer was postponed since it was found due."""
        if self.due_at <= now:
            self.due_at = _NEVER
            self._handler(now)


Heap = list[tuple[float, int, Timer]]


class Timers:
    """The timers of one loop.

    Attributes:
        heap: the times of the timers. No timer is due before the first time; a postponed timer is not due then, either.
    """

    def __init__(self) -> None:
        self.heap: Heap = []

    def add(self, timer: Timer) -> None:
        """Add a timer; a time that was set before stays in force."""
        timer.attach(self.heap)

    def run_due(self, now: float) -> None:
        """Call the handler of each due timer; a timer that a handler sets to a past time waits for the next call."""
        due: dict[Timer, None] = {}
        while self.heap and self.heap[0][0] <= now:
            timer = heapq.heappop(self.heap)[2]
            if timer.on_entry_popped(now):
                due[timer] = None
        for timer in due:
            timer.fire(now)


_MAX_WAIT_S = 3600.0

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT

# Replaces the events of a descriptor that was removed in the current turn. No real event mask has this value; the
# EPOLLOUT bit leads to `_on_writable`, which ignores the descriptor.
_REMOVED = _OUT | 1 << 40

# A descriptor that is watched for a hangup only reports the hangup once. Level-triggered, it would report it in each
# turn until it is closed, and each turn would cost time for each such descriptor.
_HANGUP_ONLY = select.EPOLLET

# Hangups and errors go to the reader, too: its next read reports them.
_READABLE = ~_OUT


class EventLoop:
    """Event loop that calls handlers for ready file descriptors and due timers.

    All descriptors are in one epoll, and all times in one heap: the cost of a wake-up does not depend on the number of
    children, connections or models. A descriptor's handler is called again as long as the descriptor is readable or
    writable, so it need not do all work in one call.

    Timers go by a clock that stands still while this process does not run. When the timeout of a poll has passed, the
    loop polls once more without waiting before it runs timers, so that input that arrived late is handled first.

    Args:
        clock: the clock of the timers.

    Attributes:
        now: when the last wait ended: the time of everything that is handled in this turn.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or process_clock()
        self.now = self._clock.now()
        # The clock's `stopped_s` at the last report of a suspension.
        self._stopped_s = self._clock.stopped_s
        self._on_suspended: Callable[[float], object] = lambda _: None
        self._epoll = select.epoll()
        self._timers = Timers()
        # The soonest time is the first. One timer is always set, so a wait never exceeds what the kernel can count.
        self._timer_heap = self._timers.heap
        self._max_wait_timer = Timer(self._reset_max_wait)
        self._timers.add(self._max_wait_timer)
        self._reset_max_wait(self.now)
        self._readers: dict[int, Callable[[], object]] = {}
        self._writers: dict[int, Callable[[], object]] = {}
        # The events that epoll watches for, by descriptor.
        self._event_masks: dict[int, int] = {}
        # The events of the current poll, by descriptor. The events of a descriptor that was removed since are dropped:
        # its number may already belong to another file.
        self._ready: dict[int, int] = {}
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
        if descriptor in self._ready:
            self._ready[descriptor] = _REMOVED

    def watch_writes(self, descriptor: int, handler: Callable[[], object]) -> None:
        """Call `handler` whenever `descriptor`, which was added before, is writable."""
        self._writers[descriptor] = handler
        self._set_mask(descriptor, self._event_masks[descriptor] | _OUT)

    def unwatch_writes(self, descriptor: int) -> None:
        """Stop watching for writability; does nothing if it was not watched."""
        if self._writers.pop(descriptor, None) is not None:
            self._set_mask(descriptor, self._event_masks[descriptor] & ~_OUT)

    def pause_reading(self, descriptor: int) -> None:
        """Do not report that `descriptor` is readable until `resume_reading`; report a hangup of its peer once."""
        self._set_mask(descriptor, self._event_masks[descriptor] & ~_IN)

    def resume_reading(self, descriptor: int) -> None:
        """Report again when `descriptor` is readable."""
        self._set_mask(descriptor, self._event_masks[descriptor] | _IN)

    def add_timer(self, timer: Timer) -> None:
        """Call the timer's handler whenever the timer is due."""
        self._timers.add(timer)

    def call_soon(self, handler: Callable[[], object]) -> None:
        """Call `handler` once, after the handlers of all descriptors that are ready now, without waiting in between.

        A handler that schedules itself again runs in the next turn, so that others get their turn first. This method
        may be called at any moment, even from `__del__`.
        """
        self._soon_handlers[handler] = None

    def on_turn_end(self, handler: Callable[[], object] | None) -> None:
        """Call `handler` at the end of each turn from now on; it replaces the handler that was set before."""
        self._on_turn_end = handler

    def on_suspended(self, handler: Callable[[float], object]) -> None:
        """Call `handler` with the number of seconds that the process was suspended, after each suspension.

        By then the descriptors of one poll after the suspension have been handled; timers that are due have not been
        called.
        """
        self._on_suspended = handler

    def run(self) -> None:
        """Wait and call handlers until one of them calls `stop`."""
        self._is_running = True
        timer_heap, now = self._timer_heap, self._clock.now
        now()
        # A long start looks like a suspension. Nothing was received or judged by deadlines before the first turn, so it
        # is not reported.
        self._stopped_s = self._clock.stopped_s
        while self._is_running:
            self._run_turn(timer_heap[0][0] - now())

    def stop(self) -> None:
        """Return from `run` at the end of this turn."""
        self._is_running = False

    def run_once(self, seconds: float = _MAX_WAIT_S) -> None:
        """Wait at most `seconds`; call the handler of each ready descriptor, then of each due timer."""
        self._run_turn(min(seconds, self._timer_heap[0][0] - self._clock.now()))

    def close(self) -> None:
        """Close the epoll descriptor."""
        self._epoll.close()

    def _run_turn(self, seconds: float) -> None:
        if self._soon_handlers or seconds < 0.0:
            seconds = 0.0
        self._call_ready(self._poll(seconds))
        clock = self._clock
        now = clock.now()
        if clock.stopped_s != self._stopped_s:
            self._report_suspension()
        if self._timer_heap[0][0] <= now:
            self._timers.run_due(now)
        if self._on_turn_end is not None:
            self._on_turn_end()

    def _poll(self, seconds: float) -> list[tuple[int, int]]:
        """Wait until a descriptor is ready, for at most `seconds`, or until the clock shows a suspension."""
        epoll, clock = self._epoll, self._clock
        deadline = clock.now() + seconds
        while True:
            # The kernel counts milliseconds, and Python rounds up: a wait never ends early.
            ready = epoll.poll(clock.clamp_wait(seconds))
            self.now = clock.now()
            seconds = deadline - self.now
            if ready:
                return ready
            if seconds <= 0.0 or clock.stopped_s != self._stopped_s:
                # If the timeout ended while the process was stopped, Python returns nothing, even if a descriptor is
                # ready.
                return epoll.poll(0.0)

    def _call_ready(self, ready: list[tuple[int, int]]) -> None:
        self._ready = dict(ready)
        for descriptor, events in self._ready.items():
            if events & _OUT:
                self._on_writable(descriptor)
            else:
                self._readers[descriptor]()
        if self._soon_handlers:
            self._run_soon_handlers()

    def _report_suspension(self) -> None:
        seconds, self._stopped_s = self._clock.stopped_s - self._stopped_s, self._clock.stopped_s
        self._on_suspended(seconds)

    def _reset_max_wait(self, now: float) -> None:
        self._max_wait_timer.set(now + _MAX_WAIT_S)

    def _on_writable(self, descriptor: int) -> None:
        """Call the reader for events other than EPOLLOUT, then the writer, unless the descriptor has been removed."""
        events = self._ready[descriptor]
        if events != _REMOVED and events & _READABLE:
            self._readers[descriptor]()
        if self._ready[descriptor] != _REMOVED and descriptor in self._writers:
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
    """Do nothing: the interpreter has written the number to the pipe, which wakes the loop."""


@contextlib.contextmanager
def watch_signals(numbers: list[signal.Signals]) -> Generator[int, None, None]:
    """Yield a descriptor from which each signal's number can be read as a byte; the signals have no other effect."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    # The pipe exists before the handlers are installed and after they are removed, so no signal is lost in between.
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
