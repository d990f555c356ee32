from __future__ import annotations

import pytest

from weightd_daemon.api.heap_trim import TRIM_DELAY_S, HeapTrimmer
from weightd_daemon.api.memory_budget import LARGE_BYTES, MemoryBudget
from weightd_daemon.platform import memory


def test_memory_is_given_back_once_after_large_messages_when_none_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[None] = []
    monkeypatch.setattr(memory, "trim_heap", lambda: trims.append(None))
    clock = iter([2.0, 3.0])
    room = MemoryBudget(2**40, lambda _: "somebody", lambda: upkeep.on_large_message(next(clock)))
    upkeep = HeapTrimmer(room)
    room.reserve(b"c", LARGE_BYTES - 1)
    assert upkeep.timer.due_at == float("inf")
    room.reserve(b"c", LARGE_BYTES)
    room.release(b"c", 2 * LARGE_BYTES - 1)
    room.reserve(b"c", LARGE_BYTES)
    assert upkeep.timer.due_at == 3.0 + TRIM_DELAY_S
    upkeep.on_timer(4.0)
    assert (trims, upkeep.timer.due_at) == ([], 4.0 + TRIM_DELAY_S)
    room.release(b"c", LARGE_BYTES)
    upkeep.on_timer(5.0)
    assert (trims, upkeep.timer.due_at) == ([None], float("inf"))
