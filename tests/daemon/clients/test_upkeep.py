from __future__ import annotations

import pytest

from weightd.daemon.clients.room import LARGE_BYTES, Room
from weightd.daemon.clients.upkeep import QUIET_S, Upkeep
from weightd.daemon.host import memory


def test_memory_is_given_back_once_after_large_messages_when_none_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[None] = []
    monkeypatch.setattr(memory, "trim", lambda: trims.append(None))
    clock = iter([2.0, 3.0])
    room = Room(2**40, lambda _: "somebody", lambda: upkeep.seen(next(clock)))
    upkeep = Upkeep(room)
    room.take(b"c", LARGE_BYTES - 1)
    assert upkeep.timer.due == float("inf")
    room.take(b"c", LARGE_BYTES)
    room.give(b"c", 2 * LARGE_BYTES - 1)
    room.take(b"c", LARGE_BYTES)
    assert upkeep.timer.due == 3.0 + QUIET_S
    upkeep.tick(4.0)
    assert (trims, upkeep.timer.due) == ([], 4.0 + QUIET_S)
    room.give(b"c", LARGE_BYTES)
    upkeep.tick(5.0)
    assert (trims, upkeep.timer.due) == ([None], float("inf"))
