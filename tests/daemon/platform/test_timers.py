from __future__ import annotations

import functools

import hypothesis.strategies as st
from hypothesis import given

from weightd_daemon.platform.timers import Timer, Timers

NEVER = float("inf")


class World:
    """Timers, and what was called: whose, and when."""

    def __init__(self, count: int) -> None:
        self.called: list[tuple[int, float]] = []
        self.timers = Timers()
        self.each = [Timer(functools.partial(self.call, index)) for index in range(count)]

    def call(self, index: int, now: float) -> None:
        self.called.append((index, now))

    def add(self) -> None:
        for each in self.each:
            self.timers.add(each)


def test_who_puts_another_off_while_both_are_due_is_heard() -> None:
    world = World(1)
    first = Timer(lambda _: world.each[0].set(9.0))
    first.set(1.0)
    world.timers.add(first)
    world.each[0].set(2.0)
    world.add()
    world.timers.run_due(3.0)
    assert world.called == []
    world.timers.run_due(9.0)
    assert world.called == [(0, 9.0)]


def test_who_is_due_again_at_once_waits_for_the_next_run() -> None:
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
def test_nobody_is_called_early_late_or_twice(actions: list[tuple[str, int, float]]) -> None:
    world = World(3)
    world.each[0].set(5.0)  # counts from when it is added
    world.add()
    due, now = [5.0, NEVER, NEVER], 0.0
    assert world.timers.heap[0][0] == 5.0
    for what, index, value in actions:
        if what == "set":
            due[index] = now + value
            world.each[index].set(due[index])
        elif what == "due_by":
            due[index] = min(due[index], now + value)
            world.each[index].set_no_later_than(now + value)
        else:
            now += value
            world.called.clear()
            world.timers.run_due(now)
            expected = [(each, now) for each in range(3) if due[each] <= now]
            assert sorted(world.called) == expected
            due = [NEVER if each <= now else each for each in due]
        assert [each.due_at for each in world.each] == due
        assert not world.timers.heap or world.timers.heap[0][0] <= min(due)


def test_what_is_put_off_again_and_again_takes_no_more_room() -> None:
    world = World(1)
    world.add()
    timer = world.each[0]
    for now in range(1000):
        timer.set(now + 30.0)
        timer.set(0.0)
        world.timers.run_due(float(now))
        timer.set(now + 30.0)
    assert len(world.timers.heap) <= 2
