from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weightd_gateway.fair_share_queue import FairShareQueue


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
