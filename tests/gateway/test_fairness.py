from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_gateway.auth import Caller
from weightd_gateway.error_codes import TooLarge
from weightd_gateway.fairness import PIPELINE_PASSES, SLICE_S, AdmissionControl, FairLimit, FairRunner, FairShareQueue
from weightd_protocol.errors import ResourceExhausted


class World:
    """A loop whose time passes only in work."""

    def __init__(self) -> None:
        self.now = 0.0
        self.next: list[Callable[[], None]] = []
        self.done: list[str] = []
        self.turns = FairRunner(self.next.append, lambda: self.now)

    def want(self, key: str, seconds: float) -> None:
        def work() -> None:
            self.now += seconds
            self.done.append(key)

        self.turns.run(key, work)

    def one_pass(self) -> None:
        due, self.next[:] = [*self.next], []
        for each in due:
            each()


def test_work_is_done_at_once_while_the_pass_has_time() -> None:
    world = World()
    for _ in range(3):
        world.want("a", SLICE_S / 2)
    assert world.done == ["a"] * 2
    world.one_pass()
    assert world.done == ["a"] * 3


def test_a_peer_with_much_work_holds_up_another_by_one_piece() -> None:
    world = World()
    for _ in range(100):
        world.want("a", SLICE_S)
    world.want("b", SLICE_S)
    for _ in range(2):
        world.one_pass()
    assert world.done == ["a", "a", "b"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 3 * SLICE_S)), max_size=50))
def test_all_work_is_done_and_a_pass_ends_in_time(wanted: list[tuple[str, float]]) -> None:
    world = World()
    for key, seconds in wanted:
        world.want(key, seconds)
    while world.next:
        before = world.now
        world.one_pass()
        assert world.now - before <= SLICE_S + max(seconds for _, seconds in wanted) + 1e-9
    assert sorted(world.done) == sorted(key for key, _ in wanted)


def test_work_that_fails_leaves_the_rest() -> None:
    world = World()

    def fail() -> None:
        raise ValueError

    world.want("a", SLICE_S)
    world.turns.run("a", fail)
    world.want("a", 0.0)
    try:
        world.one_pass()
    except ValueError:
        world.one_pass()
    assert world.done == ["a", "a"]


def test_of_requests_that_were_sent_ahead_one_begins_in_some_passes() -> None:
    world = World()
    for key in "aaab":
        world.turns.pipelined.run(key, partial(world.done.append, key))
    begun = [len(world.done)]
    for _ in range(4 * PIPELINE_PASSES):
        world.one_pass()
        begun.append(len(world.done))
    assert begun == [1] * PIPELINE_PASSES + [2] * PIPELINE_PASSES + [3] * PIPELINE_PASSES + [4] * (PIPELINE_PASSES + 1)
    assert world.done == ["a", "a", "b", "a"]
    assert not world.next, "an idle loop has nothing to do"
    world.turns.pipelined.run("b", partial(world.done.append, "b"))
    assert world.done[-1] == "b"


def test_users_without_seconds_take_turns() -> None:
    queue: FairShareQueue[int] = FairShareQueue()
    for user, item in (("a", 0), ("a", 1), ("b", 10), ("b", 11), ("c", 20)):
        queue.put(user, item)
    assert [queue.get()[1] for _ in range(5)] == [0, 10, 20, 1, 11]
    assert not queue


def test_who_was_idle_has_saved_up_nothing() -> None:
    queue: FairShareQueue[int] = FairShareQueue()
    for _ in range(3):
        queue.put("a", 0)
        queue.charge(queue.get()[0], 1.0)
    # The latest item of a began after two seconds: b is one second ahead of a, and not three.
    order = []
    for item in range(4):
        queue.put("a", item)
        queue.put("b", item)
    while queue:
        user, _ = queue.get()
        queue.charge(user, 1.0)
        order.append(user)
    assert order == ["b", "a", "b", "a", "b", "a", "b", "a"]


def test_users_that_are_not_ahead_are_forgotten() -> None:
    queue: FairShareQueue[int] = FairShareQueue()
    for number in range(100):
        queue.put(number, 0)
    while queue:
        queue.charge(queue.get()[0], 1.0)
    for _ in range(3):
        queue.put("a", 0)
        queue.charge(queue.get()[0], 1.0)
    assert len(queue._used_s) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.001, 1.0)), min_size=1, max_size=60))
