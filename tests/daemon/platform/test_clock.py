from __future__ import annotations

import os
import select
import signal
import subprocess
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from testkit.stopping import stopped
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import TICK_S, Clock


class World:
    """A clock, and the real one."""

    def __init__(self) -> None:
        self.real = 1000.0
        self.clock = Clock(lambda: self.real)

    def after(self, seconds: float) -> float:
        self.real += seconds
        return self.clock.now()


@given(st.lists(st.floats(0.0, 0.5)))
def test_it_is_the_real_clock_while_the_process_runs(steps: list[float]) -> None:
    world = World()
    for step in steps:
        assert world.after(step) == world.real


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(-1.0, 1e4))))
def test_it_never_goes_back_and_stands_still_for_what_is_longer_than_expected(steps: list[tuple[float, float]]) -> None:
    world = World()
    times = [world.clock.now()]
    for step, wait in steps:
        granted = world.clock.clamp_wait(wait)
        assert 0.0 <= granted <= max(0.0, min(wait, TICK_S))
        times.append(world.after(step))
        assert times[-1] - times[-2] <= granted + 0.5 + 1e-6
    assert all(before <= after for before, after in pairwise(times))
    assert abs(world.clock.stopped_s + times[-1] - world.real) < 1e-6


def test_only_the_next_reading_may_be_late_by_a_wait() -> None:
    world = World()
    assert world.clock.clamp_wait(60.0) == TICK_S
    assert world.after(0.9) == 1000.9
    assert world.after(0.9) == 1000.9
    assert world.clock.stopped_s == pytest.approx(0.9)


def test_a_poll_has_its_time_without_that_in_which_it_is_stopped() -> None:
    """A poll of Python's returns nothing after this."""
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
