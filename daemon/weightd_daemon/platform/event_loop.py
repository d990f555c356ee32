"""The event loop: one epoll over sockets, pidfds, the signal pipe and timers, which calls the handlers.

Its clock is monotonic and stands still while this process does not run. The daemon judges other processes by deadlines:
a worker has to answer within `predict_timeout`, a child has to report within `load_timeout`. While the daemon itself is
stopped (SIGSTOP, a debugger, the cgroup freezer, a suspended virtual machine), it cannot receive their answers, and
often they are stopped, too. That time must not count against them. So every deadline of another process is a time of
this clock. Deadlines by which others judge the daemon, those of its clients and of the service manager, go by real
time: see `EventLoop.on_suspended`.
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
"""The longest wait between two readings of a clock: whoever waits longer does so in several steps."""

_SLACK_S = 0.5
"""A reading that is this much later than expected shows that the process did not run. A busy machine stays below it."""


class Clock:
    """Monotonic seconds in which this process has run.

    A process is not told that it was stopped. It shows in the time between two readings: the event loop reads the clock
    before and after each wait, and waits for `TICK_S` at most. If a reading comes more than half a second later than
    expected, nothing of the time since the reading before counts. The clock is not thread-safe.

    Args:
        real_time: the clock to read.

    Attributes:
        stopped_s: seconds that did not count so far.
    """

    def __init__(self, real_time: Callable[[], float] = time.monotonic) -> None:
        self.stopped_s = 0.0
        self._real_time = real_time
        self._last_reading = real_time()
        self._max_step_s = _SLACK_S

    def now(self) -> float:
        """Return the time."""
        real = self._real_time()
        if real - self._last_reading > self._max_step_s:
            self.stopped_s += real - self._last_reading
        self._last_reading = real
        self._max_step_s = _SLACK_S
        return real - self.stopped_s

    def clamp_wait(self, seconds: float) -> float:
        """Return how long the caller may wait of these seconds before it reads the clock again; not less than 0."""
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
    """Poll until a descriptor is ready; return nothing after so many seconds in which this process ran.

    Python's own `poll` returns nothing if its time-out ended while the process was stopped, even if a descriptor is
    ready.
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
    """Something that will be due, once each time that it is set.

    To set it costs nothing in most cases: the heap sees a time only if that is sooner than all that it has of this
    timer. One that was put off is found out when its earlier time comes.

    Args:
        handler: called with the clock once it is due, if it was given to `Timers`.

    Attributes:
        due_at: when, in monotonic seconds; infinite while it is not set.
    """

    __slots__ = ("_entries", "_handler", "_heap", "_serial", "due_at")

    def __init__(self, handler: Handler) -> None:
        self.due_at = _NEVER
        self._handler = handler
        self._heap: Heap = []
        # Its times in the heap, the soonest last.
        self._entries = [_NEVER]
        self._serial = next(_serial)

    def set(self, due: float) -> None:
        """Be due then, and at no other time."""
        self.due_at = due
        if due < self._entries[-1]:
            self._entries.append(due)
            heapq.heappush(self._heap, (due, self._serial, self))

    def set_no_later_than(self, latest: float) -> None:
        """Be due then at the latest."""
        if latest < self.due_at:
            self.set(latest)

    def attach(self, heap: Heap) -> None:
        """Belong to this heap from now on."""
        self._heap = heap
        self._entries = [_NEVER]
        self.set(self.due_at)

    def on_entry_popped(self, now: float) -> bool:
        """Its soonest time has left the heap: return whether it is due."""
        self._entries.pop()
        if self.due_at <= now:
            return True
        self.set(self.due_at)
        return False

    def fire(self, now: float) -> None:
        """Call the handler, unless it was put off meanwhile."""
        if self.due_at <= now:
            self.due_at = _NEVER
            self._handler(now)


Heap = list[tuple[float, int, Timer]]


class Timers:
    """All timers of one loop.

    Attributes:
        heap: their times: nothing is due before the first; one that was put off is not due then either.
    """

    def __init__(self) -> None:
        self.heap: Heap = []

    def add(self, timer: Timer) -> None:
        """Have it called when it is due, as was set before or will be."""
        timer.attach(self.heap)

    def run_due(self, now: float) -> None:
        """Call each that is due; one that a handler sets to a time that has passed waits for the next call."""
        due: dict[Timer, None] = {}
        while self.heap and self.heap[0][0] <= now:
            timer = heapq.heappop(self.heap)[2]
            if timer.on_entry_popped(now):
                due[timer] = None
        for timer in due:
            timer.fire(now)


_MAX_WAIT_S = 3600.0

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT

# What no event is: with this the one who was to be told is removed.
_REMOVED = _OUT | 1 << 40

# A descriptor of which nothing but its end is wanted reports the end once. Level-triggered, it would report the end in
# each turn until it is closed, and each turn would cost time for each such descriptor.
_HANGUP_ONLY = select.EPOLLET

# Whatever else is told, a hangup or an error, the one who reads finds out.
_READABLE = ~_OUT


