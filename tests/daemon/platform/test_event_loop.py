from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import pytest
import zmq
from hypothesis import given

from testkit.stopping import stopped
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import TICK_S, Clock, EventLoop, Timer, Timers, watch_signals
from weightd_daemon.platform.zmq_sockets import watch_socket


class Pipe:
    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.read = b""

    def on_readable(self) -> None:
        self.read += os.read(self.reader, 64)


@pytest.fixture
def pipes() -> Iterator[list[Pipe]]:
    made = [Pipe() for _ in range(3)]
    yield made
    for pipe in made:
        os.close(pipe.reader)
        os.close(pipe.writer)


@pytest.fixture
def loop(pipes: list[Pipe]) -> Iterator[EventLoop]:
    made = EventLoop()
    for pipe in pipes:
        made.add(pipe.reader, pipe.on_readable)
    yield made
    made.close()


# --- reading --------------------------------------------------------------------------------------------------------


def test_calls_handler_while_readable(loop: EventLoop, pipes: list[Pipe]) -> None:
    os.write(pipes[0].writer, b"x" * 100)
    os.write(pipes[2].writer, b"c")
    loop.remove(pipes[2].reader)
    loop.run_once(float("inf"))
    loop.run_once(60.0)
    loop.run_once(0.0)
    assert [len(pipe.read) for pipe in pipes] == [100, 0, 0]


def test_handler_can_remove_other_handlers(pipes: list[Pipe]) -> None:
    loop = EventLoop()
    called: list[int] = []

    def only(index: int) -> None:
        called.append(index)
        for pipe in pipes:
            loop.remove(pipe.reader)

    for index, pipe in enumerate(pipes):
        loop.add(pipe.reader, functools.partial(only, index))
        os.write(pipe.writer, b"x")
    loop.run_once(60.0)
    loop.run_once(0.0)
    assert len(called) == 1
    loop.close()


