"""Who is next."""

from __future__ import annotations

from weightd_daemon.zmq_proxy.turns import FairQueue


def test_users_take_turns_and_so_do_the_connections_of_each() -> None:
    turns: FairQueue[str] = FairQueue()
    for name in ("a1", "a2", "a3", "b1", "c1"):
        turns.put(name[0], name)
    taken: list[str] = []
    for _ in range(9):
        taken.append(turns.take())
        if taken[-1] in ("a1", "b1"):
            turns.put(taken[-1][0], taken[-1])
    assert taken == ["a1", "b1", "c1", "a2", "b1", "a3", "b1", "a1", "b1"]


def test_what_is_forgotten_waits_no_more() -> None:
    turns: FairQueue[str] = FairQueue()
    for name in ("a1", "a2", "b1"):
        turns.put(name[0], name)
    turns.remove("b", "b1")
    turns.remove("b", "b1")
    turns.remove("a", "a1")
    assert turns.take() == "a2"
    assert not turns