class EventLoop:
    """Handlers by what they wait for: a file descriptor or a time.

    All descriptors stand in one epoll, and all times in one heap: a hundred children, a thousand connections or a
    thousand models cost a wake-up no more than one. A descriptor's handler is called again and again until nothing is
    left to read, or room to write; so it need not do everything at once.

    Timers go by a clock that stands still while this process does not run. If the time-out of a poll is over, the loop
    polls once more without waiting before it runs timers: what has arrived while it was late is handled first.

    Args:
        clock: of the timers.

    Attributes:
        now: when the last wait ended: the time of whatever is handled in this turn.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or process_clock()
        self.now = self._clock.now()
        # How much of it had been stopped when that was last looked at.
        self._stopped_s = self._clock.stopped_s
        self._on_suspended: Callable[[float], object] = lambda _: None
        self._epoll = select.epoll()
        self._timers = Timers()
        # The soonest is the first. There always is one: nothing is waited for longer than the kernel can count.
        self._timer_heap = self._timers.heap
        self._max_wait_timer = Timer(self._reset_max_wait)
        self._timers.add(self._max_wait_timer)
        self._reset_max_wait(self.now)
        self._readers: dict[int, Callable[[], object]] = {}
        self._writers: dict[int, Callable[[], object]] = {}
        # What is waited for, by descriptor.
        self._event_masks: dict[int, int] = {}
        # What the present poll has told, by descriptor. Nothing of who was removed since: its number may have gone to
        # another file already, to which no event belongs.
        self._ready: dict[int, int] = {}
        self._soon_handlers: dict[Callable[[], object], None] = {}
        self._on_turn_end: Callable[[], object] | None = None
        self._is_running = False

    def add(self, descriptor: int, handler: Callable[[], object]) -> None:
        """Call `handler` whenever `descriptor` is readable, or its peer has gone."""
        self._epoll.register(descriptor, _IN)
        self._event_masks[descriptor] = _IN
        self._readers[descriptor] = handler

    def remove(self, descriptor: int) -> None:
        """Stop waiting for `descriptor`, in both directions; call it before that is closed."""
        self._epoll.unregister(descriptor)
        del self._event_masks[descriptor], self._readers[descriptor]
        self._writers.pop(descriptor, None)
        if descriptor in self._ready:
            self._ready[descriptor] = _REMOVED

    def watch_writes(self, descriptor: int, handler: Callable[[], object]) -> None:
        """Call `handler` whenever `descriptor`, which was added, can be written to."""
        self._writers[descriptor] = handler
        self._set_mask(descriptor, self._event_masks[descriptor] | _OUT)

    def unwatch_writes(self, descriptor: int) -> None:
        """Do not call that handler any more; it is no matter whether there was one."""
        if self._writers.pop(descriptor, None) is not None:
            self._set_mask(descriptor, self._event_masks[descriptor] & ~_OUT)

    def pause_reading(self, descriptor: int) -> None:
        """Do not tell that `descriptor` is readable, only once that its peer has gone, until `resume_reading`."""
        self._set_mask(descriptor, self._event_masks[descriptor] & ~_IN)

    def resume_reading(self, descriptor: int) -> None:
        """Tell again that `descriptor` is readable."""
        self._set_mask(descriptor, self._event_masks[descriptor] | _IN)

    def add_timer(self, timer: Timer) -> None:
        """Call the timer's handler whenever it is due."""
        self._timers.add(timer)

    def call_soon(self, handler: Callable[[], object]) -> None:
        """Call `handler` once, after whoever is ready now, before anything is waited for.

        Who is called so and asks for it again has to let others have their turn first. This may be called at any
        moment, even from `__del__`.
        """
        self._soon_handlers[handler] = None

    def on_turn_end(self, handler: Callable[[], object] | None) -> None:
        """Call `handler` at the end of each turn from now on, whatever has happened in it, until there is another."""
        self._on_turn_end = handler

    def on_suspended(self, handler: Callable[[float], object]) -> None:
        """Call `handler` with a number of seconds after the process did not run for so long.

        What had arrived by then has been handled, as far as one poll tells; timers that are due have not been called.
        """
        self._on_suspended = handler

    def run(self) -> None:
        """Wait, and call handlers, until one of them has called `stop`."""
        self._is_running = True
        timer_heap, now = self._timer_heap, self._clock.now
        now()
        # What comes before the first turn does not hear and does not judge.
        self._stopped_s = self._clock.stopped_s
        while self._is_running:
            self._run_turn(timer_heap[0][0] - now())

    def stop(self) -> None:
        """Let this turn be the last one of `run`."""
        self._is_running = False

    def run_once(self, seconds: float = _MAX_WAIT_S) -> None:
        """Wait at most `seconds`, and call the handler of each source that is ready, then of each timer that is due."""
        self._run_turn(min(seconds, self._timer_heap[0][0] - self._clock.now()))

    def close(self) -> None:
        """Give the epoll descriptor back."""
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
        """Wait until something is ready, at most for so long, or until it shows that the process was stopped."""
        epoll, clock = self._epoll, self._clock
        deadline = clock.now() + seconds
        while True:
            # The kernel's clock has milliseconds, and Python rounds up: a wait never ends early.
            ready = epoll.poll(clock.clamp_wait(seconds))
            self.now = clock.now()
            seconds = deadline - self.now
            if ready:
                return ready
            if seconds <= 0.0 or clock.stopped_s != self._stopped_s:
                # If the time-out ended while the process was stopped, Python returns nothing, whatever is ready.
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
        """It can be written to, and perhaps it can be read, too; unless it was removed."""
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
    """The interpreter has written the number to the pipe: that is all a signal does."""


@contextlib.contextmanager
def watch_signals(numbers: list[signal.Signals]) -> Generator[int, None, None]:
    """Give a descriptor from which each signal's number can be read as a byte; nothing else happens on a signal."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    # The pipe is there before the handlers and after them: a signal between the two is not lost.
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