@pytest.mark.parametrize("each", [1, 3, 1000])
def test_loses_no_zmq_message_when_handlers_send(loop: EventLoop, each: int) -> None:
    """A ZeroMQ socket signals a message once, and a `send` can consume the signal before the loop sees it."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://loop")
        theirs.connect("inproc://loop")
        received: list[bytes] = []

        def on_message() -> None:
            ours.send(b"heard")
            for _ in range(each):
                if not ours.poll(0):
                    break
                received.append(ours.recv())
                ours.send(b"answer")

        use = watch_socket(loop, ours, on_message)
        for number in range(10):
            theirs.send(b"%d" % number)
            theirs.send(b"again")
            ours.send(b"something else")
            use()
            while len(received) < 2 * (number + 1):
                before = len(received)
                loop.run_once(60.0)
                assert len(received) > before
        assert received[::2] == [b"%d" % number for number in range(10)]


# --- writing, hangups and reused descriptors ------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with contextlib.ExitStack() as stack:
        made = socket.socketpair()
        for each in made:
            each.setblocking(False)
            stack.enter_context(each)
        yield made


def test_calls_write_handler_while_watched(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    calls: list[str] = []
    loop = EventLoop()
    loop.add(ours.fileno(), lambda: calls.append(f"read {ours.recv(9)!r}"))
    loop.run_once(0.0)
    assert calls == []
    with contextlib.suppress(BlockingIOError):
        while ours.send(bytes(100_000)):
            pass
    loop.watch_writes(ours.fileno(), lambda: calls.append("write"))
    loop.run_once(0.0)
    assert calls == []
    theirs.recv(10_000_000)
    theirs.send(b"hello")
    loop.run_once(60.0)
    loop.run_once(60.0)
    loop.unwatch_writes(ours.fileno())
    loop.unwatch_writes(ours.fileno())
    loop.run_once(0.0)
    assert calls == ["read b'hello'", "write", "write"]
    loop.close()


@pytest.mark.parametrize("writes", [False, True])
def test_hangup_reaches_reader_after_pause(ends: tuple[socket.socket, socket.socket], writes: bool) -> None:
    ours, theirs = ends
    calls: list[bytes] = []
    loop = EventLoop()
    loop.add(ours.fileno(), lambda: calls.append(ours.recv(1)))
    loop.pause_reading(ours.fileno())
    theirs.send(b"ab")
    loop.run_once(0.0)
    assert calls == []
    loop.resume_reading(ours.fileno())
    loop.run_once(60.0)
    assert calls == [b"a"]
    loop.pause_reading(ours.fileno())
    if writes:
        loop.watch_writes(ours.fileno(), lambda: None)
    theirs.close()
    loop.run_once(60.0)
    assert calls == [b"a", b"b"]
    loop.resume_reading(ours.fileno())
    loop.run_once(60.0)
    assert calls == [b"a", b"b", b""]
    loop.close()


def test_hangup_of_paused_descriptors_does_not_spin() -> None:
    loop = EventLoop()
    calls: list[int] = []
    with contextlib.ExitStack() as stack:
        for number in range(20):
            ours, theirs = (stack.enter_context(each) for each in socket.socketpair())
            loop.add(ours.fileno(), functools.partial(calls.append, number))
            loop.pause_reading(ours.fileno())
            theirs.close()
        for _ in range(5):
            loop.run_once(0.001)
        assert sorted(calls) == [*range(20)]
        loop.close()


def test_read_event_not_delivered_to_reused_descriptor() -> None:
    loop = EventLoop()
    calls: list[str] = []
    ends_of_pipes = [os.pipe() for _ in range(2)]

    def replace(index: int) -> None:
        """Replace the other descriptor by one that never becomes readable."""
        calls.append("old")
        other = ends_of_pipes[1 - index][0]
        loop.remove(other)
        os.dup2(empty[0], other)
        loop.add(other, lambda: calls.append("new"))

    empty = os.pipe()
    for index, (reader, writer) in enumerate(ends_of_pipes):
        loop.add(reader, functools.partial(replace, index))
        os.write(writer, b"x")
    loop.run_once(60.0)
    assert calls == ["old"]
    loop.close()
    for descriptor in (*ends_of_pipes[0], *ends_of_pipes[1], *empty):
        os.close(descriptor)


def test_write_event_not_delivered_to_reused_descriptor(
    pipes: list[Pipe], ends: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = ends
    loop, calls = EventLoop(), list[str]()

    def replace() -> None:
        """Reuse the descriptor for a pipe end that is not writable."""
        calls.append("read")
        loop.remove(ours.fileno())
        os.dup2(pipes[0].reader, ours.fileno())
        loop.add(ours.fileno(), pipes[0].on_readable)
        loop.watch_writes(ours.fileno(), lambda: calls.append("new"))

    loop.add(ours.fileno(), replace)
    loop.watch_writes(ours.fileno(), lambda: calls.append("old"))
    theirs.send(b"x")
    loop.run_once(60.0)
    assert calls == ["read"]
    loop.close()


@pytest.mark.parametrize("seconds", [-float("inf"), -1.0, 0.0, 0.0009, 0.0019])
def test_wait_never_ends_early(loop: EventLoop, seconds: float) -> None:
    begin = time.monotonic()
    loop.run_once(seconds)
    assert seconds <= time.monotonic() - begin < 5.0


# --- turns of the loop ----------------------------------------------------------------------------------------------


def test_now_is_the_end_of_the_wait(loop: EventLoop) -> None:
    began = loop.now
    loop.run_once(0.01)
    assert began + 0.01 <= loop.now <= event_loop.now()


def test_call_soon_runs_once_after_ready_handlers(loop: EventLoop, pipes: list[Pipe]) -> None:
    calls: list[bytes] = []

    def again() -> None:
        calls.append(pipes[0].read)
        os.write(pipes[0].writer, b"x")
        if len(calls) < 3:
            loop.call_soon(again)

    for _ in range(2):
        loop.call_soon(again)
    for _ in range(3):
        loop.run_once(60.0)
    assert calls == [b"", b"x", b"xx"]
    loop.run_once(60.0)
    loop.run_once(0.0)
    assert (len(calls), pipes[0].read) == (3, b"xxx")


def test_stop_ends_the_run_after_the_turn(loop: EventLoop, pipes: list[Pipe]) -> None:
    turns: list[int] = []

    def turn() -> None:
        turns.append(len(pipes[0].read))
        os.write(pipes[0].writer, b"x")
        if len(turns) == 2:
            loop.stop()
            loop.on_turn_end(None)

    loop.on_turn_end(turn)
    os.write(pipes[0].writer, b"x")
    loop.run()
    loop.run_once(60.0)
    assert (turns, pipes[0].read) == ([1, 2], b"xxx")


# --- a suspended process --------------------------------------------------------------------------------------------


class StoppedEpoll:
    """Reports events only to a poll that does not wait, as `select.epoll` does after a long suspension.

    Args:
        loop: the loop whose epoll object is replaced.
        real: the clock; each wait takes its whole time-out, and the first wait `stop` seconds more.
    """

    def __init__(self, loop: EventLoop, real: list[float], stop: float) -> None:
        self.waits: list[float] = []
        self._epoll: select.epoll = vars(loop)["_epoll"]
        self._real = real
        self._stop = stop
        vars(loop)["_epoll"] = self

    def poll(self, seconds: float) -> list[tuple[int, int]]:
        self.waits.append(seconds)
        if seconds:
            self._real[0] += seconds + self._stop
            self._stop = 0.0
            return []
        return self._epoll.poll(0.0)

    def close(self) -> None:
        self._epoll.close()


def stopped_loop(pipe: Pipe, due: float, stop: float) -> tuple[EventLoop, list[str], StoppedEpoll]:
    """Return a loop with a readable pipe and a timer, the list of its calls, and its fake epoll object."""
    real = [1000.0]
    loop, calls = EventLoop(Clock(lambda: real[0])), list[str]()
    loop.add(pipe.reader, lambda: calls.append(f"read {os.read(pipe.reader, 9)!r}"))
    loop.on_suspended(lambda seconds: calls.append(f"stopped for {seconds:g}"))
    timer = Timer(lambda now: calls.append(f"timer at {now:g}"))
    timer.set(1000.0 + due)
    loop.add_timer(timer)
    os.write(pipe.writer, b"x")
    return loop, calls, StoppedEpoll(loop, real, stop)


def test_handles_ready_events_before_overdue_timers(pipes: list[Pipe]) -> None:
    """The loop is late, but by less than a suspension."""
    loop, calls, epoll = stopped_loop(pipes[0], due=0.25, stop=0.25)
    loop.run_once(60.0)
    assert calls == ["read b'x'", "timer at 1000.5"]
    assert epoll.waits == [0.25, 0.0]
    loop.close()


@pytest.mark.parametrize("due", [0.25, 0.75, 100.0])
def test_suspension_does_not_count(pipes: list[Pipe], due: float) -> None:
    loop, calls, epoll = stopped_loop(pipes[0], due, stop=3600.0)
    loop.run_once(60.0)
    waited = min(due, TICK_S)
    assert calls == ["read b'x'", f"stopped for {3600.0 + waited:g}"]
    while len(calls) == 2:
        loop.run_once(3600.0)
    assert calls[2:] == [f"timer at {1000.0 + due:g}"]
    assert max(epoll.waits) == waited
    loop.close()


def test_reports_suspension_before_running_timers(pipes: list[Pipe]) -> None:
    real = [1000.0]
    loop, calls = EventLoop(Clock(lambda: real[0])), list[float]()

    def on_pause(seconds: float) -> None:
        calls.append(seconds)
        timer.set(0.0)

    timer = Timer(calls.append)
    timer.set(1001.0)
    loop.add_timer(timer)
    loop.call_soon(lambda: real.__setitem__(0, 1009.0))
    loop.on_suspended(on_pause)
    loop.run_once(0.0)
    assert not calls  # the loop reads the clock before and after it waits
    loop.run_once(0.0)
    assert calls == [9.0, 1000.0]
    loop.close()


# --- signals --------------------------------------------------------------------------------------------------------

USED = [signal.SIGUSR1, signal.SIGUSR2]


def test_survives_more_signals_than_the_pipe_holds() -> None:
    with watch_signals(USED) as wakeups:
        os.set_blocking(wakeups, True)
        fcntl.fcntl(wakeups, fcntl.F_SETPIPE_SZ, 4096)
        for _ in range(5000):
            signal.raise_signal(signal.SIGUSR1)
        assert os.read(wakeups, 1) == bytes([signal.SIGUSR1])


def _handlers() -> list[object]:
    return [signal.getsignal(number) for number in USED]


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _fail_after_a_signal() -> None:
    signal.raise_signal(signal.SIGUSR1)
    raise ZeroDivisionError


def test_watch_signals_restores_previous_handlers() -> None:
    calls: list[int] = []
    mine = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    try:
        gc.collect()  # loops of other tests have descriptors too
        before, descriptors = _handlers(), _descriptors()
        with pytest.raises(ZeroDivisionError), watch_signals(USED):
            _fail_after_a_signal()
        assert _handlers() == before
        assert calls == []
        signal.raise_signal(signal.SIGUSR1)
        assert calls == [signal.SIGUSR1]
        assert signal.set_wakeup_fd(-1) == -1
        assert _descriptors() == descriptors
    finally:
        signal.signal(signal.SIGUSR1, mine)


def test_nested_watch_signals_restores_the_outer_pipe() -> None:
    with watch_signals(USED) as outer:
        with watch_signals(USED) as inner:
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
                signal.raise_signal(number)
            assert os.read(inner, 64) == bytes([signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1])
        signal.raise_signal(signal.SIGUSR2)
        assert os.read(outer, 64) == bytes([signal.SIGUSR2])


NEVER = float("inf")


class TimerHarness:
    """Timers, and each call as the timer's index and the time."""

    def __init__(self, count: int) -> None:
        self.called: list[tuple[int, float]] = []
        self.timers = Timers()
        self.each = [Timer(functools.partial(self.call, index)) for index in range(count)]

    def call(self, index: int, now: float) -> None:
        self.called.append((index, now))

    def add(self) -> None:
        for each in self.each:
            self.timers.add(each)


