from __future__ import annotations

from typing import List

from weightd_common.round_robin import RoundRobinQueue


def of(*names: str) -> RoundRobinQueue[str]:
    queue: RoundRobinQueue[str] = RoundRobinQueue()
    for name in names:
        queue.put(name[0], name)
    return queue


def test_users_take_turns_and_so_do_the_items_of_each() -> None:
    queue = of("a1", "a2", "a3", "b1", "c1")
    taken: List[str] = []
    for _ in range(9):
        taken.append(queue.take())
        if taken[-1] in ("a1", "b1"):
            queue.put(taken[-1][0], taken[-1])
    assert taken == ["a1", "b1", "c1", "a2", "b1", "a3", "b1", "a1", "b1"]


def test_a_user_that_is_served_out_of_turn_is_the_last_one() -> None:
    queue = of("a1", "b1", "b2", "c1")
    assert (queue.take_of("b"), [*queue]) == ("b1", ["a", "c", "b"])


def test_an_item_that_was_removed_is_not_taken() -> None:
    queue = of("a1", "a2", "b1")
    assert [queue.remove(*each) for each in (("b", "b1"), ("b", "b1"), ("a", "a1"), ("c", "a2"))] == [
        *(True, False),
        *(True, False),
    ]
    assert "b" not in queue
    assert queue.take() == "a2"
    assert not queue
