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


class LoopSim:
    """An event loop whose clock advances only with work."""

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


def test_runs_work_while_pass_has_time() -> None:
    sim = LoopSim()
    for _ in range(3):
        sim.want("a", SLICE_S / 2)
    assert sim.done == ["a"] * 2
    sim.one_pass()
    assert sim.done == ["a"] * 3


def test_busy_peer_delays_others_by_one_item() -> None:
    sim = LoopSim()
    for _ in range(100):
        sim.want("a", SLICE_S)
    sim.want("b", SLICE_S)
    for _ in range(2):
        sim.one_pass()
    assert sim.done == ["a", "a", "b"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 3 * SLICE_S)), max_size=50))
def test_runs_all_work_in_bounded_passes(wanted: list[tuple[str, float]]) -> None:
    sim = LoopSim()
    for key, seconds in wanted:
        sim.want(key, seconds)
    while sim.next:
        before = sim.now
        sim.one_pass()
        assert sim.now - before <= SLICE_S + max(seconds for _, seconds in wanted) + 1e-9
    assert sorted(sim.done) == sorted(key for key, _ in wanted)


def test_failed_work_keeps_the_rest() -> None:
    sim = LoopSim()

    def fail() -> None:
        raise ValueError

    sim.want("a", SLICE_S)
    sim.turns.run("a", fail)
    sim.want("a", 0.0)
    try:
        sim.one_pass()
    except ValueError:
        sim.one_pass()
    assert sim.done == ["a", "a"]


def test_starts_pipelined_requests_slowly() -> None:
    sim = LoopSim()
    for key in "aaab":
        sim.turns.pipelined.run(key, partial(sim.done.append, key))
    begun = [len(sim.done)]
    for _ in range(4 * PIPELINE_PASSES):
        sim.one_pass()
        begun.append(len(sim.done))
    assert begun == [1] * PIPELINE_PASSES + [2] * PIPELINE_PASSES + [3] * PIPELINE_PASSES + [4] * (PIPELINE_PASSES + 1)
    assert sim.done == ["a", "a", "b", "a"]
    assert not sim.next, "an idle loop has nothing to do"
    sim.turns.pipelined.run("b", partial(sim.done.append, "b"))
    assert sim.done[-1] == "b"


def test_new_users_alternate() -> None:
    queue: FairShareQueue[int] = FairShareQueue()
    for user, item in (("a", 0), ("a", 1), ("b", 10), ("b", 11), ("c", 20)):
        queue.put(user, item)
    assert [queue.get()[1] for _ in range(5)] == [0, 10, 20, 1, 11]
    assert not queue


def test_idle_user_earns_no_credit() -> None:
    queue: FairShareQueue[int] = FairShareQueue()
    for _ in range(3):
        queue.put("a", 0)
        queue.charge(queue.get()[0], 1.0)
    # The latest item of a began after two seconds, so b is one second ahead of a and not three.
    order = []
    for item in range(4):
        queue.put("a", item)
        queue.put("b", item)
    while queue:
        user, _ = queue.get()
        queue.charge(user, 1.0)
        order.append(user)
    assert order == ["b", "a", "b", "a", "b", "a", "b", "a"]


def test_forgets_users_without_lead() -> None:
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
def test_waiting_users_differ_by_one_item(costs: list[tuple[str, float]]) -> None:
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


def test_single_caller_gets_three_quarters() -> None:
    shares = FairLimit(256)
    assert sum(shares.take(EVE) for _ in range(1000)) == 192
    assert sum(shares.take(ALICE) for _ in range(1000)) == 48
    assert sum(shares.take(BOB) for _ in range(1000)) == 12
    assert shares.in_use == 252
    for _ in range(192):
        shares.release(EVE)
    assert sum(shares.take(EVE) for _ in range(1000)) == 147


def test_shares_are_per_tenant_or_caller() -> None:
    shares = FairLimit(8)
    assert sum(shares.take(Caller("e", f"token {number}")) for number in range(9)) == 6
    assert [shares.take(Caller(None, f"token {number}")) for number in range(3)] == [True, True, False]


def test_unknown_callers_have_no_share() -> None:
    shares = FairLimit(4)
    assert [shares.take(None) for _ in range(5)] == [True] * 4 + [False]
    shares.release(None)
    assert shares.take(ALICE)


def test_first_request_may_use_the_whole_limit() -> None:
    shares = FairLimit(100)
    assert shares.take(ALICE, 100)
    assert not shares.take(BOB)
    shares.release(ALICE, 100)
    assert shares.take(BOB)


@given(st.integers(1, 300), st.lists(st.tuples(st.sampled_from([ALICE, BOB, EVE]), st.integers(-40, 40))))
def test_last_place_is_for_callers_without_one(most: int, steps: list[tuple[Caller, int]]) -> None:
    shares, has = FairLimit(most), dict.fromkeys((ALICE, BOB, EVE), 0)
    for who, count in steps:
        if count < 0 < has[who]:
            given_back = min(-count, has[who])
            shares.release(who, given_back)
            has[who] -= given_back
        elif count > 0 and shares.take(who, count):
            has[who] += count
            assert has[who] == count or shares.in_use < most
        assert shares.in_use == sum(has.values()) <= most


def test_rejects_beyond_limit_and_reuses_permits() -> None:
    admission = AdmissionControl(2, 100)
    with admission.admit(ALICE):
        with admission.admit(BOB):
            with pytest.raises(ResourceExhausted, match="max_in_flight") as caught, admission.admit(None):
                pass
            assert caught.value.retry_after
        assert admission.in_flight == 1
        with admission.admit(None):
            assert admission.in_flight == 2
    assert admission.in_flight == 0


def test_releases_permit_after_error() -> None:
    admission = AdmissionControl(1, 100)
    with pytest.raises(ValueError, match="x"), admission.admit(ALICE):
        raise ValueError("x")
    assert admission.in_flight == 0


def test_request_holds_its_bytes_until_it_ends() -> None:
    admission = AdmissionControl(2, 100)
    with admission.admit(ALICE) as one:
        one.reserve(60)
        with admission.admit(BOB) as other:
            other.reserve(0)
            other.reserve(30)
            with pytest.raises(ResourceExhausted, match="max_memory_bytes"):
                other.reserve(11)
            assert admission.reserved_bytes == 90
        one.reserve(15)
    assert admission.reserved_bytes == 0


def test_releasing_bytes_keeps_the_place() -> None:
    admission = AdmissionControl(1, 100)
    with admission.admit(ALICE) as one:
        one.reserve(60)
        one.release()
        assert (admission.in_flight, admission.reserved_bytes) == (1, 0)
    one.end()
    assert admission.in_flight == 0


def test_request_may_use_the_whole_limit() -> None:
    admission = AdmissionControl(8, 100)
    with admission.admit(ALICE) as one:
        for _ in range(4):
            one.reserve(25)
        with pytest.raises(TooLarge, match="max_memory_bytes"):
            one.reserve(1)
    with admission.admit(ALICE) as one, admission.admit(ALICE) as other:
        one.reserve(75)
        with pytest.raises(ResourceExhausted) as caught:
            other.reserve(1)
        assert caught.value.retry_after


def test_answer_holds_its_bytes_until_it_is_sent() -> None:
    admission = AdmissionControl(1, 100)
    sent = admission.reserve_response(ALICE, 60)
    with pytest.raises(ResourceExhausted, match="max_memory_bytes"):
        admission.reserve_response(BOB, 41)
    sent.release()
    sent.release()
    assert (admission.in_flight, admission.reserved_bytes) == (0, 0)