def test_timer_postponed_by_a_due_timer_is_not_called() -> None:
    harness = TimerHarness(1)
    first = Timer(lambda _: harness.each[0].set(9.0))
    first.set(1.0)
    harness.timers.add(first)
    harness.each[0].set(2.0)
    harness.add()
    harness.timers.run_due(3.0)
    assert harness.called == []
    harness.timers.run_due(9.0)
    assert harness.called == [(0, 9.0)]


def test_timer_due_again_runs_in_the_next_run() -> None:
    calls: list[float] = []

    def again(now: float) -> None:
        calls.append(now)
        timer.set(0.0)

    timers, timer = Timers(), Timer(again)
    timers.add(timer)
    timer.set(0.0)
    timers.run_due(1.0)
    timers.run_due(2.0)
    assert calls == [1.0, 2.0]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["set", "due_by"]), st.integers(0, 2), st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, NEVER])
        ),
        st.tuples(st.just("run"), st.just(0), st.sampled_from([0.0, 0.5, 1.0, 2.0])),
    ),
    max_size=30,
)


@given(ACTIONS)
def test_timers_run_once_and_on_time(actions: list[tuple[str, int, float]]) -> None:
    harness = TimerHarness(3)
    harness.each[0].set(5.0)  # counts from the moment at which the timer is added
    harness.add()
    due, now = [5.0, NEVER, NEVER], 0.0
    assert harness.timers.heap[0][0] == 5.0
    for what, index, value in actions:
        if what == "set":
            due[index] = now + value
            harness.each[index].set(due[index])
        elif what == "due_by":
            due[index] = min(due[index], now + value)
            harness.each[index].set_no_later_than(now + value)
        else:
            now += value
            harness.called.clear()
            harness.timers.run_due(now)
            expected = [(each, now) for each in range(3) if due[each] <= now]
            assert sorted(harness.called) == expected
            due = [NEVER if each <= now else each for each in due]
        assert [each.due_at for each in harness.each] == due
        assert not harness.timers.heap or harness.timers.heap[0][0] <= min(due)