def test_among_users_that_always_wait_seconds_differ_by_one_item_at_most(costs: list[tuple[str, float]]) -> None:
    queue: FairShareQueue[float] = FairShareQueue()
    for user, cost in costs:
        queue.put(user, cost)
    left = {user: sum(user == each for each, _ in costs) for user, _ in costs}
    used = dict.fromkeys(left, 0.0)
    while all(left.values()):
        served, cost = queue.get()
        queue.charge(served, cost)
        used[str(served)] += cost
        left[str(served)] -= 1
        assert max(used.values()) - min(used.values()) <= 1.0 + 1e-9


ALICE, BOB, EVE = Caller("a", "alice"), Caller("b", "bob"), Caller("e", "eve")


def test_who_is_alone_has_three_quarters_and_leaves_the_rest_to_who_comes() -> None:
    shares = FairLimit(256)
    assert sum(shares.take(EVE) for _ in range(1000)) == 192
    assert sum(shares.take(ALICE) for _ in range(1000)) == 48
    assert sum(shares.take(BOB) for _ in range(1000)) == 12
    assert shares.in_use == 252
    for _ in range(192):
        shares.release(EVE)
    assert sum(shares.take(EVE) for _ in range(1000)) == 147


def test_callers_of_one_tenant_are_one_and_those_of_none_are_told_apart() -> None:
    shares = FairLimit(8)
    assert sum(shares.take(Caller("e", f"token {number}")) for number in range(9)) == 6
    assert [shares.take(Caller(None, f"token {number}")) for number in range(3)] == [True, True, False]


def test_whoever_asks_has_no_share() -> None:
    shares = FairLimit(4)
    assert [shares.take(None) for _ in range(5)] == [True] * 4 + [False]
    shares.release(None)
    assert shares.take(ALICE)


def test_the_first_of_a_caller_may_be_all_there_is() -> None:
    shares = FairLimit(100)
    assert shares.take(ALICE, 100)
    assert not shares.take(BOB)
    shares.release(ALICE, 100)
    assert shares.take(BOB)


@given(st.integers(1, 300), st.lists(st.tuples(st.sampled_from([ALICE, BOB, EVE]), st.integers(-40, 40))))
def test_the_last_place_is_for_who_has_none(most: int, steps: list[tuple[Caller, int]]) -> None:
    shares, has = FairLimit(most), dict.fromkeys((ALICE, BOB, EVE), 0)
    for who, count in steps:
        if count < 0:
            given_back = min(-count, has[who])
            shares.release(who, given_back)
            has[who] -= given_back
        elif count and shares.take(who, count):
            has[who] += count
            assert has[who] == count or shares.in_use < most
        assert shares.in_use == sum(has.values()) <= most


def test_who_comes_beyond_the_bound_is_told_so_and_a_seat_is_another_s_again() -> None:
    seats = AdmissionControl(2, 100)
    with seats.admit(ALICE):
        with seats.admit(BOB):
            with pytest.raises(ResourceExhausted, match="max_in_flight") as caught, seats.admit(None):
                pass
            assert caught.value.retry_after
        assert seats.in_flight == 1
        with seats.admit(None):
            assert seats.in_flight == 2
    assert seats.in_flight == 0


def test_a_seat_is_given_back_whatever_happens() -> None:
    seats = AdmissionControl(1, 100)
    with pytest.raises(ValueError, match="x"), seats.admit(ALICE):
        raise ValueError("x")
    assert seats.in_flight == 0


def test_bytes_are_kept_until_the_end_of_their_request() -> None:
    seats = AdmissionControl(2, 100)
    with seats.admit(ALICE) as one:
        one.reserve(60)
        with seats.admit(BOB) as other:
            other.reserve(0)
            other.reserve(30)
            with pytest.raises(ResourceExhausted, match="max_memory_bytes"):
                other.reserve(11)
            assert seats.reserved_bytes == 90
        one.reserve(15)
    assert seats.reserved_bytes == 0


def test_one_request_may_have_all_that_there_is_and_is_told_if_it_wants_more() -> None:
    seats = AdmissionControl(8, 100)
    with seats.admit(ALICE) as one:
        for _ in range(4):
            one.reserve(25)
        with pytest.raises(TooLarge, match="max_memory_bytes"):
            one.reserve(1)
    with seats.admit(ALICE) as one, seats.admit(ALICE) as other:
        one.reserve(75)
        with pytest.raises(ResourceExhausted) as caught:
            other.reserve(1)
        assert caught.value.retry_after


def test_an_answer_is_kept_until_it_has_been_sent() -> None:
    seats = AdmissionControl(1, 100)
    sent = seats.reserve_response(ALICE, 60)
    with pytest.raises(ResourceExhausted, match="max_memory_bytes"):
        seats.reserve_response(BOB, 41)
    sent.release()
    sent.release()
    assert (seats.in_flight, seats.reserved_bytes) == (0, 0)