def test_rescheduling_does_not_grow_the_heap() -> None:
    harness = TimerHarness(1)
    harness.add()
    timer = harness.each[0]
    for now in range(1000):
        timer.set(now + 30.0)
        timer.set(0.0)
        harness.timers.run_due(float(now))
        timer.set(now + 30.0)
    assert len(harness.timers.heap) <= 2


class ClockHarness:
    """A Clock over a simulated real clock."""

    def __init__(self) -> None:
        self.real = 1000.0
        self.clock = Clock(lambda: self.real)

    def after(self, seconds: float) -> float:
        self.real += seconds
        return self.clock.now()


@given(st.lists(st.floats(0.0, 0.5)))
def test_clock_equals_real_clock_while_running(steps: list[float]) -> None:
    harness = ClockHarness()
    for step in steps:
        assert harness.after(step) == harness.real


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(-1.0, 1e4))))
def test_clock_is_monotonic_and_ignores_suspensions(steps: list[tuple[float, float]]) -> None:
    harness = ClockHarness()
    times = [harness.clock.now()]
    for step, wait in steps:
        granted = harness.clock.clamp_wait(wait)
        assert 0.0 <= granted <= max(0.0, min(wait, TICK_S))
        times.append(harness.after(step))
        assert times[-1] - times[-2] <= granted + 0.5 + 1e-6
    assert all(before <= after for before, after in pairwise(times))
    assert abs(harness.clock.stopped_s + times[-1] - harness.real) < 1e-6


def test_wait_allowance_covers_one_reading_only() -> None:
    harness = ClockHarness()
    assert harness.clock.clamp_wait(60.0) == TICK_S
    assert harness.after(0.9) == 1000.9
    assert harness.after(0.9) == 1000.9
    assert harness.clock.stopped_s == pytest.approx(0.9)


def test_poll_timeout_excludes_suspension() -> None:
    """`select.poll` would return nothing here."""
    reader, writer = os.pipe()
    readable = select.poll()
    readable.register(reader, select.POLLIN)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=writer) as cat:
        assert cat.stdin is not None
        os.kill(cat.pid, signal.SIGSTOP)
        cat.stdin.write(b"x")
        cat.stdin.close()
        with stopped(1.6, cat.pid):
            assert event_loop.poll(readable, 1.0) == [(reader, select.POLLIN)]
    os.read(reader, 1)
    assert event_loop.poll(readable, 0.01) == []
    for descriptor in (reader, writer):
        os.close(descriptor)
